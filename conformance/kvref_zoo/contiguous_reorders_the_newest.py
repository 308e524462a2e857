"""The newest tokens are in a separate buffer, and `reorder` moves only these.

Older tokens stay in their former rows. The QuantizedLayer of transformers had this bug: it reordered its residual and not its
quantized tokens.
"""

from collections.abc import Sequence
from typing import Any

import kvref
from kvref_zoo.right import Right

NEWEST = 2


class Cache(kvref.ContiguousCache):
    def reorder(self, rows: Sequence[int]) -> None:
        before, older = [buffer.copy() for buffer in self.raw()], slice(max(0, self.seq_len - NEWEST))
        super().reorder(rows)
        for buffer, old in zip(self.raw(), before, strict=True):
            if len(buffer) == len(old):
                buffer[:, :, older] = old[:, :, older]


class Implementation(Right):
    clause = "EDIT-07"
    also = ("EDIT-08",)
    bug = "huggingface/transformers#45510"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
