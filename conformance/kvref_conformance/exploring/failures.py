"""Failures: each collected once, made short once, and known by its clause and its shape from then on."""

from kvref_conformance.exploring.corpus import Corpus, Known
from kvref_conformance.exploring.seen import Failed, Seen, shape_as_met, within

SHAPES = 8  # failures of one clause and family that are made short; past them others count as one of those
WAITING = 50  # failures as they were met that wait for another of their clause to be short

Key = tuple[str, str]  # a clause and a family


class Failures:
    """Those of a corpus, and those that are to be made short: one at a time of each clause and family, for most are the same."""

    def __init__(self, corpus: Corpus) -> None:
        self.known = corpus.failures
        self._to_shrink: list[Seen] = []
        self._shrinking: dict[Key, Seen] = {}
        self._waiting: dict[Key, list[Seen]] = {}

    @property
    def busy(self) -> bool:
        """Whether one is not short yet."""
        return bool(self._shrinking)

    def met(self, seen: Seen) -> None:
        """A machine or a check found something, as long as it is. A check of a clause that is known to be broken is counted."""
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

    def next(self) -> Seen | None:
        """One that is to be made short."""
        return self._to_shrink.pop(0) if self._to_shrink else None

    def short(self, failed: Failed) -> Known | None:
        """One is short: what is now known that was not, if anything."""
        same = next((each for each in self.known if (each.clause, each.shape) == (failed.clause, failed.shape)), None)
        new = None
        if same is not None:
            same.times += 1
        else:
            new = Known(failed.clause, failed.shape, failed.unit)
            self.known.append(new)
        return new

    def go_on(self, clause: str, family: str, over: bool) -> None:
        """None of this clause and family is being made short any more: those that waited are looked at, unless time is over."""
        self._shrinking.pop((clause, family), None)
        for each in self._waiting.pop((clause, family), []):
            if not over:
                self.met(each)

    def keep(self, seen: Seen) -> None:
        """One that nobody lived, or had the time, to make short: known by its unit alone, which the next run asks first."""
        assert seen.found
        known = Known(seen.found.clause, (), seen.unit)
        if known not in self.known:
            self.known.append(known)

    def keep_unfinished(self) -> None:
        for seen in self._shrinking.values():
            self.keep(seen)
