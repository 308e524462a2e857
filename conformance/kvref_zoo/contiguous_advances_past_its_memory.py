"""`advance` checks the new length against max_seq_len instead of the capacity, which is the memory that exists."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def advance(self, count: int) -> None:
        if count >= 0 and self.seq_len + count <= self.config.max_seq_len:
            self.seq_len += int(count)
        else:
            super().advance(count)


class Implementation(Right):
    clause = "CONTIG-10"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
