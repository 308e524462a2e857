"""Adapters of vLLM's block bookkeeping, by its own calls and without tensors: block pool, cache managers, host store.

Adapters of vLLM's BlockPool, by its own calls, as the pool of blocks; without tensors.

`allocate` and `allocate_many` are `get_new_blocks`, `share` is `touch`, `free` is `free_blocks`, `references` is a block's
`ref_cnt`. Arguments and results are block objects: an id is the index in its list minus one, because the first is the null block,
which the pool reserves. So a pool of n blocks is created with n + 1. An id without an object in the list is *not offered*.

Adapters of vLLM's KVCacheManager, by its own calls, as the bookkeeping of a paged and of a prefix cache; without tensors.

It manages which blocks a request has and which blocks are cached; keys, values and lengths are the model's and the scheduler's,
so nothing is written or read. One group has all layers, hence one table. The null block, which the manager reserves, is not
counted: a pool of n blocks is created with n + 1, and ids are reduced by one, so a freed entry of a table is -1.

- `create` is a Request without tokens, which has no blocks yet; `ensure_capacity` is `allocate_slots`, `block_table` is
  `get_block_ids`, `drop` is `free`. `release_before`, of the manager with a window, is `remove_skipped_blocks`.
- `match` is `get_computed_blocks`. `begin` is that, and `allocate_slots` with the blocks found, as in the scheduler, except that
  nothing is cached yet (`delay_cache_blocks`, as for requests whose keys arrive later). `length` is the hit that it reported.
- `commit` is `cache_blocks`, by hashes that the Request computed from its tokens with SHA-256, the default; `reset` is
  `reset_prefix_cache`. An adapter is the name and the path of a LoRARequest; media are MultiModalFeatureSpecs with the content as
  identifier.

The scheduler's state, which requests are live and how many of their tokens were computed, is *not offered*.

Adapter of vLLM's CPUOffloadingManager, by its own calls, as the bookkeeping of a host store; without tensors.

It manages which keys are stored and in which chunks of host memory; a worker does the copies. A key is its bytes, of group 0.
Every call is a request of its own, whose keys have positions, as from the scheduler, and holds the manager's lock, as the manager
requires. Here the lock does nothing, because the manager is single-threaded; calls from several threads are *not offered*.

- `lookup` requests key after key until one is no HIT. `prepare_store` is its own method; None means that there is no room.
- `places` are the chunks that its policy has for the keys, `num_free` is its own count: neither is public.
- Its assertions about keys (cached, ready, being loaded) are mapped to KeyNotFound.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from numbers import Real
from threading import get_ident
from typing import Any, ClassVar

import torch

import kvref_adapters.vllm.import_stubs  # noqa: F401 - before vLLM
from kvref.errors import ConfigError, InUse, KeyNotFound, OutOfBlocks
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_conformance.exceptions import NotOffered

from vllm.lora.request import LoRARequest  # isort: skip
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # isort: skip
from vllm.sampling_params import SamplingParams  # isort: skip
from vllm.utils.hashing import sha256  # isort: skip
from vllm.v1.core.block_pool import BlockPool  # isort: skip
from vllm.v1.core.kv_cache_manager import KVCacheManager  # isort: skip
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # isort: skip
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec  # isort: skip
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # isort: skip
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # isort: skip
from vllm.v1.request import Request  # isort: skip

NULL = 1  # blocks that the pool reserves
HASHED = 16  # tokens per hash; nothing is hashed here


class VllmManaged(NumpyArrays):
    """Attributes that vLLM's managers share."""

    version = version("vllm")
    language = "python"
    project = "vllm"
    formats = ("float32", "float16", "bfloat16")


class VllmBlocks(VllmManaged):
    name = "vllm-blocks"

    def blocks(self, num_blocks: int) -> "VllmBlockPool":
        return VllmBlockPool(num_blocks)


class VllmBlockPool:
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


LONGEST = 2**62  # tokens of a request; the manager silently truncates longer ones
WINDOW = 1  # tokens: a query sees only itself, so all earlier tokens can be released

init_none_hash(sha256)


class VllmManager(VllmManaged):
    name = "vllm-manager"
    limits: ClassVar[dict[str, Any]] = {"one_block_table": True, "tables_alone": True}

    def paged(self, **sizes: Any) -> "VllmRequests":
        return VllmRequests(**sizes)

    def prefix(self, **sizes: Any) -> "VllmPrefixes":
        return VllmPrefixes(**sizes)


