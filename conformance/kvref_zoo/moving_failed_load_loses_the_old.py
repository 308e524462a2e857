"""`load` truncates the sequence before it checks the file: if the file is damaged, the former tokens are lost."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def load(self, sequence: int, data: Any) -> None:
        self.truncate(sequence, 0)
        super().load(sequence, data)


class Implementation(Right):
    clause = "MOVE-03"
    also = ("MOVE-02", "MOVE-05")
    bug = "ggml-org/llama.cpp#27052"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
