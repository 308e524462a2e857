"""The pytest plugin: one test per clause and implementation, with a name such as PAGED-07[numpy].

    pytest --pyargs kvref_conformance --kvref NAME [--kvref NAME ...] [--kvref-family F ...] [--kvref-clause CLAUSE]

A test belongs to the module that contains the first check of its clause. The `kvref check` command runs the same tests with
another reporter (report/console_live.py). Modules that are slow to import are imported inside functions, because pytest loads
this plugin in every run.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvref_conformance.drivers.resource_limits import TIMEOUT
from kvref_conformance.runner.options import EXAMPLES, Effort, RunOptions
from kvref_conformance.runner.verdict import MIN_JUDGED_PERCENT

if TYPE_CHECKING:
    from kvref_conformance.clauses import Clause
    from kvref_conformance.results import CheckResult
    from kvref_conformance.runner.check_runner import CheckRunner
    from kvref_conformance.runner.verdict import RunVerdict
    from kvref_conformance.testlib.registry import Check

FAMILIES = Path(__file__).parent / "families"
JUDGES_KEY = pytest.StashKey[dict[str, Any]]()
RESULTS_KEY = pytest.StashKey[dict[str, list[dict[str, Any]]]]()
FACTORY_FAILURES_KEY = pytest.StashKey[dict[str, list[Any]]]()  # of factories that raise, by the name of the implementation
CLAUSES_KEY = pytest.StashKey[dict[Path, list[Any]]]()  # the selected clauses with their checks, by the file of their first check


class ClauseFailed(Exception):
    """The clause of a test is broken. The failure is in the test's `result`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvref", "conformance of KV caches (with --pyargs kvref_conformance)")
    group.addoption("--kvref", action="append", default=[], metavar="NAME", help="implementation to judge; may be repeated")
    group.addoption(
        "--kvref-family", action="append", metavar="FAMILY", help="run only the checks of this family; may be repeated"
    )
    group.addoption("--kvref-clause", action="append", metavar="CLAUSE",
                    help="run only these clauses (PAGED-07, 'FMT-*'); may be repeated")  # fmt: skip
    group.addoption("--kvref-least-judged", type=float, default=MIN_JUDGED_PERCENT, metavar="PERCENT",
                    help="minimum percentage of judged clauses of the offered families (default %(default)g)")  # fmt: skip
    group.addoption("--kvref-seed", type=int, default=0, metavar="N", help="seed of random inputs (default %(default)s)")
    group.addoption("--kvref-slow", action="store_true", help="also run checks that need gigabytes of memory")
    group.addoption("--kvref-real", action="store_true", help="also run checks at production sizes that take seconds")
    group.addoption("--kvref-examples", type=int, default=EXAMPLES, metavar="N",
                    help="number of call sequences per family (default %(default)s)")  # fmt: skip
    group.addoption("--kvref-deep", action="store_true", help="try more and longer call sequences")
    group.addoption("--kvref-isolate", action=BooleanOptionalAction,
                    help="run the implementation in a child process, or in this process (for debuggers)")  # fmt: skip
    group.addoption("--kvref-timeout", type=float, default=TIMEOUT, metavar="S", help="seconds per call (default %(default)g)")
    group.addoption("--kvref-failures", default=".kvref/failures", metavar="DIR",
                    help="folder for traces of failures (default %(default)s)")  # fmt: skip
    group.addoption("--kvref-xfails", metavar="FILE", help="file of expected failures")
    group.addoption("--kvref-traces", metavar="DIR", help="folder for traces of passed checks")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load the implementations. If one cannot be loaded, stop with a one-line message."""
    names, option = dict.fromkeys(session.config.getoption("--kvref")), session.config.getoption
    if not names and option("pyargs") and any(part.startswith("kvref_conformance") for part in session.config.args):
        raise pytest.UsageError("expected --kvref NAME, the implementation to judge (kvref check --help describes NAME)")
    if not names or JUDGES_KEY in session.config.stash:
        return
    from kvref_conformance.exceptions import CannotRun
    from kvref_conformance.runner.expected_failures import ExpectedFailuresError, read_expected_failures
    from kvref_conformance.runner.subprocess_runner import make_runner

    try:
        _clauses_of_files(session.config)
        session.config.stash[JUDGES_KEY] = {name: make_runner(_run_options(session.config, name)) for name in names}
        if option("--kvref-xfails"):
            read_expected_failures(Path(option("--kvref-xfails")))
    except (CannotRun, ExpectedFailuresError, OSError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close the implementations. If too few clauses were judged, exit with the status that pytest uses for "no tests ran"."""
    for judge in session.config.stash.get(JUDGES_KEY, {}).values():
        judge.close()
    little = any(conclusion.verdict == "not judged" for conclusion in _verdicts(session.config).values())
    if little and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS_KEY] = {}
    if config.getoption("--kvref"):
        config.pluginmanager.register(ResultCollector(config.stash[RESULTS_KEY]))


