"""The state machine of the family `buffers`."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.buffers.model import CLASSES, Buffer
from kvref_conformance.searching.machine import Machine

INDEX = st.integers(0, 3)


class BuffersMachine(Machine):
    family = "buffers"

    @initialize(max_buffers=st.sampled_from((1, 2, 3, 2)))
    def new(self, max_buffers: int) -> None:
        self.make(max_buffers=max_buffers)
        self.pool = self.objects[0] if self.objects else None

    def held(self, index: int) -> int | None:
        """Returns a buffer: index 0 is the newest in use; released buffers follow after all buffers in use."""
        buffers = {number: each for number in self.objects if isinstance(each := self.witness.models[number], Buffer)}
        ordered = sorted(buffers, key=lambda number: (not buffers[number].held, -number))
        return ordered[index % len(ordered)] if ordered else None

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1, 1024, 0, 1025, 1024, CLASSES[-1], CLASSES[-1] + 1, -1)))
    def acquire(self, size: int) -> None:
        if len(self.objects) == 6 and (one := self.held(-1)) is not None:
            self.objects.remove(one)  # stop observing it
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
        """Release a buffer and acquire the next one of its class, which reuses the memory."""
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
