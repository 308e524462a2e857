"""The family `compressed`: its record, its operations and one sample call of each."""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from kvref.array import Array
from kvref_conformance.families import Family
from kvref_conformance.families.laws import OF_CACHES
from kvref_conformance.implementation_api import Query
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, counting_rows, on_family

Latents = Annotated[Array, "[n, head_dim]"]
ARRAYS = ("latents", "contributions", "gates")


def goes(config: Mapping[str, Any]) -> bool:
    """Whether no token is invisible, and the rotated numbers are pairs of the row (COMPR-04)."""
    rotated = config["rope_dim"]
    return bool(config["window"] >= config["ratio"] - 1 and rotated % 2 == 0 and rotated <= config["head_dim"])


FAMILY = Family(
    name="compressed",
    chapter="compressed",
    small={
        "num_blocks": 7, "head_dim": 5, "rope_dim": 4, "window": 6, "ratio": 3, "max_tokens": 40, "rollback": 2,
    },
    speaks_for=(*OF_CACHES, *(f"COMPR-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8))),
    gives={"create": "sequence", "fork": "sequence", "restore": "sequence", "offload": "handle"},
    may_be_zero=("num_blocks", "rope_dim", "rollback"),
    goes=goes,
    token_axis=-2,
    appending={"append": ARRAYS},
)  # fmt: skip

_ARRAYS = "SequenceNotFound ShapeMismatch DtypeMismatch NonFinite CapacityExceeded"
# The errors that the specification requires of each operation. The factory raises ConfigError.
ERRORS: dict[str, str] = {
    "create": "OutOfBlocks",
    "fork": "SequenceNotFound OutOfBlocks",
    "drop": "SequenceNotFound",
    "length": "SequenceNotFound",
    "append": _ARRAYS,
    "step": _ARRAYS,
    "truncate": "SequenceNotFound PositionOutOfRange NotTruncatable",
    "read_window": "SequenceNotFound",
    "read_rows": "SequenceNotFound",
    "read_state": "SequenceNotFound",
    "offload": "SequenceNotFound",
    "restore": "KeyNotFound OutOfBlocks",
    "discard": "KeyNotFound",
}


class Compressed(Protocol):
    """The operations of a cache. An implementation may lack some."""

    num_free_blocks: int

    def create(self) -> int: ...
    def fork(self, sequence: int) -> int: ...
    def drop(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def append(self, sequence: int, latents: Latents, contributions: Latents, gates: Latents) -> None: ...
    def step(
        self, sequence: int, query: Query, latents: Latents, contributions: Latents, gates: Latents, scale: float | None = None
    ) -> Query: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def read_window(self, sequence: int) -> Latents: ...
    def read_rows(self, sequence: int) -> Latents: ...
    def read_state(self, sequence: int) -> tuple[Latents, Latents]: ...
    def offload(self, sequence: int) -> int: ...
    def restore(self, handle: int) -> int: ...
    def discard(self, handle: int) -> None: ...


class CompressedFactory(Protocol):
    """Creates a cache. Every size is passed by name."""

    def __call__(
        self, *, num_blocks: int, head_dim: int, rope_dim: int, window: int, ratio: int, max_tokens: int, rollback: int
    ) -> Compressed: ...


def sequence(got: ResultByName) -> Any:
    return got["compressed.create"]


def handle(got: ResultByName) -> Any:
    return got["compressed.offload"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    rows = counting_rows(2, sizes.config.get("head_dim", 5))
    arrays: dict[str, Any] = dict.fromkeys(ARRAYS, rows)
    calls = {
        "create": args(), "append": args(sequence=sequence, **arrays), "length": args(sequence=sequence),
        "num_free_blocks": args(), "read_window": args(sequence=sequence), "read_rows": args(sequence=sequence),
        "read_state": args(sequence=sequence), "step": args(sequence=sequence, query=rows[:, None], **arrays),
        "fork": args(sequence=sequence), "offload": args(sequence=sequence), "restore": args(handle=handle),
        "discard": args(handle=handle), "truncate": args(sequence=sequence, length=3), "drop": args(sequence=sequence),
    }  # fmt: skip
    return on_family("compressed", calls)
