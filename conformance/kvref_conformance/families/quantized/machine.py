"""The state machine of the family `quantized`."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.quantized.model import Quantized
from kvref_conformance.oracle.formats import STATIC, SYMMETRIC, group_of
from kvref_conformance.searching.machine import ANY, BACK, COUNT, DAMAGE, LAST, Machine, damaged, pair, within
from kvref_conformance.searching.rows import HUGE, kinds

POSITION = st.sampled_from((0, 1, 2, 3, 1, LAST))
SIZE = st.integers(1, 3)
SOME_GROUPS = ("q8_0", "q4_1", "mxfp4", "nvfp4", "int4_g32_float16", "uint8_g32_bfloat16")
SOME_ROTATED = ("int8_hadamard", "q8_0_hadamard")
GIVEN = st.sampled_from((1.0, 0.25, 0.037, 3.0))  # scales


class QuantizedMachine(Machine):
    family = "quantized"

    @initialize(
        layers=st.sampled_from((1, 2, 2)), capacity=st.sampled_from((2, 5, 8, 1)), heads=SIZE, dim=SIZE,
        format=st.sampled_from((*SYMMETRIC, *SOME_GROUPS, *STATIC, *SOME_ROTATED)), key_scale=GIVEN, value_scale=GIVEN,
    )  # fmt: skip
    def new(self, layers: int, capacity: int, heads: int, dim: int, format: str, key_scale: float, value_scale: float) -> None:
        found = self.format_for(self.family, "format", format) or ""
        given = {"key_scale": key_scale, "value_scale": value_scale} if found in STATIC else {}
        dim *= group_of(found)
        self.make(num_layers=layers, capacity=capacity, num_kv_heads=heads, head_dim=dim, format=format, **given)

    @property
    def shape(self) -> tuple[int, int]:
        """The heads and elements of a token."""
        return self.config["num_kv_heads"], self.config["head_dim"]

    @property
    def layers(self) -> int:
        return int(self.config["num_layers"])

    @precondition(lambda self: self.objects)
    @rule(layer=ANY, count=COUNT, kind=kinds(), loud=st.sampled_from((1.0, 100.0)))
    def append(self, layer: int, count: int, kind: str, loud: float) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        values = self.source.held(values * np.float32(1.0 if kind in HUGE else loud))
        self.call("append", self.objects[0], layer=within(layer, self.layers), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(kind=kinds())
    def append_step(self, kind: str) -> None:
        keys, values = pair(self.source, (self.layers, *self.shape), kind)
        self.call("append_step", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], layer=0, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(layer=ANY, position=POSITION, head=ANY, group=st.integers(1, 2), kind=kinds(everything=False))
    def read(self, layer: int, position: int, head: int, group: int, kind: str) -> None:
        layer, head = within(layer, self.layers), within(head, self.shape[0])
        model = self.witness.models[self.objects[0]]
        assert isinstance(model, Quantized)
        position = within(position, len(model.tokens[layer]) if layer < self.layers else 0)
        self.ask("read_token", self.objects[0], layer=layer, position=position)
        self.ask("read_head", self.objects[0], layer=layer, position=position, head=head)
        heads, dim = self.shape
        query = self.source.rows((1, heads * self.subject.size("group_size", group), dim), kind)
        self.call("attend", self.objects[0], layer=layer, query=query, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(back=BACK, layer=ANY, count=COUNT, kind=kinds(), loud=st.sampled_from((1.0, 100.0)))
    def truncate(self, back: int, layer: int, count: int, kind: str, loud: float) -> None:
        model = self.witness.models[self.objects[0]]
        assert isinstance(model, Quantized)
        self.call("truncate", self.objects[0], length=min(map(len, model.tokens)) - back)
        self.append(layer, count, kind, loud)

    truncate_again = truncate

    @precondition(lambda self: self.objects)
    @rule(between=st.sampled_from((0, 1, 2)), layer=ANY, count=COUNT, damage=DAMAGE, kind=kinds())
    def move(self, between: int, layer: int, count: int, damage: int, kind: str) -> None:
        """Saves the cache, appends tokens or clears it, and loads the saved data."""
        data = self.call("save", self.objects[0])
        if data is None:
            return
        if between == 2:
            self.call("clear", self.objects[0])
        if between:
            self.append(layer, count, kind, 1.0)
        self.call("load", self.objects[0], data=damaged(data, damage))

    @precondition(lambda self: self.objects)
    @rule(kind=kinds())
    def clear(self, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(0, 1, kind, 1.0)
