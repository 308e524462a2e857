"""Adapters of vLLM's BlockPool, by its own calls, as the pool of blocks; without tensors.

`allocate` and `allocate_many` are `get_new_blocks`, `share` is `touch`, `free` is `free_blocks`, `references` is a block's
`ref_cnt`. Arguments and results are block objects: an id is the index in its list minus one, because the first is the null block,
which the pool reserves. So a pool of n blocks is created with n + 1. An id without an object in the list is *not offered*.
"""

from collections.abc import Sequence
from importlib.metadata import version
from numbers import Real
from typing import Any

import numpy as np

import kvref_conformance.implementations.caches.vllm_stubs  # noqa: F401 - before vLLM
from kvref.errors import ConfigError, OutOfBlocks
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

from vllm.v1.core.block_pool import BlockPool  # isort: skip

NULL = 1  # blocks that the pool reserves
HASHED = 16  # tokens per hash; nothing is hashed here


class Managed:
    """Attributes that vLLM's managers share."""

    version = version("vllm")
    language = "python"
    project = "vllm"
    level: Level = "exact"
    formats = ("float32", "float16", "bfloat16")

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array


class Blocks(Managed):
    name = "vllm-blocks"

    def blocks(self, num_blocks: int) -> "Pool":
        return Pool(num_blocks)


class Pool:
    def __init__(self, num_blocks: int) -> None:
        try:
            self._pool = BlockPool(with_null(num_blocks), enable_caching=False, hash_block_size=HASHED)
        except AssertionError as error:
            raise ConfigError("BlockPool: AssertionError for num_gpu_blocks") from error

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks) - NULL

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def utilization(self) -> float:
        return float(self._pool.get_usage())

    def allocate(self) -> int:
        (block,) = self.allocate_many(1)
        return block

    def allocate_many(self, count: int) -> Sequence[int]:
        try:
            return [block.block_id - NULL for block in self._pool.get_new_blocks(count)]
        except ValueError as error:
            raise OutOfBlocks(str(error)) from error

    def share(self, block: int) -> None:
        self._pool.touch([self._block(block)])

    def free(self, block: int) -> None:
        self._pool.free_blocks([self._block(block)])

    def references(self, block: int) -> int:
        return int(self._block(block).ref_cnt)

    def _block(self, block: int) -> Any:
        if not 0 <= block < self.num_blocks:
            raise NotOffered("a block id outside the pool: its arguments are block objects")
        return self._pool.blocks[block + NULL]


def with_null(num_blocks: Any) -> Any:
    """Return the number of blocks to create the pool with: one more, for the null block. Other types are passed unchanged."""
    return num_blocks + NULL if isinstance(num_blocks, Real) and not isinstance(num_blocks, bool) else num_blocks
