"""`truncate` changes only the length, and `append` counts the stored rows: the removed tokens reappear with the next token."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ContiguousCache):
    _rows = 0

    def truncate(self, length: int) -> None:
        self._rows = max(self._rows, self.seq_len)
        super().truncate(length)

    def append(self, keys: Any, values: Any) -> None:
        length, self.seq_len = self.seq_len, max(self.seq_len, self._rows)
        try:
            super().append(keys, values)
        except Exception:
            self.seq_len = length
            raise
        self._rows = 0

    def reset(self) -> None:
        self._rows = 0
        super().reset()


class Implementation(Right):
    clause = "EDIT-03"
    also = ("CONTIG-02", "CONTIG-06", "CONTIG-09")
    bug = "ml-explore/mlx-lm#1502"

    def contiguous(self, **config: Any) -> Cache:
        return Cache(kvref.ContiguousConfig(**config))