class VllmWindowManager(VllmManaged):
    """With layers that see a window: blocks below the window are freed. Only as a paged cache."""

    name = "vllm-manager-window"
    limits: ClassVar[dict[str, Any]] = {"one_block_table": True, "tables_alone": True}

    def paged(self, **sizes: Any) -> "VllmWindowRequests":
        return VllmWindowRequests(**sizes)


class VllmRequests:
    caching = False

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        _made_for_a_model(dtype, block_size=block_size, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        spec = self._spec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_dim, dtype=getattr(torch, dtype))
        layers = [f"layers.{layer}" for layer in range(num_layers)]
        config = KVCacheConfig(with_null(num_blocks), kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layers, spec)])
        try:
            self._manager = KVCacheManager(
                config, LONGEST, scheduler_block_size=block_size, hash_block_size=block_size, enable_caching=self.caching
            )
        except AssertionError as error:
            raise ConfigError("BlockPool: AssertionError for num_gpu_blocks") from error
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._size, self._layers = block_size, num_layers
        self._requests = dict[int, Request]()
        self._begun = 0

    def _spec(self, **sizes: Any) -> Any:
        return FullAttentionSpec(**sizes)

    @property
    def num_free_blocks(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    @property
    def utilization(self) -> float:
        return float(self._manager.usage)

    def create(self) -> int:
        return self._added(self._request([]))

    def drop(self, sequence: int) -> None:
        self._manager.free(self._known(sequence))
        del self._requests[sequence]

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        if num_tokens < 1:
            raise NotOffered("allocating for 0 tokens: the scheduler never does")
        if self._manager.allocate_slots(self._known(sequence), num_tokens, delay_cache_blocks=True) is None:
            raise OutOfBlocks(f"allocate_slots: no room for {num_tokens} tokens")

    def block_table(self, sequence: int, layer: int) -> list[int]:
        (blocks,) = self._manager.get_block_ids(self._known(sequence).request_id)
        if not 0 <= layer < self._layers:
            raise NotOffered("validation of the layer number: all layers share one table")
        return [block - NULL for block in blocks]

    def _request(self, tokens: list[int], salt: str = "", adapter: str = "", features: Sequence[Any] = ()) -> Request:
        name, sampling = str(self._begun), SamplingParams(max_tokens=1)
        lora = LoRARequest(adapter, 1, f"/{adapter}") if adapter else None
        named: dict[str, Any] = {"cache_salt": salt or None, "lora_request": lora, "mm_features": [*features]}
        return Request(name, tokens, sampling, None, block_hasher=self._hasher, **named)

    def _added(self, request: Request) -> int:
        self._begun += 1
        self._requests[self._begun - 1] = request
        return self._begun - 1

    def _known(self, sequence: int) -> Request:
        if sequence not in self._requests:
            raise NotOffered("rejecting unknown sequences: the scheduler keeps track of live requests")
        return self._requests[sequence]


class VllmWindowRequests(VllmRequests):
    def _spec(self, **sizes: Any) -> Any:
        return SlidingWindowSpec(sliding_window=WINDOW, **sizes)

    def release_before(self, sequence: int, position: int) -> None:
        if position < 0:
            raise NotOffered("a negative position: the argument is a number of computed tokens")
        self._manager.remove_skipped_blocks(self._known(sequence).request_id, position)


class VllmPrefixes(VllmRequests):
    caching = True

    def begin(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[Any] = ()) -> int:
        request = self._prompt(tokens, salt, adapter, media)
        found, hit, _ = self._manager.get_computed_blocks(request)
        if self._manager.allocate_slots(request, len(tokens) - hit, hit, found, delay_cache_blocks=True) is None:
            raise OutOfBlocks(f"allocate_slots: no room for {len(tokens)} tokens, of which {hit} are cached")
        request.num_computed_tokens = hit
        return self._added(request)

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        super().ensure_capacity(sequence, num_tokens - self._known(sequence).num_computed_tokens)

    def length(self, sequence: int, layer: int) -> int:
        request = self._known(sequence)
        if not request.num_prompt_tokens or not 0 <= layer < self._layers:
            raise NotOffered("the length of a sequence without a prompt: the scheduler counts it")
        return int(request.num_computed_tokens)

    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[Any] = ()) -> int:
        return int(self._manager.get_computed_blocks(self._prompt(tokens, salt, adapter, media))[1])

    def _prompt(self, tokens: Sequence[int], salt: str, adapter: str, media: Sequence[Any]) -> Request:
        if not len(tokens):
            raise NotOffered("an empty prompt: the renderer rejects it")
        ends = [0, *(position for start, stop, _ in media for position in (start, stop)), len(tokens)]
        if ends != sorted(ends) or any(start == stop for start, stop, _ in media):
            raise NotOffered("validation of the positions of media, which the processor of the model computes")
        features = [
            MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset=start, length=stop - start))
            for start, stop, content in media
        ]
        return self._request(_tokens(tokens), salt, adapter, features)

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        request, tokens = self._known(sequence), _tokens(tokens)
        known = list(request.all_token_ids)
        if len(tokens) > self._size * len(self.block_table(sequence, 0)):
            raise NotOffered("committing more tokens than were written: the scheduler counts them")
        if any(one != other for one, other in zip(known, tokens, strict=False)):
            raise NotOffered("committing other tokens than the request's own")
        request.append_output_token_ids(tokens[len(known) :])
        self._manager.cache_blocks(request, len(tokens))

    def reset(self) -> None:
        if self._requests and not any(self.block_table(sequence, 0) for sequence in self._requests):
            raise NotOffered("rejecting a reset while requests without blocks are live: the manager does not track them")
        if not self._manager.reset_prefix_cache():
            raise InUse("reset_prefix_cache: blocks are still in use")


