"""A pool of buffers in five sizes."""

from types import SimpleNamespace

import numpy as np

from kvref.errors import (
    BufferReleased,
    BufferTooLarge,
    CapacityExceeded,
    ConfigError,
    PositionOutOfRange,
)

SIZES = [1024, 4096, 16384, 65536, 262144]  # bytes


class Pool:
    """free: size -> the memory of released buffers. max_buffers: how many of them are kept, per size."""

    def __init__(self, max_buffers):
        self.max_buffers = max_buffers
        self.free = {size: [] for size in SIZES}
        self.hits = self.misses = self.allocations = self.returns = self.drops = 0

    def acquire(self, num_bytes):
        """Return a buffer for at least `num_bytes` bytes."""
        if num_bytes < 0:
            raise PositionOutOfRange(f"num_bytes: {num_bytes}")
        size = next((size for size in SIZES if size >= num_bytes), None)
        if size is None:
            raise BufferTooLarge(f"{num_bytes} bytes, but the largest buffer has {SIZES[-1]}")
        if self.free[size]:
            self.hits += 1
            return Buffer(self, self.free[size].pop())
        self.misses += 1
        return Buffer(self, self.allocate(size))

    def allocate(self, size):
        self.allocations += 1
        return np.zeros(size // 4, np.float32)

    def take_back(self, memory):
        self.returns += 1
        free = self.free[memory.nbytes]
        if len(free) < self.max_buffers:
            free.append(memory)
        else:
            self.drops += 1

    def prewarm(self, size, count):
        """Add up to `count` free buffers of a size, as far as max_buffers permits."""
        if size not in SIZES:
            raise ConfigError(f"size: {size}")
        if count < 0:
            raise PositionOutOfRange(f"count: {count}")
        for _ in range(min(count, self.max_buffers - len(self.free[size]))):
            self.free[size].append(self.allocate(size))

    def clear(self):
        for free in self.free.values():
            free.clear()

    def stats(self):
        requests = self.hits + self.misses
        return SimpleNamespace(
            hits=self.hits, misses=self.misses, allocations=self.allocations, returns=self.returns, drops=self.drops,
            hit_rate=self.hits / requests if requests else 0.0, free={size: len(free) for size, free in self.free.items()},
        )  # fmt: skip


class Buffer:
    """Memory for float32 numbers. length: how many are readable."""

    def __init__(self, pool, memory):
        self.pool, self.memory, self.length = pool, memory, 0
        self.size, self.capacity = memory.nbytes, len(memory)

    @property
    def address(self):
        return self.owned().ctypes.data

    def extend(self, values):
        memory = self.owned()
        stop = self.length + len(values)
        if stop > self.capacity:
            raise CapacityExceeded(f"{stop} numbers, but the capacity is {self.capacity}")
        memory[self.length : stop] = values
        self.length = stop

    def values(self):
        return self.owned()[: self.length].copy()

    def clear(self):
        self.owned()
        self.length = 0

    def release(self):
        """Return the memory to the pool. Releasing a buffer twice has no effect."""
        if self.memory is not None:
            memory, self.memory, self.length = self.memory, None, 0
            self.pool.take_back(memory)

    def owned(self):
        if self.memory is None:
            raise BufferReleased("the buffer was released")
        return self.memory
