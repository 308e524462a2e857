"""The state machine of the family `contiguous`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.contiguous.model import Contiguous
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
    FamilyStateMachine,
    choose_one,
    clip_index,
    make_pair,
)
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray

INDEX = st.integers(0, 5)
SIZE = st.integers(1, 3)


class ContiguousStateMachine(FamilyStateMachine):
    family = "contiguous"

    @initialize(
        batch=st.sampled_from((1, 2, 2)), heads=SIZE, dim=SIZE, initial=st.integers(0, 4), most=st.sampled_from((1, 8, 12, 7, 3)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")), twice=st.booleans(),
    )  # fmt: skip
    def new(self, batch: int, heads: int, dim: int, initial: int, most: int, dtype: str, twice: bool) -> None:
        for _ in range(1 + twice):
            self.make_object(
                batch_size=batch, num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=most, dtype=dtype
            )

    def model(self, which: int) -> Contiguous:
        """Returns the reference model of one of the caches."""
        found = self.models[choose_one(self.objects, which) or 0]
        assert isinstance(found, Contiguous)
        return found

    def random_pair(self, which: int, count: int, kind: str) -> tuple[NDArray, NDArray]:
        batch, heads, dim = self.model(which).sizes
        return make_pair(self.source, (batch, heads, count, dim), kind)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = choose_one(self.objects, which)
        batch = self.model(which).sizes[0]
        return {
            "append": lambda number: self.append(which, 1 + number % 3, "uneven", fused=False),
            "append_fused": lambda number: self.append(which, 1 + number % 3, "uneven", fused=True),
            "advance": lambda number: self.call("advance", self.edited, count=number % 3),
            "reorder": lambda number: self.call("reorder", self.edited, rows=[(number >> row) % batch for row in range(batch)]),
            "reset": lambda number: self.call("reset", self.edited),
        } | self.cache_edits(lambda: len(self.model(which).tokens))

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=TOKEN_COUNT, kind=row_kinds(), fused=st.booleans())
    def append(self, which: int, count: int, kind: str, fused: bool) -> None:
        keys, values = self.random_pair(which, count, kind)
        if fused:
            self.call("append_fused", choose_one(self.objects, which), key_values=np.stack([keys, values]))
        else:
            self.call("append", choose_one(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        batch, heads, dim = self.model(which).sizes
        keys, values = self.source.wrong_pair((batch, heads, 1, dim), wrong, side)
        self.call("append", choose_one(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=st.integers(-1, 3))
    def advance(self, which: int, count: int) -> None:
        self.call("advance", choose_one(self.objects, which), count=count)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, back=TRUNCATION, count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, which: int, back: int, count: int, kind: str) -> None:
        self.call("truncate", choose_one(self.objects, which), length=len(self.model(which).tokens) - back)
        self.append(which, count, kind, fused=False)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, rows=st.lists(ANY_INDEX, min_size=1, max_size=3), count=TOKEN_COUNT, kind=row_kinds())
    def reorder(self, which: int, rows: list[int], count: int, kind: str) -> None:
        batch, size = self.model(which).sizes[0], self.subject.size("batch_size", len(rows))
        self.call("reorder", choose_one(self.objects, which), rows=[clip_index(rows[i % len(rows)], batch) for i in range(size)])
        self.append(which, count, kind, fused=False)

    reorder_again = reorder

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=TOKEN_COUNT, kind=row_kinds())
    def reset(self, which: int, count: int, kind: str) -> None:
        self.call("reset", choose_one(self.objects, which))
        self.append(which, count, kind, fused=False)


# The states of the contiguous cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "contiguous", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RowOutOfRange",
)  # fmt: skip


def total(call: ModelCall) -> int:
    """Returns the number of tokens after an append."""
    return len(call.model.tokens) + call.tokens


@state("contiguous", "append", "append_fused")
def tokens_are_there_when_memory_grows(call: ModelCall) -> bool:
    return len(call.model.tokens) > 0 and call.model.room < total(call)


@state("contiguous", "append", "append_fused")
def memory_doubles_more_than_once(call: ModelCall) -> bool:
    return bool(total(call) > 2 * max(1, call.model.room))


@state("contiguous", "append", "append_fused")
def growth_ends_at_a_maximum_that_no_doubling_meets(call: ModelCall) -> bool:
    room = max(1, call.model.room)
    while room < total(call):
        room *= 2
    return bool(call.model.room < total(call) and room > call.model.most)


@state("contiguous", "append", "append_fused")
def memory_grows_after_a_reset(call: ModelCall) -> bool:
    return call.on in call.history.max_tokens and total(call) > call.model.room


@state("contiguous", "append", "append_fused")
def the_last_room_there_may_be_is_filled(call: ModelCall) -> bool:
    return call.tokens > 0 and total(call) == call.model.most


@state("contiguous", "append", "append_fused", raising="CapacityExceeded")
def a_cache_with_tokens_and_room_cannot_take_all_that_come(call: ModelCall) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.most)


@state("contiguous", "append", "append_fused")
def tokens_come_after_some_did_not_fit(call: ModelCall) -> bool:
    return call.tokens > 0 and "a cache with tokens and room cannot take all that come" in call.history.reached


@state("contiguous", "append", "append_fused")
def fewer_tokens_follow_a_reset(call: ModelCall) -> bool:
    return 0 < total(call) < call.history.max_tokens.get(call.on, 0)


@state("contiguous", "append", "append_fused")
def several_tokens_of_a_batch_are_added_to_some(call: ModelCall) -> bool:
    return call.model.sizes[0] > 1 and call.tokens > 1 and len(call.model.tokens) > 0


@state("contiguous", "append_fused")
def several_fused_tokens_are_added_to_some(call: ModelCall) -> bool:
    return call.tokens > 1 and len(call.model.tokens) > 0


@state("contiguous", "advance")
def tokens_are_there_when_more_are_counted(call: ModelCall) -> bool:
    return bool(call.args["count"] and call.model.tokens)


@state("contiguous", "advance")
def memory_is_counted_to_its_end(call: ModelCall) -> bool:
    return bool(call.args["count"] and len(call.model.tokens) + call.args["count"] == call.model.room)


@state("contiguous", "advance", raising="CapacityExceeded")
def more_is_counted_than_memory_holds_and_less_than_it_may(call: ModelCall) -> bool:
    return bool(call.model.room < len(call.model.tokens) + call.args["count"] <= call.model.most)


@state("contiguous", "append", "append_fused")
def tokens_follow_some_that_were_only_counted(call: ModelCall) -> bool:
    return call.tokens > 0 and None in call.model.tokens


@state("contiguous", "truncate")
def some_tokens_go_and_some_stay(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens))


@state("contiguous", "append", "append_fused")
def tokens_follow_a_truncate_of_some(call: ModelCall) -> bool:
    return bool(call.tokens and call.model.tokens and call.model.last_change == "truncate")


@state("contiguous", "append", "append_fused")
def memory_grows_after_a_truncate(call: ModelCall) -> bool:
    return bool(call.model.last_change == "truncate" and total(call) > call.model.room)


@state("contiguous", "reorder")
def rows_with_tokens_change_places(call: ModelCall) -> bool:
    rows = call.args["rows"]
    return bool(call.model.tokens and sorted(rows) == list(range(call.model.sizes[0])) != rows)


@state("contiguous", "reorder")
def a_row_with_tokens_is_there_twice(call: ModelCall) -> bool:
    return bool(call.model.tokens and len(set(call.args["rows"])) < len(call.args["rows"]))


@state("contiguous", "reorder")
def a_batch_with_tokens_grows(call: ModelCall) -> bool:
    return bool(call.model.tokens and len(call.args["rows"]) > call.model.sizes[0])


@state("contiguous", "reorder")
def a_batch_with_tokens_shrinks(call: ModelCall) -> bool:
    return bool(call.model.tokens and len(call.args["rows"]) < call.model.sizes[0])


@state("contiguous", "append", "append_fused")
def tokens_follow_a_row_that_is_there_twice(call: ModelCall) -> bool:
    return call.tokens > 0 and len(set(call.model.origins)) < len(call.model.origins)


@state("contiguous", "read")
def two_caches_hold_tokens(call: ModelCall) -> bool:
    return sum(bool(getattr(model, "tokens", None)) for model in call.models.values()) > 1


def note_contiguous(call: ModelCall) -> None:
    if call.op == "contiguous.reset":
        call.history.max_tokens[call.on] = len(call.model.tokens)


NOTES["contiguous"] = note_contiguous
