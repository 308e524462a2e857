"""kvref: the executable specification of LLM KV caches.

A suggested order for reading the code: `kvref.formats` (how a row is stored), `kvref.backend` (the kernels), the thirteen caches
(`contiguous`, `paged`, `prefix`, `windowed`, `grouped`, `quantized`, `channels`, `tiered`, `pooled`, `latent`, `sharded`,
`transfer`, `recurrent`), `hybrid`, `attention` and `rope`. The clauses that they implement are in `kvref/spec`; docstrings cite
them by id (PAGED-07).
"""

from kvref.attention import Sight, attention
from kvref.backend import Backend, ReferenceBackend, backend, reference
from kvref.block_pool import BlockPool
from kvref.block_tables import BlockTables
from kvref.buffers import Buffer, BufferPool
from kvref.channels import ChannelCache, ChannelConfig
from kvref.compressed import CompressedCache, CompressedConfig
from kvref.contiguous import ContiguousCache, ContiguousConfig
from kvref.cross import CrossCache, CrossConfig
from kvref.formats import FORMATS, Format, Quantized, get_format
from kvref.grouped import GroupedCache, GroupedConfig
from kvref.host_store import HostBlocks, HostStore
from kvref.hybrid import HybridCache, HybridConfig
from kvref.latent import LatentCache, LatentConfig
from kvref.paged import PagedCache, PagedConfig
from kvref.pooled import PooledBlock, PooledCache, PooledConfig
from kvref.prefix import PrefixCache
from kvref.pruned import PrunedCache, PrunedConfig
from kvref.quantized import QuantizedCache, QuantizedConfig, mean_absolute_error
from kvref.ragged import RaggedCache, RaggedConfig
from kvref.recurrent import RecurrentCache, RecurrentConfig
from kvref.rope import Rotary, rotary_frequencies
from kvref.serialization import load, save
from kvref.sharded import ShardedCache, ShardedConfig
from kvref.sparse import SparseCache, SparseConfig
from kvref.tiered import TieredCache, TieredConfig
from kvref.transfer import TransferCache, TransferConfig
from kvref.tree import TreeCache, TreeConfig
from kvref.windowed import WindowedCache, WindowedConfig

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "Backend",
    "BlockPool",
    "BlockTables",
    "Buffer",
    "BufferPool",
    "ChannelCache",
    "ChannelConfig",
    "CompressedCache",
    "CompressedConfig",
    "ContiguousCache",
    "ContiguousConfig",
    "CrossCache",
    "CrossConfig",
    "Format",
    "GroupedCache",
    "GroupedConfig",
    "HostBlocks",
    "HostStore",
    "HybridCache",
    "HybridConfig",
    "LatentCache",
    "LatentConfig",
    "PagedCache",
    "PagedConfig",
    "PooledBlock",
    "PooledCache",
    "PooledConfig",
    "PrefixCache",
    "PrunedCache",
    "PrunedConfig",
    "Quantized",
    "QuantizedCache",
    "QuantizedConfig",
    "RaggedCache",
    "RaggedConfig",
    "RecurrentCache",
    "RecurrentConfig",
    "ReferenceBackend",
    "Rotary",
    "ShardedCache",
    "ShardedConfig",
    "Sight",
    "SparseCache",
    "SparseConfig",
    "TieredCache",
    "TieredConfig",
    "TransferCache",
    "TransferConfig",
    "TreeCache",
    "TreeConfig",
    "WindowedCache",
    "WindowedConfig",
    "attention",
    "backend",
    "get_format",
    "load",
    "mean_absolute_error",
    "reference",
    "rotary_frequencies",
    "save",
]
