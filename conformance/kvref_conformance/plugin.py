"""pytest as the engine: one test a clause and implementation, named like PAGED-07[numpy].

    pytest --pyargs kvref_conformance --kvref NAME [--kvref NAME ...] [--kvref-family F] [--kvref-clause GLOB] [--kvref-seed N]

Each test lives in the module its first check is written in. The `kvref check` command runs the same tests with a
reporter of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvref_conformance.checking.registry import Check
    from kvref_conformance.clauses import Clause
    from kvref_conformance.interface import Implementation

CHECKS = Path(__file__).parent / "checks"
IMPLEMENTATIONS = pytest.StashKey[dict[str, Any]]()


class Failed(Exception):
    """A clause is broken; the text is in the item."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvref", "conformance of KV caches (with --pyargs kvref_conformance)")
    group.addoption("--kvref", action="append", default=[], metavar="NAME", help="judge this implementation; may be repeated")
    group.addoption("--kvref-family", metavar="FAMILY", help="only the checks of one family")
    group.addoption("--kvref-clause", default="*", metavar="GLOB", help="only the clauses whose id matches")
    group.addoption("--kvref-seed", type=int, default=0, metavar="N", help="seed of the random inputs (default 0)")
    group.addoption("--kvref-slow", action="store_true", help="also the checks that take much time or memory")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Find what is to be judged, once, and stop with one line where it cannot be found."""
    if names := session.config.getoption("--kvref"):
        from kvref_conformance.implementations import CannotRun, load

        try:
            session.config.stash[IMPLEMENTATIONS] = {name: load(name) for name in names}
        except CannotRun as error:
            raise pytest.UsageError(str(error)) from error


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.parent == CHECKS and file_path.suffix == ".py" and parent.config.getoption("--kvref"):
        return ClauseFile.from_parent(parent, path=file_path)
    return None


class ClauseFile(pytest.File):
    """The clauses whose first check is written in this file."""

    def collect(self) -> Iterator[pytest.Item]:
        from kvref_conformance.judge import select

        option = self.config.getoption
        for name, implementation in self.config.stash[IMPLEMENTATIONS].items():
            for clause, checks in select(option("--kvref-clause"), option("--kvref-family")).items():
                if Path(checks[0].source.rpartition(":")[0]) == self.path:
                    yield ClauseItem.of(self, clause, checks, name, implementation)


class ClauseItem(pytest.Item):
    clause: Clause
    checks: list[Check]
    name_asked: str
    implementation: Implementation

    @classmethod
    def of(cls, parent: ClauseFile, clause: Clause, checks: list[Check], name: str, implementation: Implementation) -> ClauseItem:
        item: ClauseItem = cls.from_parent(parent, name=f"{clause.id}[{implementation.name}]")
        item.clause, item.checks = clause, checks
        item.name_asked, item.implementation = name, implementation
        return item

    def runtest(self) -> None:
        from kvref_conformance.judge import run_clause, verdict_of

        option = self.config.getoption
        outcomes = run_clause(self.checks, self.implementation, option("--kvref-seed"), option("--kvref-slow"))
        self.result = {
            "clause": self.clause.id,
            "title": self.clause.title,
            "chapter": self.clause.chapter,
            "verdict": verdict_of(outcomes),
            "checks": [asdict(outcome) for outcome in outcomes],
        }
        if self.result["verdict"] == "failed":
            raise Failed
        if self.result["verdict"] != "passed":
            missing = sorted({outcome.missing for outcome in outcomes if outcome.missing})
            pytest.skip(f"{self.result['verdict']}: {', '.join(missing)}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from kvref_conformance.report.text import Asked, failure_text

        if not isinstance(excinfo.value, Failed):
            return super().repr_failure(excinfo, style)
        option = self.config.getoption
        asked = Asked(self.name_asked, option("--kvref-seed"), option("--kvref-family"), option("--kvref-slow"))
        return failure_text(self.result, asked)

    def reportinfo(self) -> tuple[Path, int, str]:
        path, _, line = self.checks[0].source.rpartition(":")
        return Path(path), int(line) - 1, self.name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if isinstance(item, ClauseItem) and call.when == "call" and hasattr(item, "result"):
        report.kvref = item.result  # plain data: pytest-xdist carries it between processes
    return report
