"""A buffer that is released twice is on the free list twice: its next two owners share memory."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Buffer(kvref.Buffer):
    _last: Any = None

    def release(self) -> None:
        if self._memory is not None:
            self._last, self._memory = self._memory, None
        self._pool.take_back(self._last, self.size)


class Pool(kvref.BufferPool):
    def acquire(self, num_bytes: int) -> Buffer:
        held = super().acquire(num_bytes)
        return Buffer(self, held._memory, held.size)


class Implementation(Right):
    clause = "BUF-05"
    also = ("BUF-08", "LAW-19")  # its release takes no lock either
    bug = "LMCache/LMCache#5005"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers)
