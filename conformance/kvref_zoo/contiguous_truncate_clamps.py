"""`truncate` to a length past the end changes nothing and raises no error.

A caller that counted wrong continues at the wrong position. In mlx-lm, removing more tokens than the cache has raises no error
either.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def truncate(self, length: int) -> None:
        super().truncate(min(length, self.seq_len))


class Implementation(Right):
    clause = "EDIT-02"
    also = ("LAW-01", "LAW-11")

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
