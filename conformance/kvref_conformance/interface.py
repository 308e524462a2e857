"""What an implementation offers to be judged: write these methods, leave out what you do not have.

An implementation is an object with a name, a version, a level, two conversions and a factory for each family it has. A factory
takes the family's sizes by keyword and returns an object with the methods below. Arrays go in and come out as the
implementation's own type: the judge makes them with `asarray` and reads them with `to_numpy`. A family, or a method, that is
missing is reported as *not offered*, never as passed.

Wrong use raises an exception whose class, or a base of it, is named as in kvref.errors: the name is all that counts.

Shapes: n tokens are [n, num_kv_heads, head_dim] (NHD); the contiguous cache has [batch_size, num_kv_heads, n, head_dim].
Values are read back as float32, or as a narrower float with the same values.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, get_type_hints

from kvref.array import Array

FAMILIES = (
    "elements", "rows", "kernels", "attention", "contiguous", "blocks", "paged", "quantized", "tiered", "buffers", "pooled",
)  # fmt: skip

Level = Literal["exact", "tolerant"]


class Implementation(Protocol):
    """A factory named after each family in FAMILIES is looked up by that name, and may be missing."""

    name: str
    version: str
    language: str
    level: Level

    @property
    def formats(self) -> Sequence[str]:
        """Of float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, q8, q4. A plain attribute will do."""

    def asarray(self, values: Any) -> Array:
        """A NumPy array (any dtype) as an array of the implementation's own type, with memory of its own."""

    def to_numpy(self, array: Array) -> Any:
        """An array of the implementation's as a NumPy array (bfloat16 widened to float32)."""


class Elements(Protocol):
    """Family `elements`: single values, no scale. Codes may be of any type that `decode` takes; FP8 codes are uint8."""

    def encode(self, values: Array, format: str) -> Array: ...
    def decode(self, codes: Array, format: str) -> Array: ...


class Rows(Protocol):
    """Family `rows`: rows [n, width] with a scale [n] each, and a zero [n] (None in symmetric formats)."""

    def quantize(self, rows: Array, format: str) -> tuple[Array, Array, Array | None]: ...
    def dequantize(self, codes: Array, scale: Array, zero: Array | None, width: int, format: str) -> Array: ...
    def mean_absolute_error(self, rows: Array, format: str) -> float: ...


class Kernels(Protocol):
    """Family `kernels`: stores [num_slots, ...], int64 slots [n], rows [n, ...]. Writers return the store."""

    def scatter(self, store: Array, slots: Array, rows: Array) -> Array: ...
    def gather(self, store: Array, slots: Array) -> Array: ...
    def update(self, buffer: Array, new: Array, position: int) -> Array: ...


class Attention(Protocol):
    """Family `attention`: query [nq, query heads, D], keys and values [n, kv heads, D]; the first `length` tokens count."""

    def attention(self, query: Array, keys: Array, values: Array, *, scale: float, causal: bool, length: int) -> Array: ...


class Contiguous(Protocol):
    """contiguous(batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype)."""

    seq_len: int
    capacity: int

    def update(self, keys: Array, values: Array) -> None: ...
    def update_fused(self, key_values: Array) -> None: ...
    def read(self) -> tuple[Array, Array]: ...
    def raw(self) -> tuple[Array, Array]: ...
    def advance(self, count: int) -> None: ...
    def reset(self) -> None: ...


class Blocks(Protocol):
    """blocks(num_blocks)."""

    num_blocks: int
    num_free: int
    num_used: int
    utilization: float

    def allocate(self) -> int: ...
    def free(self, block: int) -> None: ...


class Paged(Protocol):
    """paged(num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype)."""

    num_free_blocks: int
    utilization: float

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def ensure_capacity(self, sequence: int, num_tokens: int) -> None: ...
    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None: ...
    def append(self, sequences: Sequence[int], layer: int, keys: Array, values: Array) -> None: ...
    def append_step(self, sequences: Sequence[int], keys: Array, values: Array) -> None: ...
    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]: ...
    def gather_batch(self, sequences: Sequence[int], layer: int) -> tuple[Array, Array, Array]: ...
    def lengths(self, sequences: Sequence[int], layer: int) -> Sequence[int] | Array: ...
    def block_tables(self, sequences: Sequence[int], layer: int) -> Array: ...
    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]: ...
    def length(self, sequence: int, layer: int) -> int: ...
    def block_table(self, sequence: int, layer: int) -> Sequence[int] | Array: ...
    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> Sequence[int] | Array: ...
    def attend(self, sequence: int, layer: int, query: Array, scale: float) -> Array: ...


