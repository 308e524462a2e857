"""Advancing is checked against the longest sequence there may be, not against the memory there is."""

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
