"""The family `sparse`: its record, its operations and one sample call of each."""

from typing import Annotated, Any, Protocol

import numpy as np

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

IndexKeys = Annotated[Array, "[n, index_dim]"]
IndexQueries = Annotated[Array, "[num_queries, index_heads, index_dim]"]
IndexWeights = Annotated[Array, "[num_queries, index_heads]"]
Selection = Annotated[Array, "[num_queries, top_k]"]

FAMILY = Family(
    name="sparse",
    chapter="sparse",
    small={"num_blocks": 24, "num_kv_heads": 2, "head_dim": 5, "index_dim": 3, "top_k": 6, "block_size": 4},
    speaks_for=(*OF_CACHES, *(f"SPARSE-{n:02}" for n in range(1, 9))),
    gives={"create": "sequence", "fork": "sequence", "restore": "sequence", "offload": "handle"},
    may_be_zero=("num_blocks",),
    token_axis=0,
    appending={"append": ("keys", "values", "index_keys")},
)

# The errors that the specification requires of each operation. The factory raises ConfigError.
ERRORS: dict[str, str] = {
    "fork": "SequenceNotFound OutOfBlocks",
    "drop": "SequenceNotFound",
    "length": "SequenceNotFound",
    "append": "SequenceNotFound ShapeMismatch DtypeMismatch NonFinite OutOfBlocks",
    "truncate": "SequenceNotFound PositionOutOfRange",
    "read": "SequenceNotFound",
    "read_index": "SequenceNotFound",
    "select": "SequenceNotFound ShapeMismatch DtypeMismatch",
    "attend": "SequenceNotFound ShapeMismatch DtypeMismatch",
    "offload": "SequenceNotFound",
    "restore": "KeyNotFound OutOfBlocks",
    "discard": "KeyNotFound",
}


class Sparse(Protocol):
    """The operations of a cache. An implementation may lack some."""

    num_free_blocks: int

    def create(self) -> int: ...
    def fork(self, sequence: int) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def append(self, sequence: int, keys: Tokens, values: Tokens, index_keys: IndexKeys) -> None: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def read(self, sequence: int) -> tuple[Tokens, Tokens]: ...
    def read_index(self, sequence: int) -> IndexKeys: ...
    def select(self, sequence: int, index_queries: IndexQueries, weights: IndexWeights, causal: bool = False) -> Selection: ...
    def attend(
        self, sequence: int, query: Query, index_queries: IndexQueries, weights: IndexWeights, scale: float | None = None,
        causal: bool = False,
    ) -> Query: ...  # fmt: skip
    def offload(self, sequence: int) -> int: ...
    def restore(self, handle: int) -> int: ...
    def discard(self, handle: int) -> None: ...


class SparseFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(
        self, *, num_blocks: int, num_kv_heads: int, head_dim: int, index_dim: int, top_k: int, block_size: int
    ) -> Sparse: ...


def sequence(got: ResultByName) -> Any:
    return got["sparse.create"]


def handle(got: ResultByName) -> Any:
    return got["sparse.offload"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens, width = counting_rows(2, sizes.heads, sizes.dim), sizes.config.get("index_dim", 3)
    index_keys = counting_rows(2, 1, width)[:, 0]
    index = {"index_queries": counting_rows(1, 2, width), "weights": np.ones((1, 2), np.float32)}
    calls = {
        "create": args(), "append": args(sequence=sequence, keys=tokens, values=tokens, index_keys=index_keys),
        "length": args(sequence=sequence), "num_free_blocks": args(), "read": args(sequence=sequence),
        "read_index": args(sequence=sequence), "select": args(sequence=sequence, **index),
        "attend": args(sequence=sequence, query=tokens[:1], **index), "fork": args(sequence=sequence),
        "offload": args(sequence=sequence), "restore": args(handle=handle), "discard": args(handle=handle),
        "truncate": args(sequence=sequence, length=1), "drop": args(sequence=sequence),
    }  # fmt: skip
    return on_family("sparse", calls)
