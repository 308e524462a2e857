"""The family `quantized`: a cache that quantizes tokens when they are appended."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import HeadRow, Query, Saved, Step, Token, Tokens
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    SYMMETRIC_FORMATS,
    group_of,
    scales_fit,
)
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family


def fits(config: Mapping[str, Any]) -> bool:
    """Returns whether the group divides head_dim, and scales are passed exactly for formats that need them and are valid."""
    return config["head_dim"] % group_of(config["format"]) == 0 and scales_fit(config, "format")


FAMILY = Family(
    name="quantized",
    chapter="quantized",
    small={"num_layers": 2, "capacity": 20, "num_kv_heads": 2, "head_dim": 5, "format": "int8"},
    speaks_for=(
        *OF_CACHES,
        "ATTN-10",
        *(f"QUANT-{n:02}" for n in (1, 2, 4, 5, 7, 8, 10)),
        "FMT-STATIC-08",
        "EDIT-01",
        "EDIT-02",
        *(f"MOVE-{n:02}" for n in (1, 3, 4, 7)),
    ),
    gives={"save": "data"},
    formats={"format": (*SYMMETRIC_FORMATS, *FORMATS_IN_GROUPS, *STATIC_FORMATS, *ROTATED_FORMATS)},
    fits=fits,
    appending={"append": ("keys", "values")},
)


# The typed protocol of the quantized cache.

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": f"LayerOutOfRange {_TOKENS} CapacityExceeded",
    "append_step": f"{_TOKENS} CapacityExceeded",
    "read_head": "LayerOutOfRange PositionOutOfRange HeadOutOfRange",
    "read_token": "LayerOutOfRange PositionOutOfRange",
    "read_tokens": "LayerOutOfRange PositionOutOfRange",
    "length": "LayerOutOfRange",
    "truncate": "PositionOutOfRange",
    "load": "FileDamaged ConfigError CapacityExceeded",
    "attend": "LayerOutOfRange ShapeMismatch DtypeMismatch",
}


class Quantized(Protocol):
    """`attend` is not causal: each of its queries, of which all have the position of the newest token, sees every token of the
    layer.
    """

    memory_bytes: int
    fp32_bytes: int
    compression_ratio: float

    def append(self, layer: int, keys: Tokens, values: Tokens) -> None: ...
    def append_step(self, keys: Step, values: Step) -> None: ...
    def read_head(self, layer: int, position: int, head: int) -> tuple[HeadRow, HeadRow]: ...
    def read_token(self, layer: int, position: int) -> tuple[Token, Token]: ...
    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def length(self, layer: int) -> int: ...
    def truncate(self, length: int) -> None: ...
    def clear(self) -> None: ...
    def save(self) -> Saved: ...
    def load(self, data: Saved) -> None: ...
    def attend(self, layer: int, query: Query, scale: float) -> Query: ...


class QuantizedFactory(Protocol):
    """The factory. It receives every size by name, and the scales in the formats of FMT-STATIC only."""

    def __call__(
        self,
        *,
        num_layers: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        format: str,
        key_scale: float | None = None,
        value_scale: float | None = None,
    ) -> Quantized: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    step = counting_rows(sizes.layers, sizes.heads, sizes.dim)
    query = counting_rows(1, sizes.heads, sizes.dim)
    return {
        **on_family("quantized", {
            "append": args(layer=0, keys=tokens, values=tokens), "append_step": args(keys=step, values=step),
            "length": args(layer=0), "read_head": args(layer=0, position=0, head=sizes.heads - 1),
            "read_token": args(layer=0, position=0),
            "read_tokens": args(layer=0, positions=[1, 0]),
            "memory_bytes": args(), "fp32_bytes": args(), "compression_ratio": args(),
            "attend": args(layer=0, query=query, scale=1.0), "save": args(),
            "load": args(data=lambda got: got["quantized.save"]), "truncate": args(length=1), "clear": args(),
        }),
    }  # fmt: skip
