"""What the commands do, one module a command; `cli` reads the arguments."""

import argparse
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec

_WHERE = {
    "check": "check:check",
    "bench": "bench:bench",
    "canary": "canary:make",
    "soak": "soak:soak_implementation",
    "search": "search:search",
    "replay": "replay:replay_trace",
    "harness": "harness:harness",
    "vectors": "vectors:vectors",
    "report": "report:report",
    "zoo": "zoo:show_zoo",
    "list": "explain:list_implementations",
    "explain": "explain:explain",
}


def command(name: str) -> Callable[[argparse.Namespace], int]:
    """A command: it returns the exit code, and raises what the command line turns into one line: CannotRun and the like.

    Only its own module is imported, for they take longer than many a command. Raises ImportError.
    """
    for late in ("hypothesis", "jsonschema", "jsonschema_rs"):  # imported when they are used, which is no time to miss them
        if find_spec(late) is None:
            raise ModuleNotFoundError(name=late)
    found: Callable[[argparse.Namespace], int] = pkgutil.resolve_name(f"{__name__}.{_WHERE[name]}")
    return found
