"""The state machine of the family `compressed`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.compressed.model import Compressed
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
)
from kvref_conformance.fuzz.offloading_machine import OffloadingMachine
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray


class CompressedStateMachine(OffloadingMachine):
    family = "compressed"

    @initialize(
        blocks=st.sampled_from((4, 2, 6, 1, 9, 0)), dim=st.sampled_from((2, 1, 5)), rotated=st.booleans(),
        ratio=st.sampled_from((2, 3, 1, 4)), more=st.sampled_from((0, 1, 3)), most=st.sampled_from((20, 9, 4)),
        rollback=st.sampled_from((1, 0, 3)),
    )  # fmt: skip
    def new(self, blocks: int, dim: int, rotated: bool, ratio: int, more: int, most: int, rollback: int) -> None:
        self.make_object(
            num_blocks=blocks, head_dim=dim, rope_dim=dim // 2 * 2 if rotated else 0, window=max(1, ratio - 1 + more),
            ratio=ratio, max_tokens=most, rollback=rollback,
        )  # fmt: skip
        for on in self.objects:
            self.call("create", on)

    @property
    def compressed_model(self) -> Compressed:
        found = self.models[self.objects[0]]
        assert isinstance(found, Compressed)
        return found

    def arrays(self, count: int, kind: str) -> dict[str, NDArray]:
        shape = (count, self.compressed_model.dim)
        return {name: self.source.rows(shape, kind) for name in ("latents", "contributions", "gates")}

    def append_to(self, sequence: int, count: int, kind: str = "uneven") -> None:
        self.call("append", self.objects[0], sequence=sequence, **self.arrays(count, kind))

    def write_edits(self) -> dict[str, Callable[[int], Any]]:
        return {
            "append": lambda number: self.append_to(self.edited, 1 + number % 4),
            "step": lambda number: self.step_on(self.edited, 1 + number % 4, 1, 0),
        }

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        found, model = super().edits(which), self.compressed_model
        if len(model.copies) < 2 and self.edited in model.sequences:  # so that edits find a copy without a call between them
            self.call("offload", self.objects[0], sequence=self.edited)
        return found

    def step_on(self, sequence: int, count: int, heads: int, more: int) -> None:
        query = self.source.rows((max(0, count + more), heads, self.compressed_model.dim), "uneven")
        self.call("step", self.objects[0], sequence=sequence, query=query, **self.arrays(count, "uneven"))

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds())
    def append(self, index: int, count: int, kind: str) -> None:
        self.append_to(self.one_of("sequence", index), count, kind)

    append_more = append  # a second rule makes appends more frequent

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, count=TOKEN_COUNT, heads=st.sampled_from((1, 2)), more=st.sampled_from((0, 0, 0, 1, -1)))
    def step(self, index: int, count: int, heads: int, more: int) -> None:
        self.step_on(self.one_of("sequence", index), count, heads, more)

    step_more = step

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, wrong=st.sampled_from(("latents", "contributions", "gates")), how=st.integers(0, 3))
    def append_wrong_arrays(self, index: int, wrong: str, how: int) -> None:
        given = self.arrays(2, "uneven")
        rows = given[wrong]
        given[wrong] = (rows[:1], rows[0], rows[:, None], rows.astype("float64"))[how]
        self.call("append", self.objects[0], sequence=self.one_of("sequence", index), **given)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT)
    def create(self, count: int) -> None:
        sequence = self.call("create", self.objects[0])
        if sequence is not None:
            self.append_to(sequence, count)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, own=TOKEN_COUNT, childs=TOKEN_COUNT)
    def fork(self, index: int, own: int, childs: int) -> None:
        sequence = self.one_of("sequence", index)
        child = self.call("fork", self.objects[0], sequence=sequence)
        if child is not None:
            self.append_to(child, childs)
            self.append_to(sequence, own)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, back=TRUNCATION, count=TOKEN_COUNT)
    def truncate(self, index: int, back: int, count: int) -> None:
        sequence = self.one_of("sequence", index)
        self.call("truncate", self.objects[0], sequence=sequence, length=self.length(sequence) - back)
        self.append_to(sequence, count)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, removed=TRUNCATION, name=st.sampled_from(("fork", "restore")), more=TRUNCATION)
    def truncate_copy(self, index: int, removed: int, name: str, more: int) -> None:
        on, sequence = self.objects[0], self.one_of("sequence", index)
        self.call("truncate", on, sequence=sequence, length=self.length(sequence) - removed)
        if name == "fork":
            child = self.call("fork", on, sequence=sequence)
        else:
            handle = self.call("offload", on, sequence=sequence)
            child = None if handle is None else self.call("restore", on, handle=handle)
        if child is not None:
            self.call("truncate", on, sequence=child, length=self.length(child) - more)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, change=st.sampled_from(("append", "truncate", "drop")), times=st.integers(1, 2))
    def offload_and_restore(self, index: int, change: str, times: int) -> None:
        on, sequence = self.objects[0], self.one_of("sequence", index)
        handle = self.call("offload", on, sequence=sequence)
        if change == "append":
            self.append_to(sequence, 2)
        else:
            self.call(change, on, sequence=sequence, **({"length": 0} if change == "truncate" else {}))
        if handle is not None:
            for _ in range(times):
                restored = self.call("restore", on, handle=handle)
                if restored is not None:
                    self.append_to(restored, 1)
            if times == 2:  # other copies remain, for the edits
                self.call("discard", on, handle=handle)


register_error_states(
    "compressed",
    "SequenceNotFound",
    "KeyNotFound",
    "ShapeMismatch",
    "DtypeMismatch",
    "OutOfBlocks",
    "CapacityExceeded",
    "PositionOutOfRange",
    "NotTruncatable",
)


@state("compressed", "append")
def a_group_is_completed_from_two_calls(call: ModelCall) -> bool:
    found = call.model.sequences.get(call.args["sequence"])
    held = len(found.tokens) % call.model.ratio if found else 0
    return bool(held and held + len(call.args["latents"]) >= call.model.ratio)


@state("compressed", "truncate")
def a_complete_group_becomes_incomplete(call: ModelCall) -> bool:
    found, length = call.model.sequences.get(call.args["sequence"]), call.args["length"]
    ratio = call.model.ratio
    return bool(found and 0 < length < len(found.tokens) and length % ratio and len(found.tokens) // ratio > length // ratio)


@state("compressed", "truncate")
def a_copy_is_truncated(call: ModelCall) -> bool:
    found = call.model.sequences.get(call.args["sequence"])
    return bool(found and call.model.last_change in ("fork", "restore") and 0 < call.args["length"] < len(found.tokens))


@state("compressed", "step")
def a_query_precedes_the_end_of_a_group(call: ModelCall) -> bool:
    found, ratio = call.model.sequences.get(call.args["sequence"]), call.model.ratio
    count = len(call.args["latents"])
    return bool(
        found and count and (len(found.tokens) + 1) % ratio and (len(found.tokens) + count) // ratio > len(found.tokens) // ratio
    )


@state("compressed", "restore")
def an_incomplete_group_is_restored(call: ModelCall) -> bool:
    return bool(len(call.model.copies.get(call.args["handle"], ())) % call.model.ratio)
