"""Adapters of LMCache's memory allocators as block pools: PagedTensorMemoryAllocator, and TensorMemoryAllocator with one size.

`allocate` is `allocate`, `allocate_many` is `batched_allocate`; `share`, `free` and `references` are an object's `ref_count_up`,
`ref_count_down` and `get_ref_count`. Every holder of an object can call these methods, so the adapter keeps the last object that
was allocated for each block; a block that was never allocated has no object. num_free is the address manager's `get_free_size`,
the number in use `num_active_allocations`, which the library documents as a debugging value.
"""

from importlib.metadata import version
from typing import Any, ClassVar

import torch

from kvref.errors import OutOfBlocks, PositionOutOfRange, integer
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered

BYTES = 4096  # per block; addresses are multiples of it
SHAPE = torch.Size([BYTES])


class LMCacheAllocators(TorchArrays):
    version = version("lmcache")
    language = "python"
    project = "lmcache"
    formats = ()
    limits: ClassVar[dict[str, Any]] = {"num_blocks": {"least": 1}}


class LMCachePages(LMCacheAllocators):
    name = "lmcache-pages"

    def blocks(self, *, num_blocks: int) -> "LMCachePool":
        from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator

        return LMCachePool(PagedTensorMemoryAllocator(_memory(num_blocks), [SHAPE], [torch.uint8]), 1)


class LMCacheMemory(LMCacheAllocators):
    name = "lmcache-memory"

    def blocks(self, *, num_blocks: int) -> "LMCachePool":
        from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator

        return LMCachePool(TensorMemoryAllocator(_memory(num_blocks)), BYTES)


class LMCachePool:
    """unit: what an object's address counts, pages or bytes."""

    def __init__(self, allocator: Any, unit: int) -> None:
        self._allocator, self._unit = allocator, unit
        self._objects = dict[int, Any]()

    @property
    def num_blocks(self) -> int:
        return int(self._allocator.address_manager.get_heap_size() // BYTES)

    @property
    def num_free(self) -> int:
        return int(self._allocator.address_manager.get_free_size() // BYTES)

    @property
    def num_used(self) -> int:
        return int(self._allocator.num_active_allocations)

    def allocate(self) -> int:
        found = self._allocator.allocate(SHAPE, torch.uint8)
        if found is None:
            raise OutOfBlocks("allocate returned None")
        return self._handed_out(found)

    def allocate_many(self, count: int) -> list[int]:
        found = self._allocator.batched_allocate(SHAPE, torch.uint8, count)
        if found is None:  # returned for any rejected request, including a negative count
            raise (OutOfBlocks if count >= 0 else PositionOutOfRange)(f"batched_allocate of {count} returned None")
        return [self._handed_out(each) for each in found]

    def share(self, block: int) -> None:
        self._known(block).ref_count_up()

    def free(self, block: int) -> None:
        self._known(block).ref_count_down()

    def references(self, block: int) -> int:
        return int(self._known(block).get_ref_count())

    def _handed_out(self, found: Any) -> int:
        block = int(found.meta.address // self._unit)
        self._objects[block] = found
        return block

    def _known(self, block: int) -> Any:
        if block not in self._objects:
            raise NotOffered("a block that was never allocated: it has no object")
        return self._objects[block]


def _memory(num_blocks: int) -> torch.Tensor:
    size = integer(num_blocks)
    if size is None or size < 1:
        raise NotOffered("validation of num_blocks: the pool takes a tensor")
    return torch.zeros(size * BYTES, dtype=torch.uint8)
