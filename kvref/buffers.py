"""Pooled buffers: memory in a few sizes, kept for the next owner instead of being given back to the system.

A request gets the smallest size class that holds it. Releasing a buffer puts its memory on the class's free list, up to
`max_buffers`; the next request of that class takes it from there. The next owner starts from an empty buffer and can read only
what it wrote itself (LAW-05). Everything here is safe to use from several threads (BUF-08): a buffer has a lock, which is taken
before the pool's and never after it, so that a release waits for what is being written.
"""

from dataclasses import dataclass
from threading import Lock, RLock
from types import TracebackType

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import (
    BufferReleased,
    BufferTooLarge,
    CapacityExceeded,
    ConfigError,
    PositionOutOfRange,
    in_range,
    integer,
    whole,
)
from kvref.inputs import accept

SIZE_CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))  # bytes
VALUE_BYTES = 4  # buffers hold float32


class Buffer:
    """Room for `capacity` float32 values, of which `length` are written. Made by BufferPool.acquire."""

    def __init__(self, pool: "BufferPool", memory: Array, size: int) -> None:
        self.size = size  # bytes: the size class
        self.capacity = size // VALUE_BYTES
        self.length = 0
        self._pool = pool
        self._lock = Lock()
        self._memory: Array | None = memory

    def extend(self, values: Array) -> None:
        """Append float32 values [n]. Raises CapacityExceeded past capacity, BufferReleased after release."""
        values = accept("values", values, ("n",), self._pool.backend)
        with self._lock:
            memory, end = self._held(), self.length + values.shape[0]
            if end > self.capacity:
                raise CapacityExceeded(f"buffer full: {end} values needed, capacity is {self.capacity}")
            self._memory = self._pool.backend.update(memory, values[None, None, :, None], self.length)
            self.length = end

    def values(self) -> Array:
        """What was written, float32 [length]: never the last owner's values (LAW-05).

        A view of the memory, where the library has views: once the buffer is released the next owner writes there.
        """
        with self._lock:
            return self._held()[0, 0, : self.length, 0]

    def clear(self) -> None:
        """Forget the values and keep the memory. Raises BufferReleased."""
        with self._lock:
            self._held()
            self.length = 0

    @property
    def address(self) -> int | None:
        """Where the memory begins, or None where the array library does not say."""
        with self._lock:
            return self._pool.backend.address(self._held())

    def release(self) -> None:
        """Give the memory back. Releasing twice is harmless and counted once (BUF-05)."""
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._pool.take_back(memory, self.size)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _held(self) -> Array:
        if self._memory is None:
            raise BufferReleased("the buffer was released")
        return self._memory


@dataclass(frozen=True)
class BufferStats:
    """What a pool has done since it was made.

    hits, misses: requests served from a free list, or not. allocations: memories made, for misses and prewarming. returns:
    buffers released. drops: those of them that met a full free list. free: free buffers, by size class in bytes.
    """

    hits: int
    misses: int
    allocations: int
    returns: int
    drops: int
    free: dict[int, int]

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses); 0.0 before any request (BUF-07)."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0


class BufferPool:
    def __init__(self, max_buffers: int = 32, backend: Backend = reference) -> None:
        """max_buffers: free buffers kept of each class."""
        self.max_buffers = whole("max_buffers", max_buffers)
        self.backend = backend
        self.lock = RLock()
        self._free: dict[int, list[Array]] = {size: [] for size in SIZE_CLASSES}
        self._hits = self._misses = self._allocations = self._returns = self._drops = 0

    def acquire(self, num_bytes: int) -> Buffer:
        """An empty buffer of the smallest class that holds `num_bytes`. Raises BufferTooLarge above the largest."""
        size = size_class(num_bytes)
        with self.lock:
            if self._free[size]:
                self._hits += 1
                memory = self._free[size].pop()
            else:
                self._misses += 1
                memory = self._allocate(size)
            return Buffer(self, memory, size)

    def acquire_pair(self, num_bytes: int) -> tuple[Buffer, Buffer]:
        """One buffer for keys and one for values, or neither."""
        keys = self.acquire(num_bytes)
        try:
            return keys, self.acquire(num_bytes)
        except BaseException:
            keys.release()
            raise

    def prewarm(self, size: int, count: int) -> None:
        """Fill the free list of one class with `count` more buffers, up to max_buffers (BUF-06)."""
        if integer(size) not in SIZE_CLASSES:
            raise ConfigError(f"size: expected one of {', '.join(map(str, SIZE_CLASSES))}, got {size!r}")
        size, count = int(size), in_range(count, None, PositionOutOfRange, "count")
        with self.lock:
            for _ in range(min(count, self.max_buffers - len(self._free[size]))):
                self._free[size].append(self._allocate(size))

    def prewarm_all(self, count: int) -> None:
        for size in SIZE_CLASSES:
            self.prewarm(size, count)

    def clear(self) -> None:
        """Let go of every free buffer. Those in use are not touched."""
        with self.lock:
            for free in self._free.values():
                free.clear()

    def stats(self) -> BufferStats:
        with self.lock:
            free = {size: len(buffers) for size, buffers in self._free.items()}
            return BufferStats(self._hits, self._misses, self._allocations, self._returns, self._drops, free)

    def take_back(self, memory: Array, size: int) -> None:
        """Called by Buffer.release, once for each buffer."""
        with self.lock:
            self._returns += 1
            if len(self._free[size]) < self.max_buffers:
                self._free[size].append(memory)
            else:
                self._drops += 1

    def _allocate(self, size: int) -> Array:
        self._allocations += 1
        return self.backend.zeros((1, 1, size // VALUE_BYTES, 1), "float32")  # the shape the `update` kernel takes


def size_class(num_bytes: int) -> int:
    """The smallest size class that holds `num_bytes` (BUF-01). Raises BufferTooLarge, or PositionOutOfRange for a negative."""
    num_bytes = in_range(num_bytes, None, PositionOutOfRange, "num_bytes")
    for size in SIZE_CLASSES:
        if num_bytes <= size:
            return size
    raise BufferTooLarge(f"acquire: expected at most {SIZE_CLASSES[-1]} bytes, got {num_bytes}")
