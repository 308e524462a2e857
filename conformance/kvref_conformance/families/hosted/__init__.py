"""Block store with host blocks, and copies between the two."""

from collections.abc import Sequence
from typing import Protocol

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import Tokens
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, PLAIN_FORMATS, SYMMETRIC_FORMATS, group_of
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="hosted",
    chapter="moving",
    small={"num_blocks": 4, "block_size": 3, "num_kv_heads": 2, "head_dim": 5, "format": "float32", "capacity": 6},
    speaks_for=("LAW-01", "LAW-04", "LAW-10", "LAW-11", "LAW-12", "FMT-LEVEL-04", "MOVE-12"),
    formats={"format": (*PLAIN_FORMATS, *SYMMETRIC_FORMATS, *FORMATS_IN_GROUPS)},
    may_be_zero=("num_blocks", "capacity"),
    fits=lambda config: config["head_dim"] % group_of(config["format"]) == 0,
)


# Interface of a block store with host blocks, and of the copies between the two.

_BLOCKS = "ShapeMismatch SlotOutOfRange"
# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "write": "ShapeMismatch DtypeMismatch NonFinite SlotOutOfRange",
    "read": "SlotOutOfRange",
    "to_host": _BLOCKS,
    "to_device": _BLOCKS,
}


class Hosted(Protocol):
    """`write` quantizes block_size tokens of keys and values into a block, `read` returns what the block reads back as."""

    def write(self, block: int, keys: Tokens, values: Tokens) -> None: ...
    def read(self, block: int) -> tuple[Tokens, Tokens]: ...
    def to_host(self, blocks: Sequence[int], places: Sequence[int]) -> None: ...
    def to_device(self, places: Sequence[int], blocks: Sequence[int]) -> None: ...


class HostedFactory(Protocol):
    """Creates a store. Every size is passed by name."""

    def __call__(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: str, capacity: int
    ) -> Hosted: ...


# One call of each operation.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(sizes.config.get("block_size", 1), sizes.heads, sizes.dim)
    return on_family("hosted", {
        "write": args(block=0, keys=tokens, values=tokens), "to_host": args(blocks=[0], places=[0]),
        "to_device": args(places=[0], blocks=[0]), "read": args(block=0),
    })  # fmt: skip
