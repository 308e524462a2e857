"""Wrong sparse caches."""

from typing import Any

import numpy as np

import kvref
from kvref.attention import accept_query
from kvref_zoo.mutant import mutant


@mutant("SPARSE-07", seen_in="sgl-project/sglang#17085")
class SparseOffloadsWithoutIndexKeys(kvref.SparseCache):
    """Offloaded tokens have keys and values only. After they return, the indexer reads zeros and chooses the first tokens."""

    def restore(self, handle: int) -> int:
        sequence = super().restore(handle)
        slots = self._tables.slots(self._table(sequence), 0, np.arange(self.length(sequence)))
        index = self._stores[2]
        index.put(slots, index.quantized(np.zeros((len(slots), 1, self.config.index_dim), np.float32)))
        return sequence


@mutant("SPARSE-07", seen_in="kvcache-ai/Mooncake#2236")
class SparseRestoresStaleIndexKeys(kvref.SparseCache):
    """Restored tokens have the index keys that their new blocks contained before."""

    def restore(self, handle: int) -> int:
        before = self._stores[2].read(range(self.config.num_blocks * self.config.block_size))
        sequence = super().restore(handle)
        slots = self._tables.slots(self._table(sequence), 0, np.arange(self.length(sequence)))
        self._stores[2].put(slots, self._stores[2].quantized(before[slots]))
        return sequence


@mutant("SPARSE-05", also="LAW-07 SHARE-05 SPARSE-01")
class SparseCopiesBlocksWithoutIndexKeys(kvref.SparseCache):
    """Copy-on-write copies keys and values. The copy has the index keys of the block's last owner."""

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for store in self._stores[:2]:
            store.copy(sources, targets, self.config.block_size)


@mutant("SPARSE-03", also="SPARSE-02 SPARSE-04", seen_in="HKUSTDial/flash-sparse-attention#146")
class SparseMasksAfterTheSelection(kvref.SparseCache):
    """The indexer chooses among all tokens, and later ones are masked: a query of a long prompt attends to too few tokens."""

    def select(self, sequence: int, index_queries: Any, weights: Any, causal: bool = False) -> Any:
        chosen = super().select(sequence, index_queries, weights)
        if not causal:
            return chosen
        length = self.length(sequence)
        for row, numbers in enumerate(chosen):
            kept = numbers[numbers <= length - len(chosen) + row]
            numbers[:] = np.concatenate([kept, np.full(len(numbers) - len(kept), -1)])
        return chosen


@mutant("SPARSE-04")
class SparseReadsUnusedColumns(kvref.SparseCache):
    """The kernel does not mask unused columns of the selection. Their -1 is the last token."""

    def attend(
        self, sequence: int, query: Any, index_queries: Any, weights: Any, scale: float | None = None, causal: bool = False
    ) -> Any:
        keys, values, _ = self._rows(sequence)
        chosen = self.select(sequence, index_queries, weights, causal)
        mask = np.zeros((len(query), len(keys)), np.bool_)
        for row, numbers in enumerate(chosen):
            mask[row, numbers if len(keys) else []] = True
        scale = self.config.head_dim**-0.5 if scale is None else scale
        query = accept_query(query, len(query), self.config.num_kv_heads, self.config.head_dim, self._backend)
        return self._backend.attend(query, keys, values, scale, mask)
