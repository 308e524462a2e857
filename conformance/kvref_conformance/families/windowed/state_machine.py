"""The state machine of the family `windowed`."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.windowed.model import Windowed
from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, TRUNCATION, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import group_of

# Formats with scales: one scale per head, scales among the codes, a zero per group, a static scale, and rotated values.
DTYPES = (
    "float32", "float32", "float16", "bfloat16", "float32", "float16", "int8", "q8_0", "uint4_g32_float32",
    "float8_e4m3fn_static", "q8_0_hadamard",
)  # fmt: skip
SIZE = st.integers(1, 2)
GROUP = st.integers(1, 2)


class WindowedStateMachine(FamilyStateMachine):
    family = "windowed"

    @initialize(
        heads=SIZE, dim=st.integers(1, 3), window=st.sampled_from((3, 1, 4, 7, 2)), sinks=st.sampled_from((0, 0, 2, 0, 1, 5)),
        chunk=st.sampled_from((0, 0, 0, 3, 4)), rollback=st.sampled_from((0, 2, 0, 3)),
        both=st.sampled_from((False, False, True)), dtype=st.sampled_from(DTYPES),
    )  # fmt: skip
    def new(self, heads: int, dim: int, window: int, sinks: int, chunk: int, rollback: int, both: bool, dtype: str) -> None:
        """Usually a chunk excludes sinks and the window is no shorter than the chunk, as in known models."""
        if chunk and not both:
            sinks, window = 0, max(window, chunk)
        sizes = {"window": window, "sinks": sinks, "chunk": chunk, "rollback": rollback}
        group = group_of(self.format_for(self.family, "dtype", dtype) or "")
        self.make_object(num_kv_heads=heads, head_dim=dim if group == 1 else group, dtype=dtype, **sizes)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    @property
    def model(self) -> Windowed:
        found = self.models[self.objects[0]]
        assert isinstance(found, Windowed)
        return found

    def query(self, count: int, group: int) -> Any:
        return self.source.rows((count, self.shape[0] * group, self.shape[1]), "uneven")

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        return {
            "append": lambda number: self.append(1 + number, "uneven"),
            "step": lambda number: self.step(1 + number % 4, 1, "uneven"),
        } | self.cache_edits(lambda: len(self.model.tokens))

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, group=GROUP, kind=row_kinds())
    def step(self, count: int, group: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        self.call("step", self.objects[0], query=self.query(count, group), keys=keys, values=values, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT | st.integers(6, 16), group=GROUP)
    def step_far(self, count: int, group: int) -> None:
        self.step(count, group, "uneven")

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT | st.integers(6, 16), kind=row_kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(more=st.sampled_from((1, -1)))
    def step_with_queries_of_other_tokens(self, more: int) -> None:
        keys, values = make_pair(self.source, (2, *self.shape), "counting")
        self.call("step", self.objects[0], query=self.query(2 + more, 1), keys=keys, values=values, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(1, 3), group=GROUP)
    def attend(self, count: int, group: int) -> None:
        self.call("attend", self.objects[0], query=self.query(count, group), scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(back=st.lists(st.integers(0, 12), min_size=1, max_size=3))
    def read(self, back: list[int]) -> None:
        """back: distances from the end; 0 is the position after the newest token."""
        self.call("read", self.objects[0], positions=[len(self.model.tokens) - each for each in back])

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION, count=TOKEN_COUNT, group=GROUP, looks=st.booleans())
    def truncate(self, back: int, count: int, group: int, looks: bool) -> None:
        """Truncates, then steps with tokens that replace the removed ones. If `looks`, reads old positions one by one."""
        self.call("truncate", self.objects[0], length=len(self.model.tokens) - back)
        if looks:
            self.attend(count, group)
        self.step(count, group, "uneven")
        for at in range(len(self.model.tokens))[-8:] if looks else ():
            self.call_quietly("read", self.objects[0], positions=[at])

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, group=GROUP)
    def clear(self, count: int, group: int) -> None:
        self.call("clear", self.objects[0])
        self.step(count, group, "uneven")


# The states of the windowed cache that random call sequences should reach, because bugs depend on them.

register_error_states("windowed", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "NotTruncatable")


def stop(call: ModelCall) -> int:
    """Returns the length after the call."""
    return len(call.model.tokens) + call.tokens


@state("windowed", "step")
def a_step_is_longer_than_the_window(call: ModelCall) -> bool:
    return bool(call.tokens > call.model.window > 1)


@state("windowed", "step")
def a_step_ends_where_the_window_is_full(call: ModelCall) -> bool:
    return bool(stop(call) == call.model.window and 0 < call.tokens < call.model.window)


@state("windowed", "step")
def several_tokens_come_to_a_ring_that_is_full(call: ModelCall) -> bool:
    return bool(len(call.model.tokens) >= call.model.window > call.tokens > 1)


@state("windowed", "step")
def several_tokens_come_across_the_end_of_a_ring(call: ModelCall) -> bool:
    ring = call.model.window + call.model.rollback
    start = len(call.model.tokens) - call.model.sinks
    return bool(start > ring > 1 and start % ring and start % ring + call.tokens > ring)


@state("windowed", "step")
def one_token_comes_long_after_the_window_is_full(call: ModelCall) -> bool:
    return bool(len(call.model.tokens) > 2 * call.model.window and call.tokens == 1)


@state("windowed", "step")
def a_window_of_one_token_sees_it(call: ModelCall) -> bool:
    return bool(call.model.window == 1 and call.tokens and call.model.tokens)


@state("windowed", "step")
def sinks_are_seen_past_the_window(call: ModelCall) -> bool:
    return bool(call.model.sinks and stop(call) > call.model.window + call.model.sinks and call.tokens)


@state("windowed", "step")
def the_sinks_are_not_all_there_and_some_come(call: ModelCall) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.sinks < stop(call))


@state("windowed", "step")
def a_step_goes_over_the_end_of_a_chunk(call: ModelCall) -> bool:
    chunk = call.model.chunk
    return bool(
        chunk and call.tokens > 1 and len(call.model.tokens) % chunk and len(call.model.tokens) // chunk < stop(call) // chunk
    )


@state("windowed", "step")
def the_first_token_of_a_chunk_comes_alone(call: ModelCall) -> bool:
    return bool(call.model.chunk and call.tokens == 1 and call.model.tokens and len(call.model.tokens) % call.model.chunk == 0)


@state("windowed", "append")
def more_is_appended_than_is_kept(call: ModelCall) -> bool:
    return bool(call.tokens > call.model.window + call.model.rollback and call.model.tokens)


@state("windowed", "truncate")
def a_draft_goes_that_pushed_others_out(call: ModelCall) -> bool:
    back = len(call.model.tokens) - call.args["length"]
    return bool(0 < back <= call.model.rollback and len(call.model.tokens) > call.model.window + back)


@state("windowed", "truncate")
def tokens_go_before_any_left_the_window(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens) and call.model.first_needed == 0)


@state("windowed", "step")
def tokens_come_in_the_place_of_some_that_went(call: ModelCall) -> bool:
    return bool(call.model.last_change == "truncate" and call.model.first_needed and call.tokens)


@state("windowed", "read", raising="PositionOutOfRange")
def a_token_that_left_the_window_is_read(call: ModelCall) -> bool:
    model = call.model
    return bool(any(model.sinks <= each < model.first_needed for each in call.args["positions"]))


@state("windowed", "attend")
def the_newest_token_is_looked_from_again(call: ModelCall) -> bool:
    return bool(len(call.model.tokens) > call.model.window and not call.model.truncated_last)
