"""The family `transfer`: a paged cache that sends sequences to other caches and receives sequences from them."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="transfer",
    chapter="transfer",
    small={
        "num_blocks": 24, "block_size": 3, "num_layers": 2, "num_kv_heads": 2, "head_dim": 5, "head_ranks": 2, "dtype": "float32",
    },
    speaks_for=(*OF_CACHES, *(f"TRANSFER-{n:02}" for n in range(1, 13)), "EDIT-01", "EDIT-02"),
    gives={"create": "sequence", "commit": "sequence", "begin": "transfer", "export": "handle"},
    formats={"dtype": PLAIN_FORMATS},
    multiples={"num_kv_heads": "head_ranks"},
    may_be_zero=("num_blocks",),
    appending={"append": ("keys", "values")},
)  # fmt: skip


# The typed protocol of the transfer cache.

Span = Sequence[int]  # the range [start, stop), as a list of two numbers

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
_PART = f"TransferNotFound LayerOutOfRange PositionOutOfRange HeadOutOfRange {_TOKENS}"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "append": f"SequenceNotFound {_TOKENS} OutOfBlocks",
    "gather": "SequenceNotFound LayerOutOfRange",
    "length": "SequenceNotFound",
    "truncate": "SequenceNotFound PositionOutOfRange",
    "drop": "SequenceNotFound",
    "begin": "PositionOutOfRange ConfigError OutOfBlocks",
    "arrive": f"{_PART} AlreadyArrived",
    "commit": "TransferNotFound TransferIncomplete",
    "abort": "TransferNotFound",
    "expire": "ConfigError",
    "fence": "TransferNotFound",
    "write_late": _PART,
    "export": "SequenceNotFound",
    "send": "ExportNotFound LayerOutOfRange PositionOutOfRange HeadOutOfRange",
    "release": "ExportNotFound",
}


class Transfer(Protocol):
    """`append` is given [num_layers, n, num_kv_heads, head_dim]; `arrive` and `write_late` [n, number of heads, head_dim].

    `write_late` writes to the blocks of an aborted transfer, as a one-sided write does that was in flight.
    """

    num_free_blocks: int
    num_sequences: int

    def create(self) -> int: ...
    def append(self, sequence: int, keys: Tokens, values: Tokens) -> None: ...
    def gather(self, sequence: int, layer: int) -> tuple[Tokens, Tokens]: ...
    def length(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def drop(self, sequence: int) -> None: ...
    def begin(self, length: int, deadline: int | None = None) -> int: ...
    def arrive(self, transfer: int, layer: int, start: int, heads: Span, keys: Tokens, values: Tokens) -> None: ...
    def commit(self, transfer: int) -> int: ...
    def abort(self, transfer: int) -> None: ...
    def expire(self, now: int) -> Sequence[int] | Array: ...
    def fence(self, transfer: int) -> None: ...
    def write_late(self, transfer: int, layer: int, start: int, heads: Span, keys: Tokens, values: Tokens) -> None: ...
    def export(self, sequence: int) -> int: ...
    def send(self, handle: int, layer: int, tokens: Span, heads: Span) -> tuple[Tokens, Tokens]: ...
    def release(self, handle: int) -> None: ...


class TransferFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, head_ranks: int, dtype: str
    ) -> Transfer: ...


# One call of each operation, for the self-test of a harness.


def sequence(got: ResultByName) -> Any:
    return got["transfer.create"]


def transfer(got: ResultByName) -> Any:
    """The transfer to which a part arrives, and which is then aborted."""
    return got["transfer.begin again"]


def handle(got: ResultByName) -> Any:
    return got["transfer.export"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    step, row = counting_rows(sizes.layers, 2, sizes.heads, sizes.dim), counting_rows(1, 1, sizes.dim)
    part = args(transfer=transfer, layer=0, start=0, heads=[0, 1], keys=row, values=row)
    return {
        **on_family("transfer", {
            "create": args(), "append": args(sequence=sequence, keys=step, values=step),
            "gather": args(sequence=sequence, layer=0), "length": args(sequence=sequence), "num_free_blocks": args(),
            "num_sequences": args(), "export": args(sequence=sequence), "truncate": args(sequence=sequence, length=1),
            "drop": args(sequence=sequence), "send": args(handle=handle, layer=0, tokens=[0, 2], heads=[0, 1]),
            "release": args(handle=handle),
            "begin": args(length=0), "commit": args(transfer=lambda got: got["transfer.begin"]),
            "begin again": args(length=1), "arrive": part, "expire": args(now=0), "abort": args(transfer=transfer),
            "write_late": part, "fence": args(transfer=transfer),
        }),
    }  # fmt: skip
