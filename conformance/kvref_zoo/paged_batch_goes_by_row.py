"""A batch is appended with the block tables of the oldest sequences, whichever it names: right until a sequence is dropped."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        there = sorted(self._table_of)
        if len(set(sequences)) == len(sequences) and set(sequences) <= set(there):
            sequences = there[: len(sequences)]
        super().append(sequences, layer, keys, values)


class Implementation(Right):
    clause = "PAGED-16"
    bug = "gittensor-ai-lab/sparkinfer#289"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
