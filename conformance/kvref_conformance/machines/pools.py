"""The machines of the block pool, the paged cache and the buffer pool."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.machines.base import ANY, COUNT, LAST, Machine, one_of, pair, within
from kvref_conformance.machines.rows import kinds
from kvref_conformance.oracle.blocks import Blocks
from kvref_conformance.oracle.buffers import CLASSES, Buffer
from kvref_conformance.oracle.paged import Paged

INDEX = st.integers(0, 3)
GONE = 8  # an index that stands for a sequence that was dropped
SEQUENCE = st.sampled_from((*(0, 1, 2) * 5, GONE, LAST))
BATCH = st.sampled_from((
    (0,), (0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (0, 0), (1, 0, 1), (0, 0, 0), (0, 1, 0, 1), (1, GONE), (0, LAST), (),
))  # fmt: skip
POSITIONS = st.sampled_from(((0,), (1, 0), (4, 2, 7), (2, 2), (5, 0), (8, 3, 1), (0, LAST), ()))
NOWHERE = 9  # a write that starts at no position at all
BACK = st.sampled_from((*(0,) * 9, *(1, 2, 3, 4) * 2, -1, NOWHERE))  # how far before the end a write starts


class BlocksMachine(Machine):
    family = "blocks"

    @initialize(num_blocks=st.sampled_from((2, 3, 1, 4, 3, 0)))
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
        blocks=st.sampled_from((6, 7, 9, 12, 5, 24, 0)), size=st.sampled_from((1, 2, 3, 4, 2, 3)),
        layers=st.sampled_from((1, 2, 2)), heads=st.integers(1, 2), dim=st.sampled_from((1, 3)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")), sequences=st.sampled_from((1, 2, 3, 2)),
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
        """One that there is; or, for the last indices, one that there was and one that there never was."""
        there = one_of(self.model.ids - set(self.model.sequences) if index == GONE else self.model.sequences, index)
        return 1000 if there is None or index == LAST else there

    def length(self, index: int, layer: int) -> int:
        """Of the sequence that an index stands for; 0 where there is none, or no such layer."""
        layers = self.model.sequences.get(self.sequence(index), [])
        return len(layers[layer].tokens) if layer < len(layers) else 0

    def create(self) -> None:
        if self.objects:
            self.call("create", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, back=BACK, count=COUNT, kind=kinds())
    def write(self, which: int, layer: int, back: int, count: int, kind: str) -> None:
        layer = within(layer, self.layers)
        start = max(0, self.length(which, layer) - back) if back != NOWHERE else -1  # at the end, before it, past it
        self.put(which, layer, start, count, kind)

    write_more = write  # a rule under each name: most of what there is to find takes tokens

    def put(self, which: int, layer: int, start: int, count: int, kind: str) -> None:
        sequence, (keys, values) = self.sequence(which), pair(self.source, (count, *self.shape), kind)
        self.call("write", self.objects[0], sequence=sequence, layer=layer, start=start, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=ANY, layer=ANY, start=st.integers(0, 9), count=COUNT, kind=kinds())
    def overwrite(self, which: int, layer: int, start: int, count: int, kind: str) -> None:
        """Write over tokens that are there, and no others."""
        layer %= self.layers
        if length := self.length(which, layer):
            start %= length
            self.put(which, layer, start, min(count, length - start), kind)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def write_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("write", self.objects[0], sequence=self.sequence(which), layer=0, start=0, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=BATCH, layer=ANY, kind=kinds(), step=st.booleans())
    def append(self, which: tuple[int, ...], layer: int, kind: str, step: bool) -> None:
        sequences = [self.sequence(each) for each in which]
        if step:
            keys, values = pair(self.source, (self.layers, len(which), *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=sequences, keys=keys, values=values)
        else:
            keys, values = pair(self.source, (len(which), *self.shape), kind)
            there = within(layer, self.layers)
            self.call("append", self.objects[0], sequences=sequences, layer=there, keys=keys, values=values)
        self.ask("gather_batch", self.objects[0], sequences=sequences, layer=within(layer, self.layers))

    @precondition(lambda self: self.objects)
    @rule(which=BATCH, layer=ANY)
    def read_batch(self, which: tuple[int, ...], layer: int) -> None:
        batch = {"sequences": [self.sequence(each) for each in which], "layer": within(layer, self.layers)}
        for name in ("gather_batch", "lengths"):
            self.ask(name, self.objects[0], **batch)
        self.call("block_tables", self.objects[0], **batch)

    @precondition(lambda self: self.objects)
    @rule(
        which=SEQUENCE,
        layer=ANY,
        tokens=st.sampled_from((4, 8, 12, 3, 0, -1)),
        start=st.integers(-1, 3),
        count=st.integers(-1, 5),
    )
    def ensure_capacity(self, which: int, layer: int, tokens: int, start: int, count: int) -> None:
        sequence, layer = self.sequence(which), within(layer, self.layers)
        self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=tokens)
        self.ask("slot_mapping", self.objects[0], sequence=sequence, layer=layer, start=start, count=count)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, count=COUNT, kind=kinds())
    def drop(self, which: int, layer: int, count: int, kind: str) -> None:
        """Drop a sequence, one with tokens if there is one; the next one takes up its blocks."""
        full = {id for id, layers in self.model.sequences.items() if any(each.tokens for each in layers)}
        sequence = one_of(full, which) if full and which < GONE else self.sequence(which)
        self.call("drop", self.objects[0], sequence=sequence)
        self.create()
        self.put(len(self.model.sequences) - 1, within(layer, self.layers), 0, count, kind)

    drop_another = drop

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, positions=POSITIONS, group=st.integers(1, 2), kind=kinds(everything=False))
    def read(self, which: int, layer: int, positions: tuple[int, ...], group: int, kind: str) -> None:
        sequence, layer = self.sequence(which), within(layer, self.layers)
        there = [within(position, self.length(which, layer)) for position in positions]
        self.ask("read", self.objects[0], sequence=sequence, layer=layer, positions=there)
        self.ask("length", self.objects[0], sequence=sequence, layer=layer)
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], sequence=sequence, layer=layer, query=query, scale=0.5)


class BuffersMachine(Machine):
    family = "buffers"

    @initialize(max_buffers=st.sampled_from((1, 2, 3, 2)))
    def new(self, max_buffers: int) -> None:
        self.make(max_buffers=max_buffers)
        self.pool = self.objects[0] if self.objects else None

    def held(self, index: int) -> int | None:
        """A buffer: the newest first of those in use, then those that were released."""
        buffers = {number: each for number in self.objects if isinstance(each := self.witness.models[number], Buffer)}
        ordered = sorted(buffers, key=lambda number: (not buffers[number].held, -number))
        return ordered[index % len(ordered)] if ordered else None

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1, 1024, 0, 1025, 1024, CLASSES[-1], CLASSES[-1] + 1, -1)))
    def acquire(self, size: int) -> None:
        if len(self.objects) == 6 and (one := self.held(-1)) is not None:
            self.objects.remove(one)  # it is looked at no more
        self.acquired(size)

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 256, 6, 0, 300)))
    def extend(self, which: int, count: int) -> None:
        self.call("extend", self.held(which), values=self.source.rows((count,), "counting"))

    extend_more = extend

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def extend_wrongly(self, which: int) -> None:
        self.call("extend", self.held(which), values=np.ones((2, 2), np.float32))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 0)))
    def clear_buffer(self, which: int, count: int) -> None:
        self.call("clear", self.held(which))
        self.call("extend", self.held(which), values=self.source.rows((count,), "counting"))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 0)))
    def release(self, which: int, count: int) -> None:
        """Give a buffer back; the next one of its class has its memory."""
        number = self.held(which)
        if number is not None:
            buffer = self.witness.models[number]
            assert isinstance(buffer, Buffer)
            self.call("release", number)
            self.acquire(buffer.bytes)
            self.extend(0, count)

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def release_only(self, which: int) -> None:
        self.call("release", self.held(which))

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1024, 4096, 1000)), count=st.sampled_from((1, 2, 3, 0, -1)))
    def prewarm(self, size: int, count: int) -> None:
        self.call("prewarm", self.pool, size=size, count=count)

    @precondition(lambda self: self.objects)
    @rule()
    def clear(self) -> None:
        self.call("clear", self.pool)
