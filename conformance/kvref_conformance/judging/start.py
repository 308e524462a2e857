"""Creates the judge for an implementation: in this process, or in a child process."""

from kvref_conformance.implementations import is_foreign, is_program, load
from kvref_conformance.judging.asked import Asked
from kvref_conformance.judging.isolated import POSSIBLE, IsolatedJudge
from kvref_conformance.judging.judge import Judge


def isolated(asked: Asked) -> bool:
    """Whether the implementation runs in a child process of the judge. A program has its own process in any case."""
    if is_program(asked.name):
        return False
    return POSSIBLE and is_foreign(asked.name) if asked.isolate is None else asked.isolate


def start(asked: Asked) -> Judge:
    """Load the implementation and return its judge. Raises CannotRun if it cannot be loaded."""
    if isolated(asked):
        return IsolatedJudge(asked.name, asked.effort)
    return Judge(load(asked.name, asked.show_stderr), asked.effort, asked.name)
