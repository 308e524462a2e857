"""Prefix caches of serving engines, through their own calls and without tensors: vLLM's KVCacheManager, SGLang's two trees.

Each receives the calls of its scheduler, in the same order and without code of kvref in between, for a prompt as a list of
numbers. `prepare` does what its server does with the list before a lookup: vLLM makes a request, which hashes every full
block; SGLang makes an array.
"""

from array import array
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Protocol

from kvref_bench import baselines
from kvref_bench.comparison import Contender

# SGLang's trees, by module. The second stores its nodes in Rust, and is the default of its server.
TREE_MODULES = {"RadixCache": "mem_cache.radix_cache", "UnifiedRadixCache": "mem_cache.unified_radix_cache"}
DEVICE = "cpu"


class PrefixManager(Protocol):
    name: str

    def prepare(self, tokens: list[int]) -> Any: ...

    def find(self, prompt: Any) -> int:
        """Return how many leading tokens of a prepared prompt are cached, never all of them."""

    def serve(self, tokens: list[int], *, keep: bool) -> int:
        """Run a request with room for all of its tokens from beginning to end; if `keep`, cache its tokens.

        Return how many of them were cached before.
        """


def prefix_managers(seen: Iterable[list[int]], blocks: int, block_size: int, longest: int) -> list[PrefixManager]:
    """Return the installed engines, each with a pool of `blocks` blocks that has served these prompts."""
    found: list[PrefixManager] = []
    if baselines.are_installed("torch", "vllm", "kvref_adapters"):
        found.append(VllmManager(blocks, block_size, longest))
    if baselines.are_installed("torch", "sglang", "kvref_adapters"):
        found += [SglangManager(tree, blocks, block_size, longest) for tree in TREE_MODULES]
    for tokens in seen:
        for engine in found:
            engine.serve(tokens, keep=True)
    return found


def _import_vllm() -> None:
    """Before SGLang: what stands for Triton once that has been imported, vLLM and torch's compiler would take for Triton."""
    with baselines.quiet_import():
        import_module("kvref_adapters.vllm.import_stubs")
        import_module("vllm.v1.core.kv_cache_manager")


def _sglang() -> Any:
    """Return a function that imports a module of SGLang by name."""
    if baselines.are_installed("vllm"):
        _import_vllm()
    with baselines.quiet_import():
        return import_module("kvref_adapters.sglang.modules").sglang_module


class VllmManager:
    """`KVCacheManager` with one group of one layer, and hashes with SHA-256, which is the default."""

    name = "vllm KVCacheManager"

    def __init__(self, blocks: int, block_size: int, longest: int) -> None:
        _import_vllm()
        with baselines.quiet_import():
            import torch
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import sha256
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
            from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
            from vllm.v1.request import Request

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)  # one is its null block
        sizes = {"scheduler_block_size": block_size, "hash_block_size": block_size}
        self._manager = KVCacheManager(config, longest, enable_caching=True, **sizes)
        self._request, self._sampling = Request, SamplingParams(max_tokens=1)
        self._hasher = get_request_block_hasher(block_size, sha256)

    def prepare(self, tokens: list[int]) -> Any:
        return self._request("request", tokens, self._sampling, None, block_hasher=self._hasher)

    def find(self, prompt: Any) -> int:
        return int(self._manager.get_computed_blocks(prompt)[1])

    def serve(self, tokens: list[int], *, keep: bool) -> int:
        request = self.prepare(tokens)
        found, hit, _ = self._manager.get_computed_blocks(request)
        room = self._manager.allocate_slots(request, len(tokens) - hit, hit, found, delay_cache_blocks=not keep)
        assert room is not None
        self._manager.free(request)
        return int(hit)


