"""Creates the judge for an implementation: in this process, or in a child process."""

from kvref_conformance.implementations import is_foreign, is_program, load
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import RunOptions
from kvref_conformance.runner.subprocess_runner import POSSIBLE, SubprocessRunner


def runs_in_subprocess(asked: RunOptions) -> bool:
    """Whether the implementation runs in a child process of the judge. A program has its own process in any case."""
    if is_program(asked.name):
        return False
    return POSSIBLE and is_foreign(asked.name) if asked.isolate is None else asked.isolate


def make_runner(asked: RunOptions) -> CheckRunner:
    """Load the implementation and return its judge. Raises CannotRun if it cannot be loaded."""
    if runs_in_subprocess(asked):
        return SubprocessRunner(asked.name, asked.effort)
    return CheckRunner(load(asked.name, asked.show_stderr), asked.effort, asked.name)
