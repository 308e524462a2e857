"""The kernel returns a new array, as in libraries with immutable arrays, but the buffer keeps the old one and reads zeros."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Copying(kvref.ReferenceBackend):
    def update(self, buffer: Any, new: Any, position: int) -> Any:
        return super().update(buffer.copy(), new, position)


class Pool(kvref.BufferPool):
    def acquire(self, num_bytes: int) -> "Dropping":
        buffer = super().acquire(num_bytes)
        return Dropping(self, buffer._memory, buffer.size)


class Dropping(kvref.Buffer):
    def extend(self, values: Any) -> None:
        memory = self._memory
        super().extend(values)
        self._memory = memory


class Implementation(Right):
    clause = "BUF-09"
    also = ("BUF-02", "BUF-05", "BUF-08", "LAW-05")
    bug = "reservoirpy/reservoirpy#234"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers, Copying())
