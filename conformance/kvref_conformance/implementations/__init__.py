"""Lookup of implementations by name, for `kvref check NAME` and the other commands.

A name is one of:

- `reference` or `reference:LIBRARY`: kvref's own caches on an array library
- an entry point of the group `kvref.backends`: kvref's own caches on that backend
- one of these two with `:token-hits` after it: the same, with a prefix cache that declares `token_hits`
- an entry point of the group `kvref.implementations`, such as an adapter of the distribution kvref-adapters
- `zoo:MEMBER`: a deliberately wrong cache
- `module:object`: an object of the user's; a class or function is called without arguments
- `exec:COMMAND`, or a name that kvref.toml defines: a program that speaks the protocol
- `server:URL --canary DIR`: a completions server
"""

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

import kvref
import kvref_zoo
from kvref.errors import BackendNotFound
from kvref.formats import FORMATS
from kvref_canary.server import url
from kvref_conformance.calls.source_location import raised_at
from kvref_conformance.drivers.reply_validation import short_repr
from kvref_conformance.drivers.resource_limits import SERVER_TIMEOUT, TIMEOUT
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.families import all_families
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import ExternalImplementation, Implementation, offers
from kvref_conformance.implementations.backends import TOKEN_HITS, OnBackend
from kvref_conformance.implementations.external import read_config, start_command, start_named
from kvref_conformance.limits import Limits, LimitsError
from kvref_conformance.oracle.formats import PLAIN_FORMATS

ADAPTERS_PACKAGE = "kvref-adapters"  # the distribution with the adapters of third-party projects
MAX_NAME_LENGTH = 300  # the maximum number of characters of an implementation's name, version, language and project
BACKEND_LIBRARIES = ("numpy", "torch", "strict", "jax", "cupy")  # array libraries of the reference backend


def require_folder(option: str, file: str | None) -> None:
    """Raise CannotRun if the file that an option names cannot be written: its folder does not exist, or it is a folder itself."""
    if file and not Path(file).resolve().parent.is_dir():
        raise CannotRun(f"--{option}: no folder {Path(file).resolve().parent}")
    if file and Path(file).is_dir():
        raise CannotRun(f"--{option}: {file} is a folder")


def selected_name(options: argparse.Namespace) -> str | None:
    """Return the name of the implementation that a command line selects (NAME, --exec or --server), or None. Raises CannotRun."""
    ways = {
        "a NAME": options.name,
        "--exec COMMAND": None if options.exec is None else f"exec:{options.exec}",
        "--server URL": url.selected_server(options),
    }
    asked = {way: name for way, name in ways.items() if name is not None}
    if len(asked) > 1:
        said = " and ".join(name.partition(":")[2] if way.startswith("--") else name for way, name in asked.items())
        raise CannotRun(f"expected {' or '.join(asked)}, got {'both' if len(asked) == 2 else 'all'}: {said}")
    return next(iter(asked.values()), None)


def required_name(options: argparse.Namespace) -> str:
    """Like `selected_name`, but raise CannotRun if the command line selects no implementation."""
    if (name := selected_name(options)) is None:
        raise CannotRun("expected an implementation: NAME, --exec COMMAND or --server URL (kvref list shows the names)")
    return name


def call_timeout(options: argparse.Namespace, name: str) -> float:
    """Return the time limit of one call in seconds: --timeout, or a default, which is longer for servers.

    A server may have other clients. Raises CannotRun for an invalid --timeout.
    """
    if options.timeout is not None:
        seconds: float = options.timeout
        if not 0.01 <= seconds < float("inf"):
            raise CannotRun(f"--timeout: expected at least 0.01, got {seconds}")
        return seconds
    return SERVER_TIMEOUT if name.startswith(url.SERVER_PREFIX) else TIMEOUT


@dataclass(frozen=True)
class ListedImplementation:
    """One line of `kvref list`. missing: why the implementation cannot run here; empty if it can."""

    name: str
    missing: str


