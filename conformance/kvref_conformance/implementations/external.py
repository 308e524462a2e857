"""Programs as implementations: `exec:COMMAND`, or a name that the nearest kvref.toml assigns to a command.

    [implementations.mycache]
    exec = ["./build/harness", "--flag"]
    limits = {head_dim = [64, 128], num_layers = {most = 1}}

The command runs in the folder of kvref.toml. `limits` replace the limits that the program declares in its hello.
"""

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvref_conformance.drivers.json_client import HelloError, JsonClient
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.limits import Limits, LimitsError

CONFIG_FILE = "kvref.toml"


def start_command(words: str, show_stderr: bool = False) -> JsonClient:
    """Start the program that a command line names. The words are split as by a shell, but no shell runs. Raises CannotRun."""
    try:
        command = shlex.split(words)
    except ValueError as error:
        raise CannotRun(f"--exec {words}: {error}") from None
    if not command:
        raise CannotRun("--exec: expected a program and its arguments, got nothing")
    return _start(f"--exec {words}", command, Path.cwd(), show_stderr)


def start_named(name: str, show_stderr: bool = False) -> JsonClient | None:
    """Start the program that kvref.toml defines under this name, or return None. Raises CannotRun."""
    path, programs = read_config()
    if name not in programs:
        return None
    command, limits = programs[name]
    program = _start(name, command, path.parent, show_stderr)
    program.limits = program.limits if limits is None else limits
    return program


def read_config() -> tuple[Path, dict[str, tuple[list[str], Any]]]:
    """Return the path of the nearest kvref.toml, in this folder or above it, and its commands and limits by name.

    Raises CannotRun.
    """
    folders = [Path.cwd(), *Path.cwd().parents]
    path = next((folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()), None)
    if path is None:
        return Path(CONFIG_FILE), {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotRun(f"{path}: {error}") from None
    tables = document.get("implementations", {})
    commands: dict[str, tuple[list[str], Any]] = {}
    for name, table in tables.items() if isinstance(tables, dict) else [("", None)]:
        command = table.get("exec") if isinstance(table, dict) else None
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise CannotRun(f'{path}: [implementations.{name}]: expected exec = ["PROGRAM", "ARGUMENT", ...], got {table!r}')
        limits = table["limits"] if isinstance(table, dict) and "limits" in table else None
        try:
            Limits(limits)
        except LimitsError as error:
            raise CannotRun(f"{path}: [implementations.{name}]: {error}") from None
        commands[name] = command, limits
    return path, commands


def _start(asked: str, command: Sequence[str], folder: Path, show_stderr: bool) -> JsonClient:
    try:
        return JsonClient(command, folder, show_stderr)
    except (OSError, HelloError) as error:
        raise CannotRun(f"{asked}: {error}") from error
