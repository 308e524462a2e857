"""`truncate` computes how many tokens to remove and limits the number only from above.

A negative number makes the cache longer.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def truncate(self, length: int) -> None:
        count = min(self.seq_len, self.seq_len - int(length))
        self.seq_len = min(self.seq_len - count, self.capacity)


class Implementation(Right):
    clause = "EDIT-02"
    also = ("LAW-01", "LAW-05", "LAW-11")
    bug = "ml-explore/mlx-lm#1868"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
