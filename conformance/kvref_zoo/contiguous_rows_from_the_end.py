"""A negative row is counted from the end, as in Python lists.

`reorder` returns another user's tokens instead of raising an error.
"""

from collections.abc import Sequence
from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def reorder(self, rows: Sequence[int]) -> None:
        batch = self.config.batch_size
        super().reorder([row + batch if -batch <= row < 0 else row for row in rows])


class Implementation(Right):
    clause = "EDIT-09"
    also = ("LAW-01", "LAW-11")

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
