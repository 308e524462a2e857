"""The address of a server as one name for traces: `server:URL --canary DIR [--model NAME]`."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvref_conformance.exceptions import CannotRun

SERVER_PREFIX = "server:"
URL_SHAPE = "http://HOST:PORT/v1"


@dataclass(frozen=True)
class Address:
    """folder: written by `kvref canary make`. model: its name on the server; None if the server has only one."""

    url: str
    folder: Path
    model: str | None = None


def selected_server(options: argparse.Namespace) -> str | None:
    """Return the name of the server given on the command line, or None. Raises CannotRun."""
    if options.server is None:
        for option in ("canary", "model"):
            if getattr(options, option) is not None:
                raise CannotRun(f"--{option}: expected also --server URL, to which it applies")
        return None
    if options.canary is None:
        raise CannotRun("--server: expected also --canary DIR, the folder that kvref canary make wrote and the server has loaded")
    words = [options.server, "--canary", options.canary]
    return SERVER_PREFIX + shlex.join([*words, "--model", options.model] if options.model is not None else words)


def parse_address(name: str) -> Address:
    """Parse such a name. Raises CannotRun."""
    try:
        words = shlex.split(name.removeprefix(SERVER_PREFIX))
    except ValueError as error:
        raise CannotRun(f"{name}: {error}") from None
    if len(words) not in (3, 5) or words[1] != "--canary" or words[3:4] not in ([], ["--model"]):
        raise CannotRun(f"{name}: expected {SERVER_PREFIX}{URL_SHAPE} --canary DIR [--model NAME]")
    _require_url(words[0])
    return Address(words[0].rstrip("/"), Path(words[2]), words[4] if words[4:] else None)


def _require_url(url: str) -> None:
    """Raises CannotRun unless the URL is valid and without a password: traces store it."""
    try:
        parts = urlsplit(url)
        parts.port  # raises ValueError for an invalid port
    except ValueError as error:
        raise CannotRun(f"--server: expected {URL_SHAPE}, got {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or not url.isprintable():
        raise CannotRun(f"--server: expected {URL_SHAPE}, got {url!r}")
    if parts.username is not None:
        raise CannotRun("--server: expected no user and no password in the URL, because traces store it")
