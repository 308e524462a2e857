"""pytest as the engine: one test a clause and implementation, named like PAGED-07[numpy].

    pytest --pyargs kvref_conformance --kvref NAME [--kvref NAME ...] [--kvref-family F] [--kvref-clause CLAUSE] [--kvref-seed N]

Each test lives in the module its first check is written in. The `kvref check` command runs the same tests with a
reporter of its own.
"""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvref_conformance.conversation.drivers.guard import TIMEOUT
from kvref_conformance.judging.asked import EXAMPLES, Asked, Effort
from kvref_conformance.judging.conclusion import LEAST_JUDGED

if TYPE_CHECKING:
    from kvref_conformance.checking.registry import Check
    from kvref_conformance.clauses import Clause
    from kvref_conformance.judging.conclusion import Conclusion
    from kvref_conformance.judging.judge import Judge

FAMILIES = Path(__file__).parent / "families"
JUDGES = pytest.StashKey[dict[str, Any]]()
RESULTS = pytest.StashKey[dict[str, list[dict[str, Any]]]]()
TOLD = pytest.StashKey[dict[str, Any]]()  # by the name of each
CLAUSES = pytest.StashKey[dict[Path, list[Any]]]()  # the clauses that are asked for, with their checks, by the file of each


class Failed(Exception):
    """A clause is broken; the text is in the item."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvref", "conformance of KV caches (with --pyargs kvref_conformance)")
    group.addoption("--kvref", action="append", default=[], metavar="NAME", help="judge this implementation; may be repeated")
    group.addoption("--kvref-family", metavar="FAMILY", help="only the checks of one family")
    group.addoption("--kvref-clause", action="append", metavar="CLAUSE", help="only these: PAGED-07, 'FMT-*'; may be repeated")
    group.addoption("--kvref-least-judged", type=float, default=LEAST_JUDGED, metavar="PERCENT",
                    help="the run fails where less is judged of the families that are offered (%(default)g)")  # fmt: skip
    group.addoption("--kvref-seed", type=int, default=0, metavar="N", help="seed of the random inputs (default %(default)s)")
    group.addoption("--kvref-slow", action="store_true", help="also the checks that take much time or memory")
    group.addoption("--kvref-real", action="store_true", help="also the larger checks at sizes that models have")
    group.addoption("--kvref-examples", type=int, default=EXAMPLES, metavar="N", help="sequences of calls a family (%(default)s)")
    group.addoption("--kvref-deep", action="store_true", help="many more and longer sequences")
    group.addoption("--kvref-isolate", action=BooleanOptionalAction, help="run it in a child process, or in this (for debuggers)")
    group.addoption("--kvref-timeout", type=float, default=TIMEOUT, metavar="S", help="seconds a call may take (%(default)g)")
    group.addoption("--kvref-failures", default=".kvref/failures", metavar="DIR", help="where failures are written as traces")
    group.addoption("--kvref-xfails", metavar="FILE", help="clauses that are expected to fail")
    group.addoption("--kvref-traces", metavar="DIR", help="write the traces of what passes here")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find what is to be judged, once, and stop with one line where it cannot be found."""
    names, option = dict.fromkeys(session.config.getoption("--kvref")), session.config.getoption
    if not names and option("pyargs") and any(part.startswith("kvref_conformance") for part in session.config.args):
        raise pytest.UsageError("expected --kvref NAME: what is to be judged (kvref check --help says what a NAME can be)")
    if not names or JUDGES in session.config.stash:
        return
    from kvref_conformance.judging.start import start
    from kvref_conformance.judging.xfails import XfailsError, read
    from kvref_conformance.outcome import CannotRun

    try:
        _clauses_of_files(session.config)
        session.config.stash[JUDGES] = {name: start(_asked(session.config, name)) for name in names}
        if option("--kvref-xfails"):
            read(Path(option("--kvref-xfails")))
    except (CannotRun, XfailsError, OSError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Close what was judged. Passed is no success where too little was judged: pytest's word for that is that no tests ran."""
    for judge in session.config.stash.get(JUDGES, {}).values():
        judge.close()
    little = any(conclusion.verdict == "not judged" for conclusion in _conclusions(session.config).values())
    if little and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}
    if config.getoption("--kvref"):
        config.pluginmanager.register(Collected(config.stash[RESULTS]))


class Collected:
    """The results by the name of the implementation, wherever they were found: pytest-xdist's workers send theirs."""

    def __init__(self, results: dict[str, list[dict[str, Any]]]) -> None:
        self._results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "kvref"):
            self._results.setdefault(report.kvref_name, []).append(report.kvref)


