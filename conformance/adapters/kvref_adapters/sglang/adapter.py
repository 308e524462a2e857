"""Adapters of SGLang: allocators as block pools, its pool of keys and values as slot kernels, and requests as caches.

Allocators: TokenToKVPoolAllocator (by slot) and PagedTokenToKVPoolAllocator (by page). `allocate` is `alloc`, which returns slots
or None; `free` is `free`, whose argument is slots; num_free is `available_size`. Slot 0 or page 0 is reserved for padding and is
no block, so block ids are shifted by one. The prefix tree keeps references, not the allocators.

MHATokenToKVPool runs on a CPU without its AMX kernels. The given store is the pool's buffer. `scatter` is `set_kv_buffer`, with
the same tokens as keys and as values; `copy` is `move_kv_cache`, whose arguments are slots (SGLANG_NATIVE_MOVE_KV_CACHE, its
implementation without CUDA); `gather` indexes `get_key_buffer` by slots, like its PyTorch attention. It has no `update`.

Requests over its pools and prefix trees are a paged cache and a prefix cache. The adapter calls what SGLang's scheduler calls, in
its order, with SGLang's Req, ReqToTokenPool, allocators and MHATokenToKVPool:

- `create` makes a waiting Req, which has neither a row nor a slot; `ensure_capacity` and `write` extend it by
  `alloc_for_extend`, as a chunk of its prompt. Like PrefillAdder, the adapter first checks for room: free slots and slots that
  the tree could evict.
- `append_step` is a decode batch, by `alloc_for_decode`; its requests have a prompt, and no more slots than tokens.
- `write` is `set_kv_buffer`; `gather` indexes `get_key_buffer` by the row of `req_to_token`. Tables and slots are that row
  (`suffix_page_indices`).
- `drop` is `release_kv_cache` without a checkpoint.
- `begin` is `init_next_round_input`, which matches, a lock on the matched node, and `alloc_for_extend`; `commit` is the tree's
  `checkpoint`, `match` its `match_prefix`, `reset` what the scheduler's `flush_cache` does. An adapter is a Req's `lora_id`.

The engine, here the adapter, keeps the tokens of a request and how many of them each layer has written; checks that contradict
this are *not offered*. Without prefix caching the library's own tree with `disable=True` is used.
"""

import os
from array import array
from collections.abc import Sequence
from operator import index
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvref.errors import (
    ConfigError,
    DtypeMismatch,
    LayerOutOfRange,
    OutOfBlocks,
    SequenceNotFound,
    ShapeMismatch,
    SlotOutOfRange,
    TokenOutOfRange,
    integer,
)
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_adapters.sglang.modules import DEVICE, VERSION, sglang_module
from kvref_conformance.exceptions import NotOffered

ALLOCATOR = sglang_module("mem_cache.allocator")
PAGE = 4  # slots


class SGLangAllocators(TorchArrays):
    version = VERSION
    language = "python"
    project = "sglang"
    formats = ()


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


class SGLangKVPool(TorchArrays):
    name = "sglang-pool"
    version = VERSION
    language = "python"
    project = "sglang"
    limits: ClassVar[dict[str, Any]] = {"dtype": "float32"}

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


ALLOCATION, COMMON = sglang_module("mem_cache.allocation"), sglang_module("mem_cache.common")
POOLS = sglang_module("mem_cache.memory_pool")
RADIX, UNIFIED = sglang_module("mem_cache.radix_cache"), sglang_module("mem_cache.unified_radix_cache")
PREFIXES, PARAMS = sglang_module("mem_cache.base_prefix_cache"), sglang_module("mem_cache.cache_init_params")
FULL = (sglang_module("mem_cache.unified_cache.component_type").ComponentType.FULL,)
BATCH, UTILS = sglang_module("managers.schedule_batch"), sglang_module("utils.common")


class SGLangCaches(TorchArrays):
    version = VERSION
    language = "python"
    project = "sglang"
    limits: ClassVar[dict[str, Any]] = {
        "dtype": "float32",
        "num_blocks": {"least": 1},
        "one_block_table": True,
        "other_eviction_order": True,
    }


class SGLangUnified(SGLangCaches):
    """UnifiedRadixCache, which SGLang's server creates by default."""

    name = "sglang-unified"

    def paged(self, **sizes: Any) -> "SGLangRequests":
        return SGLangRequests(UNIFIED.UnifiedRadixCache, disable=True, **sizes)

    def prefix(self, **sizes: Any) -> "SGLangPrefixes":
        return SGLangPrefixes(UNIFIED.UnifiedRadixCache, disable=False, **sizes)


class SGLangRadix(SGLangCaches):
    """RadixCache, the older tree."""

    name = "sglang-radix"

    def prefix(self, **sizes: Any) -> "SGLangPrefixes":
        return SGLangPrefixes(RADIX.RadixCache, disable=False, **sizes)