class Quantized(Protocol):
    """quantized(num_layers, capacity, num_kv_heads, head_dim, format)."""

    memory_bytes: int
    fp32_bytes: int
    compression_ratio: float

    def push(self, layer: int, key: Array, value: Array) -> None: ...
    def push_step(self, keys: Array, values: Array) -> None: ...
    def read_head(self, layer: int, position: int, head: int) -> tuple[Array, Array]: ...
    def read_token(self, layer: int, position: int) -> tuple[Array, Array]: ...
    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Array, Array]: ...
    def length(self, layer: int) -> int: ...
    def clear(self) -> None: ...
    def attend(self, layer: int, query: Array, scale: float) -> Array: ...


class TieredStats(Protocol):
    total_tokens: int
    tail_tokens: int
    warm_tokens: int
    store_tokens: int
    tail_bytes: int
    warm_bytes: int
    store_bytes: int
    compression_ratio: float


class Tiered(Protocol):
    """tiered(num_kv_heads, head_dim, max_tokens, tail_length, tail_dtype, warm_length, warm_format, store_format,
    migration_batch).
    """

    total_tokens: int

    def append(self, keys: Array, values: Array) -> None: ...
    def read(self) -> tuple[Array, Array]: ...
    def tier_of(self, position: int) -> str: ...
    def stats(self) -> TieredStats: ...
    def update_policy(self, **changes: Any) -> None: ...
    def clear(self) -> None: ...
    def attend(self, query: Array, scale: float) -> Array: ...


class HeldBuffer(Protocol):
    size: int
    capacity: int
    length: int
    address: int | None

    def extend(self, values: Array) -> None: ...
    def values(self) -> Array: ...
    def clear(self) -> None: ...
    def release(self) -> None: ...


class BufferStats(Protocol):
    hits: int
    misses: int
    allocations: int
    returns: int
    drops: int
    hit_rate: float
    free: dict[int, int]  # by size class


class Buffers(Protocol):
    """buffers(max_buffers)."""

    def acquire(self, num_bytes: int) -> HeldBuffer: ...
    def prewarm(self, size: int, count: int) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> BufferStats: ...


class PooledStats(Protocol):
    total_tokens: int
    num_blocks: int
    tokens_per_block: int
    bytes: int
    pool: BufferStats


class Pooled(Protocol):
    """pooled(num_kv_heads, head_dim, tokens_per_block, max_tokens, pool=None): `pool` is what `buffers` returned."""

    total_tokens: int

    def append(self, keys: Array, values: Array) -> None: ...
    def read(self) -> tuple[Array, Array]: ...
    def clear(self) -> None: ...
    def stats(self) -> PooledStats: ...


PROTOCOLS: dict[str, type] = {
    "elements": Elements, "rows": Rows, "kernels": Kernels, "attention": Attention, "contiguous": Contiguous, "blocks": Blocks,
    "paged": Paged, "quantized": Quantized, "tiered": Tiered, "buffers": Buffers, "buffer": HeldBuffer, "pooled": Pooled,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """A method or an attribute of a family's protocol.

    parameters: those that may be passed by position. reply: the annotation of what comes back.
    """

    name: str
    parameters: tuple[str, ...]
    reply: Any
    attribute: bool


@cache
def operations(family: str) -> dict[str, Operation]:
    """By name, for a family or for "buffer", what a pool hands out."""
    protocol = PROTOCOLS[family]
    found = {name: Operation(name, (), hint, True) for name, hint in get_type_hints(protocol).items()}
    for name, method in inspect.getmembers(protocol, inspect.isfunction):
        if not name.startswith("_"):
            every = inspect.signature(method).parameters.values()
            parameters = tuple(each.name for each in every if each.kind is each.POSITIONAL_OR_KEYWORD)[1:]
            found[name] = Operation(name, parameters, get_type_hints(method).get("return"), False)
    return found
