"""Adapter of SGLang's pool of keys and values, MHATokenToKVPool, as slot kernels, on a CPU and without its AMX kernels.

The given store is the pool's buffer. `scatter` is `set_kv_buffer`, with the same tokens as keys and as values; `copy` is
`move_kv_cache`, whose arguments are slots (SGLANG_NATIVE_MOVE_KV_CACHE, its implementation without CUDA); `gather` indexes
`get_key_buffer` by slots, like its PyTorch attention. It has no `update` at a position.
"""

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_conformance.implementations.caches.sglang_modules import DEVICE, VERSION, module
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # read when a pool is created
MEMORY_POOL = module("mem_cache.memory_pool")
OWN_SLOTS = (torch.int64, torch.int32)  # the dtypes of slots in its allocators and tables
LAYER = SimpleNamespace(layer_id=0)  # the only attribute of a model's layer that it reads


class Pool:
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

    def kernels(self) -> "Pool":
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
