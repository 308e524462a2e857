"""The state machine of the family `quantized`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.quantized.model import Quantized
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    DAMAGE_KIND,
    LAST_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
    FamilyStateMachine,
    clip_index,
    damage_saved_data,
    make_pair,
)
from kvref_conformance.fuzz.row_generators import HUGE_KINDS, row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import STATIC_FORMATS, SYMMETRIC_FORMATS, group_of

POSITION = st.sampled_from((0, 1, 2, 3, 1, LAST_INDEX))
SIZE = st.integers(1, 3)
SOME_GROUPS = ("q8_0", "q4_1", "mxfp4", "nvfp4", "int4_g32_float16", "uint8_g32_bfloat16")
SOME_ROTATED = ("int8_hadamard", "q8_0_hadamard")
GIVEN = st.sampled_from((1.0, 0.25, 0.037, 3.0))  # scales


class QuantizedStateMachine(FamilyStateMachine):
    family = "quantized"

    @initialize(
        layers=st.sampled_from((1, 2, 2)), capacity=st.sampled_from((2, 5, 8, 1)), heads=SIZE, dim=SIZE,
        format=st.sampled_from((*SYMMETRIC_FORMATS, *SOME_GROUPS, *STATIC_FORMATS, *SOME_ROTATED)), key_scale=GIVEN,
        value_scale=GIVEN,
    )  # fmt: skip
    def new(self, layers: int, capacity: int, heads: int, dim: int, format: str, key_scale: float, value_scale: float) -> None:
        found = self.format_for(self.family, "format", format) or ""
        scales = {"key_scale": key_scale, "value_scale": value_scale} if found in STATIC_FORMATS else {}
        dim *= group_of(found)
        self.make_object(num_layers=layers, capacity=capacity, num_kv_heads=heads, head_dim=dim, format=format, **scales)

    @property
    def shape(self) -> tuple[int, int]:
        """The heads and elements of a token."""
        return self.config["num_kv_heads"], self.config["head_dim"]

    @property
    def layers(self) -> int:
        return int(self.config["num_layers"])

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        model = self.models[self.edited]
        assert isinstance(model, Quantized)
        return {
            "append": lambda number: self.append(number, 1 + number % 3, "uneven", 1.0),
            "append_step": lambda number: self.append_step("uneven"),
        } | self.cache_edits(lambda: min(map(len, model.tokens)))

    @precondition(lambda self: self.objects)
    @rule(layer=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds(), loud=st.sampled_from((1.0, 100.0)))
    def append(self, layer: int, count: int, kind: str, loud: float) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        values = self.source.round_to_dtype(values * np.float32(1.0 if kind in HUGE_KINDS else loud))
        self.call("append", self.objects[0], layer=clip_index(layer, self.layers), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(kind=row_kinds())
    def append_step(self, kind: str) -> None:
        keys, values = make_pair(self.source, (self.layers, *self.shape), kind)
        self.call("append_step", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], layer=0, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(layer=ANY_INDEX, position=POSITION, head=ANY_INDEX, group=st.integers(1, 2), kind=row_kinds(everything=False))
    def read(self, layer: int, position: int, head: int, group: int, kind: str) -> None:
        layer, head = clip_index(layer, self.layers), clip_index(head, self.shape[0])
        model = self.models[self.objects[0]]
        assert isinstance(model, Quantized)
        position = clip_index(position, len(model.tokens[layer]) if layer < self.layers else 0)
        self.call_quietly("read_token", self.objects[0], layer=layer, position=position)
        self.call_quietly("read_head", self.objects[0], layer=layer, position=position, head=head)
        heads, dim = self.shape
        query = self.source.rows((1, heads * self.subject.size("group_size", group), dim), kind)
        self.call("attend", self.objects[0], layer=layer, query=query, scale=0.5)

    read_more = read

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION, layer=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds(), loud=st.sampled_from((1.0, 100.0)))
    def truncate(self, back: int, layer: int, count: int, kind: str, loud: float) -> None:
        model = self.models[self.objects[0]]
        assert isinstance(model, Quantized)
        self.call("truncate", self.objects[0], length=min(map(len, model.tokens)) - back)
        self.append(layer, count, kind, loud)

    truncate_again = truncate

    @precondition(lambda self: self.objects)
    @rule(between=st.sampled_from((0, 1, 2)), layer=ANY_INDEX, count=TOKEN_COUNT, damage=DAMAGE_KIND, kind=row_kinds())
    def move(self, between: int, layer: int, count: int, damage: int, kind: str) -> None:
        """Saves the cache, appends tokens or clears it, and loads the saved data."""
        data = self.call("save", self.objects[0])
        if data is None:
            return
        if between == 2:
            self.call("clear", self.objects[0])
        if between:
            self.append(layer, count, kind, 1.0)
        self.call("load", self.objects[0], data=damage_saved_data(data, damage))

    @precondition(lambda self: self.objects)
    @rule(kind=row_kinds())
    def clear(self, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(0, 1, kind, 1.0)


# The states of the quantized cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "quantized", "LayerOutOfRange", "PositionOutOfRange", "HeadOutOfRange", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded",
    "NonFinite",
)  # fmt: skip


def fill(call: ModelCall) -> list[int]:
    """Returns the length of each layer."""
    return [len(tokens) for tokens in call.model.tokens]


@state("quantized", "length")
def a_layer_is_full_and_another_is_not(call: ModelCall) -> bool:
    return bool(min(fill(call)) < max(fill(call)) == call.model.room)


@state("quantized", "append_step", raising="CapacityExceeded")
def a_step_meets_a_full_layer_and_one_that_is_not(call: ModelCall) -> bool:
    return bool(min(fill(call)) < call.model.room)


@state("quantized", "append_step")
def a_step_goes_to_layers_of_different_length(call: ModelCall) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def every_layer_is_full(call: ModelCall) -> bool:
    return len(fill(call)) > 1 and min(fill(call)) == call.model.room


@state("quantized", "clear")
def layers_of_different_length_are_cleared(call: ModelCall) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def fewer_tokens_follow_a_clear(call: ModelCall) -> bool:
    return 0 < sum(fill(call)) < call.history.max_tokens.get(call.on, 0)


@state("quantized", "length")
def every_layer_has_tokens_after_a_clear(call: ModelCall) -> bool:
    return call.on in call.history.max_tokens and len(fill(call)) > 1 and min(fill(call)) > 0


@state("quantized", "length")
def a_quiet_token_lies_beside_a_loud_one(call: ModelCall) -> bool:
    for tokens in call.model.tokens:
        loudest = [float(np.abs(token[0].values).max()) for token in tokens]
        if loudest and 0 < 50 * min(loudest) < max(loudest):
            return True
    return False


@state("quantized", "truncate")
def layers_of_different_length_are_truncated(call: ModelCall) -> bool:
    return len(set(fill(call))) > 1 and call.args["length"] > 0


@state("quantized", "truncate")
def every_layer_loses_some_tokens_and_keeps_some(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < min(fill(call)))


@state("quantized", "append", "append_step")
def tokens_follow_a_truncate_of_some(call: ModelCall) -> bool:
    return call.model.last_change == "truncate" and call.tokens > 0 and min(fill(call)) > 0


@state("quantized", "read_token")
def a_token_is_read_that_is_neither_the_first_nor_the_last(call: ModelCall) -> bool:
    return bool(0 < call.args["position"] < fill(call)[call.args["layer"]] - 1)


@state("quantized", "read_head")
def a_head_is_read_that_is_not_the_first(call: ModelCall) -> bool:
    return bool(call.args["head"] > 0)


@state("quantized", "read_token")
def a_token_of_a_layer_is_read_that_is_not_the_first(call: ModelCall) -> bool:
    return bool(call.args["layer"] > 0)


@state("quantized", "attend")
def attention_goes_over_several_tokens(call: ModelCall) -> bool:
    return bool(fill(call)[call.args["layer"]] > 1)


def note_quantized(call: ModelCall) -> None:
    if call.op == "quantized.clear" and any(fill(call)):
        call.history.max_tokens[call.on] = sum(fill(call))


NOTES["quantized"] = note_quantized
