"""State machine of the family `offload`: random call sequences."""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.offload.model import Offload
from kvref_conformance.fuzz.base_machine import FamilyStateMachine
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

FIRST = 10**12  # the smallest key, larger than 32 bits can represent
START, COUNT, WHICH = st.integers(0, 6), st.sampled_from((1, 2, 1, 3, 2, 4, 0)), st.integers(0, 5)
SUCCESS = st.sampled_from((True, True, False))


def run_of(start: int, count: int) -> list[int]:
    """Consecutive keys, which stand for the blocks of a prompt."""
    return [FIRST + number for number in range(start, start + count)]


class OffloadStateMachine(FamilyStateMachine):
    family = "offload"

    @initialize(capacity=st.sampled_from((3, 2, 4, 3, 1, 5, 0)))
    def new(self, capacity: int) -> None:
        self.make_object(capacity=capacity)

    @property
    def model(self) -> Offload:
        model = self.models[self.objects[0]]
        assert isinstance(model, Offload)
        return model

    def pick(self, among: list[int], which: int) -> list[int]:
        """One key, or all keys from one index to the end. Empty if `among` is empty."""
        at = which // 2 % len(among) if among else 0
        return among[at:] if which % 2 else among[at : at + 1]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]

        def prepare_store(number: int) -> None:
            self.call("prepare_store", self.edited, keys=run_of(number, 1 + number % 3))

        def complete_store(number: int) -> None:
            self.complete_store(number, number != 7)

        def prepare_load(number: int) -> None:
            if keys := self.pick(sorted(self.model.ready), number):
                self.call("prepare_load", self.edited, keys=keys)

        return {
            "prepare_store": prepare_store, "complete_store": complete_store, "prepare_load": prepare_load,
            "complete_load": self.complete_load, "touch": lambda number: self.touch(number, 2),
        }  # fmt: skip

    @precondition(lambda self: self.objects)
    @rule(start=START, count=COUNT, arrives=st.sampled_from((True, True, True, False)))
    def store(self, start: int, count: int, arrives: bool) -> None:
        """Store keys. If not `arrives`, they stay in the state of being stored."""
        prepared = self.call("prepare_store", self.objects[0], keys=run_of(start, count))
        if prepared is not None and prepared[0] and arrives:
            self.call("complete_store", self.objects[0], keys=list(prepared[0]))

    store_more = store

    @precondition(lambda self: self.objects)
    @rule(start=START, count=COUNT, again=st.booleans())
    def fail(self, start: int, count: int, again: bool) -> None:
        prepared = self.call("prepare_store", self.objects[0], keys=run_of(start, count))
        if prepared is not None and prepared[0]:
            self.call("complete_store", self.objects[0], keys=list(prepared[0]), success=False)
            if again:
                self.store(start, count, True)

    @precondition(lambda self: self.objects)
    @rule(start=START, other=START)
    def store_one_that_is_named_twice(self, start: int, other: int) -> None:
        self.call("prepare_store", self.objects[0], keys=[*run_of(start, 1), *run_of(other, 1), *run_of(start, 1)])

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, success=SUCCESS)
    def complete_store(self, which: int, success: bool) -> None:
        if keys := self.pick(sorted(self.model.being_stored), which):
            self.call("complete_store", self.objects[0], keys=keys, success=success)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, success=SUCCESS)
    def complete_what_is_not_being_stored(self, which: int, success: bool) -> None:
        if keys := self.pick([key for key in self.model.known_keys if key not in self.model.being_stored], which):
            self.call("complete_store", self.objects[0], keys=keys, success=success)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, twice=st.sampled_from((False, False, True)))
    def load(self, which: int, twice: bool) -> None:
        if keys := self.pick(sorted(self.model.ready), which):
            self.call_quietly("lookup", self.objects[0], keys=keys)
            self.call("prepare_load", self.objects[0], keys=keys)
            if twice:
                self.call("prepare_load", self.objects[0], keys=keys[-1:])

    load_more = load

    @precondition(lambda self: self.objects)
    @rule(start=START, last=st.booleans())
    def load_what_is_not_there(self, start: int, last: bool) -> None:
        """Load a missing key together with stored keys, as the last or as the first key of the call."""
        keys, ready = run_of(start, 1), sorted(self.model.ready - set(run_of(start, 1)))
        self.call("prepare_load", self.objects[0], keys=[*ready, *keys] if last else [*keys, *ready])
        self.store(start, 1, True)

    @precondition(lambda self: self.objects)
    @rule(over=st.sampled_from((False, False, True)))
    def load_and_store_another(self, over: bool) -> None:
        """Load the least recently used key, then store one key more than fits. If `over`, the load completes before that."""
        missing = [key for key in run_of(0, 20) if key not in self.model.by_last_use]
        fills, another = missing[: self.model.free], missing[self.model.free :][:1]
        if self.call("prepare_store", self.objects[0], keys=fills) is not None and fills:
            self.call("complete_store", self.objects[0], keys=fills)
        if oldest := [key for key in self.model.by_last_use if key in self.model.ready][:1]:
            self.call("prepare_load", self.objects[0], keys=oldest)
            self.call("touch", self.objects[0], keys=[key for key in reversed(self.model.by_last_use) if key not in oldest])
            if over:
                self.call("complete_load", self.objects[0], keys=oldest)
            self.call("prepare_store", self.objects[0], keys=another)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH)
    def complete_load(self, which: int) -> None:
        if keys := self.pick(sorted(key for key, count in self.model.loads.items() if count), which):
            self.call("complete_load", self.objects[0], keys=keys)

    complete_more = complete_load

    @precondition(lambda self: self.objects)
    @rule(start=START, count=COUNT)
    def complete_any_load(self, start: int, count: int) -> None:
        self.call("complete_load", self.objects[0], keys=run_of(start, count))

    @precondition(lambda self: self.objects)
    @rule(start=START, count=COUNT)
    def touch(self, start: int, count: int) -> None:
        self.call("touch", self.objects[0], keys=run_of(start, count))

    @precondition(lambda self: self.objects)
    @rule(start=START)
    def ask_where_it_lies(self, start: int) -> None:
        self.call_quietly("places", self.objects[0], keys=run_of(start, 1))


