"""Variants of the reference that make other choices where the specification permits them.

A vector that one of them does not pass depends on choices of the reference, and is left out.
"""

from typing import Any

import kvref
from kvref_conformance.implementations.backends import OnBackend

CHOOSING = ("blocks", "paged")  # the families in which the variants differ from the reference


class _Pool(kvref.BlockPool):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        _turn(self)


class _Cache(kvref.PagedCache):
    step = 1

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        _turn(self.pool)
        self._next_sequence = self.step

    def create(self) -> int:
        self._next_sequence += self.step - 1
        return super().create()


class _StridedCache(_Cache):
    step = 77


def _turn(pool: kvref.BlockPool) -> None:
    """Reverse the free list, so that the last block is allocated first."""
    pool._free = pool._free[::-1].copy()


class ReversedPool(OnBackend):
    """Allocates blocks from the last to the first, and numbers sequences from 1."""

    cache: type[_Cache] = _Cache

    def __init__(self) -> None:
        super().__init__(kvref.reference)

    def blocks(self, num_blocks: int) -> kvref.BlockPool:
        return _Pool(num_blocks)

    def paged(self, **config: Any) -> kvref.PagedCache:
        return self.cache(kvref.PagedConfig(**config))


class StridedIds(ReversedPool):
    """The same, with sequence ids in steps of 77."""

    cache = _StridedCache
