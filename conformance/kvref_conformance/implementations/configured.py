"""Programs as implementations: `exec:COMMAND`, or a name that the nearest kvref.toml gives to a command.

    [implementations.mycache]
    exec = ["./build/harness", "--flag"]

The command runs in the folder of the file.
"""

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from kvref_conformance.drivers.stdio import HelloError, OverStdio
from kvref_conformance.outcome import CannotRun

FILE = "kvref.toml"


def by_command(words: str, show_stderr: bool = False) -> OverStdio:
    """The program started by a shell's words, without a shell. Raises CannotRun."""
    try:
        command = shlex.split(words)
    except ValueError as error:
        raise CannotRun(f"--exec {words}: {error}") from None
    if not command:
        raise CannotRun("--exec: expected a program and its arguments, got nothing")
    return _started(f"--exec {words}", command, Path.cwd(), show_stderr)


def by_name(name: str, show_stderr: bool = False) -> OverStdio | None:
    """What kvref.toml calls by this name, or None. Raises CannotRun."""
    path, commands = configured()
    return _started(name, commands[name], path.parent, show_stderr) if name in commands else None


def configured() -> tuple[Path, dict[str, list[str]]]:
    """The commands by name, and the file: of this folder, or the nearest above it. Raises CannotRun."""
    folders = [Path.cwd(), *Path.cwd().parents]
    path = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
    if path is None:
        return Path(FILE), {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotRun(f"{path}: {error}") from None
    tables = document.get("implementations", {})
    commands = {}
    for name, table in tables.items() if isinstance(tables, dict) else [("", None)]:
        command = table.get("exec") if isinstance(table, dict) else None
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            raise CannotRun(f'{path}: [implementations.{name}]: expected exec = ["PROGRAM", "ARGUMENT", ...], got {table!r}')
        commands[name] = command
    return path, commands


def _started(asked: str, command: Sequence[str], folder: Path, show_stderr: bool) -> OverStdio:
    try:
        return OverStdio(command, folder, show_stderr)
    except (OSError, HelloError) as error:
        raise CannotRun(f"{asked}: {error}") from error
