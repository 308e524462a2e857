"""A reused buffer keeps its former length, so that its new owner reads the values of the former owner."""

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BufferPool):
    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers)
        self._owners: dict[int, kvref.Buffer] = {}

    def acquire(self, num_bytes: int) -> kvref.Buffer:
        buffer = super().acquire(num_bytes)
        last = self._owners.get(id(buffer._memory), buffer)
        buffer.length = last.length
        self._owners[id(buffer._memory)] = buffer
        return buffer


class Implementation(Right):
    clause = "LAW-05"
    also = ("BUF-02", "BUF-08", "BUF-09")
    bug = "vllm-project/vllm#43990"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers)
