"""The family `grouped`: sequences in blocks, for models in which some layers see every token and the others a window."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.families.pool_adapters import NullBlockAdapter, SettlingAdapter
from kvref_conformance.implementation_api import Query, Tokens
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

SMALL = {
    "num_blocks": 26, "block_size": 3, "num_layers": 4, "num_groups": 2, "window": 7, "num_kv_heads": 2, "head_dim": 5,
    "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="grouped",
    chapter="groups",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        *(f"GROUP-{n:02}" for n in range(1, 8)),
        *("PAGED-01", "PAGED-07", "PREFIX-02", "PREFIX-11", "PREFIX-14", "PREFIX-15"),
        *("SHARE-03", "EDIT-01", "EDIT-02"),
    ),
    gives={"create": "sequence", "fork": "sequence", "begin": "sequence"},
    formats={"dtype": (*PLAIN_FORMATS, *SCALED_FORMATS)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0,
    may_be_zero=("num_blocks",),
    multiples={"num_layers": "num_groups"},
    appending={"step": ("keys", "values")},
    counted_as={"settle": SettlingAdapter, "null_block": NullBlockAdapter},
    whole=("step",),  # the blocks that its first query sees stay allocated until the next step (GROUP-02)
)


# The typed protocol of the grouped cache.

TokenStep = Annotated[Array, "[num_layers, n, num_kv_heads, head_dim]"]

_TOKENS = "ShapeMismatch DtypeMismatch NonFinite"
_LAYER = "SequenceNotFound LayerOutOfRange"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "drop": "SequenceNotFound",
    "fork": "SequenceNotFound",
    "truncate": "SequenceNotFound PositionOutOfRange NotTruncatable",
    "begin": "TokenOutOfRange",
    "commit": "SequenceNotFound TokenOutOfRange PositionOutOfRange TokenMismatch",
    "match": "TokenOutOfRange",
    "reset": "InUse",
    "step": f"SequenceNotFound {_TOKENS} OutOfBlocks",
    "read": f"{_LAYER} PositionOutOfRange",
    "attend": f"{_LAYER} PositionOutOfRange ShapeMismatch DtypeMismatch",
    "length": "SequenceNotFound",
    "block_table": _LAYER,
}


class Grouped(Protocol):
    """Layer i is in group i % num_groups. The layers of the last group see all tokens, the others the last `window` tokens.

    `step` appends tokens in every layer. The queries of `attend` are those of the last tokens, and it is causal. `block_table` is
    that of the layer's group, with -1 in the place of a freed block. `begin` creates a sequence with the cached prefix of the
    tokens, and allocates no block for the others. `commit` declares the tokens at the first positions of a sequence.
    """

    num_free_blocks: int

    def create(self) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def begin(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def commit(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def match(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def reset(self) -> None: ...
    def step(self, sequence: int, keys: TokenStep, values: TokenStep) -> None: ...
    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Tokens, Tokens]: ...
    def attend(self, sequence: int, layer: int, query: Query, scale: float) -> Query: ...
    def length(self, sequence: int) -> int: ...
    def block_table(self, sequence: int, layer: int) -> Sequence[int] | Array: ...


class GroupedFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_groups: int, window: int, num_kv_heads: int,
        head_dim: int, dtype: str,
    ) -> Grouped: ...  # fmt: skip


# One call of each operation, for the self-test of a harness.


def sequence(got: ResultByName) -> Any:
    return got["grouped.create"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    step = counting_rows(sizes.layers, 2, sizes.heads, sizes.dim)
    query = counting_rows(1, sizes.heads, sizes.dim)
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    return {
        **on_family("grouped", {
            "reset": args(), "create": args(),
            "step": args(sequence=sequence, keys=step, values=step), "length": args(sequence=sequence),
            "read": args(**here, positions=[1, 0]), "block_table": args(**here), "num_free_blocks": args(),
            "attend": args(**here, query=query, scale=1.0), "commit": args(sequence=sequence, tokens=[1, 2]),
            "match": args(tokens=[1, 2, 3]), "begin": args(tokens=[1, 2, 3]), "fork": args(sequence=sequence),
            "truncate": args(sequence=sequence, length=1), "drop": args(sequence=sequence),
        }),
    }  # fmt: skip
