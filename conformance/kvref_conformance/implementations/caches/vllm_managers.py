"""Adapters of vLLM's KVCacheManager, by its own calls, as the bookkeeping of a paged and of a prefix cache; without tensors.

It manages which blocks a request has and which blocks are cached; keys, values and lengths are the model's and the scheduler's,
so nothing is written or read. One group has all layers, hence one table. The null block, which the manager reserves, is not
counted: a pool of n blocks is created with n + 1, and ids are reduced by one, so a freed entry of a table is -1.

- `create` is a Request without tokens, which has no blocks yet; `ensure_capacity` is `allocate_slots`, `block_table` is
  `get_block_ids`, `drop` is `free`. `release_before`, of the manager with a window, is `remove_skipped_blocks`.
- `match` is `get_computed_blocks`. `begin` is that, and `allocate_slots` with the blocks found, as in the scheduler, except that
  nothing is cached yet (`delay_cache_blocks`, as for requests whose keys arrive later). `length` is the hit that it reported.
- `commit` is `cache_blocks`, by hashes that the Request computed from its tokens with SHA-256, the default; `reset` is
  `reset_prefix_cache`.

The scheduler's state, which requests are live and how many of their tokens were computed, is *not offered*.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvref.errors import ConfigError, InUse, OutOfBlocks
from kvref_conformance.implementations.caches.vllm_blocks import NULL, Managed, with_null
from kvref_conformance.outcome import NotOffered

from vllm.sampling_params import SamplingParams  # isort: skip
from vllm.utils.hashing import sha256  # isort: skip
from vllm.v1.core.kv_cache_manager import KVCacheManager  # isort: skip
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # isort: skip
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec  # isort: skip
from vllm.v1.request import Request  # isort: skip

LONGEST = 2**62  # tokens of a request; the manager silently truncates longer ones
WINDOW = 1  # tokens: a query sees only itself, so all earlier tokens can be released

init_none_hash(sha256)


class Manager(Managed):
    name = "vllm-manager"
    limits: ClassVar[dict[str, Any]] = {"one_block_table": True, "tables_alone": True}

    def paged(self, **sizes: Any) -> "Requests":
        return Requests(**sizes)

    def prefix(self, **sizes: Any) -> "Prefixes":
        return Prefixes(**sizes)


class WindowManager(Managed):
    """With layers that see a window: blocks below the window are freed. Only as a paged cache."""

    name = "vllm-manager-window"
    limits: ClassVar[dict[str, Any]] = {"one_block_table": True, "tables_alone": True}

    def paged(self, **sizes: Any) -> "WindowRequests":
        return WindowRequests(**sizes)


class Requests:
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

    def _request(self, tokens: list[int], salt: str = "") -> Request:
        name, sampling = str(self._begun), SamplingParams(max_tokens=1)
        return Request(name, tokens, sampling, None, cache_salt=salt or None, block_hasher=self._hasher)

    def _added(self, request: Request) -> int:
        self._begun += 1
        self._requests[self._begun - 1] = request
        return self._begun - 1

    def _known(self, sequence: int) -> Request:
        if sequence not in self._requests:
            raise NotOffered("rejecting unknown sequences: the scheduler keeps track of live requests")
        return self._requests[sequence]


class WindowRequests(Requests):
    def _spec(self, **sizes: Any) -> Any:
        return SlidingWindowSpec(sliding_window=WINDOW, **sizes)

    def release_before(self, sequence: int, position: int) -> None:
        if position < 0:
            raise NotOffered("a negative position: the argument is a number of computed tokens")
        self._manager.remove_skipped_blocks(self._known(sequence).request_id, position)


class Prefixes(Requests):
    caching = True

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        request = self._prompt(tokens, salt)
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

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        return int(self._manager.get_computed_blocks(self._prompt(tokens, salt))[1])

    def _prompt(self, tokens: Sequence[int], salt: str) -> Request:
        if not len(tokens):
            raise NotOffered("an empty prompt: the renderer rejects it")
        return self._request(_tokens(tokens), salt)

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
    if dtype not in Managed.formats:
        raise NotOffered("validation of dtype")


def _tokens(tokens: Sequence[int]) -> list[int]:
    found = list(tokens)
    if not all(type(token) is int for token in found):
        raise NotOffered("token ids that are not int")
    if any(not 0 <= token < 2**63 for token in found):
        raise NotOffered("invalid token ids: the renderer rejects tokens outside the vocabulary")
    return found
