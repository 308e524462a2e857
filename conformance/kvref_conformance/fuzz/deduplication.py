"""The failures of a search. Each is shrunk once; later failures with the same clause and shape count as the same failure."""

from kvref_conformance.fuzz.corpus import Corpus, KnownFailure
from kvref_conformance.fuzz.work_unit import UnitFailure, UnitResult, shape_as_met, within

SHAPES = 8  # maximum number of different failures per clause and family; further ones count as the first
WAITING = 50  # maximum number of unshrunk failures that wait while another failure of their clause is shrunk

Key = tuple[str, str]  # a clause and a family


class DistinctFailures:
    """The known failures of a corpus, and new ones to shrink.

    Per clause and family, one failure is shrunk at a time, because most of the others turn out to be the same.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.known = corpus.failures
        self._to_shrink: list[UnitResult] = []
        self._shrinking: dict[Key, UnitResult] = {}
        self._waiting: dict[Key, list[UnitResult]] = {}

    @property
    def busy(self) -> bool:
        """Whether a failure is being shrunk."""
        return bool(self._shrinking)

    def met(self, seen: UnitResult) -> None:
        """Add an unshrunk failure of a state machine or a check: count it if it is known, or else shrink it."""
        assert seen.found
        key, shape = (seen.found.clause, seen.unit.family), shape_as_met(seen.found.conversation)
        alike = [each for each in self.known if (each.clause, each.unit.family) == key]
        known = (each for each in alike if each.trace and (seen.unit.kind == "check" or within(each.shape, shape)))
        same = next(known, None)
        if same is None and len(alike) >= SHAPES:
            same = alike[0]
        if same is not None:
            same.times += 1
        elif key in self._shrinking:
            waiting = self._waiting.setdefault(key, [])
            waiting += [seen] if len(waiting) < WAITING else []
        else:
            self._shrinking[key] = seen
            self._to_shrink.append(seen)

    def next(self) -> UnitResult | None:
        """The next failure to shrink, or None."""
        return self._to_shrink.pop(0) if self._to_shrink else None

    def short(self, failed: UnitFailure) -> KnownFailure | None:
        """Add a shrunk failure. Returns it if it is new, or None."""
        same = next((each for each in self.known if (each.clause, each.shape) == (failed.clause, failed.shape)), None)
        new = None
        if same is not None:
            same.times += 1
        else:
            new = KnownFailure(failed.clause, failed.shape, failed.unit)
            self.known.append(new)
        return new

    def go_on(self, clause: str, family: str, over: bool) -> None:
        """End shrinking for this clause and family, and add the failures that waited. over: the time is over; drop them."""
        self._shrinking.pop((clause, family), None)
        for each in self._waiting.pop((clause, family), []):
            if not over:
                self.met(each)

    def keep(self, seen: UnitResult) -> None:
        """Store a failure that was not shrunk, because its worker ended or time was over. The next run repeats its unit first."""
        assert seen.found
        known = KnownFailure(seen.found.clause, (), seen.unit)
        if known not in self.known:
            self.known.append(known)

    def keep_unfinished(self) -> None:
        """Store all failures whose shrinking has not ended."""
        for seen in self._shrinking.values():
            self.keep(seen)