class SGLangRequests:
    def __init__(
        self, tree: Any, *, disable: bool, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int,
        dtype: str,
    ) -> None:  # fmt: skip
        _made_for_a_model(num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype)
        slots = num_blocks * block_size
        options: dict[str, Any] = {"dtype": torch.float32, "device": DEVICE}
        of_a_token = {"head_num": num_kv_heads, "head_dim": head_dim, "layer_num": num_layers}
        self._pool = POOLS.MHATokenToKVPool(slots, block_size, enable_memory_saver=False, **of_a_token, **options)
        options |= {"kvcache": self._pool, "need_sort": False}
        self._allocator = (
            ALLOCATOR.TokenToKVPoolAllocator(slots, **options)
            if block_size == 1
            else ALLOCATOR.PagedTokenToKVPoolAllocator(slots, block_size, **options)
        )
        self._rows = POOLS.ReqToTokenPool(num_blocks, slots, DEVICE, enable_memory_saver=False)
        params = PARAMS.CacheInitParams(disable, self._rows, self._allocator, block_size, tree_components=FULL)
        self._tree = tree(params)
        self._page, self._layers, self._shape = block_size, num_layers, (num_kv_heads, head_dim)
        self._requests = dict[int, Any]()
        self._lengths = dict[int, list[int]]()
        self._begun = 0

    @property
    def num_free_blocks(self) -> int:
        return int(self._allocator.available_size() + self._tree.evictable_size()) // self._page

    def create(self) -> int:
        return self._added(self._waiting([]), 0)

    def drop(self, sequence: int) -> None:
        request = self._known(sequence)
        if request.kv.holds_kv:  # a waiting request has none
            COMMON.release_kv_cache(request, self._tree, checkpoint=False)
        del self._requests[sequence], self._lengths[sequence]

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        if num_tokens < 0:
            raise NotOffered("a negative number of tokens, which no batch contains")
        self._extend(self._known(sequence), num_tokens)

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        request, length = self._known(sequence), self.length(sequence, layer)
        if not self._first_to_write(request) <= start <= length:
            raise NotOffered("writing past the end, or into cached prefix blocks")
        end = start + len(keys)
        if end > request.kv.kv_allocated_len and not self._fit(keys, values):
            raise NotOffered("rejecting arrays before allocation: a model computes them after the allocation")
        self._extend(request, end)
        self._store(layer, self._slots(request, start, end).to(torch.int64), keys, values)
        self._lengths[sequence][layer] = max(length, end)

    def append_step(self, sequences: Sequence[int], keys: Any, values: Any) -> None:
        requests = [self._known(sequence) for sequence in sequences]
        lengths = [each.kv.kv_allocated_len for each in requests]
        ready = [self._lengths[sequence] == [length] * self._layers for sequence, length in zip(sequences, lengths, strict=True)]
        if not all(ready) or not all(lengths) or len(set(sequences)) < len(lengths) or not lengths:
            raise NotOffered(
                "decoding between layers, without a prompt, with unused slots, twice in a batch, or with an empty batch"
            )
        if not all(self._fit(*pair) and len(pair[0]) == len(lengths) for pair in zip(keys, values, strict=False)):
            raise NotOffered("rejecting arrays before allocation: a model computes them after the allocation")
        before, rows = torch.tensor(lengths), torch.tensor([each.kv.req_pool_idx for each in requests])
        pages = UTILS.get_num_new_pages(seq_lens=before + 1, page_size=self._page, decode=True)
        if self._page == 1:
            pages = len(lengths)  # with a page size of 1 it does not count pages
        if pages > self.num_free_blocks:
            raise OutOfBlocks(f"out of blocks: {pages} needed, {self.num_free_blocks} free or evictable")
        batch = SimpleNamespace(
            reqs=requests, seq_lens=before, seq_lens_cpu=before, req_pool_indices=rows, req_pool_indices_cpu=rows, device=DEVICE,
            req_to_token_pool=self._rows, tree_cache=self._tree, maybe_evict_swa=lambda: None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )  # fmt: skip
        slots = ALLOCATION.alloc_for_decode(batch, 1)
        for layer, pair in enumerate(zip(keys, values, strict=True)):
            self._store(layer, slots, *pair)
        for sequence in sequences:
            self._lengths[sequence] = [length + 1 for length in self._lengths[sequence]]

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        slots = self._slots(self._known(sequence), 0, self.length(sequence, layer))
        return self._pool.get_key_buffer(layer)[slots], self._pool.get_value_buffer(layer)[slots]

    def length(self, sequence: int, layer: int) -> int:
        self._known(sequence)
        if not 0 <= layer < self._layers:
            raise LayerOutOfRange(layer)
        return self._lengths[sequence][layer]

    def block_table(self, sequence: int, layer: int) -> list[int]:
        self.length(sequence, layer)
        kv = self._requests[sequence].kv
        if not kv.holds_kv:
            return []
        pages = COMMON.suffix_page_indices(self._rows.req_to_token, kv.req_pool_idx, 0, kv.kv_allocated_len, self._page)
        return [int(page) - 1 for page in pages]

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        self.length(sequence, layer)
        request = self._requests[sequence]
        if not 0 <= start <= start + count <= request.kv.kv_allocated_len:
            raise NotOffered("rejecting slots past the length: all rows have one size")
        return [int(slot) - self._page for slot in self._slots(request, start, start + count)]

    def _store(self, layer: int, slots: Any, keys: Any, values: Any) -> None:
        try:
            self._pool.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, keys, values)
        except (RuntimeError, IndexError, ValueError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error

    def _first_to_write(self, request: Any) -> int:
        return int(request.kv.cache_protected_len)

    def _waiting(self, tokens: list[int], salt: str = "", adapter: str = "") -> Any:
        try:
            ids = array("q", tokens)
        except (TypeError, OverflowError) as error:  # a Req accepts only array[int]
            raise TokenOutOfRange(str(error)) from error
        request = BATCH.Req(
            str(self._begun), "", ids, SimpleNamespace(custom_params=None), cache_salt=salt, lora_id=adapter or None
        )
        request.prefix_len = 0
        return request

    def _extend(self, request: Any, tokens: int) -> None:
        """Allocate slots for `tokens` tokens in all. Raises OutOfBlocks."""
        kv = request.kv
        if tokens <= kv.kv_allocated_len:
            return
        start = kv.kv_allocated_len if kv.holds_kv else request.prefix_len
        before, after = torch.tensor([start]), torch.tensor([tokens])
        pages = UTILS.get_num_new_pages(seq_lens=after, prefix_lens=before, page_size=self._page)
        if pages > self.num_free_blocks:
            raise OutOfBlocks(f"out of blocks: {pages} needed, {self.num_free_blocks} free or evictable")
        request.prefix_len = start
        batch = SimpleNamespace(
            reqs=[request], prefix_lens=[start], extend_lens=[tokens - start], extend_num_tokens=tokens - start,
            seq_lens=after, seq_lens_cpu=after, device=DEVICE, req_to_token_pool=self._rows, tree_cache=self._tree,
            hisparse_coordinator=None, maybe_evict_swa=lambda: None, is_dllm=lambda: False,
        )  # fmt: skip
        ALLOCATION.alloc_for_extend(batch)

    def _slots(self, request: Any, start: int, stop: int) -> Any:
        if not request.kv.holds_kv:
            return torch.zeros(0, dtype=torch.int32)
        return self._rows.req_to_token[request.kv.req_pool_idx, start:stop]

    def _added(self, request: Any, hit: int) -> int:
        self._begun += 1
        sequence = self._begun - 1
        self._requests[sequence], self._lengths[sequence] = request, [hit] * self._layers
        return sequence

    def _known(self, sequence: int) -> Any:
        if sequence not in self._requests:
            raise SequenceNotFound(sequence)
        return self._requests[sequence]

    def _fit(self, keys: Any, values: Any) -> bool:
        """Whether keys and values have the shapes and dtype that the model computes."""
        shapes = [tuple(array.shape[1:]) == self._shape and array.dtype == torch.float32 for array in (keys, values)]
        return all(shapes) and len(keys) == len(values)


class SGLangPrefixes(SGLangRequests):
    def begin(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        if not len(tokens):
            raise NotOffered("a request without tokens")
        request = self._waiting(list(tokens), salt, adapter)
        request.init_next_round_input(self._tree)
        request.lock = self._tree.lock(request.last_node)
        try:
            self._extend(request, len(tokens))
        except OutOfBlocks:
            self._tree.unlock(request.lock)
            raise
        return self._added(request, int(request.kv.cache_protected_len))

    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        request = self._waiting(list(tokens), salt, adapter)
        limit, label = max(0, len(tokens) - 1), {"extra_key": request.extra_key, "cache_salt": request.cache_salt}
        key = RADIX.RadixKey(request.origin_input_ids, limit=limit, **label)
        return int(self._tree.match_prefix(PREFIXES.MatchPrefixParams(key=key)).device_prefix_len)

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        request = self._known(sequence)
        told = self._waiting(list(tokens)).origin_input_ids
        if len(told) > min(self._lengths[sequence]):
            raise NotOffered("committing more tokens than were written: the engine counts them")
        before = max(request.full_untruncated_fill_ids[: request.kv.cache_protected_len], request.origin_input_ids, key=len)
        if any(one != other for one, other in zip(before, told, strict=False)):
            raise NotOffered("committing other tokens than the request's own")
        if len(told) <= request.kv.cache_protected_len:
            return
        request.full_untruncated_fill_ids = told
        self._tree.checkpoint(request, up_to=len(told))

    def reset(self) -> None:
        if self._requests:
            raise NotOffered("rejecting a reset while requests are live: the scheduler checks it")
        for each in (self._tree, self._rows, self._allocator):
            (each.reset if each is self._tree else each.clear)()


def _made_for_a_model(*sizes: Any) -> None:
    """Raise NotOffered for invalid sizes: SGLang takes sizes from the model and the available memory."""
    *numbers, dtype = sizes
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in numbers) or dtype != "float32":
        raise NotOffered("validation of sizes: they come from the model and the available memory")
