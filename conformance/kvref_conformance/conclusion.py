"""What a run comes to as a whole: how much of what is offered was judged, and what follows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

LEAST_JUDGED = 50.0  # per cent of the clauses of the families that an implementation offers

Verdict = Literal["conformant", "not conformant", "not conformant, as expected", "not judged"]

EXIT_STATUS: dict[Verdict, int] = {
    "conformant": 0, "not conformant, as expected": 0, "not conformant": 1, "not judged": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Conclusion:
    """judged: how many clauses have a verdict, of those with a check for a family that is offered. least: per cent, to be enough.

    What takes --slow, and was not run, counts for neither.
    """

    verdict: Verdict
    judged: int
    of: int
    least: float

    @property
    def share(self) -> str:
        return f"{self.judged} of {self.of} clauses of the families it offers"

    @property
    def enough(self) -> bool:
        return self.judged > 0 and 100 * self.judged >= self.least * self.of


def conclude(results: Iterable[dict[str, Any]], least: float = LEAST_JUDGED) -> Conclusion:
    """results: as `kvref check --json` writes them, one a clause.

    A failure is a failure however little was judged; that nothing failed says something only where enough was.
    """
    counted = [each["verdict"] for each in results if each["offered"] and each["verdict"] != "not run"]
    judged = sum(verdict != "not offered" for verdict in counted)
    as_expected = Conclusion("not conformant, as expected" if "xfailed" in counted else "conformant", judged, len(counted), least)
    if "failed" in counted:
        return Conclusion("not conformant", judged, len(counted), least)
    return as_expected if as_expected.enough else Conclusion("not judged", judged, len(counted), least)
