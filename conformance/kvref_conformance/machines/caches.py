"""The machines of the contiguous, the quantized, the tiered and the pooled cache."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.arrays import NDArray
from kvref_conformance.machines.base import ANY, COUNT, LAST, Machine, one_of, pair, within
from kvref_conformance.machines.rows import HUGE, kinds
from kvref_conformance.oracle.quantized import Quantized

INDEX = st.integers(0, 5)
POSITION = st.sampled_from((0, 1, 2, 3, 1, LAST))
SIZE = st.integers(1, 3)


class ContiguousMachine(Machine):
    family = "contiguous"

    @initialize(
        batch=st.integers(1, 2), heads=SIZE, dim=SIZE, initial=st.integers(0, 4), most=st.sampled_from((3, 8, 12, 7, 1)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")), twice=st.booleans(),
    )  # fmt: skip
    def new(self, batch: int, heads: int, dim: int, initial: int, most: int, dtype: str, twice: bool) -> None:
        for _ in range(1 + twice):
            self.make(batch_size=batch, num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=most, dtype=dtype)
        self.shape = batch, heads, dim

    def some(self, count: int, kind: str) -> tuple[NDArray, NDArray]:
        batch, heads, dim = self.shape
        return pair(self.source, (batch, heads, count, dim), kind)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds(), fused=st.booleans())
    def append(self, which: int, count: int, kind: str, fused: bool) -> None:
        keys, values = self.some(count, kind)
        if fused:
            self.call("append_fused", one_of(self.objects, which), key_values=np.stack([keys, values]))
        else:
            self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        batch, heads, dim = self.shape
        keys, values = self.source.wrong_pair((batch, heads, 1, dim), wrong, side)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=st.integers(-1, 3))
    def advance(self, which: int, count: int) -> None:
        self.call("advance", one_of(self.objects, which), count=count)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds())
    def reset(self, which: int, count: int, kind: str) -> None:
        self.call("reset", one_of(self.objects, which))
        self.append(which, count, kind, fused=False)


class QuantizedMachine(Machine):
    family = "quantized"

    @initialize(
        layers=st.sampled_from((1, 2, 2)), capacity=st.sampled_from((2, 5, 8, 1)), heads=SIZE, dim=SIZE,
        format=st.sampled_from(("int8", "float8_e4m3fn", "float8_e5m2")),
    )  # fmt: skip
    def new(self, layers: int, capacity: int, heads: int, dim: int, format: str) -> None:
        self.make(num_layers=layers, capacity=capacity, num_kv_heads=heads, head_dim=dim, format=format)
        self.shape, self.layers = (heads, dim), layers

    @precondition(lambda self: self.objects)
    @rule(layer=ANY, count=COUNT, kind=kinds(), loud=st.sampled_from((1.0, 100.0)))
    def append(self, layer: int, count: int, kind: str, loud: float) -> None:
        layer, factor = within(layer, self.layers), np.float32(1.0 if kind in HUGE else loud)
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], layer=layer, keys=keys, values=values * factor)

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
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], layer=layer, query=query, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(kind=kinds())
    def clear(self, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(0, 1, kind, 1.0)


POLICIES = {
    "tail_length": st.integers(0, 4),
    "warm_length": st.integers(0, 2),
    "tail_dtype": st.sampled_from(("float32", "float16", "bfloat16", "int8")),
    "warm_format": st.sampled_from(("q8", "int8", "float16")),
    "store_format": st.sampled_from(("q4", "q8", "float8_e4m3fn", "float32")),
}


class TieredMachine(Machine):
    family = "tiered"

    @initialize(
        heads=SIZE, dim=SIZE, most=st.sampled_from((3, 7, 9, 5, 1)), tail=st.sampled_from((1, 2, 3, 0, 9)),
        warm=st.sampled_from((0, 1, 2, 0, 3)),
        tail_dtype=st.sampled_from(("float32", "float16", "bfloat16")), warm_format=st.sampled_from(("q8", "int8")),
        store_format=st.sampled_from(("q8", "q4", "int8", "float8_e5m2")), batch=st.sampled_from((1, 3, 100)),
    )  # fmt: skip
    def new(
        self, heads: int, dim: int, most: int, tail: int, warm: int, tail_dtype: str, warm_format: str, store_format: str,
        batch: int,
    ) -> None:  # fmt: skip
        tail = min(tail, most)
        self.make(
            num_kv_heads=heads, head_dim=dim, max_tokens=most, tail_length=tail, tail_dtype=tail_dtype,
            warm_length=min(warm, most - tail), warm_format=warm_format, store_format=store_format, migration_batch=batch,
        )  # fmt: skip
        self.shape = heads, dim

    @precondition(lambda self: self.objects)
    @rule(count=COUNT | COUNT | st.integers(6, 16), kind=kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from((*POLICIES, "tail_length", "warm_length", "store_format")), min_size=1, max_size=2),
    )
    def update_policy(self, data: Any, names: list[str]) -> None:
        changes = {name: data.draw(POLICIES[name]) for name in names}
        if all(isinstance(value, int) or value in self.search.implementation.formats for value in changes.values()):
            self.call("update_policy", self.objects[0], **changes)
            self.append(1, "counting")

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(group=st.integers(1, 2), kind=kinds(everything=False))
    def attend(self, group: int, kind: str) -> None:
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], query=query, scale=0.5)


class PooledMachine(Machine):
    family = "pooled"

    @initialize(
        heads=SIZE, dim=st.sampled_from((1, 3, 300)), block=st.sampled_from((1, 2, 3, 4, 300)),
        most=st.sampled_from((3, 7, 4, 8, 12)), caches=st.integers(1, 2), buffers=st.integers(1, 3),
    )  # fmt: skip
    def new(self, heads: int, dim: int, block: int, most: int, caches: int, buffers: int) -> None:
        can_share = caches > 1 and hasattr(self.search.implementation, "buffers")
        shared = {"pool": self.another("buffers", max_buffers=buffers)} if can_share else {}
        for _ in range(caches):
            self.make(num_kv_heads=heads, head_dim=dim, tokens_per_block=block, max_tokens=max(most, block), **shared)
        self.shape = heads, dim

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT | COUNT | st.integers(6, 16), kind=kinds())
    def append(self, which: int, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds())
    def clear(self, which: int, count: int, kind: str) -> None:
        self.call("clear", one_of(self.objects, which))
        self.append(which, count, kind)
