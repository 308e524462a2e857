"""What an implementation offers to be judged: write these methods, leave out what you do not have.

An implementation is an object with a name, a version, a level, two conversions and a factory for each family it has. A factory
takes the family's sizes by keyword and returns an object with the methods below. Arrays go in and come out as the
implementation's own type: the judge makes them with `asarray` and reads them with `to_numpy`. A family, or a method, that is
missing is reported as *not offered*, never as passed.

Wrong use raises an exception whose class, or a base of it, is named as in kvref.errors: the name is all that counts.

Shapes stand beside the arrays: n tokens are [n, num_kv_heads, head_dim] (NHD), those of the contiguous cache [batch_size,
num_kv_heads, n, head_dim]. Values are read back as float32, or as a narrower float with the same values.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from kvref.array import Array

FAMILIES = (
    "elements", "rows", "kernels", "attention", "contiguous", "blocks", "paged", "quantized", "tiered", "buffers", "pooled",
)  # fmt: skip

Level = Literal["exact", "tolerant"]

Numbers = Annotated[Array, "[n]"]
Codes = Annotated[Array, "[n]"]
Integers = Annotated[Array, "int64 [n]"]
RowsOf = Annotated[Array, "[n, width]"]
CodesOf = Annotated[Array, "[n, bytes a row]"]
Scales = Annotated[Array, "[n]"]
Store = Annotated[Array, "[num_slots, ...]"]
Slotted = Annotated[Array, "[n, ...]"]
HeadRow = Annotated[Array, "[head_dim]"]
Token = Annotated[Array, "[num_kv_heads, head_dim]"]
Tokens = Annotated[Array, "[n, num_kv_heads, head_dim]"]
Step = Annotated[Array, "[num_layers, num_kv_heads, head_dim]"]
Batch = Annotated[Array, "[sequences, num_kv_heads, head_dim]"]
BatchStep = Annotated[Array, "[num_layers, sequences, num_kv_heads, head_dim]"]
Offsets = Annotated[Array, "[sequences + 1]"]
Tables = Annotated[Array, "[sequences, most blocks]"]
Query = Annotated[Array, "[num_queries, num_query_heads, head_dim]"]
Values = Annotated[Array, "[n, num_kv_heads, value_dim]"]
Attended = Annotated[Array, "[num_queries, num_query_heads, value_dim]"]
Lanes = Annotated[Array, "[batch_size, num_kv_heads, n, head_dim]"]
FusedLanes = Annotated[Array, "[2, batch_size, num_kv_heads, n, head_dim]"]
Memory = Annotated[Array, "[batch_size, num_kv_heads, capacity, head_dim]"]


def offers(implementation: Any, family: str) -> bool:
    """Whether it has a factory for the family; None stands for none."""
    return getattr(implementation, family, None) is not None


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


class Factories(Protocol):
    """What an implementation may have: a factory for each of its families, given every size by name."""

    def elements(self) -> "Elements": ...
    def rows(self) -> "Rows": ...
    def kernels(self) -> "Kernels": ...
    def attention(self) -> "Attention": ...
    def contiguous(
        self, *, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> "Contiguous": ...
    def blocks(self, *, num_blocks: int) -> "Blocks": ...
    def paged(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "Paged": ...
    def quantized(self, *, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, format: str) -> "Quantized": ...
    def tiered(
        self, *, num_kv_heads: int, head_dim: int, max_tokens: int, tail_length: int, tail_dtype: str, warm_length: int,
        warm_format: str, store_format: str, migration_batch: int,
    ) -> "Tiered": ...  # fmt: skip
    def buffers(self, *, max_buffers: int) -> "Buffers": ...
    def pooled(
        self, *, num_kv_heads: int, head_dim: int, tokens_per_block: int, max_tokens: int, pool: "Buffers | None" = None
    ) -> "Pooled": ...


class Elements(Protocol):
    """Single values, no scale. Codes may be of any type that `decode` takes; FP8 codes are uint8."""

    def encode(self, values: Numbers, format: str) -> Codes: ...
    def decode(self, codes: Codes, format: str) -> Numbers: ...


class Rows(Protocol):
    """Rows with a scale each, and a zero each in formats that have one (None in symmetric formats)."""

    def quantize(self, rows: RowsOf, format: str) -> tuple[CodesOf, Scales, Scales | None]: ...
    def dequantize(self, codes: CodesOf, scale: Scales, zero: Scales | None, width: int, format: str) -> RowsOf: ...
    def mean_absolute_error(self, rows: RowsOf, format: str) -> float: ...


class Kernels(Protocol):
    """Moving tokens by slot. Writers return the store or buffer, which may be a new one."""

    def scatter(self, store: Store, slots: Integers, new: Slotted) -> Store: ...
    def gather(self, store: Store, slots: Integers) -> Slotted: ...
    def update(self, buffer: Memory, new: Lanes, position: int) -> Memory: ...


class Attention(Protocol):
    """The first `length` tokens count."""

    def attention(
        self, query: Query, keys: Tokens, values: Values, *, scale: float, causal: bool, length: int
    ) -> Attended: ...  # fmt: skip


class Contiguous(Protocol):
    seq_len: int
    capacity: int

    def append(self, keys: Lanes, values: Lanes) -> None: ...
    def append_fused(self, key_values: FusedLanes) -> None: ...
    def read(self) -> tuple[Lanes, Lanes]: ...
    def raw(self) -> tuple[Memory, Memory]: ...
    def advance(self, count: int) -> None: ...
    def reset(self) -> None: ...


class Blocks(Protocol):
    num_blocks: int
    num_free: int
    num_used: int
    utilization: float

    def allocate(self) -> int: ...
    def allocate_many(self, count: int) -> Sequence[int] | Array: ...
    def free(self, block: int) -> None: ...


class Paged(Protocol):
    num_free_blocks: int
    utilization: float

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def ensure_capacity(self, sequence: int, num_tokens: int) -> None: ...
    def write(self, sequence: int, layer: int, start: int, keys: Tokens, values: Tokens) -> None: ...
    def append(self, sequences: Sequence[int], layer: int, keys: Batch, values: Batch) -> None: ...
    def append_step(self, sequences: Sequence[int], keys: BatchStep, values: BatchStep) -> None: ...
    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def gather_batch(self, sequences: Sequence[int], layer: int) -> tuple[Tokens, Tokens, Offsets]: ...
    def lengths(self, sequences: Sequence[int], layer: int) -> Sequence[int] | Array: ...
    def block_tables(self, sequences: Sequence[int], layer: int) -> Tables: ...
    def gather(self, sequence: int, layer: int) -> tuple[Tokens, Tokens]: ...
    def length(self, sequence: int, layer: int) -> int: ...
    def block_table(self, sequence: int, layer: int) -> Sequence[int] | Array: ...
    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> Sequence[int] | Array: ...
    def attend(self, sequence: int, layer: int, query: Query, scale: float) -> Query: ...


class Quantized(Protocol):
    memory_bytes: int
    fp32_bytes: int
    compression_ratio: float

    def append(self, layer: int, keys: Tokens, values: Tokens) -> None: ...
    def append_step(self, keys: Step, values: Step) -> None: ...
    def read_head(self, layer: int, position: int, head: int) -> tuple[HeadRow, HeadRow]: ...
    def read_token(self, layer: int, position: int) -> tuple[Token, Token]: ...
    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def length(self, layer: int) -> int: ...
    def clear(self) -> None: ...
    def attend(self, layer: int, query: Query, scale: float) -> Query: ...


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
    """`update_policy` takes any of the sizes and formats but num_kv_heads, head_dim and max_tokens."""

    total_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def tier_of(self, position: int) -> str: ...
    def stats(self) -> TieredStats: ...
    def update_policy(self, **changes: Any) -> None: ...
    def clear(self) -> None: ...
    def attend(self, query: Query, scale: float) -> Query: ...


class HeldBuffer(Protocol):
    """Known as the family `buffer`: what a pool hands out."""

    size: int
    capacity: int
    length: int
    address: int | None

    def extend(self, values: Numbers) -> None: ...
    def values(self) -> Numbers: ...
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
    """`pool`, where one is given, is what `buffers` returned."""

    total_tokens: int

    def append(self, keys: Tokens, values: Tokens) -> None: ...
    def read(self) -> tuple[Tokens, Tokens]: ...
    def clear(self) -> None: ...
    def stats(self) -> PooledStats: ...
