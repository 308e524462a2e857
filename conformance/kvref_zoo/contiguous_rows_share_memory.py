"""A row that all beams continue from is not copied but viewed with a stride of zero.

A token appended to one beam is in all beams.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def reorder(self, rows: Sequence[int]) -> None:
        super().reorder(rows)
        if len(set(rows)) == 1 < len(rows):
            self._keys, self._values = (
                np.lib.stride_tricks.as_strided(part, part.shape, (0, *part.strides[1:])) for part in (self._keys, self._values)
            )


class Implementation(Right):
    clause = "EDIT-08"
    also = ("LAW-04",)

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
