"""The probable causes of the failures of a run: which failure to look at first, and which others the same fault explains.

One fault often breaks ten clauses. Each shown failure is therefore reduced a second time, to the smallest calls that break any
clause: its root. Failures belong to the same cause if their roots break the same clause or have the same calls, or if the calls
of one contain the calls of the other. The failure with the fewest calls shows its fault most directly, if its root breaks the
clause that failed. If the root breaks another clause, the check failed before it reached its own subject.

Causes in which an invalid argument is accepted come after the others: no valid call shows them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import Exchange, is_error_text
from kvref_conformance.clauses import all_clauses
from kvref_conformance.exceptions import CallTimeout, ClauseViolation
from kvref_conformance.results import Evidence, Result
from kvref_conformance.traces.shape import is_subsequence

PRODUCTION_SIZES_CLAUSE = "LAW-18"
FAILURE_KINDS = "contents", "unexpected error", "no error", "no reply", "counts"  # the most direct first
ARGUMENT_ERRORS = (
    "ConfigError", "DtypeMismatch", "HeadOutOfRange", "LayerOutOfRange", "PositionOutOfRange", "RankOutOfRange", "RowOutOfRange",
    "ShapeMismatch", "SlotOutOfRange", "TokenOutOfRange",
)  # fmt: skip
LAW_CALLS = 2  # a law is as direct as the clause of a chapter if its reproducer has two calls less


@dataclass(frozen=True)
class ShownFailure:
    """A failed check of a clause, whose calls are shown. check: the fields of its CheckResult; trace: the path of its trace."""

    clause: str
    title: str
    check: dict[str, Any]
    evidence: Evidence

    @property
    def root_clause(self) -> str:
        """The clause that the root breaks, or the failed clause if there is no root."""
        return self.evidence.root_clause or self.clause

    @property
    def accepts_invalid_argument(self) -> bool:
        return self.evidence.kind == "no error" and self.check["expected"].startswith(ARGUMENT_ERRORS)

    @property
    def directness(self) -> tuple[Any, ...]:
        """A sort key: the failure that shows its fault most directly is the first."""
        law = self.clause.startswith("LAW-")
        return (
            self.clause == PRODUCTION_SIZES_CLAUSE,
            not self.evidence.root,
            self.root_clause != self.clause,
            self.evidence.calls + LAW_CALLS * law,
            FAILURE_KINDS.index(self.evidence.kind),
            self.evidence.numbers,
            list(all_clauses()).index(self.clause),
        )

    def has_same_cause(self, other: "ShownFailure") -> bool:
        own, its = self.evidence, other.evidence
        if own.root and its.root and self.root_clause == other.root_clause:
            return True
        missing_errors = {each.check["expected"] if each.evidence.kind == "no error" else "" for each in (self, other)}
        if len(missing_errors) > 1:
            return False  # a call that accepts an invalid argument explains no other wrong reply
        if own.root and own.root == its.root:
            return True
        short, long = sorted((own.shape, its.shape), key=len)
        # Without the last call, which often is one of several observables of the same wrong state.
        edits = [call for call in short[:-1] if not call.endswith((".new", ".create"))]
        return bool(short) and is_subsequence(short[:-1] if len(edits) > 1 else short, long)


@dataclass(frozen=True)
class ProbableCause:
    """One fault, as far as the failures show.

    first: the failure that shows the fault most directly. others: failures that it probably explains, the most direct first.
    """

    first: ShownFailure
    others: list[ShownFailure]

    @property
    def clauses(self) -> list[str]:
        """The broken clauses, the most directly broken one first."""
        return list(dict.fromkeys(each.clause for each in (self.first, *self.others)))


def shown_failures(result: Result) -> list[ShownFailure]:
    """The failed checks of a clause whose calls are shown, one per kind of failure, the most direct first."""
    shown = [
        ShownFailure(result["clause"], result["title"], check, Evidence(**check["evidence"]))
        for check in result["checks"]
        if check["evidence"]
    ]
    return sorted(shown, key=lambda each: each.directness)


def probable_causes(results: Iterable[Result]) -> list[ProbableCause]:
    """The failures of a run, grouped by their probable cause; the cause with the most direct failure is the first.

    A failure at production sizes, whose calls are too many to compare, belongs to the first cause if there is one.
    """
    failures = [each for result in results if result["verdict"] == "failed" for each in shown_failures(result)]
    at_production_sizes = [each for each in failures if each.clause == PRODUCTION_SIZES_CLAUSE]
    groups: list[list[ShownFailure]] = []
    for failure in (each for each in failures if each not in at_production_sizes):
        alike = [group for group in groups if any(failure.has_same_cause(each) for each in group)]
        groups = [group for group in groups if group not in alike]
        groups.append([*(each for group in alike for each in group), failure])
    groups = [sorted(group, key=lambda each: each.directness) for group in groups]
    groups.sort(key=lambda group: (group[0].accepts_invalid_argument, group[0].directness))
    if at_production_sizes:
        groups[:1] = [[*(groups[0] if groups else []), *at_production_sizes]]
    return [ProbableCause(first, others) for first, *others in groups]


def failure_kind(violation: ClauseViolation, call_trace: Sequence[Exchange]) -> str:
    """One of FAILURE_KINDS: what is wrong with the reply to the last call."""
    if isinstance(violation, CallTimeout):
        return "no reply"
    if is_error_text(violation.expected):
        return "no error"
    if violation.expected == "no error" or is_error_text(violation.got):
        return "unexpected error"
    ok = call_trace[-1].reply.ok if call_trace and call_trace[-1].reply else None
    parts = ok if isinstance(ok, tuple) else (ok,)
    return "contents" if any(isinstance(part, np.ndarray) and part.dtype.kind in "fV" for part in parts) else "counts"
