"""`kvref init`: writes an adapter project for a cache, in which the user writes the calls."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.adapter_project import FILES, check_layout, write_project
from kvref_conformance.exceptions import CannotRun, suggest
from kvref_conformance.families import names

EXAMPLE = "kvref init --family contiguous --language python"
_LANGUAGE_NAMES = {"c++": "cpp", "js": "javascript", "py": "python"}


def write_adapter_project(options: argparse.Namespace) -> int:
    family = _choice("--family", options.family, names())
    language = _choice("--language", _LANGUAGE_NAMES.get(options.language, options.language), tuple(FILES))
    if why := check_layout(family, options.layout):
        raise CannotRun(why)
    folder = Path(options.output or f"{family}-{language}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotRun(f"{folder}: expected a new or empty folder (-o DIR)")
    for path in write_project(folder, family, language, options.layout):
        print(f"wrote   {folder / path}")
    print(f"\nNext: {folder / 'README.md'} has the commands that build and judge it. Write your calls in "
          f"{folder / next(iter(FILES[language].values()))}.")  # fmt: skip
    return 0


def _choice(option: str, given: str | None, choices: Sequence[str]) -> str:
    """An option's value. If it is absent, a person at a terminal is asked for it."""
    if given is None and sys.stdin.isatty():
        given = input(f"{option.strip('-')} ({', '.join(choices)}): ").strip()
    if not given:
        raise CannotRun(f"{option} is missing: one of {', '.join(choices)}. Example: {EXAMPLE}")
    if given not in choices:
        raise CannotRun(f"{option}: got {given!r}{suggest(given, choices)}; expected one of {', '.join(choices)}")
    return given
