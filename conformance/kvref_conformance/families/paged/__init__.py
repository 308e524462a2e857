"""The family `paged`: a cache of sequences in blocks."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.families.paged.shared_table_adapter import SharedTableAdapter
from kvref_conformance.families.pool_adapters import NullBlockAdapter, SettlingAdapter
from kvref_conformance.implementation_api import Batch, BatchStep, Offsets, Query, Saved, Tables, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SCALED_FORMATS, group_of, scales_fit
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

SMALL = {
    "num_blocks": 24, "block_size": 3, "num_layers": 2, "num_kv_heads": 2, "head_dim": 5, "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="paged",
    chapter="paged",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        "LAW-02",
        "LAW-03",
        "ATTN-10",
        *(f"PAGED-{n:02}" for n in (*range(1, 14), 15, 16, 17)),
        *(f"SHARE-{n:02}" for n in (3, 4, 5, 6, 7)),
        *(f"EDIT-{n:02}" for n in (1, 2, 4, 10)),
        *(f"MOVE-{n:02}" for n in (1, 2, 3, 4, 7)),
        "WIN-09",
    ),
    gives={"create": "sequence", "fork": "sequence", "save": "data"},
    several={"sequences": "sequence"},
    formats={"dtype": (*PLAIN_FORMATS, *SCALED_FORMATS)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0 and scales_fit(config, "dtype"),
    may_be_zero=("num_blocks",),
    appending={"write": ("keys", "values")},
    counted_as={"settle": SettlingAdapter, "null_block": NullBlockAdapter, "one_block_table": SharedTableAdapter},
)


# The typed protocol of the paged cache.

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
    """`attend` is not causal: each of its queries, of which all have the position of the newest token, sees every token of the
    layer.
    """

    num_free_blocks: int
    utilization: float

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def release_before(self, sequence: int, position: int) -> None: ...
    def remove(
        self, sequence: int, start: int, stop: int, frequencies: Sequence[float] | None = None, layout: Layout = "halves"
    ) -> None: ...
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


class PagedFactory(Protocol):
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


# One call of each operation, for the self-test of a harness.


def sequence(got: ResultByName) -> Any:
    return got["paged.create"]


def sequences(got: ResultByName) -> Any:
    return [got["paged.create"]]


def length(got: ResultByName) -> int:
    """Returns the number of tokens after append_step, which is first, because some caches need layers of equal length for it."""
    return int("paged.append_step" in got)


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    query = counting_rows(1, sizes.heads, sizes.dim)
    batch = counting_rows(1, sizes.heads, sizes.dim)
    step = counting_rows(sizes.layers, 1, sizes.heads, sizes.dim)
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    return {
        **on_family("paged", {
            "create": args(), "ensure_capacity": args(sequence=sequence, num_tokens=2),
            "append_step": args(sequences=sequences, keys=step, values=step),
            "write": args(**here, start=length, keys=tokens, values=tokens),
            "append": args(sequences=sequences, layer=sizes.layers - 1, keys=batch, values=batch),
            "length": args(**here), "lengths": args(sequences=sequences, layer=0), "gather": args(**here),
            "gather_batch": args(sequences=sequences, layer=0),
            "read": args(**here, positions=[1, 0]), "block_table": args(**here),
            "block_tables": args(sequences=sequences, layer=0), "slot_mapping": args(**here, start=0, count=2),
            "num_free_blocks": args(), "utilization": args(), "attend": args(**here, query=query, scale=1.0),
            "fork": args(sequence=sequence), "release_before": args(sequence=sequence, position=0),
            "save": args(sequence=sequence), "load": args(sequence=sequence, data=lambda got: got["paged.save"]),
            "remove": args(sequence=sequence, start=0, stop=0),
            "truncate": args(sequence=sequence, length=0), "drop": args(sequence=sequence),
        }),
    }  # fmt: skip
