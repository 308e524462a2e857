"""A pool of buffers in five sizes, which keeps the memory of released buffers for later requests (chapter BUF).

A request gets a buffer of the smallest size class that fits. Releasing a buffer adds its memory to the free list of its class,
which has at most `max_buffers` entries. The next owner of the memory starts with an empty buffer and can read only what it wrote
(LAW-05).

Threads can share pools and buffers (BUF-08). A buffer has a lock, which is always acquired before the pool's lock, so that a
release blocks until a write or read of the same buffer has finished.
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
from kvref.validation import accept

SIZE_CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))  # bytes
VALUE_BYTES = 4  # buffers hold float32


class Buffer:
    """A buffer of `size` bytes, with room for `capacity` float32 values, of which `length` are written.

    `BufferPool.acquire` creates buffers. Used as a context manager, a buffer is released at the end.
    """

    def __init__(self, pool: "BufferPool", memory: Array, size: int) -> None:
        self.size = size  # bytes; a size class
        self.capacity = size // VALUE_BYTES
        self.length = 0
        self._pool = pool
        self._lock = Lock()
        self._memory: Array | None = memory

    def extend(self, values: Array) -> None:
        """Append values [n], all or none (BUF-09).

        Raises CapacityExceeded if they exceed the capacity, BufferReleased, ShapeMismatch or DtypeMismatch.
        """
        values = accept("values", values, ("n",), self._pool.backend)
        with self._lock:
            memory, end = self._held(), self.length + values.shape[0]
            if end > self.capacity:
                raise CapacityExceeded(f"buffer full: {end} values needed, capacity is {self.capacity}")
            self._memory = self._pool.backend.update(memory, values[None, None, :, None], self.length)
            self.length = end

    def values(self) -> Array:
        """Return the values that were written: float32 [length]. Raises BufferReleased.

        It is a view of the memory if the array library has views, and valid until the buffer is released.
        """
        with self._lock:
            return self._held()[0, 0, : self.length, 0]

    def clear(self) -> None:
        """Remove the values and keep the memory. Raises BufferReleased."""
        with self._lock:
            self._held()
            self.length = 0

    @property
    def address(self) -> int | None:
        """The address of the memory, or None if the array library does not expose it. Raises BufferReleased."""
        with self._lock:
            return self._pool.backend.address(self._held())

    def release(self) -> None:
        """Return the memory to the pool. Releasing twice has no effect (BUF-05)."""
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                self._pool.take_back(memory, self.size)

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _held(self) -> Array:
        """The memory. Raises BufferReleased."""
        if self._memory is None:
            raise BufferReleased("the buffer was released")
        return self._memory


@dataclass(frozen=True)
class BufferStats:
    """Statistics of a pool since it was created (BUF-03).

    - `hits`, `misses`: requests that were served from a free list, and requests for which memory was allocated.
    - `allocations`: allocations of memory, by misses and by `prewarm`.
    - `returns`: released buffers. `drops`: released buffers whose memory was not kept, because the free list was full (BUF-04).
    - `free`: the number of free buffers, by size class in bytes.
    """

    hits: int
    misses: int
    allocations: int
    returns: int
    drops: int
    free: dict[int, int]

    @property
    def hit_rate(self) -> float:
        """hits / (hits + misses); 0.0 before the first request (BUF-07)."""
        requests = self.hits + self.misses
        return self.hits / requests if requests else 0.0


class BufferPool:
    """A pool of buffers of 1, 4, 16, 64 and 256 KiB (chapter BUF). Threads and caches can share it."""

    def __init__(self, max_buffers: int = 32, backend: Backend = reference) -> None:
        """max_buffers: the largest number of free buffers per size class, 1 or more. Raises ConfigError."""
        self.max_buffers = whole("max_buffers", max_buffers)
        self.backend = backend
        self.lock = RLock()
        self._free: dict[int, list[Array]] = {size: [] for size in SIZE_CLASSES}
        self._hits = self._misses = self._allocations = self._returns = self._drops = 0

    def acquire(self, num_bytes: int) -> Buffer:
        """Return an empty buffer of the smallest size class that is at least `num_bytes` (BUF-01).

        Raises BufferTooLarge above the largest class, PositionOutOfRange if `num_bytes` is negative.
        """
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
        """Return two buffers, for keys and for values, or none. Raises as `acquire` does."""
        keys = self.acquire(num_bytes)
        try:
            return keys, self.acquire(num_bytes)
        except BaseException:
            keys.release()
            raise

    def prewarm(self, size: int, count: int) -> None:
        """Allocate `count` free buffers of a size class, or as many as bring its free list to max_buffers (BUF-06).

        Raises ConfigError if `size` is not a size class in bytes, PositionOutOfRange if `count` is negative.
        """
        if integer(size) not in SIZE_CLASSES:
            raise ConfigError(f"size: expected one of {', '.join(map(str, SIZE_CLASSES))}, got {size!r}")
        size, count = int(size), in_range(count, None, PositionOutOfRange, "count")
        with self.lock:
            for _ in range(min(count, self.max_buffers - len(self._free[size]))):
                self._free[size].append(self._allocate(size))

    def prewarm_all(self, count: int) -> None:
        """`prewarm` for every size class."""
        for size in SIZE_CLASSES:
            self.prewarm(size, count)

    def clear(self) -> None:
        """Free the memory of all free buffers. Buffers in use do not change (BUF-06)."""
        with self.lock:
            for free in self._free.values():
                free.clear()

    def stats(self) -> BufferStats:
        """Return the statistics since the pool was created (BUF-03)."""
        with self.lock:
            free = {size: len(buffers) for size, buffers in self._free.items()}
            return BufferStats(self._hits, self._misses, self._allocations, self._returns, self._drops, free)

    def take_back(self, memory: Array, size: int) -> None:
        """Add the memory of a released buffer to its free list, or drop it. Called by `Buffer.release` once per buffer."""
        with self.lock:
            self._returns += 1
            if len(self._free[size]) < self.max_buffers:
                self._free[size].append(memory)
            else:
                self._drops += 1

    def _allocate(self, size: int) -> Array:
        """New memory of `size` bytes."""
        self._allocations += 1
        return self.backend.zeros((1, 1, size // VALUE_BYTES, 1), "float32")  # the shape that the kernel `update` requires


def size_class(num_bytes: int) -> int:
    """Return the smallest size class that is at least `num_bytes` (BUF-01). Raises BufferTooLarge or PositionOutOfRange."""
    num_bytes = in_range(num_bytes, None, PositionOutOfRange, "num_bytes")
    for size in SIZE_CLASSES:
        if num_bytes <= size:
            return size
    raise BufferTooLarge(f"acquire: expected at most {SIZE_CLASSES[-1]} bytes, got {num_bytes}")
