"""The length is computed in the integer type of the caller: after two `advance` calls with an int8 of 100 it is -56."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def advance(self, count: int) -> None:
        before = self.seq_len
        super().advance(count)
        self.seq_len = before + count


class Implementation(Right):
    clause = "LAW-20"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
