"""The judge that was asked for: in this process, or beside it."""

from kvref_conformance.implementations import is_foreign, is_program, load
from kvref_conformance.judging.asked import Asked
from kvref_conformance.judging.isolated import POSSIBLE, IsolatedJudge
from kvref_conformance.judging.judge import Judge


def isolated(asked: Asked) -> bool:
    """Whether it runs in a child process of the judge's. A program has one already. Raises CannotRun."""
    if is_program(asked.name):
        return False
    return POSSIBLE and is_foreign(asked.name) if asked.isolate is None else asked.isolate


def start(asked: Asked) -> Judge:
    """Raises CannotRun where there is nothing of that name to judge."""
    if isolated(asked):
        return IsolatedJudge(asked.name, asked.effort)
    return Judge(load(asked.name, asked.show_stderr), asked.effort, asked.name)
