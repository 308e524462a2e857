"""The typed protocol of the contiguous cache."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.interface import FusedLanes, Lanes, Memory

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


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> Contiguous: ...
