"""Adapters of SGLang's allocators as block pools, and of its pool of keys and values as slot kernels.

Adapters of SGLang's allocators as block pools: TokenToKVPoolAllocator (by slot) and PagedTokenToKVPoolAllocator (by page).

`allocate` is `alloc`, which returns slots or None; `free` is `free`, whose argument is slots; num_free is `available_size`. Slot
0 or page 0 is reserved for padding and is no block, so block ids are shifted by one. The prefix tree keeps references, not the
allocators.

Adapter of SGLang's pool of keys and values, MHATokenToKVPool, as slot kernels, on a CPU and without its AMX kernels.

The given store is the pool's buffer. `scatter` is `set_kv_buffer`, with the same tokens as keys and as values; `copy` is
`move_kv_cache`, whose arguments are slots (SGLANG_NATIVE_MOVE_KV_CACHE, its implementation without CUDA); `gather` indexes
`get_key_buffer` by slots, like its PyTorch attention. It has no `update` at a position.
"""

import os
from operator import index
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvref.errors import ConfigError, DtypeMismatch, OutOfBlocks, ShapeMismatch, SlotOutOfRange, integer
from kvref_adapters.sglang.modules import DEVICE, VERSION, sglang_module
from kvref_conformance.implementation_api import Level
from kvref_conformance.outcome import NotOffered

ALLOCATOR = sglang_module("mem_cache.allocator")
PAGE = 4  # slots


class SGLangAllocators:
    version = VERSION
    language = "python"
    project = "sglang"
    level: Level = "exact"
    formats = ()

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class SGLangSlots(SGLangAllocators):
    name = "sglang-blocks"

    def blocks(self, *, num_blocks: int) -> "SGLangBlockPool":
        return SGLangBlockPool(ALLOCATOR.TokenToKVPoolAllocator, num_blocks, 1)


class SGLangPages(SGLangAllocators):
    name = "sglang-pages"

    def blocks(self, *, num_blocks: int) -> "SGLangBlockPool":
        return SGLangBlockPool(ALLOCATOR.PagedTokenToKVPoolAllocator, num_blocks, PAGE, page_size=PAGE)


class SGLangBlockPool:
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


os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # read when a pool is created
MEMORY_POOL = sglang_module("mem_cache.memory_pool")
OWN_SLOTS = (torch.int64, torch.int32)  # the dtypes of slots in its allocators and tables
LAYER = SimpleNamespace(layer_id=0)  # the only attribute of a model's layer that it reads


class SGLangKVPool:
    name = "sglang-pool"
    version = VERSION
    language = "python"
    project = "sglang"
    level: Level = "exact"
    formats = ("float32",)
    limits: ClassVar[dict[str, Any]] = {"dtype": "float32"}

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()

    def kernels(self) -> "SGLangKVPool":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        pool = _pool_of(store)
        try:
            pool.set_kv_buffer(LAYER, _own(slots), new, new)
        except (IndexError, RuntimeError) as error:
            raise _meant(error) from error
        return pool.get_key_buffer(0)

    def gather(self, store: Any, slots: Any) -> Any:
        try:
            return _pool_of(store).get_key_buffer(0)[_own(slots)]
        except (IndexError, RuntimeError) as error:
            raise _meant(error) from error

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        pool, inside = _pool_of(store), torch.arange(block_size)
        to, of = ((_own(blocks)[:, None] * block_size + inside).reshape(-1) for blocks in (targets, sources))
        try:
            pool.move_kv_cache(to, of)
        except (IndexError, RuntimeError) as error:
            raise _meant(error) from error
        return pool.get_key_buffer(0)


def _own(slots: Any) -> Any:
    slots = torch.as_tensor(slots)
    if slots.dtype not in OWN_SLOTS and not slots.is_floating_point() and slots.dtype != torch.bool:
        raise NotOffered(f"slots of {slots.dtype}: the pool's slots are int64 or int32")
    return slots


def _pool_of(store: Any) -> Any:
    slots, heads, width = store.shape
    pool = MEMORY_POOL.MHATokenToKVPool(
        slots - 1, 1, store.dtype, heads, width, 1, DEVICE, enable_memory_saver=False
    )  # one slot less, because the pool adds a page of one slot for padding
    pool.k_buffer, pool.v_buffer = [store], [store.clone()]
    return pool


def _meant(error: Exception) -> Exception:
    """Return the specification's error for a message of PyTorch."""
    said = str(error)
    if "out of bounds" in said or "out of range" in said:
        return SlotOutOfRange(said)
    of_types = any(word in said for word in ("dtype", "tensors used as indices", "the mask"))
    return (DtypeMismatch if of_types else ShapeMismatch)(said)
