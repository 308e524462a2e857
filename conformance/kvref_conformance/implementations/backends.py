"""kvref's own caches on any backend as an implementation to judge: the shortest example of an adapter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvref
from kvref.array import Array
from kvref.attention import attention
from kvref.canary import sized
from kvref.engine import Engine
from kvref.errors import SlotOutOfRange, in_range, whole
from kvref.formats import FORMATS, element_format, get_format
from kvref.token_store import TokenStore
from kvref.validation import accept, accept_pair
from kvref_conformance.implementation_api import Level
from kvref_conformance.oracle.formats import STATIC_FORMATS

TOKEN_HITS = ":token-hits"  # the end of the name of kvref's own caches whose prefix cache has token hits


class OnBackend:
    """kvref's caches and components on one backend. token_hits: whether the prefix cache has token hits (PREFIX-19)."""

    version = kvref.__version__
    language = "python"
    project = "kvref"
    level: Level = "exact"
    formats = tuple(FORMATS)

    def __init__(self, backend: kvref.Backend, *, token_hits: bool = False) -> None:
        self.backend, self._token_hits = backend, token_hits
        self.name = backend.name + TOKEN_HITS * token_hits
        if token_hits:
            self.limits = {"prefix": {"token_hits": True}}

    def asarray(self, values: Any) -> Array:
        if values.dtype.name == "bfloat16" and hasattr(self.backend.xp, "bfloat16"):
            return self.backend.asarray(values.astype(np.float32), "bfloat16")  # no library accepts arrays of ml_dtypes' bfloat16
        return self.backend.asarray(np.array(values))  # a copy, because the judge owns NumPy's memory

    def to_numpy(self, array: Array) -> Any:
        if isinstance(array, np.ndarray):
            return array  # block ids are host arrays on every backend
        xp = self.backend.xp
        if hasattr(xp, "bfloat16") and array.dtype == xp.bfloat16:  # NumPy has no bfloat16
            array = xp.astype(array, xp.float32)
        return self.backend.to_numpy(array)

    def elements(self) -> "Elements":
        return Elements(self.backend)

    def rows(self, given_scale: float | None = None) -> "Rows":
        return Rows(self.backend, given_scale)

    def kernels(self) -> kvref.Backend:
        return self.backend

    def attention(self) -> "Attention":
        return Attention(self.backend)

    def contiguous(self, **config: Any) -> kvref.ContiguousCache:
        return kvref.ContiguousCache(kvref.ContiguousConfig(**config), self.backend)

    def blocks(self, num_blocks: int) -> kvref.BlockPool:
        return kvref.BlockPool(num_blocks)

    def paged(self, **config: Any) -> kvref.PagedCache:
        return kvref.PagedCache(kvref.PagedConfig(**config), self.backend)

    def prefix(self, **config: Any) -> kvref.PrefixCache:
        return kvref.PrefixCache(kvref.PagedConfig(**config), self.backend, token_hits=self._token_hits)

    def windowed(self, **config: Any) -> kvref.WindowedCache:
        return kvref.WindowedCache(kvref.WindowedConfig(**config), self.backend)

    def grouped(self, **config: Any) -> kvref.GroupedCache:
        return kvref.GroupedCache(kvref.GroupedConfig(**config), self.backend)

    def quantized(self, **config: Any) -> kvref.QuantizedCache:
        return kvref.QuantizedCache(kvref.QuantizedConfig(**config), self.backend)

    def channels(self, **config: Any) -> kvref.ChannelCache:
        return kvref.ChannelCache(kvref.ChannelConfig(**config), self.backend)

    def tiered(self, **config: Any) -> kvref.TieredCache:
        return kvref.TieredCache(kvref.TieredConfig(**config), self.backend)

    def buffers(self, max_buffers: int) -> kvref.BufferPool:
        return kvref.BufferPool(max_buffers, self.backend)

    def pooled(self, pool: kvref.BufferPool | None = None, **config: Any) -> kvref.PooledCache:
        return kvref.PooledCache(kvref.PooledConfig(**config), pool, self.backend)

    def latent(self, **config: Any) -> kvref.LatentCache:
        return kvref.LatentCache(kvref.LatentConfig(**config), self.backend)

    def sharded(self, **config: Any) -> kvref.ShardedCache:
        return kvref.ShardedCache(kvref.ShardedConfig(**config), self.backend)

    def recurrent(self, **config: Any) -> kvref.RecurrentCache:
        return kvref.RecurrentCache(kvref.RecurrentConfig(**config), self.backend)

    def pruned(self, **config: Any) -> kvref.PrunedCache:
        return kvref.PrunedCache(kvref.PrunedConfig(**config), self.backend)

    def compressed(self, **config: Any) -> kvref.CompressedCache:
        return kvref.CompressedCache(kvref.CompressedConfig(**config), self.backend)

    def sparse(self, **config: Any) -> kvref.SparseCache:
        return kvref.SparseCache(kvref.SparseConfig(**config), self.backend)

    def transfer(self, **config: Any) -> kvref.TransferCache:
        return kvref.TransferCache(kvref.TransferConfig(**config), self.backend)

    def ragged(self, **config: Any) -> kvref.RaggedCache:
        return kvref.RaggedCache(kvref.RaggedConfig(**config), self.backend)

    def tree(self, **config: Any) -> kvref.TreeCache:
        return kvref.TreeCache(kvref.TreeConfig(**config), self.backend)

    def cross(self, **config: Any) -> kvref.CrossCache:
        return kvref.CrossCache(kvref.CrossConfig(**config), self.backend)

    def offload(self, capacity: int) -> kvref.HostStore:
        return kvref.HostStore(capacity)

    def hosted(self, **config: Any) -> "Hosted":
        return Hosted(self.backend, **config)

    def engine(self, cache_tokens: int, **sizes: int) -> Engine:
        return Engine(sized(**sizes), cache_tokens, backend=self.backend)