def load_implementation(name: str, show_stderr: bool = False) -> Implementation:
    """Return the implementation called `name`. Raises CannotRun.

    show_stderr: pass a program's standard error on to the terminal.
    """
    if name.startswith(url.SERVER_PREFIX):
        from kvref_conformance.implementations.server import ServerImplementation  # slow to import: asyncio

        return validate_implementation(name, ServerImplementation(url.parse_address(name)))
    try:
        program = start_command(name[5:], show_stderr) if name.startswith("exec:") else start_named(name, show_stderr)
        if program is not None:
            return validate_implementation(name, program)
        kind, _, library = (backend := name.removesuffix(TOKEN_HITS)).partition(":")
        if kind == "reference":
            return OnBackend(_reference(library or "numpy"), token_hits=name != backend)
        if kind in (entry.name for entry in entry_points(group="kvref.backends")):
            return OnBackend(kvref.backend(backend), token_hits=name != backend)
    except BackendNotFound as error:
        raise CannotRun(str(error)) from error
    if name.startswith("zoo:"):
        return _zoo(name.partition(":")[2])
    found = _entry_point(name)
    if found is None and ":" in name:
        found = _import_object(name)
    if found is None:
        here = {each.stem for each in Path().glob("*.py")}
        near = [f"{name}:OBJECT"] if name in here else get_close_matches(name, _all_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CannotRun(
            f"no implementation {name!r}: {hint}write your own as module:object, or run this where its kvref.toml is; "
            f"kvref list shows the names{_adapters_note()}"
        )
    return validate_implementation(name, _instantiate(name, found))


def runs_foreign_code(name: str) -> bool:
    """Whether calling it runs code in this process that is not kvref's own, and so may hang or crash the process."""
    if is_program(name) or name.partition(":")[0] in ("reference", "zoo"):
        return False
    backends = entry_points(group="kvref.backends", name=name.partition(":")[0])
    entries = [*backends, *entry_points(group="kvref.implementations", name=name)]
    if entries:
        return any(entry.dist is None or entry.dist.name not in ("kvref", ADAPTERS_PACKAGE) for entry in entries)
    return ":" in name


def is_program(name: str) -> bool:
    """Whether the implementation runs in a process of its own. Raises CannotRun if kvref.toml cannot be read."""
    return name.startswith(("exec:", url.SERVER_PREFIX)) or name in read_config()[1]


def validate_implementation(name: str, implementation: Any) -> Implementation:
    """Return the implementation if its attributes and limits are valid. Raises CannotRun otherwise."""
    needed = ("name", "version", "language", "level", "formats", "asarray", "to_numpy")
    if lacking := [attribute for attribute in needed if not hasattr(implementation, attribute)]:
        raise CannotRun(f"{name}: missing attributes {', '.join(lacking)} (kvref/spec/protocol.md describes the object)")
    for attribute in ("name", "version", "language", "project"):
        said = getattr(implementation, attribute, implementation.name)
        if not isinstance(said, str) or not said.isprintable() or not 0 < len(said) <= MAX_NAME_LENGTH:
            raise CannotRun(f"{name}: {attribute}: expected one line of 1 to {MAX_NAME_LENGTH} characters, got {repr(said)[:60]}")
    if implementation.level not in ("exact", "tolerant"):
        raise CannotRun(f"{name}: level: expected 'exact' or 'tolerant', got {implementation.level!r}")
    if isinstance(implementation.formats, str):
        raise CannotRun(f"{name}: formats: expected a tuple of names, got the string {implementation.formats!r}")
    unknown = [format for format in implementation.formats if format not in FORMATS]
    if unknown:
        raise CannotRun(f"{name}: formats: expected names from {', '.join(FORMATS)}, got {unknown[0]!r}")
    try:
        declares = hasattr(type(implementation), "limits") or hasattr(implementation, "limits")
        limits = Limits(
            implementation.limits if declares else None
        )  # an AttributeError inside the property must not look like "no limits"
    except LimitsError as error:
        raise CannotRun(f"{name}: {error}") from None
    except Exception as error:  # raised by the user's property
        raise CannotRun(f"{name}: limits: {_first_line(error)}") from error
    plain = [format for format in implementation.formats if format in PLAIN_FORMATS]
    for family, record in all_families().items():
        if plain and not record.encodes and not set(plain) & set(limits.dtypes(family)):
            said = " or ".join(limits.dtypes(family))
            raise CannotRun(
                f"{name}: limits: dtype: expected one of its formats ({', '.join(implementation.formats)}), got {said}"
            )
    if not any(offers(implementation, family) for family in families()):
        near = [family for family in families() if get_close_matches(family, vars(type(implementation)), n=1, cutoff=0.8)]
        hint = f": did you mean {near[0]}?" if near else ""
        raise CannotRun(f"{name}: nothing to test, it has none of the families {', '.join(families())}{hint}")
    for family, record in all_families().items():
        if offers(implementation, family):
            _require_factory_arguments(name, family, getattr(implementation, family), record.small)
    found: Implementation = implementation
    return found


def _require_factory_arguments(name: str, family: str, factory: Any, sizes: Mapping[str, Any]) -> None:
    """Raise CannotRun if a factory cannot be called with the sizes of its family, which would break every clause."""
    if not callable(factory):
        raise CannotRun(f"{name}: {family}: expected a class or a function that creates the cache, got {short_repr(factory)}")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of a factory in another language
        return
    try:
        signature.bind(**sizes)
    except TypeError as error:
        accepted = f"arguments named {', '.join(sizes)}" if sizes else "no arguments"
        raise CannotRun(f"{name}: {family}: expected a factory that accepts {accepted}; {error}") from None


def all_implementations() -> list[ListedImplementation]:
    """Return every named implementation of this environment, each with the reason why it cannot run, if any."""
    found = []
    for name in _all_names():
        try:
            implementation = load_implementation(name)
        except CannotRun as missing:
            found.append(ListedImplementation(name, str(missing)))
        else:
            found.append(ListedImplementation(name, ""))
            close_implementation(implementation)
    return found


def close_implementation(implementation: Implementation) -> None:
    """Release the implementation's resources: end its program, or close its connections to a server."""
    if isinstance(implementation, ExternalImplementation):
        implementation.close()


def _all_names() -> Iterator[str]:
    yield "reference"
    yield from (f"reference:{library}" for library in BACKEND_LIBRARIES[1:])
    yield f"reference{TOKEN_HITS}"
    yield from read_config()[1]
    for group in ("kvref.backends", "kvref.implementations"):
        yield from sorted(entry.name for entry in entry_points(group=group))


def _reference(library: str) -> kvref.Backend:
    if library != "strict":
        backend = kvref.ReferenceBackend(library)
        if library == "jax":
            # otherwise JAX converts float64 to float32 before the cache can reject it
            import_module("jax").config.update("jax_enable_x64", True)
        try:
            backend.zeros((1,), "float32")
        except Exception as error:  # the library is installed, but the device that it needs is missing
            raise CannotRun(f"reference:{library}: {_first_line(error)}") from error
        return backend
    try:
        import array_api_strict as strict
    except ImportError as error:
        raise CannotRun("reference:strict needs array-api-strict (pip install array-api-strict)") from error
    strict.set_array_api_strict_flags(api_version="2024.12")
    # Not the default device, so that an array created without an explicit device fails at once.
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
        raise CannotRun(f"{name} cannot be imported: {_first_line(error)}") from error


def _adapters_note() -> str:
    """Return a note for a name that is not found, or nothing if the adapters of third-party projects are installed."""
    try:
        distribution(ADAPTERS_PACKAGE)
    except PackageNotFoundError:
        return f"; third-party projects need the distribution {ADAPTERS_PACKAGE}, which is not installed"
    return ""


def _import_object(name: str) -> Any:
    module_name, _, path = name.partition(":")
    if not path or not all(part.isidentifier() for part in [*module_name.split("."), *path.split(".")]):
        raise CannotRun(f"no implementation {name!r}: expected module:object, both dotted names")
    if module_name.endswith(".py"):
        raise CannotRun(
            f"no implementation {name!r}: expected a module, got a file: write {module_name.removesuffix('.py')}:{path}"
        )
    sys.path.insert(0, str(Path.cwd()))  # like `python -m`: finds modules in the current folder
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        at = raised_at(error)
        where = f" ({at})" if at and "importlib" not in at else ""
        raise CannotRun(f"{module_name} cannot be imported: {_first_line(error)}{where}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    for part in path.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            raise CannotRun(f"{module_name} has no {path!r}{f': did you mean {near[0]!r}?' if near else ''}")
        found = getattr(found, part)
    return found


def _instantiate(name: str, found: Any) -> Any:
    if not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        asked = " (expected a callable without arguments)" if isinstance(error, TypeError) else ""
        raise CannotRun(f"{name} cannot be created{asked}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0]}" if message else type(error).__name__