# States of a host store in which bugs are likely.

register_error_states("offload", "OutOfBlocks", "KeyNotFound")


def evicted_keys(call: ModelCall) -> list[int]:
    """The keys that a call evicted."""
    return list(call.result[1])


def keys_passed_over(call: ModelCall) -> list[int]:
    """Keys used less recently than an evicted key, which an LRU order would have evicted before it."""
    used: list[int] = call.model.by_last_use
    return used[: max((used.index(key) for key in evicted_keys(call)), default=0)]


def model_and_keys(call: ModelCall) -> tuple[Offload, Sequence[int]]:
    return call.model, call.args["keys"]


@state("offload", "prepare_store")
def a_key_is_evicted(call: ModelCall) -> bool:
    return bool(evicted_keys(call))


@state("offload", "prepare_store")
def eviction_passes_over_a_key_being_loaded(call: ModelCall) -> bool:
    return any(call.model.loads[key] for key in keys_passed_over(call))


@state("offload", "prepare_store")
def eviction_passes_over_a_key_being_stored(call: ModelCall) -> bool:
    return any(key in call.model.being_stored for key in keys_passed_over(call))


@state("offload", "prepare_store")
def eviction_passes_over_a_key_of_the_call(call: ModelCall) -> bool:
    return any(key in call.args["keys"] for key in keys_passed_over(call))


@state("offload", "prepare_store")
def a_key_is_evicted_that_was_loaded_before(call: ModelCall) -> bool:
    return any(key in call.history.freed_blocks for key in evicted_keys(call))


@state("offload", "prepare_store")
def some_keys_are_stored_and_some_are_new(call: ModelCall) -> bool:
    return 0 < len(call.result[0]) < len(call.args["keys"])


@state("offload", "prepare_store", raising="OutOfBlocks")
def no_key_can_be_evicted_while_stores_or_loads_are_in_progress(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    new = sum(key not in model.by_last_use for key in set(keys))
    return new <= model.free + sum(key not in keys for key in model.by_last_use)


@state("offload", "prepare_load", raising="KeyNotFound")
def a_later_key_of_a_load_is_missing(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    return len(keys) > 1 and keys[0] in model.ready


@state("offload", "prepare_load", raising="KeyNotFound")
def a_key_being_stored_is_loaded(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    return any(key in model.being_stored for key in keys)


@state("offload", "prepare_load")
def a_key_has_two_loads_in_progress(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    return any(model.loads[key] for key in keys)


@state("offload", "complete_load")
def one_of_two_loads_completes(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    return any(model.loads[key] > 1 for key in keys)


@state("offload", "complete_store")
def a_store_fails(call: ModelCall) -> bool:
    return not call.args.get("success", True) and any(key in call.model.being_stored for key in call.args["keys"])


@state("offload", "complete_store")
def a_key_whose_store_failed_is_stored(call: ModelCall) -> bool:
    return call.args.get("success", True) and any(key in call.history.reused_buffers for key in call.args["keys"])


@state("offload", "touch")
def the_least_recently_used_key_is_touched(call: ModelCall) -> bool:
    model, keys = model_and_keys(call)
    return len(model.by_last_use) > 1 and model.by_last_use[0] in keys


def note_offload(call: ModelCall) -> None:
    if call.error_kind:
        return
    if call.op == "offload.complete_load":
        call.history.freed_blocks.update(call.args["keys"])
    elif call.op == "offload.complete_store" and not call.args.get("success", True):
        call.history.reused_buffers.update(call.args["keys"])


NOTES["offload"] = note_offload