class Elements:
    def __init__(self, backend: kvref.Backend) -> None:
        self._backend = backend

    def encode(self, values: Array, format: str) -> Array:
        values = accept("values", values, ("n",), self._backend)
        return self._backend.encode(values, element_format(format))

    def decode(self, codes: Array, format: str) -> Array:
        return self._backend.decode(codes, element_format(format))


class Rows:
    def __init__(self, backend: kvref.Backend, given_scale: float | None = None) -> None:
        self._backend = backend
        self._static = {name: get_format(name, scale=given_scale) for name in STATIC_FORMATS}

    def quantize(self, rows: Array, format: str) -> tuple[Array, Array | None, Array | None]:
        rows = accept("rows", rows, ("n", "width"), self._backend)
        codes, scale, zero = self._backend.quantize(rows, self._format(format))
        return codes, scale, zero

    def dequantize(self, codes: Array, scale: Array | None, zero: Array | None, width: int, format: str) -> Array:
        return self._backend.dequantize(kvref.Quantized(codes, scale, zero), width, self._format(format))

    def mean_absolute_error(self, rows: Array, format: str) -> float:
        return kvref.mean_absolute_error(rows, self._format(format), self._backend)

    def _format(self, name: str) -> kvref.Format:
        return self._static.get(name) or get_format(name)


class Attention:
    def __init__(self, backend: kvref.Backend) -> None:
        self._backend = backend

    def attention(self, query: Array, keys: Array, values: Array, **options: Any) -> Array:
        return attention(query, keys, values, **options, backend=self._backend)

    def window_attention(self, query: Array, keys: Array, values: Array, scale: float, **sees: int) -> Array:
        return attention(query, keys, values, scale=scale, causal=True, sight=kvref.Sight(**sees), backend=self._backend)

    def sink_attention(self, query: Array, keys: Array, values: Array, **options: Any) -> Array:
        return attention(query, keys, values, **options, backend=self._backend)


class Hosted:
    """Device blocks and host blocks, and copies between them."""

    def __init__(
        self, backend: kvref.Backend, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: str,
        capacity: int,
    ) -> None:  # fmt: skip
        self._backend, self._num_blocks = backend, whole("num_blocks", num_blocks, minimum=0)
        self._shape = whole("block_size", block_size), whole("num_kv_heads", num_kv_heads), whole("head_dim", head_dim)
        self._store = TokenStore(backend, get_format(format), self._num_blocks * self._shape[0], *self._shape[1:])
        self._host = kvref.HostBlocks(self._store, self._shape[0], capacity, backend)

    def write(self, block: int, keys: Array, values: Array) -> None:
        slots = self._slots(block)
        self._store.write(slots, *accept_pair(keys, values, self._shape, self._backend))

    def read(self, block: int) -> tuple[Array, Array]:
        return self._store.read(self._slots(block))

    def to_host(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        self._host.to_host(blocks, places)

    def to_device(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        self._host.to_device(places, blocks)

    def _slots(self, block: int) -> range:
        first = in_range(block, self._num_blocks, SlotOutOfRange, "block") * self._shape[0]
        return range(first, first + self._shape[0])
