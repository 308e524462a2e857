"""A tiered cache: the newest tokens exact, older ones quantized, the oldest evicted."""

from types import SimpleNamespace

import numpy as np

from kvref.errors import PositionOutOfRange


def round_trip(rows):
    """Return float32 rows [..., dim] as INT8 with one scale per row reads them."""
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scales = np.maximum(largest / np.float32(127), np.float32(2**-23))
    quotients = rows / scales
    magnitudes = np.abs(quotients)
    whole = np.floor(magnitudes)
    codes = np.clip(np.sign(quotients) * (whole + (magnitudes - whole >= 0.5)), -127, 127).astype(np.int8)
    return codes.astype(np.float32) * scales


class Cache:
    """tail, store: position -> keys and values of the token, [2, num_kv_heads, head_dim]. length: the next position."""

    def __init__(
        self, num_kv_heads, head_dim, max_tokens, tail_length, tail_dtype, warm_length, warm_format, store_format, migration_batch
    ):
        self.row = num_kv_heads, head_dim
        self.max_tokens, self.tail_length = max_tokens, tail_length
        self.clear()

    def clear(self):
        self.tail, self.store, self.length = {}, {}, 0

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        for key, value in zip(keys, values, strict=True):
            self.tail[self.length] = np.stack([key, value])
            self.length += 1
        self.migrate()
        self.evict()

    def migrate(self):
        """Quantize the tokens that are too old for the tail."""
        for position in sorted(self.tail):
            age = self.length - 1 - position  # the newest token has age 0
            if age >= self.tail_length:
                self.store[position] = round_trip(self.tail.pop(position))

    def evict(self):
        for position in sorted(self.store):
            if position < self.length - self.max_tokens:
                del self.store[position]

    @property
    def total_tokens(self):
        return len(self.tail) + len(self.store)

    def read(self):
        """Return the keys and values of all stored tokens, the oldest first."""
        tokens = [part[position] for part in (self.store, self.tail) for position in sorted(part)]
        rows = np.array(tokens, np.float32).reshape(-1, 2, *self.row)
        return rows[:, 0], rows[:, 1]

    def stats(self):
        tail, store = len(self.tail), len(self.store)
        heads, dim = self.row
        return SimpleNamespace(
            total_tokens=tail + store, tail_tokens=tail, warm_tokens=0, store_tokens=store,
            tail_bytes=tail * 2 * heads * dim * 4, warm_bytes=0, store_bytes=store * 2 * heads * (dim + 4),
        )  # fmt: skip

    def tier_of(self, position):
        for name, part in (("tail", self.tail), ("store", self.store)):
            if position in part:
                return name
        raise PositionOutOfRange(f"position {position}: it was evicted, or not yet appended")
