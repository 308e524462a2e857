"""Blocks freed by `release_before` stay in the block table: they are freed a second time when the sequence is dropped."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def release_before(self, sequence: int, position: int) -> None:
        table = self._table(sequence)
        super().release_before(sequence, position)
        self._tables.released[table] = 0

    def _held(self, table: int, position: int, stop: int | None, what: str) -> int:
        position = super()._held(table, position, stop, what)
        if self._tables.at(table, 0, position // self.config.block_size) < 0 and position < self._tables.lengths[table].max():
            raise kvref.errors.PositionOutOfRange(f"{what}: {position} was released")
        return position


class Implementation(Right):
    clause = "WIN-09"
    also = ("LAW-11", "MOVE-03")
    bug = "vllm-project/vllm#42571"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
