"""`truncate` changes only the length.

Tokens that count as stored in full again are read from ring slots that contain other tokens.
"""

from typing import Any

import kvref
from kvref.errors import PositionOutOfRange, in_range
from kvref_zoo.right import Right


class Cache(kvref.ChannelCache):
    def truncate(self, length: int) -> None:
        self.length = in_range(length, self.length + 1, PositionOutOfRange, "length")


class Implementation(Right):
    clause = "KIVI-08"
    bug = "rajveer43/VeloxQuant-MLX#369"

    def channels(self, **config: Any) -> Cache:
        return Cache(kvref.ChannelConfig(**config))
