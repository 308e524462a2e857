"""The family `recurrent`: states of layers without attention, with checkpoints, drafts and a prefix index."""

from collections.abc import Sequence
from typing import Annotated, Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Saved
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="recurrent",
    chapter="recurrent",
    small={
        "num_blocks": 9, "num_layers": 2, "num_heads": 2, "channels": 4, "num_inputs": 3, "key_dim": 5, "value_dim": 6,
        "delta_rule": 0, "max_drafts": 2, "interval": 3, "dtype": "float32", "matrix_dtype": "float32",
    },
    speaks_for=(
        *OF_CACHES,
        *(f"RECUR-{n:02}" for n in (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17)),
        *("MOVE-01", "MOVE-02", "MOVE-03", "MOVE-04", "MOVE-07"),
    ),
    gives={"create": "sequence", "fork": "sequence", "begin": "sequence", "save": "data"},
    several={"sequences": "sequence"},
    formats={"dtype": PLAIN_FORMATS, "matrix_dtype": PLAIN_FORMATS},
    fits=lambda config: config["delta_rule"] in (0, 1),
    may_be_zero=("num_blocks", "delta_rule", "max_drafts"),
    appending={"append": ("inputs", "keys", "values", "gates")},
    whole=("append",),  # drafts are the last tokens of one append (RECUR-09)
)  # fmt: skip


# The typed protocol of the recurrent cache.

InputStep = Annotated[Array, "[num_layers, n, num_heads, channels]"]
KeyStep = Annotated[Array, "[num_layers, n, num_heads, key_dim]"]
ValueStep = Annotated[Array, "[num_layers, n, num_heads, value_dim]"]
GateStep = Annotated[Array, "[num_layers, n, num_heads, 2]"]
InputBatch = Annotated[Array, "[num_layers, sequences, n, num_heads, channels]"]
KeyBatch = Annotated[Array, "[num_layers, sequences, n, num_heads, key_dim]"]
ValueBatch = Annotated[Array, "[num_layers, sequences, n, num_heads, value_dim]"]
GateBatch = Annotated[Array, "[num_layers, sequences, n, num_heads, 2]"]
LastInputs = Annotated[Array, "[num_inputs, num_heads, channels]"]
Matrices = Annotated[Array, "[num_heads, key_dim, value_dim]"]
MatrixQuery = Annotated[Array, "[num_queries, num_heads, key_dim]"]
MatrixOutput = Annotated[Array, "[num_queries, num_heads, value_dim]"]
Span = Sequence[int] | None  # the range [start, stop), as a list of two numbers; None is all

_TOKENS = "SequenceNotFound ShapeMismatch DtypeMismatch NonFinite"
# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "create": "OutOfBlocks",
    "fork": "SequenceNotFound OutOfBlocks",
    "drop": "SequenceNotFound",
    "length": "SequenceNotFound",
    "append": _TOKENS,
    "append_batch": f"{_TOKENS} PositionOutOfRange",
    "read_inputs": "SequenceNotFound LayerOutOfRange",
    "read_matrix": "SequenceNotFound LayerOutOfRange",
    "apply": "SequenceNotFound LayerOutOfRange ShapeMismatch DtypeMismatch",
    "checkpoint": "SequenceNotFound OutOfBlocks",
    "truncate": "SequenceNotFound PositionOutOfRange NotTruncatable",
    "match": "TokenOutOfRange",
    "begin": "TokenOutOfRange OutOfBlocks",
    "commit": "SequenceNotFound TokenOutOfRange PositionOutOfRange TokenMismatch",
    "reset": "InUse",
    "save": "SequenceNotFound LayerOutOfRange HeadOutOfRange",
    "load": "SequenceNotFound FileDamaged ConfigError OutOfBlocks",
}


class Recurrent(Protocol):
    """The state of a layer is its last `num_inputs` inputs and a matrix per head. `delta_rule`: 0 for SSD, 1 for the delta rule.

    `gates` are the decay and the strength of each write. `append_batch` appends the first `counts[i]` tokens of row i to
    `sequences[i]`; the others are padding. `apply` multiplies queries by the matrices. `truncate` restores a state: the zero
    state, a checkpoint, or one of the last `max_drafts` tokens of the last append. `begin` creates a sequence from the longest
    checkpoint at a multiple of `interval` that was committed for the tokens. `save` saves the state, or the part of it with the
    layers and heads in two ranges [start, stop); `load` accepts both.
    """

    num_free_blocks: int

    def create(self) -> int: ...
    def fork(self, sequence: int) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def append(self, sequence: int, inputs: InputStep, keys: KeyStep, values: ValueStep, gates: GateStep) -> None: ...
    def append_batch(
        self, sequences: Sequence[int], counts: Sequence[int], inputs: InputBatch, keys: KeyBatch, values: ValueBatch,
        gates: GateBatch,
    ) -> None: ...  # fmt: skip
    def read_inputs(self, sequence: int, layer: int) -> LastInputs: ...
    def read_matrix(self, sequence: int, layer: int) -> Matrices: ...
    def apply(self, sequence: int, layer: int, query: MatrixQuery) -> MatrixOutput: ...
    def checkpoint(self, sequence: int) -> None: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def match(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def begin(self, tokens: Sequence[int], salt: str = "") -> int: ...
    def commit(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def reset(self) -> None: ...
    def save(self, sequence: int, *, layers: Span = None, heads: Span = None) -> Saved: ...
    def load(self, sequence: int, data: Saved) -> None: ...


class RecurrentFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(
        self, *, num_blocks: int, num_layers: int, num_heads: int, channels: int, num_inputs: int, key_dim: int, value_dim: int,
        delta_rule: int, max_drafts: int, interval: int, dtype: str, matrix_dtype: str,
    ) -> Recurrent: ...  # fmt: skip


# One call of each operation, for the self-test of a harness.


def sequence(got: ResultByName) -> Any:
    return got["recurrent.create"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    config = FAMILY.small | dict(sizes.config)
    heads, widths = config["num_heads"], {"inputs": "channels", "keys": "key_dim", "values": "value_dim"}
    tokens = {name: counting_rows(config["num_layers"], 2, heads, config[width]) for name, width in widths.items()}
    tokens["gates"] = counting_rows(config["num_layers"], 2, heads, 2) * 0 + 1
    batch = {name: each[:, None] for name, each in tokens.items()}
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    return on_family("recurrent", {
        "reset": args(), "create": args(), "num_free_blocks": args(), "append": args(sequence=sequence, **tokens),
        "append_batch": args(sequences=lambda got: [sequence(got)], counts=[1], **batch), "length": args(sequence=sequence),
        "read_inputs": args(**here), "read_matrix": args(**here),
        "apply": args(**here, query=counting_rows(1, heads, config["key_dim"])), "checkpoint": args(sequence=sequence),
        "commit": args(sequence=sequence, tokens=[1, 2, 3]), "match": args(tokens=[1, 2, 3, 4]),
        "begin": args(tokens=[1, 2, 3, 4]), "fork": args(sequence=sequence), "truncate": args(sequence=sequence, length=0),
        "save": args(sequence=sequence), "load": args(sequence=sequence, data=lambda got: got["recurrent.save"]),
        "drop": args(sequence=sequence),
    })  # fmt: skip