def _made_for_a_model(dtype: Any, **sizes: Any) -> None:
    """Raise NotOffered for invalid sizes: the manager takes sizes from a validated model or configuration."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise NotOffered(f"validation of {name}, which comes from a model")
    if dtype not in VllmManaged.formats:
        raise NotOffered("validation of dtype")


def _tokens(tokens: Sequence[int]) -> list[int]:
    found = list(tokens)
    if not all(type(token) is int for token in found):
        raise NotOffered("token ids that are not int")
    if any(not 0 <= token < 2**63 for token in found):
        raise NotOffered("invalid token ids: the renderer rejects tokens outside the vocabulary")
    return found


KEY_BYTES = 8


class VllmOffload(VllmManaged):
    name = "vllm-offload"

    def offload(self, capacity: int) -> "VllmHostStore":
        return VllmHostStore(capacity)


class VllmHostStore:
    def __init__(self, capacity: int) -> None:
        self._manager = CPUOffloadingManager(num_chunks=int(capacity))  # an int, as the engine computes it from bytes
        self._thread = get_ident()

    @property
    def num_free(self) -> int:
        return int(self._manager._get_num_free_chunks())

    def lookup(self, keys: Sequence[int]) -> int:
        with self._asked(keys) as (names, request):
            missing = (count for count, key in enumerate(names) if self._manager.lookup(key, request) is not LookupResult.HIT)
            return next(missing, len(keys))

    def places(self, keys: Sequence[int]) -> list[int]:
        with self._asked(keys) as (names, _):
            chunks = [self._manager._policy.get(key) for key in names]
        if None in chunks:
            raise KeyNotFound("the policy has no such chunk")
        return [int(chunk.chunk_id) for chunk in chunks]

    def prepare_store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        with self._asked(keys) as (names, request):
            prepared = self._manager.prepare_store(names, request)
        if prepared is None:
            raise OutOfBlocks("prepare_store returned None")
        return [_number(key) for key in prepared.keys_to_store], [_number(key) for key in prepared.evicted_keys]

    def complete_store(self, keys: Sequence[int], success: bool = True) -> None:
        with self._asked(keys) as (names, request):
            self._manager.complete_store(names, request, success)

    def prepare_load(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.prepare_load(names, request)

    def complete_load(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.complete_load(names, request)

    def touch(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.touch(names, request)

    @contextmanager
    def _asked(self, keys: Sequence[int]) -> Iterator[tuple[list[Any], Any]]:
        """Return the keys as the manager's type, and a request that has them."""
        if get_ident() != self._thread:
            raise NotOffered("calls from several threads: its lock does nothing")
        names, request = [make_offload_key(int(key).to_bytes(KEY_BYTES, "big"), 0) for key in keys], ReqContext(req_id="")
        for position, name in enumerate(names):
            request.set_offload_key_position(name, position + 1)
        try:
            with self._manager.lock:
                yield names, request
        except AssertionError as error:
            raise KeyNotFound(str(error)) from error


def _number(key: bytes) -> int:
    return int.from_bytes(key[:KEY_BYTES], "big")
