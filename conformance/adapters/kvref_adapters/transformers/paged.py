"""Adapters of Hugging Face transformers' PagedAttentionCache (continuous batching): full attention, and a sliding window.

Adapters of Hugging Face transformers' PagedAttentionCache (continuous batching) as a paged cache and as a prefix cache.

The adapter calls the cache's own methods, as its scheduler and its batches do, in their order. The cache keeps block tables and
shared blocks; the caller (a RequestState), here the adapter, keeps lengths and tokens. A forward pass writes layer by layer, so
each layer has a length.

- `create` adds a request without tokens; `ensure_capacity` and `write` allocate by `can_store_request_tokens`.
- `write` and `gather` are `extend_read_and_write_indices` and `update`; a request can be written at its end only.
- `fork` is `prepare_fork_request` and `perform_cache_copy`; `drop` is `free_blocks`.
- `begin` is `search_prefix_match`, `match` the lookup inside it, `commit` is `mark_complete_blocks`, `reset` is `reset`.

Cached blocks are not in its pool of free blocks. If an allocation fails, the scheduler evicts all of them; the adapter does this
if it makes enough room, and counts cached blocks as free until then. What the library leaves to its caller, the tokens of a
request and whether requests are live, is *not offered*.

Adapter of a sliding window layer in Hugging Face transformers' PagedAttentionCache (continuous batching).

A window is a ring of blocks there: `SlidingAttentionCacheAllocator`. One step does what a batch of one request does, by the
library's own calls and in their order: allocation (`can_store_request_tokens`), indices (`extend_read_and_write_indices`), the
mask (`build_attention_mask`), and `sdpa_attention_forward`, which updates the cache and attends. Stored tokens are those that the
next step would read. The caller, here the adapter, counts the tokens of a request.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import ContinuousBatchingConfig, LlamaConfig, MistralConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.initialization import check_cb_values_bounds
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvref.errors import (
    ConfigError,
    DtypeMismatch,
    LayerOutOfRange,
    OutOfBlocks,
    PositionOutOfRange,
    SequenceNotFound,
    ShapeMismatch,
)
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered

FULL_ATTENTION = "full_attention"
SMALLEST_PAGE = 4  # tokens: the minimum in BOUNDS of its initialization
LARGEST_TOKEN = 2**31  # token ids are int32


class TransformersPaged(TorchArrays):
    name = "transformers-paged"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    formats = ("float32",)  # keys and values must have the cache's dtype: it does not cast
    # head_dim: the pool is a number of sectors of a multiple of 128 bytes; with this limit each block is one sector.
    limits: ClassVar[dict[str, Any]] = {
        "dtype": "float32",
        "block_size": {"least": SMALLEST_PAGE},
        "head_dim": {"multiple_of": 16},
        "num_blocks": {"least": 1},
        "one_block_table": True,
        "other_eviction_order": True,
    }

    def paged(self, **sizes: Any) -> "TransformersRequests":
        return TransformersRequests(**sizes)

    def prefix(self, **sizes: Any) -> "TransformersPrefixes":
        return TransformersPrefixes(**sizes)


class TransformersRequests:
    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        _made_for_a_model(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        if isinstance(num_blocks, int) and num_blocks == 0:
            raise NotOffered("an empty pool: it allocates at least one block")
        model = LlamaConfig(
            num_hidden_layers=num_layers,
            num_attention_heads=num_kv_heads,
            num_key_value_heads=num_kv_heads,
            hidden_size=num_kv_heads * head_dim,
            head_dim=head_dim,
            vocab_size=8,
        )
        batches = ContinuousBatchingConfig(
            page_size=block_size, num_blocks=num_blocks, max_batch_tokens=1, max_memory_percent=0.9, max_blocks_per_request=0
        )
        try:
            check_cb_values_bounds(batches)
            self._cache = PagedAttentionCache(model, batches, "cpu", DistributedHelper(None, None), torch.float32)
        except (ValueError, TypeError, MemoryError) as error:
            raise ConfigError(str(error)) from error
        self._blocks = self._cache.cache_allocators[FULL_ATTENTION]
        self._page, self._shape = block_size, (num_kv_heads, head_dim)
        self._requests = dict[int, RequestState]()
        self._lengths = dict[int, list[int]]()
        self._begun = 0

    @property
    def num_free_blocks(self) -> int:
        pool = self._cache.pool
        in_sectors: int = pool.num_free_sectors * self._blocks.blocks_per_sector
        return in_sectors + int(pool.count_free_blocks(self._blocks.index)) + len(self._blocks.ledger.cached_blocks)

    def create(self) -> int:
        return self._created([])

    def drop(self, sequence: int) -> None:
        self._known(sequence)
        self._cache.free_blocks(self._requests.pop(sequence).request_id)
        del self._lengths[sequence]

    def fork(self, sequence: int) -> int:
        parent, copies = self._known(sequence), {FULL_ATTENTION: (list[int](), list[int]())}
        length, *others = self._lengths[sequence]
        if any(other != length for other in others):
            raise NotOffered("forking between layers of a step: a request has one length")
        if len(self._blocks.block_table[parent.request_id]) > -(-length // self._page):
            raise NotOffered("forking with unused blocks: the child allocates as many")
        parent.position_offset = length
        child = parent.fork(str(self._begun))
        missing = self._blocks.count_non_shareable_blocks(parent.request_id, parent.position_offset)
        if not self._evicting(missing, lambda: bool(self._cache.prepare_fork_request(parent, [child.request_id], copies))):
            raise OutOfBlocks(f"prepare_fork_request: no room for {child.request_id}")
        self._cache.perform_cache_copy(copies)
        return self._added(child, list(self._lengths[sequence]))

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        if num_tokens < 0:
            raise NotOffered("a negative number of tokens, which no batch contains")
        self._make_room(self._known(sequence), 0, num_tokens)

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        request, length = self._known(sequence), self.length(sequence, layer)
        if start != length:
            raise NotOffered("writing anywhere but at the end")
        if not self._fit(keys, values) and self._blocks.needs_new_blocks(request.request_id, start, len(keys)):
            raise NotOffered("rejecting arrays before allocation: a failed batch ends its requests")
        self._make_room(request, start, len(keys))
        self._update(sequence, layer, start, keys, values)
        self._lengths[sequence][layer] += len(keys)

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        none = torch.zeros((0, *self._shape), dtype=torch.float32)
        return self._update(sequence, layer, self.length(sequence, layer), none, none)

    def length(self, sequence: int, layer: int) -> int:
        self._known(sequence)
        if not 0 <= layer < len(self._lengths[sequence]):
            raise LayerOutOfRange(layer)
        return self._lengths[sequence][layer]

    def block_table(self, sequence: int, layer: int) -> list[int]:
        self.length(sequence, layer)
        trash = 2 * self._blocks.blocks_per_sector  # blocks that no request uses
        return [block - trash for block in self._blocks.block_table[self._requests[sequence].request_id]]

    def _update(self, sequence: int, layer: int, past: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens and read all tokens, as the forward pass does."""
        read, wrote = [list[int]()], [list[int]()]
        name = self._requests[sequence].request_id
        self._cache.extend_read_and_write_indices(name, past, len(keys), read, wrote)
        told = {
            "cu_seq_lens_k": {FULL_ATTENTION: torch.tensor([0, past + len(keys)])},
            "max_length_k": {FULL_ATTENTION: past + len(keys)},
            "read_index": [torch.tensor(index, dtype=torch.int64) for index in read],
            "write_index": [torch.tensor(index, dtype=torch.int64) for index in wrote],
        }
        try:
            found = self._cache.update(*(array.transpose(0, 1).unsqueeze(0) for array in (keys, values)), layer, told)
        except (RuntimeError, IndexError, ValueError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        first, second = (array.squeeze(0).transpose(0, 1) for array in found)
        return first, second

    def _make_room(self, request: RequestState, past: int, count: int) -> None:
        request.position_offset = past
        missing = self._blocks.needs_new_blocks(request.request_id, past, count)
        if not self._evicting(missing, lambda: self._cache.can_store_request_tokens(request, count)):
            raise OutOfBlocks(f"can_store_request_tokens: no room for {count} tokens after {past}")

    def _evicting(self, blocks: int, attempt: Callable[[], bool]) -> bool:
        """Try to allocate. If that fails, evict all cached blocks, if that frees enough, and try again."""
        if attempt():
            return True
        if not self._blocks.ledger.cached_blocks or blocks > self.num_free_blocks:
            return False
        self._cache.evict_cached_blocks()
        self._cache.pool.try_to_free_sectors()
        return attempt()

    def _created(self, tokens: list[int], hit: int = 0, name: str = "") -> int:
        request = RequestState(name or str(self._begun), tokens, position_offset=hit)
        try:
            self._make_room(request, hit, len(tokens) - hit)
        except OutOfBlocks:
            self._cache.free_blocks(request.request_id)
            raise
        return self._added(request, [hit] * len(self._cache.layer_to_allocator))

    def _added(self, request: RequestState, lengths: list[int]) -> int:
        self._begun += 1
        sequence = self._begun - 1
        self._requests[sequence], self._lengths[sequence] = request, lengths
        return sequence

    def _known(self, sequence: int) -> RequestState:
        if sequence not in self._requests:
            raise SequenceNotFound(sequence)
        return self._requests[sequence]

    def _fit(self, keys: Any, values: Any) -> bool:
        """Whether keys and values have the shapes and dtype that the model computes."""
        shapes = [tuple(array.shape[1:]) == self._shape and array.dtype == torch.float32 for array in (keys, values)]
        return all(shapes) and len(keys) == len(values)


class TransformersPrefixes(TransformersRequests):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._told = dict[int, list[int]]()  # by request: the tokens that it was begun with and found cached, or committed

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        tokens = _tokens(tokens, salt)
        name = str(self._begun)
        hit = self._cache.search_prefix_match(name, tokens)
        sequence = self._created(tokens, hit, name)
        self._told[sequence] = tokens[:hit]
        return sequence

    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        self._told[child] = self._told.get(sequence, [])
        return child

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        return len(self._blocks.match_prefix_blocks(_tokens(tokens, salt))) * self._page

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        request, tokens = self._known(sequence), _tokens(tokens)
        if len(tokens) > min(self._lengths[sequence]):
            raise NotOffered("committing more tokens than were written: the caller counts them")
        known = self._told.get(sequence, [])
        if any(one != other for one, other in zip(known, tokens, strict=False)):
            raise NotOffered("committing other tokens than the request's own")
        complete = len(known) // self._page
        self._told[sequence] = max(known, tokens, key=len)
        request.initial_tokens = self._told[sequence]
        self._cache.mark_complete_blocks(request, {FULL_ATTENTION: max(0, len(tokens) // self._page - complete)})

    def reset(self) -> None:
        if self._requests:
            raise NotOffered("rejecting a reset while requests are live: its reset ends them")
        self._cache.reset()


def _made_for_a_model(dtype: Any, **sizes: Any) -> None:
    """Raise NotOffered for invalid sizes: the library takes sizes from a model."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise NotOffered(f"validation of {name}, which comes from a model")
    if dtype != "float32":
        raise NotOffered("validation of dtype")


def _tokens(tokens: Sequence[int], salt: str = "") -> list[int]:
    if salt:
        raise NotOffered("a salt")
    found = list(tokens)
    if any(isinstance(token, int) and token >= LARGEST_TOKEN for token in found):
        raise NotOffered("token ids of 2^31 and above: its ids are int32")
    return found


SLIDING_ATTENTION = "sliding_attention"
PAGE = 4  # tokens: the minimum of its initialization


class TransformersPagedWindow(TorchArrays):
    name = "transformers-paged-window"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    formats = ("float32",)  # keys and values must have the cache's dtype: it does not cast
    # the model's limit: rotary embedding rotates pairs
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "head_dim": {"multiple_of": 2}}

    def windowed(self, **config: Any) -> "TransformersPagedWindowLayer":
        return TransformersPagedWindowLayer(config)


class TransformersPagedWindowLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        check_sizes(config)
        heads, dim, window = config["num_kv_heads"], config["head_dim"], config["window"]
        model = MistralConfig(
            num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=heads, hidden_size=heads * dim, head_dim=dim,
            sliding_window=window, vocab_size=8,
        )  # fmt: skip
        batches = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=-(-window // PAGE), max_batch_tokens=1, max_memory_percent=0.9, max_blocks_per_request=0
        )
        self._config = config
        self._cache = PagedAttentionCache(model, batches, "cpu", DistributedHelper(None, None), torch.float32)
        self.clear()

    def clear(self) -> None:
        self._cache.reset()
        self._request, self.length = RequestState("request", []), 0
        self._cache.can_store_request_tokens(self._request, 0)

    @property
    def stored_tokens(self) -> int:
        return len(self._held())

    def append(self, keys: Any, values: Any) -> None:
        self._said(lambda told: self._cache.update(_in_batch(keys), _in_batch(values), 0, told), len(keys))

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        count, window = len(keys), self._config["window"]
        total = self._cache.cache_allocators[SLIDING_ATTENTION].get_seqlen_k(self.length, count)
        mask = torch.empty(1, 1, count, total)
        build_attention_mask(mask, [0, count], [0, total], window)
        layer = SimpleNamespace(layer_idx=0, is_causal=False, num_key_value_groups=query.shape[1] // keys.shape[1])

        def forward(told: dict[str, Any]) -> Any:
            given = [_in_batch(array) for array in (query, keys, values)]
            return sdpa_attention_forward(layer, *given, mask, scaling=scale, cache=self._cache, **told)

        return self._said(forward, count)[0][0]

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        held = self._held()
        if any(position not in held for position in positions):
            raise PositionOutOfRange(f"position: expected one of {held}, got {list(positions)}")
        none = _in_batch(torch.zeros(0, self._config["num_kv_heads"], self._config["head_dim"]))
        keys, values = self._cache.update(none, none, 0, self._told(0))
        at = [held.index(position) for position in positions]
        return keys[0].transpose(0, 1)[at], values[0].transpose(0, 1)[at]

    def _held(self) -> range:
        return range(self.length - self._cache.cache_allocators[SLIDING_ATTENTION].get_seqlen_k(self.length, 0), self.length)

    def _said(self, forward: Any, count: int) -> Any:
        """Return the attention output of a forward pass of `count` tokens, after their blocks were allocated."""
        self._request.position_offset = self.length
        if not self._cache.can_store_request_tokens(self._request, count):
            raise OutOfBlocks(f"can_store_request_tokens: no room for {count} tokens after {self.length}")
        try:
            found = forward(self._told(count))
        except (RuntimeError, IndexError, ValueError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        self.length += count
        return found

    def _told(self, count: int) -> dict[str, Any]:
        """Return what a layer receives about its batch. If no request has tokens yet, nothing is read."""
        read, wrote = [list[int]()], [list[int]()]
        name, past = self._request.request_id, self.length
        self._cache.extend_read_and_write_indices(name, past, count, read if past else None, wrote)
        total = self._cache.cache_allocators[SLIDING_ATTENTION].get_seqlen_k(past, count)
        return {
            "cu_seq_lens_k": {SLIDING_ATTENTION: torch.tensor([0, total])},
            "max_length_k": {SLIDING_ATTENTION: total},
            "read_index": [torch.tensor(index, dtype=torch.int64) for index in read],
            "write_index": [torch.tensor(index, dtype=torch.int64) for index in wrote],
        }


def _in_batch(array: Any) -> Any:
    return array.transpose(0, 1)[None]
