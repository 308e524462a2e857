"""Variants of the reference that make other choices where the specification permits them.

A vector that one of them does not pass depends on choices of the reference, and is left out.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.recurrent import RecurrentSequence
from kvref_conformance.implementations.backends import OnBackend

FAMILIES_WITH_CHOICES = ("blocks", "paged", "recurrent")  # the families in which the variants differ from the reference


class _ReversedBlockPool(kvref.BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        _reverse_free_list(self)


class _ReversedCache(kvref.PagedCache):
    step = 1

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        _reverse_free_list(self.pool)
        self._next_sequence = self.step

    def create(self) -> int:
        self._next_sequence += self.step - 1
        return super().create()


class _StridedCache(_ReversedCache):
    step = 77


class _ReversedRecurrentCache(kvref.RecurrentCache):
    """Can also truncate to lengths for which the reference raises NotTruncatable."""

    step = 1

    def __init__(self, config: kvref.RecurrentConfig) -> None:
        super().__init__(replace(config, max_drafts=config.max_drafts + 2))
        _reverse_free_list(self.pool)
        self._next_sequence = self.step

    def _open(self, state: RecurrentSequence, source: NDArray[np.int64] | None) -> int:
        self._next_sequence += self.step - 1
        return super()._open(state, source)


class _StridedRecurrentCache(_ReversedRecurrentCache):
    step = 77


def _reverse_free_list(pool: kvref.BlockPool) -> None:
    """Reverse the free list, so that the last block is allocated first."""
    pool._free = pool._free[::-1].copy()


class ReversedPool(OnBackend):
    """Allocates blocks from the last to the first, and numbers sequences from 1."""

    cache: type[_ReversedCache] = _ReversedCache
    recurrent_cache: type[_ReversedRecurrentCache] = _ReversedRecurrentCache

    def __init__(self, token_hits: bool = False) -> None:
        super().__init__(kvref.reference, token_hits=token_hits)

    def blocks(self, num_blocks: int) -> kvref.BlockPool:
        return _ReversedBlockPool(num_blocks)

    def paged(self, **config: Any) -> kvref.PagedCache:
        return self.cache(kvref.PagedConfig(**config))

    def recurrent(self, **config: Any) -> kvref.RecurrentCache:
        return self.recurrent_cache(kvref.RecurrentConfig(**config))


class StridedIds(ReversedPool):
    """The same, with sequence ids in steps of 77."""

    cache = _StridedCache
    recurrent_cache = _StridedRecurrentCache