class ResultCollector:
    """Collects the results by the name of the implementation, including those of pytest-xdist's worker processes."""

    def __init__(self, results: dict[str, list[dict[str, Any]]]) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "kvref"):
            self._results.setdefault(report.kvref_name, []).append(report.kvref)


def _verdicts(config: pytest.Config) -> dict[str, RunVerdict]:
    from kvref_conformance.runner.verdict import overall_verdict

    least = config.getoption("--kvref-least-judged")
    return {name: overall_verdict(results, least) for name, results in config.stash[RESULTS_KEY].items()}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict of each implementation, one per line."""
    from kvref_conformance.report.console import causes_text, conclusion_text
    from kvref_conformance.runner.causes import probable_causes

    conclusions = _verdicts(config)
    if conclusions:
        terminalreporter.section("kvref")
    for name, conclusion in conclusions.items():
        if causes := probable_causes(config.stash[RESULTS_KEY][name]):
            terminalreporter.line(f"{name}: {causes_text(causes)}")
        terminalreporter.line(f"{name}: {conclusion_text(conclusion)}")


def _run_options(config: pytest.Config, name: str) -> RunOptions:
    def option(name: str) -> Any:
        return config.getoption(f"--kvref-{name}")

    searched = option("seed"), option("slow"), option("real"), option("examples"), option("deep")
    effort = Effort(*searched, option("timeout"), keep_traces=option("traces") is not None)
    return RunOptions(name, effort, ",".join(option("family") or []) or None, option("isolate"))


def _select_clauses(config: pytest.Config) -> dict[Clause, list[Check]]:
    """The selected clauses with their checks. Raises CannotRun."""
    from kvref_conformance.exceptions import CannotRun
    from kvref_conformance.runner.check_runner import select_checks

    try:
        families = ",".join(config.getoption("--kvref-family") or [])
        return select_checks(",".join(config.getoption("--kvref-clause") or ["*"]), families or None)
    except CannotRun as error:
        raise CannotRun(f"--kvref-clause {error}") from None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.parent.parent == FAMILIES and file_path.match("checks*.py") and parent.config.getoption("--kvref"):
        return ClauseFile.from_parent(parent, path=file_path)
    return None


def _clauses_of_files(config: pytest.Config) -> dict[Path, list[tuple[Clause, list[Check]]]]:
    """The selected clauses by the file that contains their first check. Raises CannotRun."""
    if CLAUSES_KEY not in config.stash:
        found = config.stash[CLAUSES_KEY] = {}
        for clause, checks in _select_clauses(config).items():
            found.setdefault(Path(_first_function(clause, checks).source.rpartition(":")[0]), []).append((clause, checks))
    return config.stash[CLAUSES_KEY]


def _first_function(clause: Clause, checks: list[Check]) -> Check:
    """The first check that is a function. If the clause has only a state machine in this family, one of another family."""
    from kvref_conformance.testlib.registry import all_checks

    return next(each for each in (*checks, *all_checks()) if each.run and each.clause == clause.id)


class ClauseFile(pytest.File):
    """The tests of the clauses whose first check is in this file."""

    def collect(self) -> Iterator[pytest.Item]:
        from kvref_conformance.runner.expected_failures import read_expected_failures

        option = self.config.getoption
        expected = read_expected_failures(Path(option("--kvref-xfails"))) if option("--kvref-xfails") else {}
        judges = self.config.stash[JUDGES_KEY]
        called = Counter(judge.implementation.name for judge in judges.values())
        for name, judge in judges.items():
            own = judge.implementation.name
            for clause, checks in _clauses_of_files(self.config).get(self.path, []):
                test = f"{clause.id}[{own if called[own] == 1 else name}]"
                item = ClauseItem.create(self, test, clause, checks, name, judge)
                if clause.id in expected:
                    item.reason = expected[clause.id]
                    # Not strict: the report lists clauses that passed, and --update-xfails removes them from the file.
                    item.add_marker(pytest.mark.xfail(reason=item.reason, raises=ClauseFailed, strict=False))
                yield item


class ClauseItem(pytest.Item):
    """The test of one clause for one implementation.

    implementation_name: the name by which the user selected the implementation. reason: why the clause is expected to fail, or
    None.
    """

    clause: Clause
    checks: list[Check]
    implementation_name: str
    judge: CheckRunner
    reason: str | None = None

    @classmethod
    def create(
        cls, parent: ClauseFile, test: str, clause: Clause, checks: list[Check], name: str, judge: CheckRunner
    ) -> ClauseItem:
        item: ClauseItem = cls.from_parent(parent, name=test)
        item.clause, item.checks, item.implementation_name, item.judge = clause, checks, name, judge
        return item

    def runtest(self) -> None:
        from kvref_conformance.runner.check_runner import clause_result
        from kvref_conformance.traces.paths import save_all_traces

        option = self.config.getoption
        outcomes = self.judge.judge_clause(self.checks)
        if option("--kvref-traces"):
            save_all_traces(outcomes, Path(option("--kvref-traces")), self.clause.id, self.implementation_name)
        self.result = clause_result(self.judge, self.clause, self.checks, outcomes, self.reason)
        self._save_failures(outcomes)
        verdict = self.result["verdict"]
        if verdict in ("failed", "xfailed"):
            raise ClauseFailed
        if verdict not in ("passed", "xpassed"):
            pytest.skip(f"{verdict}: {', '.join(self.result['missing'])}")

    def _save_failures(self, outcomes: list[CheckResult]) -> None:
        """Write the traces of the shown failures. The first of them, the most direct, is the one that the result names."""
        from kvref_conformance.runner.causes import FAILURE_KINDS, shown_failures
        from kvref_conformance.traces.paths import save_failure

        shown, folder = shown_failures(self.result), Path(self.config.getoption("--kvref-failures"))
        for number in range(len(FAILURE_KINDS)):
            there = [each for each in outcomes if number < len(shown) and each.check == shown[number].check["check"]]
            clause = f"{self.clause.id}-{number + 1}" if number else self.clause.id
            if saved := save_failure(there, folder, clause, self.implementation_name):
                shown[number].check["trace"] = str(saved[1])
        if shown:
            self.result |= {"shown": shown[0].check["check"], "trace": shown[0].check["trace"]}

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from kvref_conformance.report.console import failure_text
        from kvref_conformance.runner.causes import shown_failures

        if not isinstance(excinfo.value, ClauseFailed):
            return super().repr_failure(excinfo, style)
        failure, *others = shown_failures(self.result)
        before = self.config.stash.setdefault(FACTORY_FAILURES_KEY, {}).setdefault(self.implementation_name, [])
        if failure.evidence.shape[-1:] and failure.evidence.shape[-1].endswith(".new!"):
            if same := next((each for each in before if failure.has_same_cause(each)), None):
                return f"{self.clause.id} · {self.clause.title}: same failure as {same.clause}"
            before.append(failure)
        options = _run_options(self.config, self.implementation_name)
        checks: Any = self.result["checks"]
        found_by = [check["check"] for check in checks if check["verdict"] == "failed"]
        return "\n\n".join(failure_text(each, options, found_by) for each in (failure, *others))

    def reportinfo(self) -> tuple[Path, int, str]:
        path, _, line = _first_function(self.clause, self.checks).source.rpartition(":")
        return Path(path), int(line) - 1, self.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if isinstance(item, ClauseItem) and call.when == "call" and hasattr(item, "result"):
        report.kvref, report.kvref_name = (
            item.result,
            item.implementation_name,
        )  # plain data, which pytest-xdist sends between processes
    return report
