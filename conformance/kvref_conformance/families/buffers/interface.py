"""The pool of buffers in size classes, and the buffers it hands out."""

from typing import Protocol

from kvref_conformance.interface import Numbers, Statistics

# The errors that each operation may have to answer with; what `new` has to refuse is always a ConfigError.
ERRORS: dict[str, str] = {
    "acquire": "BufferTooLarge PositionOutOfRange",
    "prewarm": "ConfigError PositionOutOfRange",
    "buffer.address": "BufferReleased",
    "buffer.extend": "ShapeMismatch DtypeMismatch CapacityExceeded BufferReleased",
    "buffer.values": "BufferReleased",
    "buffer.clear": "BufferReleased",
}


class HeldBuffer(Protocol):
    """What `buffers.acquire` returns. The family name of its operations is `buffer`."""

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
    free: dict[int, int]  # by size class


class Buffers(Protocol):
    def acquire(self, num_bytes: int) -> HeldBuffer: ...
    def prewarm(self, size: int, count: int) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> BufferStats: ...


HANDED_OUT = {"buffer": HeldBuffer}  # by the name that it has in a request


class Factory(Protocol):
    """What makes one: it is given every size by name."""

    def __call__(self, *, max_buffers: int) -> Buffers: ...