def _conclusions(config: pytest.Config) -> dict[str, Conclusion]:
    from kvref_conformance.judging.conclusion import conclude

    least = config.getoption("--kvref-least-judged")
    return {name: conclude(results, least) for name, results in config.stash[RESULTS].items()}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A line an implementation: what it comes to, and how much was judged."""
    from kvref_conformance.report.text import conclusion_text

    conclusions = _conclusions(config)
    if conclusions:
        terminalreporter.section("kvref")
    for name, conclusion in conclusions.items():
        terminalreporter.line(f"{name}: {conclusion_text(conclusion)}")


def _asked(config: pytest.Config, name: str) -> Asked:
    def option(name: str) -> Any:
        return config.getoption(f"--kvref-{name}")

    searched = option("seed"), option("slow"), option("real"), option("examples"), option("deep")
    effort = Effort(*searched, option("timeout"), keep=option("traces") is not None)
    return Asked(name, effort, option("family"), option("isolate"))


def _chosen(config: pytest.Config) -> dict[Clause, list[Check]]:
    """What is to be checked. Raises CannotRun."""
    from kvref_conformance.judging.judge import select
    from kvref_conformance.outcome import CannotRun

    try:
        return select(",".join(config.getoption("--kvref-clause") or ["*"]), config.getoption("--kvref-family"))
    except CannotRun as error:
        raise CannotRun(f"--kvref-clause {error}") from None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.parent.parent == FAMILIES and file_path.match("checks*.py") and parent.config.getoption("--kvref"):
        return ClauseFile.from_parent(parent, path=file_path)
    return None


def _clauses_of_files(config: pytest.Config) -> dict[Path, list[tuple[Clause, list[Check]]]]:
    """The clauses that are asked for, by the file in which the first check of each is written. Raises CannotRun."""
    if CLAUSES not in config.stash:
        found = config.stash[CLAUSES] = {}
        for clause, checks in _chosen(config).items():
            found.setdefault(Path(_written(clause, checks).source.rpartition(":")[0]), []).append((clause, checks))
    return config.stash[CLAUSES]


def _written(clause: Clause, checks: list[Check]) -> Check:
    """The first that is written out, of another family where a machine alone speaks for the clause in this."""
    from kvref_conformance.checking.registry import all_checks

    return next(each for each in (*checks, *all_checks()) if each.run and each.clause == clause.id)


class ClauseFile(pytest.File):
    """The clauses whose first check is written in this file."""

    def collect(self) -> Iterator[pytest.Item]:
        from kvref_conformance.judging.xfails import read

        option = self.config.getoption
        expected = read(Path(option("--kvref-xfails"))) if option("--kvref-xfails") else {}
        judges = self.config.stash[JUDGES]
        called = Counter(judge.implementation.name for judge in judges.values())
        for name, judge in judges.items():
            own = judge.implementation.name
            for clause, checks in _clauses_of_files(self.config).get(self.path, []):
                test = f"{clause.id}[{own if called[own] == 1 else name}]"
                item = ClauseItem.of(self, test, clause, checks, name, judge)
                if clause.id in expected:
                    item.reason = expected[clause.id]
                    # Not strict: the report says which passed, and --update-xfails takes them out of the file.
                    item.add_marker(pytest.mark.xfail(reason=item.reason, raises=Failed, strict=False))
                yield item


class ClauseItem(pytest.Item):
    clause: Clause
    checks: list[Check]
    name_asked: str
    judge: Judge
    reason: str | None = None  # why it is expected to fail, if it is

    @classmethod
    def of(cls, parent: ClauseFile, test: str, clause: Clause, checks: list[Check], name: str, judge: Judge) -> ClauseItem:
        item: ClauseItem = cls.from_parent(parent, name=test)
        item.clause, item.checks, item.name_asked, item.judge = clause, checks, name, judge
        return item

    def runtest(self) -> None:
        from kvref_conformance.conversation.trace.store import save_all, save_failure
        from kvref_conformance.interface import offers
        from kvref_conformance.judging.judge import through, verdict_of

        option = self.config.getoption
        outcomes = self.judge.clause(self.checks)
        saved = save_failure(outcomes, Path(option("--kvref-failures")), self.clause.id, self.name_asked)
        if option("--kvref-traces"):
            save_all(outcomes, Path(option("--kvref-traces")), self.clause.id, self.name_asked)
        verdict: str = verdict_of(outcomes)
        missing = self.judge.missing(self.checks, outcomes)
        if self.reason is not None:
            verdict = {"failed": "xfailed", "passed": "xpassed"}.get(verdict, verdict)
        self.result = {
            "clause": self.clause.id,
            "title": self.clause.title,
            "chapter": self.clause.chapter,
            "verdict": verdict,
            "offered": any(offers(self.judge.implementation, check.family) for check in self.checks),
            "missing": missing,
            "through": through(self.checks, outcomes),
            "reason": self.reason,
            "shown": saved[0].check if saved else None,
            "trace": str(saved[1]) if saved else None,
            "checks": [{name: value for name, value in vars(outcome).items() if name != "trace"} for outcome in outcomes],
        }
        if verdict in ("failed", "xfailed"):
            raise Failed
        if verdict not in ("passed", "xpassed"):
            pytest.skip(f"{verdict}: {', '.join(missing)}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from kvref_conformance.report.text import Told, failure_text

        if not isinstance(excinfo.value, Failed):
            return super().repr_failure(excinfo, style)
        told = self.config.stash.setdefault(TOLD, {}).setdefault(self.name_asked, Told())
        return failure_text(self.result, _asked(self.config, self.name_asked), told)

    def reportinfo(self) -> tuple[Path, int, str]:
        path, _, line = _written(self.clause, self.checks).source.rpartition(":")
        return Path(path), int(line) - 1, self.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if isinstance(item, ClauseItem) and call.when == "call" and hasattr(item, "result"):
        report.kvref, report.kvref_name = item.result, item.name_asked  # plain data: pytest-xdist carries it between processes
    return report
