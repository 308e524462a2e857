"""A length past the end is taken for the end, in silence: whoever counted wrongly writes on in the wrong place.

As mlx-lm does, which takes away as many tokens as there are where it is asked for more.
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
