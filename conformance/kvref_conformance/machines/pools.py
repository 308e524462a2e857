"""The machines of the block pool, the paged cache and the buffer pool."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.machines.base import ANY, LAST, Machine, one_of, pair, within
from kvref_conformance.machines.rows import kinds
from kvref_conformance.oracle.blocks import Blocks
from kvref_conformance.oracle.buffers import CLASSES, Buffer
from kvref_conformance.oracle.paged import Paged

INDEX = st.integers(0, 3)
BACK = st.sampled_from((0, 0, 0, 1, 2, -1))  # how far before the end a write starts


class BlocksMachine(Machine):
    family = "blocks"

    @initialize(num_blocks=st.sampled_from((2, 1, 0, 3)))
    def new(self, num_blocks: int) -> None:
        self.make(num_blocks=num_blocks)

    @precondition(lambda self: self.objects)
    @rule()
    def allocate(self) -> None:
        self.call("allocate", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(-1, 3))
    def allocate_many(self, count: int) -> None:
        self.call("allocate_many", self.objects[0], count=count)

    @precondition(lambda self: self.objects)
    @rule(index=INDEX)
    def free(self, index: int) -> None:
        pool = self.witness.models[self.objects[0]]
        assert isinstance(pool, Blocks)
        block = one_of(pool.held, index)
        if block is not None:
            self.call("free", self.objects[0], block=block)

    @precondition(lambda self: self.objects)
    @rule(block=st.integers(-1, 3))
    def free_anything(self, block: int) -> None:
        self.call("free", self.objects[0], block=block)


class PagedMachine(Machine):
    family = "paged"

    @initialize(
        blocks=st.sampled_from((6, 12, 0, 24)), size=st.integers(1, 3), layers=st.integers(1, 2), heads=st.integers(1, 2),
        dim=st.sampled_from((1, 3)), dtype=st.sampled_from(("float32", "float16", "bfloat16")), sequences=st.integers(1, 3),
    )  # fmt: skip
    def new(self, blocks: int, size: int, layers: int, heads: int, dim: int, dtype: str, sequences: int) -> None:
        self.make(num_blocks=blocks, block_size=size, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)
        self.shape, self.layers = (heads, dim), layers

        for _ in range(sequences):
            self.create()

    @property
    def model(self) -> Paged:
        found = self.witness.models[self.objects[0]]
        assert isinstance(found, Paged)
        return found

    def sequence(self, index: int) -> int:
        """One that there is; or, for the last index, one that there is not."""
        there = one_of(self.model.sequences, index)
        return 1000 if there is None or index == LAST else there

    def create(self) -> None:
        if self.objects:
            self.call("create", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(which=ANY, layer=ANY, back=BACK, count=st.integers(0, 5), kind=kinds())
    def write(self, which: int, layer: int, back: int, count: int, kind: str) -> None:
        sequence, keys_values = self.sequence(which), pair(self.source, (count, *self.shape), kind)
        layers, layer = self.model.sequences.get(sequence, []), within(layer, self.layers)
        length = len(layers[layer].tokens) if layer < len(layers) else 0
        start = max(-1, length - back)  # at the end, before it, past it
        self.call(
            "write", self.objects[0], sequence=sequence, layer=layer, start=start, keys=keys_values[0], values=keys_values[1]
        )

    write_more = write_still_more = write  # a rule under each name: most of what there is to find takes tokens

    @precondition(lambda self: self.objects)
    @rule(which=ANY, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def write_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("write", self.objects[0], sequence=self.sequence(which), layer=0, start=0, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=st.lists(ANY, max_size=3), layer=ANY, kind=kinds(), step=st.booleans())
    def append(self, which: list[int], layer: int, kind: str, step: bool) -> None:
        sequences = [self.sequence(each) for each in which]
        if step:
            keys, values = pair(self.source, (self.layers, len(which), *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=sequences, keys=keys, values=values)
        else:
            keys, values = pair(self.source, (len(which), *self.shape), kind)
            there = within(layer, self.layers)
            self.call("append", self.objects[0], sequences=sequences, layer=there, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=st.lists(ANY, max_size=3), layer=ANY)
    def read_batch(self, which: list[int], layer: int) -> None:
        batch = {"sequences": [self.sequence(each) for each in which], "layer": within(layer, self.layers)}
        for name in ("gather_batch", "lengths", "block_tables"):
            self.call(name, self.objects[0], **batch)

    @precondition(lambda self: self.objects)
    @rule(which=ANY, tokens=st.integers(-1, 9))
    def ensure_capacity(self, which: int, tokens: int) -> None:
        self.call("ensure_capacity", self.objects[0], sequence=self.sequence(which), num_tokens=tokens)

    @precondition(lambda self: self.objects)
    @rule(which=ANY)
    def drop(self, which: int) -> None:
        self.call("drop", self.objects[0], sequence=self.sequence(which))
        self.create()

    @precondition(lambda self: self.objects)
    @rule(which=ANY, layer=ANY, positions=st.lists(ANY, max_size=3))
    def read(self, which: int, layer: int, positions: list[int]) -> None:
        sequence, layer = self.sequence(which), within(layer, self.layers)
        layers = self.model.sequences.get(sequence, [])
        length = len(layers[layer].tokens) if layer < len(layers) else 0
        there = [within(position, length) for position in positions]
        self.call("read", self.objects[0], sequence=sequence, layer=layer, positions=there)
        self.call("length", self.objects[0], sequence=sequence, layer=layer)

    @precondition(lambda self: self.objects)
    @rule(which=ANY, layer=ANY, start=st.integers(-1, 3), count=st.integers(-1, 5))
    def slot_mapping(self, which: int, layer: int, start: int, count: int) -> None:
        layer = within(layer, self.layers)
        self.call("slot_mapping", self.objects[0], sequence=self.sequence(which), layer=layer, start=start, count=count)

    @precondition(lambda self: self.objects)
    @rule(which=ANY, group=st.integers(1, 2), kind=kinds(everything=False))
    def attend(self, which: int, group: int, kind: str) -> None:
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], sequence=self.sequence(which), layer=0, query=query, scale=0.5)


class BuffersMachine(Machine):
    family = "buffers"

    @initialize(max_buffers=st.integers(1, 2))
    def new(self, max_buffers: int) -> None:
        self.make(max_buffers=max_buffers)
        self.pool = self.objects[0] if self.objects else None

    def held(self, index: int) -> int | None:
        return one_of((number for number in self.objects if isinstance(self.witness.models[number], Buffer)), index)

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1, 1024, 0, 1025, CLASSES[-1], CLASSES[-1] + 1, -1)))
    def acquire(self, size: int) -> None:
        if len(self.objects) < 5:
            self.acquired(size)

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 0, 256, 300)))
    def extend(self, which: int, count: int) -> None:
        self.call("extend", self.held(which), values=self.source.rows((count,), "counting"))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def extend_wrongly(self, which: int) -> None:
        self.call("extend", self.held(which), values=np.ones((2, 2), np.float32))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def clear_buffer(self, which: int) -> None:
        self.call("clear", self.held(which))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def release(self, which: int) -> None:
        self.call("release", self.held(which))

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 4096, 1000)), count=st.integers(-1, 3))
    def prewarm(self, size: int, count: int) -> None:
        self.call("prewarm", self.pool, size=size, count=count)

    @precondition(lambda self: self.objects)
    @rule()
    def clear(self) -> None:
        self.call("clear", self.pool)