class SglangManager:
    """A prefix tree over the allocator of pages and the rows of slots that go with it."""

    def __init__(self, tree: str, blocks: int, block_size: int, longest: int) -> None:
        import torch

        self.name, module = f"sglang {tree}", _sglang()
        with baselines.quiet_import():
            made, self._key = getattr(module(TREE_MODULES[tree]), tree), module("mem_cache.radix_cache").RadixKey
            base, self._evict = module("mem_cache.base_prefix_cache"), module("mem_cache.common").evict_from_tree_cache
            pages = module("mem_cache.allocator").PagedTokenToKVPoolAllocator
            rows = module("mem_cache.memory_pool").ReqToTokenPool
            params = module("mem_cache.cache_init_params").CacheInitParams
            full = (module("mem_cache.unified_cache.component_type").ComponentType.FULL,)
        self._match, self._insert, self._slots = base.MatchPrefixParams, base.InsertParams, torch.int64
        options = {"dtype": torch.float32, "device": DEVICE, "kvcache": None, "need_sort": False}
        self._pages = pages(blocks * block_size, block_size, **options)
        self._rows = rows(1, longest, DEVICE, enable_memory_saver=False)
        self._tree = made(params(False, self._rows, self._pages, block_size, tree_components=full))

    def prepare(self, tokens: list[int]) -> Any:
        return array("q", tokens)

    def find(self, prompt: Any) -> int:
        return int(self._found(prompt).device_prefix_len)

    def serve(self, tokens: list[int], *, keep: bool) -> int:
        """Run a request whose prompt is a whole number of pages."""
        prompt = self.prepare(tokens)
        found = self._found(prompt)
        hit, end = found.device_prefix_len, len(prompt)
        lock = self._tree.lock(found.last_device_node)
        self._evict(self._tree, end - hit)
        new, (row,) = self._pages.alloc(end - hit), self._rows.alloc_rows(1)
        self._rows.write((row, slice(0, hit)), self._tree.path_device_indices(found.last_device_node))
        self._rows.write((row, slice(hit, end)), new)
        if keep:  # as its checkpoint does it
            slots = self._rows.req_to_token[row, :end].to(self._slots, copy=True)
            self._tree.insert(self._insert(key=self._key(prompt), value=slots, prev_prefix_len=hit))
        else:
            self._pages.free_segment(new, start_pos=hit)
        self._tree.unlock(lock)
        self._rows.free_rows([row])
        return int(hit)

    def _found(self, prompt: Any) -> Any:
        return self._tree.match_prefix(self._match(key=self._key(prompt, limit=len(prompt) - 1)))


def fork_contenders(tokens: int, heads: int, dim: int) -> Iterator[Contender]:
    """A beam of SGLang's search: it copies the prompt's slots to a row of its own and stores one token after them.

    It supports pages of one slot only, so that no beam writes to a page that others read.
    """
    if not baselines.are_installed("torch", "sglang", "kvref_adapters"):
        return
    import torch

    module = _sglang()
    with baselines.quiet_import():
        alias = module("beam_search.fork").alias_members_prompt_kv
        pools, allocators = module("mem_cache.memory_pool"), module("mem_cache.allocator")
    options = {"dtype": torch.float32, "device": DEVICE}
    pool = pools.MHATokenToKVPool(tokens + 1, 1, head_num=heads, head_dim=dim, layer_num=1, enable_memory_saver=False, **options)
    slots = allocators.TokenToKVPoolAllocator(tokens + 1, kvcache=pool, need_sort=False, **options)
    rows = pools.ReqToTokenPool(2, tokens + 1, DEVICE, enable_memory_saver=False)
    (leader,) = rows.alloc_rows(1)
    rows.write((leader, slice(0, tokens - 1)), slots.alloc(tokens - 1))
    one, layer = torch.ones((1, heads, dim)), _Layer()

    def diverge() -> None:
        (member,) = rows.alloc_rows(1)
        alias(rows.req_to_token, torch.tensor([member]), leader, tokens - 1)
        slot = slots.alloc(1)
        rows.write((member, slice(tokens - 1, tokens)), slot)
        pool.set_kv_buffer(layer, slot, one, one)
        slots.free(slot)
        rows.free_rows([member])

    yield Contender("sglang: a beam's row of slots", diverge)


class _Layer:
    layer_id = 0  # all that the pool reads of a layer of a model
