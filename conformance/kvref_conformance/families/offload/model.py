"""Expected replies of a host store, computed from its set of keys and a list of the keys in the order of their last use."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvref_conformance.calls.messages import format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import Level
from kvref_conformance.oracle.expectations import AcceptedOrError, AnyOf, ExactValue, Expectation
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel


@dataclass(frozen=True)
class PreparedStore(AnyOf):
    """Reply of `prepare_store`: the new keys in the order of the call, and the required number of evicted keys, in any order."""

    new: tuple[int, ...] = ()
    count: int = 0  # number of keys that must be evicted
    may_go: tuple[int, ...] = ()  # evictable keys, least recently used first
    any_order: bool = False

    def compare(self, ok: Any, op: str, level: Level) -> None:
        new, evicted = map(list, ok)
        if new != list(self.new):
            raise ClauseViolation(f"keys to store, returned by {op}", format_value(list(self.new)), format_value(new), "MOVE-10")
        if pinned := [key for key in evicted if key not in self.may_go]:
            raise ClauseViolation(
                f"keys evicted by {op}", f"some of {format_value(list(self.may_go))}", format_value(pinned), "MOVE-09"
            )
        if len(set(evicted)) != len(evicted) or len(evicted) != self.count:
            raise ClauseViolation(
                f"keys evicted by {op}", f"{self.count} of them", f"{len(evicted)}: {format_value(evicted)}", "MOVE-10"
            )
        oldest = list(self.may_go[: self.count])
        if not self.any_order and set(evicted) != set(oldest):
            raise ClauseViolation(
                f"keys evicted by {op}", f"the least recently used, {format_value(oldest)}", format_value(evicted), "MOVE-11"
            )


class Offload(ReferenceModel):
    family = "offload"
    clause_by_observation: ClassVar = {
        ("complete_store", "lookup"): "MOVE-06", ("failed", "lookup"): "MOVE-08", ("failed", "num_free"): "MOVE-08",
        ("prepare_load", "lookup"): "MOVE-09", ("complete_load", "lookup"): "MOVE-09", "lookup": "MOVE-10",
        "num_free": "MOVE-10", "places": "MOVE-10",
    }  # fmt: skip

    def __init__(self, *, capacity: int) -> None:
        super().__init__()
        self.total = capacity
        self.ready: set[int] = set()
        self.being_stored: set[int] = set()
        self.loads: Counter[int] = Counter()
        self.by_last_use: list[int] = []  # stored keys and keys being stored, least recently used first
        self.place_of: dict[int, int] = {}  # of each key whose place was returned
        self.known_keys: dict[int, None] = {}  # every key that any call contained
        self.uncertain_use: set[int] = set()  # keys of a failed prepare_store, which may count as a use
        self.any_order = False

    def apply_limits(self, switch: Callable[[str], bool]) -> None:
        self.any_order = switch("other_eviction_order")

    def observations(self) -> list[ReadCall]:
        here: list[ReadCall] = [("places", {"keys": list(self.by_last_use)})] if self.by_last_use else []
        return [("num_free", {}), *(("lookup", {"keys": [key]}) for key in self.known_keys), *here]

    @property
    def free(self) -> int:
        return self.total - len(self.by_last_use)

    def capacity(self) -> Expectation:
        return ExactValue("MOVE-10", value=self.total)

    def num_free(self) -> Expectation:
        return ExactValue(self.clause_of("num_free"), value=self.free)

    def lookup(self, keys: Sequence[int]) -> Expectation:
        found = next((count for count, key in enumerate(keys) if key not in self.ready), len(keys))
        being_stored = found < len(keys) and keys[found] in self.being_stored
        return ExactValue("MOVE-06" if being_stored else self.clause_of("lookup"), value=found)

    def places(self, keys: Sequence[int]) -> Expectation:
        if any(key not in self.by_last_use for key in keys):
            return self.expect_error([("KeyNotFound", "MOVE-10")])
        other_places = {place for key, place in self.place_of.items() if key not in keys}

        def accepts(places: Sequence[int]) -> bool:
            place_of = dict(zip(keys, places, strict=True))
            unchanged = all(self.place_of.get(key, place) == place for key, place in zip(keys, places, strict=True))
            distinct = len(set(place_of.values())) == len(place_of) and not other_places & set(place_of.values())
            return unchanged and distinct and all(0 <= place < self.total for place in places)

        says = f"places in [0, {self.total}), one per key"
        places = {key: self.place_of[key] for key in keys if key in self.place_of}
        return AnyOf(
            self.clause_of("places"), lambda places: self.place_of.update(zip(keys, places, strict=True)), range_text=says,
            details=lambda: f", where they were: {places}" if places else "", accepts=accepts, length=(len(keys), "MOVE-10"),
        )  # fmt: skip

    def prepare_store(self, keys: Sequence[int]) -> Expectation:
        self.known_keys |= dict.fromkeys(keys)
        new = [key for key in dict.fromkeys(keys) if key not in self.by_last_use]
        count = max(0, len(new) - self.free)
        may_go = [key for key in self.by_last_use if key in self.ready and not self.loads[key] and key not in keys]
        if count > len(may_go):
            occupied = sum(key not in keys for key in self.by_last_use)
            refused = self.expect_error([("OutOfBlocks", "MOVE-09" if count <= occupied else "MOVE-10")])

            def note_refusal() -> None:
                refused.on_error()
                self.uncertain_use |= set(keys) & set(self.by_last_use)

            return replace(refused, on_error=note_refusal)

        def change(ok: Any) -> None:
            for key in ok[1]:
                self._forget(key)
            self.being_stored |= set(new)
            self.by_last_use += new
            self._use(keys)

        any_order = self.any_order or not self.uncertain_use.isdisjoint(may_go)
        then, says = self.on_success("prepare_store", change), f"{new} to be stored, {count} of {may_go} evicted"
        return PreparedStore(
            "MOVE-10", then, range_text=says, new=tuple(new), count=count, may_go=tuple(may_go), any_order=any_order
        )  # fmt: skip

    def complete_store(self, keys: Sequence[int], success: bool = True) -> Expectation:
        keys_being_stored = [key for key in dict.fromkeys(keys) if key in self.being_stored]

        def change(ok: Any) -> None:
            self.being_stored -= set(keys_being_stored)
            if success:
                self.ready |= set(keys_being_stored)
            else:
                for key in keys_being_stored:
                    self._forget(key)

        then, clause = self.on_success("complete_store" if success else "failed", change), "MOVE-06" if success else "MOVE-08"
        if len(keys_being_stored) == len(set(keys)):
            return Expectation(clause, then)
        return AcceptedOrError("MOVE-08", then, kinds=("KeyNotFound",), on_error=lambda: self.note_unchanged("refused"))

    def prepare_load(self, keys: Sequence[int]) -> Expectation:
        if any(key not in self.ready for key in keys):
            return self.expect_error([("KeyNotFound", "MOVE-06")])

        def change(ok: Any) -> None:
            self.loads.update(keys)
            self._use(keys)

        return Expectation("MOVE-09", self.on_success("prepare_load", change))

    def complete_load(self, keys: Sequence[int]) -> Expectation:
        if any(self.loads[key] < count for key, count in Counter(keys).items()):
            return self.expect_error([("KeyNotFound", "MOVE-09")])
        clause = "LAW-01" if self.unchanged_by == "refused" else "MOVE-09"  # the failed call freed some of the loads
        return Expectation(clause, self.on_success("complete_load", lambda ok: self.loads.subtract(keys)))

    def touch(self, keys: Sequence[int]) -> Expectation:
        return Expectation("MOVE-11", self.on_success("touch", lambda ok: self._use(keys)))

    def _use(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key in self.by_last_use:
                self.by_last_use.remove(key)
                self.by_last_use.append(key)
                self.uncertain_use.discard(key)

    def _forget(self, key: int) -> None:
        self.by_last_use.remove(key)
        self.ready.discard(key)
        self.uncertain_use.discard(key)
        self.place_of.pop(key, None)
