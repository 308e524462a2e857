"""The state machine of the family `channels`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.channels.model import Channels
from kvref_conformance.fuzz.base_machine import TRUNCATION, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import HUGE_KINDS, row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import group_of

COUNT = st.sampled_from((1, 31, 2, 32, 33, 1, 3, 16, 40, 70, 0))  # tokens of an append, for groups of 32
SOME = ("uint4_g32_float16", "uint2_g32_float32", "uint8_g32_bfloat16", "uint2_g32_float16")
LOUD = st.sampled_from((1.0, 64.0))


class ChannelsStateMachine(FamilyStateMachine):
    family = "channels"

    @initialize(
        heads=st.sampled_from((1, 2, 1)), most=st.sampled_from((96, 70, 120, 33)), groups=st.sampled_from((1, 2, 1)),
        rollback=st.sampled_from((0, 3, 0, 40)), format=st.sampled_from(SOME),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    )  # fmt: skip
    def new(self, heads: int, most: int, groups: int, rollback: int, format: str, dtype: str) -> None:
        group = group_of(self.format_for(self.family, "format", format) or "")
        self.make_object(
            num_kv_heads=heads, head_dim=group, max_tokens=most * group // 32, residual=groups * group, format=format,
            dtype=dtype, rollback=rollback,
        )  # fmt: skip

    @property
    def model(self) -> Channels:
        found = self.models[self.objects[0]]
        assert isinstance(found, Channels)
        return found

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        append = {"append": lambda number: self.append((1, 31, 2, 32, 33, 3, 16, 40)[number], "uneven", 1.0)}
        return append | self.cache_edits(lambda: len(self.model))

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=row_kinds(), loud=LOUD)
    def append(self, count: int, kind: str, loud: float) -> None:
        """Appends tokens. One channel in eight of the keys is loud."""
        keys, values = make_pair(self.source, (count, *self.model.row), kind)
        if kind not in HUGE_KINDS:
            keys[:, :, ::8] = self.source.round_to_dtype(keys[:, :, ::8] * np.float32(loud))
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(beyond=st.sampled_from((-1, 0, 1, 5)), loud=LOUD)
    def append_up_to_a_residual(self, beyond: int, loud: float) -> None:
        """Appends tokens up to the length at which the next keys are quantized, or to one near it."""
        count = self.model.residual - len(self.model) % self.model.residual + beyond
        self.append(count, "uneven", loud)
        if beyond == -1:
            self.append(1, "uneven", loud)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.model.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(back=st.lists(st.integers(0, 70), min_size=1, max_size=3))
    def read(self, back: list[int]) -> None:
        """back: distances from the end; 0 is the position after the newest token."""
        self.call_quietly("read", self.objects[0], positions=[len(self.model) - each for each in back])

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(1, 2), group=st.integers(1, 2), kind=row_kinds(everything=False))
    def attend(self, count: int, group: int, kind: str) -> None:
        heads, dim = self.model.row
        query = self.source.rows((count, heads * self.subject.size("group_size", group), dim), kind)
        self.call("attend", self.objects[0], query=query, scale=0.5 / dim)

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION | st.sampled_from((20, 33)), count=COUNT, kind=row_kinds())
    def truncate(self, back: int, count: int, kind: str) -> None:
        """Truncates, then appends tokens that replace the removed ones."""
        self.call("truncate", self.objects[0], length=len(self.model) - back)
        self.append(count, kind, 1.0)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=row_kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind, 1.0)


# The states of the `channels` cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "channels", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "CapacityExceeded", "NonFinite", "NotTruncatable",
)  # fmt: skip


def past(call: ModelCall) -> int:
    """Returns the number of tokens after the last full residual, whose keys are quantized together."""
    return len(call.model) % int(call.model.residual)


@state("channels", "append", raising="CapacityExceeded")
def tokens_that_do_not_fit_would_fill_a_residual(call: ModelCall) -> bool:
    return bool(0 < past(call) < call.model.residual <= past(call) + call.tokens)


@state("channels", "append")
def it_is_filled_to_the_last_token(call: ModelCall) -> bool:
    return bool(call.tokens and len(call.model) + call.tokens == call.model.room)


@state("channels", "append")
def one_token_fills_the_residual(call: ModelCall) -> bool:
    return bool(call.tokens == 1 and past(call) == call.model.residual - 1)


@state("channels", "append")
def several_residuals_come_at_once(call: ModelCall) -> bool:
    return bool(call.tokens > 2 * call.model.residual)


@state("channels", "append")
def a_group_is_of_what_was_held_and_what_comes(call: ModelCall) -> bool:
    return bool(past(call) > 0 and call.model.residual < past(call) + call.tokens)


@state("channels", "append")
def a_second_residual_is_quantized_in_a_later_call(call: ModelCall) -> bool:
    return bool(len(call.model) >= call.model.residual <= past(call) + call.tokens)


@state("channels", "append")
def values_get_old_and_keys_are_not_full(call: ModelCall) -> bool:
    return bool(len(call.model) >= call.model.residual and 0 < past(call) + call.tokens < call.model.residual)


@state("channels", "length")
def a_loud_channel_is_quantized_beside_a_quiet_one(call: ModelCall) -> bool:
    model: Channels = call.model
    keys = model.keys[: len(model.quantized[0].values)]
    loudest = np.abs(keys).max(axis=(0, 1)).astype(np.float64) if len(keys) else np.zeros(1)
    return bool(0 < 20 * loudest.min() < loudest.max())


@state("channels", "append")
def tokens_follow_a_truncate_of_some(call: ModelCall) -> bool:
    return call.model.last_change == "truncate" and call.tokens > 0 and len(call.model) > 0


@state("channels", "truncate")
def keys_that_are_quantized_are_taken_back(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < len(call.model.quantized[0].values))


@state("channels", "truncate")
def values_that_are_quantized_are_in_full_again(call: ModelCall) -> bool:
    return bool(call.model.residual < call.args["length"] < len(call.model))


@state("channels", "append")
def fewer_tokens_are_appended_after_a_clear(call: ModelCall) -> bool:
    return not len(call.model) and 0 < call.tokens < call.history.max_tokens.get(call.on, 0)


@state("channels", "attend")
def attention_goes_over_quantized_keys_and_others(call: ModelCall) -> bool:
    return bool(len(call.model) > call.model.residual and past(call))


@state("channels", "read")
def a_value_is_read_in_full_whose_key_is_quantized(call: ModelCall) -> bool:
    keys, values = (len(part.values) for part in call.model.quantized)
    return any(values <= position < keys for position in call.args["positions"])


def note_channels(call: ModelCall) -> None:
    if call.op == "channels.clear" and len(call.model):
        call.history.max_tokens[call.on] = len(call.model)


NOTES["channels"] = note_channels
