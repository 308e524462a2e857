"""Adapters of SGLang's caches over its Triton kernels: `sglang-triton-unified`, `-triton-pool` and `-triton-mla`.

- `sglang-triton-unified`: the requests of `sglang-unified`, whose slots `alloc_extend_kernel`, `alloc_decode_kernel`,
  `get_last_loc_triton` and `write_req_to_token_pool_triton` compute.
- `sglang-triton-pool`: `copy` is `copy_all_layer_kv_cache_tiled`, which `move_kv_cache` of MHATokenToKVPool calls.
- `sglang-triton-mla`: MLATokenToKVPool with a slot allocator. `append` is `set_mla_kv_buffer`, `read` is `get_mla_kv_buffer`, and
  `truncate` and `clear` free slots. `attend` is `decode_attention_fwd` over the rows, with the matrices multiplied into the
  queries and the output as a model does; a query is a request with the number of tokens that it sees.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvref.errors import CapacityExceeded, PositionOutOfRange
from kvref_adapters._shared.triton_interpreter import reachable
from kvref_adapters.sglang.triton_attention import SGLangTriton, attend_slots  # before the adapter
from kvref_conformance.exceptions import NotOffered

from kvref_adapters.sglang import adapter  # isort: skip
from kvref_adapters.sglang.modules import DEVICE  # isort: skip

LAYER = SimpleNamespace(layer_id=0)  # the only attribute of a model's layer that a pool reads
write_cache_indices = adapter.ALLOCATION.write_cache_indices


def _write_cache_indices(*args: Any) -> None:
    prefixes = args[9]  # slots of cached prefixes, whose addresses the kernel gets
    with reachable(**{f"prefix {number}": prefix for number, prefix in enumerate(prefixes)}):
        write_cache_indices(*args)


adapter.ALLOCATION.write_cache_indices = _write_cache_indices


class SGLangTritonUnified(adapter.SGLangUnified):
    name = "sglang-triton-unified"
    version = SGLangTriton.version
    language = "triton"
    limits: ClassVar[dict[str, Any]] = {
        **adapter.SGLangCaches.limits, "block_size": [1, 2, 4, 8, 16, 32, 64], "threads": False,
    }  # fmt: skip


class SGLangTritonPool(SGLangTriton):
    name = "sglang-triton-pool"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "threads": False}

    def kernels(self) -> "SGLangTritonPool":
        return self

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        slots, heads, width = store.shape
        inside = torch.arange(block_size)
        to, of = (
            (torch.as_tensor(blocks).to(torch.int64)[:, None] * block_size + inside).reshape(-1) for blocks in (targets, sources)
        )
        pool = Pool(
            slots - 1, 1, store.dtype, heads, width, 1, DEVICE, enable_memory_saver=False, enable_kv_cache_copy=True
        )  # one slot less, because the pool adds a page of one slot for padding
        pool.use_native_move_kv_cache = False
        pool.k_buffer[0][:], pool.v_buffer[0][:] = store, store
        with reachable(keys=pool.k_buffer[0], values=pool.v_buffer[0]):
            pool.move_kv_cache(to, of)
        store[:] = pool.k_buffer[0]
        return store


class Pool(adapter.MEMORY_POOL.MHATokenToKVPool):  # type: ignore[misc]
    def _init_kv_copy_and_warmup(self) -> None:
        with reachable(keys=self.k_buffer[0], values=self.v_buffer[0]):
            super()._init_kv_copy_and_warmup()


class SGLangTritonMla(SGLangTriton):
    name = "sglang-triton-mla"
    limits: ClassVar[dict[str, Any]] = {
        "dtype": ["float32"],
        "rank": [4, 8, 16, 32, 64, 128, 256, 512],
        "rope_dim": [4, 8, 16, 32, 64],
        "threads": False,
    }  # fmt: skip - powers of two, which the kernel of `get_mla_kv_buffer` requires

    def latent(self, *, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> "Latents":
        return Latents(rank, rope_dim, max_tokens, dtype)


class Latents:
    def __init__(self, rank: int, rope_dim: int, max_tokens: int, dtype: str) -> None:
        sizes = (rank, rope_dim, max_tokens)
        if not all(type(size) is int and size > 0 for size in sizes) or dtype != "float32":
            raise NotOffered("validation of sizes: they come from the model and the available memory")
        self._pool = adapter.MEMORY_POOL.MLATokenToKVPool(
            max_tokens, 1, torch.float32, rank, rope_dim, 1, DEVICE, enable_memory_saver=False
        )
        self._allocator = adapter.ALLOCATOR.TokenToKVPoolAllocator(max_tokens, torch.float32, DEVICE, self._pool, need_sort=False)
        self._widths = (rank, rope_dim)
        self._slots = torch.zeros(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        return len(self._slots)

    def append(self, latent: Any, rope: Any) -> None:
        shapes = [(array.shape[1:], array.dtype) for array in (latent, rope)]
        if shapes != [((width,), torch.float32) for width in self._widths] or len(latent) != len(rope):
            raise NotOffered("rejecting other shapes and dtypes: one projection of the model produces both parts")
        slots = self._allocator.alloc(len(latent))
        if slots is None:
            raise CapacityExceeded(f"alloc({len(latent)}) returned None")
        self._pool.set_mla_kv_buffer(LAYER, slots, latent[:, None], rope[:, None])
        self._slots = torch.cat([self._slots, slots.to(torch.int64)])

    def read(self) -> Any:
        if not len(self._slots):
            return torch.zeros(0, sum(self._widths))
        return torch.cat(self._pool.get_mla_kv_buffer(LAYER, self._slots), dim=2)[:, 0]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= len(self._slots):
            raise PositionOutOfRange(length)
        self._allocator.free(self._slots[length:])
        self._slots = self._slots[:length]

    def clear(self) -> None:
        self.truncate(0)

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: float, causal: bool) -> Any:
        if any(array.dtype != torch.float32 for array in (query, up_keys, up_values)):
            raise NotOffered("rejecting other dtypes: one model computes queries and has the matrices")
        if any(array.ndim != 3 for array in (query, up_keys, up_values)):
            raise NotOffered("rejecting shapes that do not match: one model computes queries and has the matrices")
        nope = up_keys.shape[1]
        matching = up_keys.shape[2] == up_values.shape[2] == self._widths[0] and query.shape[2] == nope + self._widths[1]
        if query.shape[1] != len(up_keys) or len(up_keys) != len(up_values) or not matching:
            raise NotOffered("rejecting shapes that do not match: one model computes queries and has the matrices")
        absorbed = torch.cat([torch.einsum("qhn,hnr->qhr", query[..., :nope], up_keys), query[..., nope:]], dim=2)
        keys, values = self._pool.get_kv_buffer(0)
        mean = attend_slots(absorbed, keys, values, self._slots, scale, causal)
        return torch.einsum("qhr,hvr->qhv", mean, up_values)
