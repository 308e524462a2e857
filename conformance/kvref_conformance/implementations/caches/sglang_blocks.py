"""Adapters of SGLang's allocators as block pools: TokenToKVPoolAllocator (by slot) and PagedTokenToKVPoolAllocator (by page).

`allocate` is `alloc`, which returns slots or None; `free` is `free`, whose argument is slots; num_free is `available_size`. Slot
0 or page 0 is reserved for padding and is no block, so block ids are shifted by one. The prefix tree keeps references, not the
allocators.
"""

from operator import index
from typing import Any

import torch

from kvref.errors import ConfigError, OutOfBlocks, integer
from kvref_conformance.implementations.caches.sglang_modules import DEVICE, VERSION, module
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

ALLOCATOR = module("mem_cache.allocator")
PAGE = 4  # slots


class Allocators:
    version = VERSION
    language = "python"
    project = "sglang"
    level: Level = "exact"
    formats = ()

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class Slots(Allocators):
    name = "sglang-blocks"

    def blocks(self, *, num_blocks: int) -> "Pool":
        return Pool(ALLOCATOR.TokenToKVPoolAllocator, num_blocks, 1)


class Pages(Allocators):
    name = "sglang-pages"

    def blocks(self, *, num_blocks: int) -> "Pool":
        return Pool(ALLOCATOR.PagedTokenToKVPoolAllocator, num_blocks, PAGE, page_size=PAGE)


class Pool:
    def __init__(self, allocator: Any, num_blocks: int, page: int, **sizes: int) -> None:
        if integer(num_blocks) is None:
            raise NotOffered("validation of num_blocks: the server computes it from the available memory")
        self._page = page
        try:
            self._allocator = allocator(
                index(num_blocks) * page, **sizes, dtype=torch.float32, device=DEVICE, kvcache=None, need_sort=False
            )
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise ConfigError(str(error)) from error

    @property
    def num_blocks(self) -> int:
        return int(self._allocator.size_full // self._page)

    @property
    def num_free(self) -> int:
        return int(self._allocator.available_size() // self._page)

    def allocate(self) -> int:
        return self.allocate_many(1)[0]

    def allocate_many(self, count: int) -> list[int]:
        slots = self._allocator.alloc(index(count) * self._page)
        if slots is None:
            raise OutOfBlocks(f"alloc({count * self._page}) returned None")
        return [int(slot) // self._page - 1 for slot in slots[:: self._page]]

    def free(self, block: int) -> None:
        first = (index(block) + 1) * self._page
        self._allocator.free(torch.tensor(range(first, first + self._page), dtype=torch.int64))
