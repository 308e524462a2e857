"""`attend` passes the codes to the kernel without their scales. Reads are right, so that only attention shows the bug."""

from typing import Any

import kvref
from kvref.formats import FORMATS
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def attend(self, sequence: int, layer: int, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        stores = self._store.keys, self._store.values
        right = [store.format for store in stores]
        for store in stores:
            store.format = FORMATS[store.format.name]  # the format with a scale of 1
        try:
            return super().attend(sequence, layer, query, scale, causal)
        finally:
            for store, format in zip(stores, right, strict=True):
                store.format = format


class Implementation(Right):
    clause = "ATTN-10"
    also = ()
    bug = "flashinfer-ai/flashinfer#1023"
    formats = tuple(FORMATS)

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
