"""The typed protocol of the paged cache."""

from collections.abc import Sequence
from typing import Literal, Protocol

from kvref.array import Array
from kvref_conformance.interface import Batch, BatchStep, Offsets, Query, Saved, Tables, Tokens

Span = Sequence[int] | None  # the range [start, stop), as a list of two numbers; None is all
Layout = Literal["halves", "pairs"]  # which numbers of a head form a rotary pair: see kvref.rope

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
_LAYER = "SequenceNotFound LayerOutOfRange"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "drop": "SequenceNotFound",
    "fork": "SequenceNotFound OutOfBlocks",
    "truncate": "SequenceNotFound PositionOutOfRange NotTruncatable",
    "release_before": "SequenceNotFound PositionOutOfRange",
    "remove": "SequenceNotFound PositionOutOfRange OutOfBlocks ConfigError",
    "ensure_capacity": "SequenceNotFound PositionOutOfRange OutOfBlocks",
    "write": f"{_LAYER} PositionOutOfRange {_TOKENS} OutOfBlocks",
    "append": f"{_LAYER} {_TOKENS} OutOfBlocks",
    "append_step": f"SequenceNotFound {_TOKENS} OutOfBlocks",
    "read": f"{_LAYER} PositionOutOfRange",
    "save": "SequenceNotFound LayerOutOfRange PositionOutOfRange HeadOutOfRange ConfigError",
    "load": "SequenceNotFound FileDamaged ConfigError OutOfBlocks",
    "gather_batch": _LAYER,
    "lengths": _LAYER,
    "block_tables": _LAYER,
    "gather": _LAYER,
    "length": _LAYER,
    "block_table": _LAYER,
    "slot_mapping": f"{_LAYER} PositionOutOfRange",
    "attend": f"{_LAYER} ShapeMismatch DtypeMismatch",
}


class Paged(Protocol):
    num_free_blocks: int
    utilization: float

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def release_before(self, sequence: int, position: int) -> None: ...
    def remove(self, sequence: int, start: int, stop: int, theta: float | None = None, layout: Layout = "halves") -> None: ...
    def save(self, sequence: int, *, layers: Span = None, tokens: Span = None, heads: Span = None) -> Saved: ...
    def load(self, sequence: int, data: Saved) -> None: ...
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


class Factory(Protocol):
    """The factory. It receives every size by name, and the scales in the formats of FMT-STATIC only."""

    def __call__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        key_scale: float | None = None,
        value_scale: float | None = None,
    ) -> Paged: ...
