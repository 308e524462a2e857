"""Implementations by name: how `kvref check NAME` finds what it is to judge.

A name is `reference` or `reference:LIBRARY`, a backend of kvref's (entry points `kvref.backends`), an entry point of group
`kvref.implementations`, `zoo:MEMBER` (wrong on purpose), `module:object`, `exec:COMMAND`, what a kvref.toml calls a command, or
`server:URL --canary DIR`.
An object that can be called, a class or a function, is called without arguments.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import kvref
import kvref_zoo
from kvref.errors import BackendNotFound
from kvref.formats import FORMATS
from kvref_conformance.conversation.drivers.guard import SERVED_WITHIN, TIMEOUT
from kvref_conformance.families import all_families
from kvref_conformance.families import names as families
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.implementations.configured import by_command, by_name, configured
from kvref_conformance.interface import ExternalImplementation, Implementation, offers
from kvref_conformance.limits import Limits, LimitsError
from kvref_conformance.oracle.formats import PLAIN
from kvref_conformance.outcome import CannotRun
from kvref_conformance.server import address

LONGEST = 300  # characters of what an implementation calls itself
LIBRARIES = ("numpy", "torch", "strict", "jax", "cupy")  # what the reference is offered on


def existing_folder(option: str, file: str | None) -> None:
    """Raise CannotRun where an option names a file that could not be written."""
    if file and not Path(file).resolve().parent.is_dir():
        raise CannotRun(f"--{option}: no folder {Path(file).resolve().parent}")
    if file and Path(file).is_dir():
        raise CannotRun(f"--{option}: {file} is a folder")


def named(options: argparse.Namespace) -> str | None:
    """The implementation that a command line asks for: by its name, as a program, or as a server. Raises CannotRun."""
    ways = {
        "a NAME": options.name,
        "--exec COMMAND": None if options.exec is None else f"exec:{options.exec}",
        "--server URL": address.named(options),
    }
    asked = {way: name for way, name in ways.items() if name is not None}
    if len(asked) > 1:
        said = " and ".join(name.partition(":")[2] if way.startswith("--") else name for way, name in asked.items())
        raise CannotRun(f"expected {' or '.join(asked)}, got {'both' if len(asked) == 2 else 'all'}: {said}")
    return next(iter(asked.values()), None)


def needed(options: argparse.Namespace) -> str:
    """The same, where there has to be one. Raises CannotRun."""
    if (name := named(options)) is None:
        raise CannotRun(
            "expected a NAME or --exec COMMAND or --server URL: what is to be judged (kvref list shows what there is)"
        )
    return name


def patience(options: argparse.Namespace, name: str) -> float:
    """Seconds that a call may take: as the command line says, or more for a server, which may have others to serve.

    Raises CannotRun for what is no such number.
    """
    if options.timeout is not None:
        seconds: float = options.timeout
        if not 0.01 <= seconds < float("inf"):
            raise CannotRun(f"--timeout: expected at least 0.01, got {seconds}")
        return seconds
    return SERVED_WITHIN if name.startswith(address.PREFIX) else TIMEOUT


@dataclass(frozen=True)
class Listed:
    """One line of `kvref list`. missing: why it cannot run here, or empty."""

    name: str
    missing: str


def load(name: str, show_stderr: bool = False) -> Implementation:
    """The implementation called `name`. show_stderr: let a program's standard error through. Raises CannotRun."""
    if name.startswith(address.PREFIX):
        from kvref_conformance.server.served import Served  # slow to import: asyncio

        return checked(name, Served(address.address(name)))
    try:
        program = by_command(name[5:], show_stderr) if name.startswith("exec:") else by_name(name, show_stderr)
        if program is not None:
            return checked(name, program)
        if name == "reference" or name.startswith("reference:"):
            return OnBackend(_reference(name.partition(":")[2] or "numpy"))
        if name.partition(":")[0] in (entry.name for entry in entry_points(group="kvref.backends")):
            return OnBackend(kvref.backend(name))
    except BackendNotFound as error:
        raise CannotRun(str(error)) from error
    if name.startswith("zoo:"):
        return _zoo(name.partition(":")[2])
    found = _entry_point(name)
    if found is None and ":" in name:
        found = _object_at(name)
    if found is None:
        here = {each.stem for each in Path().glob("*.py")}
        near = [f"{name}:OBJECT"] if name in here else get_close_matches(name, _names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CannotRun(f"no implementation {name!r}: {hint}one of yours is module:object; kvref list shows what there is")
    return checked(name, _made(name, found))


def is_foreign(name: str) -> bool:
    """Whether to call it is to run code in this process that is not kvref's own: it may hang there, or take the process down."""
    if is_program(name) or name.partition(":")[0] in ("reference", "zoo"):
        return False
    backends = entry_points(group="kvref.backends", name=name.partition(":")[0])
    entries = [*backends, *entry_points(group="kvref.implementations", name=name)]
    if entries:
        return any(entry.dist is None or entry.dist.name != "kvref" for entry in entries)
    return ":" in name


def is_program(name: str) -> bool:
    """Whether it has a process of its own already. Raises CannotRun where kvref.toml cannot be read."""
    return name.startswith(("exec:", address.PREFIX)) or name in configured()[1]


def checked(name: str, implementation: Any) -> Implementation:
    """The same object, if it has what the judge needs first. Raises CannotRun."""
    needed = ("name", "version", "language", "level", "formats", "asarray", "to_numpy")
    if lacking := [attribute for attribute in needed if not hasattr(implementation, attribute)]:
        raise CannotRun(f"{name}: an implementation needs {', '.join(lacking)} (see kvref_conformance.interface)")
    for attribute in ("name", "version", "language", "project"):
        said = getattr(implementation, attribute, implementation.name)
        if not isinstance(said, str) or not said.isprintable() or not 0 < len(said) <= LONGEST:
            raise CannotRun(f"{name}: {attribute} must be a line of 1 to {LONGEST} characters, got {repr(said)[:60]}")
    if implementation.level not in ("exact", "tolerant"):
        raise CannotRun(f"{name}: level must be 'exact' or 'tolerant', got {implementation.level!r}")
    unknown = [format for format in implementation.formats if format not in FORMATS]
    if unknown:
        raise CannotRun(f"{name}: formats must be of {', '.join(FORMATS)}, got {unknown[0]!r}")
    try:
        declares = hasattr(type(implementation), "limits") or hasattr(implementation, "limits")
        limits = Limits(
            implementation.limits if declares else None
        )  # an AttributeError of theirs does not say that there are none
    except LimitsError as error:
        raise CannotRun(f"{name}: {error}") from None
    except Exception as error:  # a property of theirs
        raise CannotRun(f"{name}: limits: {_one_line(error)}") from error
    plain = [format for format in implementation.formats if format in PLAIN]
    for family, record in all_families().items():
        if plain and not record.encodes and not set(plain) & set(limits.dtypes(family)):
            said = " or ".join(limits.dtypes(family))
            raise CannotRun(
                f"{name}: limits: dtype: {said} is none of its formats, which are {', '.join(implementation.formats)}"
            )
    if not any(offers(implementation, family) for family in families()):
        near = [family for family in families() if get_close_matches(family, vars(type(implementation)), n=1, cutoff=0.8)]
        hint = f": did you mean {near[0]}?" if near else ""
        raise CannotRun(f"{name}: nothing to test, it offers none of {', '.join(families())}{hint}")
    found: Implementation = implementation
    return found


def names() -> list[Listed]:
    """Every implementation that has a name of its own here, with what it lacks."""
    found = []
    for name in _names():
        try:
            implementation = load(name)
        except CannotRun as missing:
            found.append(Listed(name, str(missing)))
        else:
            found.append(Listed(name, ""))
            end(implementation)
    return found


def end(implementation: Implementation) -> None:
    """Leave nothing of it behind: a program is ended, connections to a server are closed."""
    if isinstance(implementation, ExternalImplementation):
        implementation.close()


def _names() -> Iterator[str]:
    yield "reference"
    yield from (f"reference:{library}" for library in LIBRARIES[1:])
    yield from configured()[1]
    for group in ("kvref.backends", "kvref.implementations"):
        yield from sorted(entry.name for entry in entry_points(group=group))


def _reference(library: str) -> kvref.Backend:
    if library != "strict":
        backend = kvref.ReferenceBackend(library)
        if library == "jax":
            import_module("jax").config.update("jax_enable_x64", True)  # or float64 would be float32 before it can be refused
        try:
            backend.zeros((1,), "float32")
        except Exception as error:  # a library that is here, and the device that it needs is not
            raise CannotRun(f"reference:{library}: {_one_line(error)}") from error
        return backend
    try:
        import array_api_strict as strict
    except ImportError as error:
        raise CannotRun("reference:strict needs array-api-strict (pip install array-api-strict)") from error
    strict.set_array_api_strict_flags(api_version="2024.12")
    # Not its default device: an array made without saying where shows at once.
    backend = kvref.ReferenceBackend("array_api_strict", strict.Device("device1"))
    backend.name = "reference:strict"
    return backend


def _zoo(name: str) -> Implementation:
    try:
        found: Implementation = kvref_zoo.member(name)
    except KeyError:
        near = get_close_matches(name, kvref_zoo.names(), n=1)
        raise CannotRun(f"no member of the zoo {name!r}{f': did you mean {near[0]!r}?' if near else ''} (kvref zoo)") from None
    return found


def _entry_point(name: str) -> Any:
    entries = [entry for entry in entry_points(group="kvref.implementations") if entry.name == name]
    if not entries:
        return None
    try:
        return entries[0].load()
    except ModuleNotFoundError as error:
        raise CannotRun(f"{name} needs {error.name} (pip install {error.name})") from error
    except Exception as error:
        raise CannotRun(f"{name} cannot be imported: {_one_line(error)}") from error


def _object_at(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if not path or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise CannotRun(f"no implementation {name!r}: expected module:object, both dotted names")
    if module_name.endswith(".py"):
        raise CannotRun(f"no implementation {name!r}: expected a module and no file: {module_name.removesuffix('.py')}:{path}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: a module in the user's own folder
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        raise CannotRun(f"{module_name} cannot be imported: {_one_line(error)}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            raise CannotRun(f"{module_name} has no {path!r}{f': did you mean {near[0]!r}?' if near else ''}")
        found = getattr(found, part)
    return found


def _made(name: str, found: Any) -> Any:
    if not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        asked = " (expected what takes no arguments, and has a factory for each family)" if isinstance(error, TypeError) else ""
        raise CannotRun(f"{name} cannot be made{asked}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__
