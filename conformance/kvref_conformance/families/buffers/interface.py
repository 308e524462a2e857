"""The typed protocols of the buffer pool and of its buffers."""

from typing import Protocol

from kvref_conformance.interface import Numbers, Statistics

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "acquire": "BufferTooLarge PositionOutOfRange",
    "prewarm": "ConfigError PositionOutOfRange",
    "buffer.address": "BufferReleased",
    "buffer.extend": "ShapeMismatch DtypeMismatch CapacityExceeded BufferReleased",
    "buffer.values": "BufferReleased",
    "buffer.clear": "BufferReleased",
}


class HeldBuffer(Protocol):
    """The object that `buffers.acquire` returns. Requests name its operations `buffer.NAME`."""

    size: int
    capacity: int
    length: int
    address: int | None

    def extend(self, values: Numbers) -> None: ...
    def values(self) -> Numbers: ...
    def clear(self) -> None: ...
    def release(self) -> None: ...


class BufferStats(Statistics, Protocol):
    hits: int
    misses: int
    allocations: int
    returns: int
    drops: int
    hit_rate: float
    free: dict[int, int]  # size class -> number of free buffers


class Buffers(Protocol):
    def acquire(self, num_bytes: int) -> HeldBuffer: ...
    def prewarm(self, size: int, count: int) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> BufferStats: ...


HANDED_OUT = {"buffer": HeldBuffer}  # name in a request -> protocol


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self, *, max_buffers: int) -> Buffers: ...
