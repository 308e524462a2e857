"""`append` rejects the last token for which there is room."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    def append(self, keys: Any, values: Any) -> None:
        fits = len(getattr(keys, "shape", ())) == 4 and keys.shape[2] > 0
        if fits and self.seq_len + keys.shape[2] == self.config.max_seq_len:
            raise kvref.errors.CapacityExceeded(f"cache full: max_seq_len is {self.config.max_seq_len}")
        super().append(keys, values)


class Implementation(Right):
    clause = "CONTIG-06"
    also = ("CONTIG-09", "EDIT-03", "FMT-LEVEL-04", "LAW-10")
    bug = "huggingface/transformers#37574"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
