"""The reporter of `kvref check`: collects results from pytest, and shows a progress bar and the clauses that failed so far."""

from collections.abc import Generator
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvref_conformance.calls import interrupts
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementation_api import offers
from kvref_conformance.pytest_plugin import JUDGES_KEY, ClauseItem
from kvref_conformance.results import Result
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import RunOptions


class LiveReporter:
    """A pytest plugin that provides the judge. It prints one line per failure to `err`, and on a terminal a progress bar.

    results: one per finished clause. trouble: the errors that stopped the run.
    """

    def __init__(self, err: Console, run_options: RunOptions, judge: CheckRunner) -> None:
        self._asked, self._judge = run_options, judge
        self.results: list[Result] = []
        self.trouble: list[str] = []
        # The bar counts clauses and the call sequences of the state machines, which take most of the time.
        clauses = TextColumn("{task.fields[done]}/{task.fields[clauses]}")
        columns = (TextColumn("{task.description}"), BarColumn(20), clauses, TimeElapsedColumn())
        self._progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._progress.add_task("reading the specification", total=None, done=0, clauses="?")
        self._sequences: dict[str, int] = {}
        judge.progress = self._show_search_progress
        if err.is_terminal:
            interrupts.exit_callbacks.append(self._progress.stop)  # makes the cursor visible again

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.stash[JUDGES_KEY] = {self._asked.name: self._judge}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        clauses = [item for item in session.items if isinstance(item, ClauseItem)]
        searched = {check.family for item in clauses for check in item.checks if check.run is None}
        searched = {family for family in searched if offers(self._judge.implementation, family)}
        total = len(clauses) + len(searched) * self._asked.effort.num_sequences
        self._progress.update(self._task, total=total, clauses=len(clauses))
        if not self._progress.disable:
            self._progress.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        interrupts.raise_if_interrupted()
        self._progress.update(self._task, description=nodeid.rpartition("::")[2].partition("[")[0].ljust(14))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Skip the test of a clause that Ctrl-C interrupts. Otherwise pytest's JUnit file would contain a test without a name."""
        try:
            return (yield)
        except CannotRun as cannot:  # the implementation loads in this process, but not in a worker
            self.trouble.append(str(cannot))
            item.session.shouldstop = "cannot run"
            pytest.skip("cannot run")
        except KeyboardInterrupt:
            item.session.shouldstop = "interrupted"
            pytest.skip("interrupted")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "kvref"):
            self.results.append(report.kvref)
            if report.kvref["verdict"] == "failed":  # at once, because a second Ctrl-C ends the run without a report
                self._progress.console.print(f"failed: {report.kvref['clause']} · {report.kvref['title']}", markup=False)
            self._progress.update(self._task, advance=1, done=len(self.results))
        elif report.failed:
            self.trouble.append(str(report.longrepr))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.trouble.append(str(report.longrepr))

    def pytest_sessionfinish(self) -> None:
        self._progress.stop()

    def _show_search_progress(self, family: str, sequences: int, of: int) -> None:
        description = f"{family}: {sequences} of {of} sequences"
        self._progress.update(self._task, advance=sequences - self._sequences.get(family, 0), description=description)
        self._sequences[family] = sequences
