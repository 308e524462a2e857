"""The reporter of `kvref check`: collects results from pytest and shows, on one line, how far it has come."""

from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvref_conformance.judge import Judge
from kvref_conformance.plugin import JUDGES
from kvref_conformance.report.text import Result


class Live:
    """A pytest plugin that brings the judges.

    `results` fills as clauses finish; `trouble` holds what stopped the run, if anything did.
    """

    def __init__(self, console: Console, judges: dict[str, Judge]) -> None:
        self._judges = judges
        self.results: list[Result] = []
        self.trouble: list[str] = []
        self.interrupted = False
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("reading the specification")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.stash[JUDGES] = self._judges

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.update(self._task, total=len(session.items))
        if not self._progress.disable:
            self._progress.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._progress.update(self._task, description=nodeid.rpartition("::")[2].partition("[")[0].ljust(14))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "kvref"):
            self.results.append(report.kvref)
            self._progress.advance(self._task)
        elif report.failed:
            self.trouble.append(str(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble.append(str(report.longrepr))

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def pytest_sessionfinish(self) -> None:
        if not self._progress.disable:
            self._progress.stop()
