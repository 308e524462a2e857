"""Wrong buffer pools."""

import random
import time
from contextlib import nullcontext
from typing import Any

import kvref
from kvref_zoo.mutant import mutant


@mutant("BUF-09", also="BUF-02 BUF-05 BUF-08 LAW-05", seen_in="reservoirpy/reservoirpy#234")
class BuffersIgnoreTheReturnedArray(kvref.BufferPool):
    """The kernel returns a new array, as in libraries with immutable arrays, but the buffer keeps the old one and reads zeros."""

    class Backend(kvref.ReferenceBackend):
        def update(self, buffer: Any, new: Any, position: int) -> Any:
            return super().update(buffer.copy(), new, position)

    class Buffer(kvref.Buffer):
        def extend(self, values: Any) -> None:
            memory = self._memory
            super().extend(values)
            self._memory = memory

    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers, self.Backend())

    def acquire(self, num_bytes: int) -> Buffer:
        buffer = super().acquire(num_bytes)
        return self.Buffer(self, buffer._memory, buffer.size)


@mutant("LAW-05", also="BUF-02 BUF-08 BUF-09", seen_in="vllm-project/vllm#43990")
class BuffersKeepTheirFormerLength(kvref.BufferPool):
    """A reused buffer keeps its former length, so that its new owner reads the values of the former owner."""

    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers)
        self._owners: dict[int, kvref.Buffer] = {}

    def acquire(self, num_bytes: int) -> kvref.Buffer:
        buffer = super().acquire(num_bytes)
        last = self._owners.get(id(buffer._memory), buffer)
        buffer.length = last.length
        self._owners[id(buffer._memory)] = buffer
        return buffer


@mutant("BUF-05", also="BUF-08 LAW-19", seen_in="LMCache/LMCache#5005")  # its release takes no lock either
class BuffersReleasedTwice(kvref.BufferPool):
    """A buffer that is released twice is on the free list twice: its next two owners share memory."""

    class Buffer(kvref.Buffer):
        _last: Any = None

        def release(self) -> None:
            if self._memory is not None:
                self._last, self._memory = self._memory, None
            self._pool.take_back(self._last, self.size)

    def acquire(self, num_bytes: int) -> Buffer:
        held = super().acquire(num_bytes)
        return self.Buffer(self, held._memory, held.size)


@mutant("BUF-08", seen_in="sgl-project/sglang#24226")
class BuffersReleasedWhileWritten(kvref.BufferPool):
    """`release` does not wait until a write in progress ends.

    The values are written to memory that already belongs to the next owner.
    """

    class Backend(kvref.ReferenceBackend):
        def update(self, buffer: Any, new: Any, position: int) -> Any:
            time.sleep(random.uniform(0, 1e-3))  # a copy to another device takes some time
            return super().update(buffer, new, position)

    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers, self.Backend())

    def acquire(self, num_bytes: int) -> kvref.Buffer:
        buffer: Any = super().acquire(num_bytes)
        buffer._lock = nullcontext()
        return buffer  # type: ignore[no-any-return]


@mutant("BUF-08", seen_in="cupy/cupy#382")
class BuffersUnlocked(kvref.BufferPool):
    """The pool updates its statistics without a lock: releases of two threads at the same time are counted as one."""

    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers)
        self.lock: Any = nullcontext()

    def take_back(self, memory: Any, size: int) -> None:
        returns = self._returns
        time.sleep(0)  # let another thread run, as can happen at any time
        super().take_back(memory, size)
        self._returns = returns + 1
