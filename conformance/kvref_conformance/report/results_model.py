"""The view of results in a report: a run, its verdict on a clause (a cell), and its verdicts on a chapter (a share)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvref_conformance.clauses import Chapter, Clause, all_clauses
from kvref_conformance.exceptions import printable
from kvref_conformance.results import Result
from kvref_conformance.runner.verdict import RunVerdict, overall_verdict
from kvref_conformance.traces.paths import implementation_path_name

VERDICT_SIGNS = {
    "passed": "✓",
    "failed": "✗",
    "xfailed": "✗",
    "xpassed": "!",
    "not offered": "·",
    "not run": "–",
    "no result": " ",
}
FAILED_VERDICTS = ("failed", "xfailed")


@dataclass(frozen=True)
class ResultFile:
    """One file of results. label: its name in the report, if that differs from the name of the implementation."""

    path: Path
    document: dict[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        name: str = self.label or self.document["implementation"]["name"]
        return name

    @property
    def slug(self) -> str:
        """The name as a path component."""
        return implementation_path_name(self.name)

    @property
    def project(self) -> str:
        """The project that the implementation belongs to."""
        project: str = self.document["implementation"].get("project", self.name)
        return project

    @cached_property
    def verdicts(self) -> dict[str, Result]:
        return {result["clause"]: result for result in self.document["clauses"]}

    @property
    def tally(self) -> Counter[str]:
        return Counter(result["verdict"] for result in self.document["clauses"])

    @cached_property
    def conclusion(self) -> RunVerdict:
        """The overall verdict, computed from the clauses; the verdict in the file is not used."""
        said = self.document
        return overall_verdict(said["clauses"], said["conclusion"]["least"], "interrupted" in said)

    @property
    def causes(self) -> list[tuple[Clause, list[str]]]:
        """The clause that shows each probable cause most directly, and the ids of the others that it breaks."""
        known = all_clauses()
        return [(known[first], others) for first, *others in self.document.get("causes", []) if first in known]

    @property
    def num_failed(self) -> int:
        return sum(self.tally[verdict] for verdict in FAILED_VERDICTS)

    @property
    def summary(self) -> str:
        """The overall verdict in a few words."""
        found = self.conclusion
        if self.num_failed:
            return f"breaks {self.num_failed} of {found.judged}"
        if found.verdict == "not judged":
            return f"not judged: {found.judged} of {found.of}"
        share = f"{found.judged} clauses" if found.judged == found.of else f"{found.judged} of {found.of} clauses"
        return share if found.whole else f"{share} selected"

    @property
    def color(self) -> str:
        found = self.conclusion
        return "bad" if self.num_failed else "good" if found.whole and found.verdict != "not judged" else "some"


@dataclass(frozen=True)
class FindingLink:
    """A description of a failure in docs/findings. link: relative to the first page of the report."""

    title: str
    link: str


@dataclass(frozen=True)
class MatrixCell:
    """The result of a run for a clause. trace: the text of the trace, if the report contains it."""

    run: ResultFile
    clause: Clause
    trace: str | None = None
    findings: tuple[FindingLink, ...] = ()

    @property
    def result(self) -> Result | None:
        return self.run.verdicts.get(self.clause.id)

    @property
    def verdict(self) -> str:
        return self.result["verdict"] if self.result else "no result"

    @property
    def is_offered(self) -> bool:
        """Whether the implementation has a family with a check of the clause."""
        return bool(self.result and self.result["offered"])

    @property
    def is_failed(self) -> bool:
        return self.verdict in FAILED_VERDICTS

    @property
    def file(self) -> str:
        """The path of the trace in the report."""
        return f"traces/{self.run.slug}/{self.clause.id}.jsonl"

    @property
    def sign(self) -> str:
        return VERDICT_SIGNS[self.verdict]

    @property
    def through(self) -> list[str]:
        """The derived operations on which the verdict depends."""
        return self.result.get("through", []) if self.result else []

    @property
    def summary(self) -> str:
        """The verdict, and the derived operations."""
        return "; ".join([self.verdict, *self.through])

    @property
    def shown_check(self) -> dict[str, Any] | None:
        """The failed check whose calls are shown."""
        checks = self.result["checks"] if self.result else []
        return next((check for check in checks if self.result and check["check"] == self.result["shown"]), None)


@dataclass(frozen=True)
class ChapterShare:
    """The results of a run for a chapter."""

    run: ResultFile
    chapter: Chapter
    cells: tuple[MatrixCell, ...]

    @property
    def num_judged(self) -> int:
        return self.num_failed + self.num_passed

    @property
    def num_failed(self) -> int:
        return sum(cell.is_failed for cell in self.cells)

    @property
    def num_passed(self) -> int:
        return sum(cell.verdict in ("passed", "xpassed") for cell in self.cells)

    @property
    def num_derived(self) -> int:
        """The number of clauses that passed with derived operations."""
        return sum(cell.verdict in ("passed", "xpassed") and bool(cell.through) for cell in self.cells)

    @property
    def color(self) -> str:
        if self.num_failed:
            return "failed"
        return "xfailed" if self.run.conclusion.verdict == "not judged" else "passed"

    @property
    def summary(self) -> str:
        parts = [f"{self.num_failed} failed"] if self.num_failed else []
        if self.num_passed:
            parts.append(
                f"{self.num_passed} passed"
                + (f", {self.num_derived} of them with derived operations" if self.num_derived else "")
            )
        if missing := sum(cell.verdict == "not offered" for cell in self.cells):
            parts.append(f"{missing} not offered")
        return "; ".join(parts)


# The differences between two runs of one implementation: its version, and the clauses whose verdict changed.


def list_changes(before: ResultFile, now: ResultFile) -> list[str]:
    """One line per difference, in the order of the specification."""
    return [printable(line, keep_lines=False) for line in (*_version_changes(before, now), *_verdict_changes(before, now))]


def list_still_failing(before: ResultFile, now: ResultFile) -> list[str]:
    """The clauses that failed before and fail now, in the order of the specification."""
    clauses = all_clauses().values()
    return [each.id for each in clauses if MatrixCell(before, each).is_failed and MatrixCell(now, each).is_failed]


def _version_changes(before: ResultFile, now: ResultFile) -> Iterator[str]:
    was, is_now = (run.document["implementation"]["version"] for run in (before, now))
    if was != is_now:
        yield f"version {was} -> {is_now}"


def _verdict_changes(before: ResultFile, now: ResultFile) -> Iterator[str]:
    for clause in all_clauses().values():
        was, cell = MatrixCell(before, clause), MatrixCell(now, clause)
        if was.verdict != cell.verdict:
            why = f": {shown['what']}: expected {shown['expected']}, got {shown['got']}" if (shown := cell.shown_check) else ""
            yield f"{clause.id} {was.verdict} -> {cell.verdict}{why}"
