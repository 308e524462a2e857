"""What a run comes to as a whole: how much of what is offered was judged, and what follows."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvref_conformance.clauses import all_clauses

LEAST_JUDGED = 50.0  # per cent of the clauses of the families that an implementation offers

Verdict = Literal["conformant", "not conformant", "not conformant, as expected", "not judged"]

EXIT_STATUS: dict[Verdict, int] = {
    "conformant": 0, "not conformant, as expected": 0, "not conformant": 1, "not judged": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Conclusion:
    """judged: how many clauses have a verdict, of those with a check for a family that is offered. least: per cent, to be enough.

    whole: whether every clause there is was asked for, or only some (--clause, --family, -k). What takes --slow or --real, and
    was not run, counts for neither, nor what is about formats alone that an implementation does not have.
    """

    verdict: Verdict
    judged: int
    of: int
    least: float
    whole: bool

    @property
    def share(self) -> str:
        return f"{self.judged} of {self.of} clauses"

    @property
    def scope(self) -> str:
        """Which clauses those are."""
        return "of the families it offers" if self.whole else "asked for"

    @property
    def enough(self) -> bool:
        return self.judged > 0 and 100 * self.judged >= self.least * self.of


def conclude(results: Iterable[dict[str, Any]], least: float = LEAST_JUDGED, interrupted: bool = False) -> Conclusion:
    """results: as `kvref check --json` writes them, one a clause. interrupted: not all that were asked for are there.

    A failure is a failure however little was judged; that nothing failed says something only where enough was, and all is there.
    """
    results = list(results)
    counted = [
        each["verdict"] for each in results if each["offered"] and each["verdict"] != "not run" and not _of_other_formats(each)
    ]
    judged = sum(verdict != "not offered" for verdict in counted)
    whole = {each["clause"] for each in results} >= set(all_clauses())
    verdict: Verdict = "not conformant, as expected" if "xfailed" in counted else "conformant"
    found = Conclusion("not conformant" if "failed" in counted else verdict, judged, len(counted), least, whole)
    return found if "failed" in counted or (found.enough and not interrupted) else replace(found, verdict="not judged")


def _of_other_formats(result: dict[str, Any]) -> bool:
    """Whether a clause is about formats that are not had, which are as little asked of anybody as a family is.

    What holds for every format is asked of everybody who offers rows; and what limits leave out of formats that are had, counts.
    """
    if result["verdict"] != "not offered" or result["clause"].startswith("FMT-LEVEL-"):
        return False
    reasons = result["missing"]
    return bool(reasons) and all(each.startswith("format ") and " limits " not in each for each in reasons)
