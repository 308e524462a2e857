"""The failures of a search. Each is shrunk once; later failures with the same clause and shape count as the same failure."""

from kvref_conformance.fuzz.corpus import Corpus, KnownFailure
from kvref_conformance.fuzz.work_unit import UnitFailure, UnitResult
from kvref_conformance.traces.shape import is_subsequence, shape_of_exchanges

MAX_SHAPES = 8  # maximum number of different failures per clause and family; further ones count as the first
MAX_WAITING = 50  # maximum number of unshrunk failures that wait while another failure of their clause is shrunk

FailureKey = tuple[str, str]  # a clause and a family


class DistinctFailures:
    """The known failures of a corpus, and new ones to shrink.

    Per clause and family, one failure is shrunk at a time, because most of the others turn out to be the same.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.known_failures = corpus.failures
        self._to_shrink: list[UnitResult] = []
        self._shrinking: dict[FailureKey, UnitResult] = {}
        self._waiting: dict[FailureKey, list[UnitResult]] = {}

    @property
    def is_shrinking(self) -> bool:
        """Whether a failure is being shrunk."""
        return bool(self._shrinking)

    def add_failure(self, result: UnitResult) -> None:
        """Add an unshrunk failure of a state machine or a check: count it if it is known, or else shrink it."""
        assert result.fuzz_failure
        key, shape = (result.fuzz_failure.clause, result.unit.family), shape_of_exchanges(result.fuzz_failure.call_trace)
        alike = [each for each in self.known_failures if (each.clause, each.unit.family) == key]
        known = (each for each in alike if each.trace and (result.unit.kind == "check" or is_subsequence(each.shape, shape)))
        same = next(known, None)
        if same is None and len(alike) >= MAX_SHAPES:
            same = alike[0]
        if same is not None:
            same.times += 1
        elif key in self._shrinking:
            waiting = self._waiting.setdefault(key, [])
            waiting += [result] if len(waiting) < MAX_WAITING else []
        else:
            self._shrinking[key] = result
            self._to_shrink.append(result)

    def next_to_shrink(self) -> UnitResult | None:
        """The next failure to shrink, or None."""
        return self._to_shrink.pop(0) if self._to_shrink else None

    def add_shrunk(self, failed: UnitFailure) -> KnownFailure | None:
        """Add a shrunk failure. Returns it if it is new, or None."""
        same = next((each for each in self.known_failures if (each.clause, each.shape) == (failed.clause, failed.shape)), None)
        new = None
        if same is not None:
            same.times += 1
        else:
            new = KnownFailure(failed.clause, failed.shape, failed.unit)
            self.known_failures.append(new)
        return new

    def finish_shrinking(self, clause: str, family: str, over: bool) -> None:
        """End shrinking for this clause and family, and add the failures that waited. over: the time is over; drop them."""
        self._shrinking.pop((clause, family), None)
        for each in self._waiting.pop((clause, family), []):
            if not over:
                self.add_failure(each)

    def store_unshrunk(self, result: UnitResult) -> None:
        """Store a failure that was not shrunk, because its worker ended or time was over. The next run repeats its unit first."""
        assert result.fuzz_failure
        known = KnownFailure(result.fuzz_failure.clause, (), result.unit)
        if known not in self.known_failures:
            self.known_failures.append(known)

    def store_unfinished(self) -> None:
        """Store all failures whose shrinking has not ended."""
        for result in self._shrinking.values():
            self.store_unshrunk(result)
