"""The family `contiguous`: one growing buffer for a batch of sequences."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import FusedLanes, Lanes, Memory
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

SMALL = {
    "batch_size": 1, "num_kv_heads": 2, "head_dim": 5, "initial_capacity": 3, "max_seq_len": 20, "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="contiguous",
    chapter="contiguous",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        *(f"CONTIG-{n:02}" for n in (*range(1, 8), *range(9, 13))),
        *(f"EDIT-{n:02}" for n in (1, 2, 7, 8, 9)),
    ),
    formats={"dtype": PLAIN_FORMATS},
    may_be_zero=("initial_capacity",),
    token_axis=-2,
    appending={"append": ("keys", "values"), "append_fused": ("key_values",)},
)


# The typed protocol of the contiguous cache.

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": f"{_TOKENS} CapacityExceeded",
    "append_fused": f"{_TOKENS} CapacityExceeded",
    "advance": "CapacityExceeded PositionOutOfRange",
    "truncate": "PositionOutOfRange",
    "reorder": "RowOutOfRange ConfigError",
}


class Contiguous(Protocol):
    """After a `reorder`, `batch_size` in the shapes is the length of its `rows`."""

    seq_len: int
    capacity: int

    def append(self, keys: Lanes, values: Lanes) -> None: ...
    def append_fused(self, key_values: FusedLanes) -> None: ...
    def read(self) -> tuple[Lanes, Lanes]: ...
    def raw(self) -> tuple[Memory, Memory]: ...
    def advance(self, count: int) -> None: ...
    def truncate(self, length: int) -> None: ...
    def reorder(self, rows: Sequence[int]) -> None: ...
    def reset(self) -> None: ...


class ContiguousFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> Contiguous: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    lanes = counting_rows(1, sizes.heads, 2, sizes.dim)
    return {
        **on_family("contiguous", {
            "append": args(keys=lanes, values=lanes),
            "append_fused": args(key_values=np.stack([lanes, lanes])), "seq_len": args(),
            "capacity": args(), "read": args(), "raw": args(), "advance": args(count=0),
            "truncate": args(length=1), "reorder": args(rows=[0]), "reset": args(),
        }),
    }  # fmt: skip
