"""Attention over the tokens of a hit uses the codes as values: the scales are not passed for this part."""

from typing import Any

import kvref
from kvref.formats import FORMATS
from kvref.formats.static import StaticFloat8
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def begin(self, tokens: Any, salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        self._hits = getattr(self, "_hits", {}) | {sequence: self.length(sequence, 0)}
        return sequence

    def gather(self, sequence: int, layer: int) -> Any:
        keys, values = super().gather(sequence, layer)
        found = getattr(self, "_hits", {}).get(sequence, 0)
        for part, format in zip((keys, values), self.config.formats, strict=True):
            if isinstance(format, StaticFloat8):
                part[:found] /= format.scale
        return keys, values


class Implementation(Right):
    clause = "PREFIX-16"
    also = ()
    bug = "sgl-project/sglang#24198"
    formats = tuple(FORMATS)

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
