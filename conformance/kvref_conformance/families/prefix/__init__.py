"""The family `prefix`: a paged cache that finds blocks of committed tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvref_conformance.families import Family
from kvref_conformance.families.paged import ERRORS as OF_PAGES
from kvref_conformance.families.paged import FAMILY as PAGES
from kvref_conformance.families.paged import Paged
from kvref_conformance.families.paged import sample_calls as steps_of_pages
from kvref_conformance.testlib.sample_calls import Arguments, ResultByName, SampleCalls, Sizes, args, on_family

FAMILY = Family(
    name="prefix",
    chapter="prefixes",
    small=PAGES.small,
    speaks_for=(
        *(clause for clause in PAGES.speaks_for if not clause.startswith("MOVE")),  # checks judge hits after load
        *(f"PREFIX-{n:02}" for n in (*range(1, 16), 17, 18, 19)),
    ),
    gives={**PAGES.gives, "begin": "sequence"},
    several=PAGES.several,
    formats=PAGES.formats,
    fits=PAGES.fits,
    may_be_zero=PAGES.may_be_zero,
    appending=PAGES.appending,
    counted_as=PAGES.counted_as,
)


MediaItem = tuple[int, int, str]  # the placeholders of a content: start, stop, content

# The typed protocol of the prefix cache: the operations of a paged cache, and begin, commit, match and reset.

ERRORS: dict[str, str] = OF_PAGES | {
    "begin": "TokenOutOfRange PositionOutOfRange OutOfBlocks",
    "commit": "SequenceNotFound TokenOutOfRange PositionOutOfRange TokenMismatch",
    "match": "TokenOutOfRange PositionOutOfRange",
    "reset": "InUse",
}


class Prefix(Paged, Protocol):
    """`begin` creates a sequence with the cached prefix of the tokens, and allocates blocks for all of them, or none. The length
    of the sequence is that of the prefix. `media` are lists [start, stop, content] of positions and of their content. `commit`
    declares the tokens at the first positions of a sequence. `attend` is that of the paged cache.
    """

    def begin(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> int: ...
    def commit(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> int: ...
    def reset(self) -> None: ...


class PrefixFactory(Protocol):
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
    ) -> Prefix: ...


# One call of each operation, for the self-test of a harness.


def sequence(got: ResultByName) -> Any:
    return got["prefix.begin"]


def sample_calls(sizes: Sizes) -> SampleCalls:
    """Returns the steps of this family, and those of the paged cache on a sequence created by begin."""
    pages = {name.partition(".")[2]: _renamed(arguments) for name, arguments in steps_of_pages(sizes).items()}
    drop = pages.pop("drop")
    committed = {"commit": args(sequence=sequence, tokens=[]), "match": args(tokens=[1, 2, 3])}
    begun = {"begin": args(tokens=[1, 2, 3])}
    return on_family("prefix", {"reset": args()} | begun | pages | committed | {"drop": drop})


def _renamed(arguments: Arguments) -> Arguments:
    """Returns `arguments` for results that are stored under the name of this family."""
    return lambda got: arguments({f"paged{name.removeprefix('prefix')}": value for name, value in got.items()})
