"""The overall verdict of a run: how many clauses were judged, which failed, and the exit status that follows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvref_conformance.clauses import all_clauses

MIN_JUDGED_PERCENT = 50.0  # percent of the clauses of the offered families

Verdict = Literal["conformant", "not conformant", "not conformant, as expected", "not judged"]

EXIT_STATUS: dict[Verdict, int] = {
    "conformant": 0, "not conformant, as expected": 0, "not conformant": 1, "not judged": 2,
}  # fmt: skip


@dataclass(frozen=True)
class RunVerdict:
    """The overall verdict, with the numbers that it depends on.

    of: how many of the selected clauses have a check for an offered family. judged: how many of those have a verdict.
    least: the minimum percentage of judged clauses. whole: whether all clauses were selected, or only some (--clause,
    --family, -k). Two kinds of clauses count in neither number: clauses that did not run because their checks need --slow
    or --real, and clauses that are only about formats that the implementation lacks.
    """

    verdict: Verdict
    judged: int
    of: int
    least: float
    whole: bool

    @property
    def share(self) -> str:
        return f"{self.judged} of {self.of} {self.scope}"

    @property
    def scope(self) -> str:
        """Which clauses were counted."""
        return "clauses of its families" if self.whole else "selected clauses"

    @property
    def is_enough(self) -> bool:
        return self.judged > 0 and 100 * self.judged >= self.least * self.of


def overall_verdict(
    results: Iterable[dict[str, Any]], least: float = MIN_JUDGED_PERCENT, interrupted: bool = False
) -> RunVerdict:
    """results: one per clause, as `kvref check --json` writes them. interrupted: results of some selected clauses are missing.

    One failure makes an implementation not conformant, however few clauses were judged. It is conformant only if enough clauses
    were judged, none of them failed and the run was complete.
    """
    results = list(results)
    counted = [each["verdict"] for each in results if is_counted(each) and each["verdict"] != "not run"]
    judged = sum(verdict != "not offered" for verdict in counted)
    whole = {each["clause"] for each in results} >= set(all_clauses())
    verdict: Verdict = "not conformant, as expected" if "xfailed" in counted else "conformant"
    found = RunVerdict("not conformant" if "failed" in counted else verdict, judged, len(counted), least, whole)
    return found if "failed" in counted or (found.is_enough and not interrupted) else replace(found, verdict="not judged")


def is_counted(result: dict[str, Any]) -> bool:
    """Whether a clause counts: a check of it is for an offered family, and not only for formats that the implementation lacks."""
    of_others = result["verdict"] == "not offered" and needs_missing_formats(result["clause"], result["missing"])
    return result["offered"] and not of_others


def needs_missing_formats(clause: str, missing: Sequence[str]) -> bool:
    """Whether a clause that is not offered is only about formats that the implementation lacks: formats are optional.

    missing: the reasons why its checks cannot judge. FMT-LEVEL clauses apply to every format, so they always count. A format that
    the implementation has, but that its limits exclude from a check, counts too.
    """
    of_formats = (each.startswith("format ") and " limits " not in each for each in missing)
    return bool(missing) and not clause.startswith("FMT-LEVEL-") and all(of_formats)
