"""The commands of `kvref`, one module per command. `cli` parses the arguments."""

import argparse
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec

_FUNCTIONS = {
    "check": "check:check",
    "bench": "bench:bench",
    "canary": "canary:make_canary",
    "soak": "soak:soak_implementation",
    "search": "search:search_implementation",
    "replay": "replay:replay_trace",
    "init": "init:write_adapter_project",
    "harness": "harness:test_harness",
    "vectors": "vectors:compare_vectors",
    "report": "report:make_report",
    "zoo": "zoo:show_zoo",
    "lab": "lab:run_lab",
    "list": "spec_info:list_implementations",
    "explain": "spec_info:explain",
}


def find_command(name: str) -> Callable[[argparse.Namespace], int]:
    """The function of a command. It returns the exit status; `cli` prints the exceptions it raises (CannotRun, ...) as one line.

    Only the module of this command is imported, because all imports together take longer than many commands. Raises ImportError.
    """
    for late in ("hypothesis", "jsonschema", "jsonschema_rs"):  # a run imports these late: find out now
        if find_spec(late) is None:
            raise ModuleNotFoundError(name=late)
    found: Callable[[argparse.Namespace], int] = pkgutil.resolve_name(f"{__name__}.{_FUNCTIONS[name]}")
    return found
