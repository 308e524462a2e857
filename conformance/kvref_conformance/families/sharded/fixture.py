"""A sharded cache with the tokens appended to it, and the expected rank and position of each, computed token by token."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_within,
    default_scale,
    expected_attention,
    normal,
)
from kvref_conformance.testlib.fixtures import clamp_to_limits, construct, pair_of_tokens, supports

GRIDS = ((4, 3), (1, 3), (2, 1), (2, 2), (4, 1), (1, 4), (1, 1))  # rows and columns of ranks; with two heads, 4 rows are copies
HEADS = ((4, 2), (4, 4), (3, 1), (3, 3), (1, 2), (1, 3), (3, 6), (6, 2), (9, 3), (8, 2))  # kv heads and rows
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def grids(subject: Subject, *wanted: tuple[int, int], **sizes: Any) -> Iterator[dict[str, Any]]:
    """Configurations for each grid (rows, columns), GRIDS by default. Sizes outside the limits are replaced by the nearest
    allowed size. Each configuration occurs once.

    Raises NotOffered if the limits allow no grid.
    """
    tried = list[dict[str, Any]]()
    for rows, columns in wanted or GRIDS:
        try:
            config = clamp_to_limits(subject, "sharded", **{"head_ranks": rows, "token_ranks": columns} | sizes)
        except NotOffered:
            continue
        if config not in tried:
            tried.append(config)
            yield config
    if not tried:
        raise NotOffered("a grid of ranks, within its limits, over which its heads can be divided or copied")


def heads_and_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """Configurations for those pairs of HEADS that the limits allow: divided heads, and copied heads."""
    for heads, rows in HEADS:
        if supports(subject, "num_kv_heads", heads) and supports(subject, "head_ranks", rows):
            yield clamp_to_limits(subject, "sharded", num_kv_heads=heads, head_ranks=rows)


class ShardedFixture:
    """`cache`, and the expected keys and values, [n, num_kv_heads, head_dim]."""

    def __init__(self, subject: Subject, **config: Any) -> None:
        """config: allowed sizes, as returned by `grids` or `clamp_to_limits`."""
        self.subject, self.config = subject, config
        self.cache = construct(subject, "sharded", **config)
        self.rows, self.columns, self.size = (config[name] for name in ("head_ranks", "token_ranks", "block_size"))
        self.row = config["num_kv_heads"], config["head_dim"]
        self.keys, self.values = self.tokens(0)

    @property
    def ranks(self) -> range:
        return range(self.rows * self.columns)

    @property
    def room(self) -> int:
        return int(self.config["num_blocks"] * self.size * self.columns)

    def __len__(self) -> int:
        return len(self.keys)

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        return pair_of_tokens(self.subject, count, *self.row)

    def append(self, count: int) -> None:
        """Append `count` random tokens, or fewer if there is less room."""
        self.give(*self.tokens(min(count, self.room - len(self))))

    def give(self, keys: NDArray, values: NDArray) -> None:
        self.cache.append(keys, values)
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.keys, self.values = self.keys[:length], self.values[:length]

    def heads(self, rank: int) -> list[int]:
        """The expected heads of a rank: heads divided among rows, or rows divided among heads."""
        row, heads = rank // self.columns, np.arange(self.row[0])
        dealt = np.split(heads, self.rows) if self.row[0] >= self.rows else np.repeat(heads, self.rows // self.row[0])[:, None]
        return [int(head) for head in dealt[row]]

    def positions(self, rank: int) -> list[int]:
        """The expected positions of a rank: consecutive blocks are assigned to the columns in turn."""
        blocks = [range(first, min(first + self.size, len(self))) for first in range(0, len(self), self.size)]
        return [position for block in blocks[rank % self.columns :: self.columns] for position in block]

    def blocks(self) -> int:
        """The number of blocks that every rank must use: one per begun round of the columns."""
        return len(range(0, len(self), self.size * self.columns))

    def num_bytes(self, rank: int) -> int:
        """The size of the blocks that a rank must use."""
        numbers = 2 * self.blocks() * self.size * len(self.heads(rank)) * self.row[1]
        return int(numbers * NUMBER_BYTES[self.config["dtype"]])

    def share(self, rank: int) -> tuple[NDArray, NDArray]:
        """The expected keys and values of a rank."""
        at = np.ix_(self.positions(rank), self.heads(rank))
        dtype = self.config["dtype"]
        return round_to(self.keys[at], dtype), round_to(self.values[at], dtype)

    def look_at(self, ranks: Sequence[int], when: str) -> None:
        """Check that each of these ranks has exactly the expected positions, keys and values."""
        for rank in ranks:
            assert_equal(
                [int(each) for each in self.cache.positions(rank)], self.positions(rank), f"positions of rank {rank} {when}"
            )
            assert_pair(self.cache.read_rank(rank), self.share(rank), f"the tokens of rank {rank} {when}")

    def look(self, when: str) -> None:
        """Check the length, every rank, and `read` of the whole cache."""
        assert_equal(int(self.cache.length), len(self), f"length {when}")
        self.look_at(self.ranks, when)
        dtype = self.config["dtype"]
        assert_pair(
            self.cache.read(), (round_to(self.keys, dtype), round_to(self.values, dtype)), f"the tokens that read returned {when}"
        )

    def tables(self, ranks: Sequence[int], when: str) -> list[int]:
        """Returns the block table of these ranks. Checks that all have the same table, with the expected number of blocks."""
        said = [[int(block) for block in self.cache.block_table(rank)] for rank in ranks]
        for rank, table in zip(ranks, said, strict=True):
            assert_equal(table, said[0], f"the block table of rank {rank} {when}, compared with the table of rank {ranks[0]}")
        assert_equal(len(set(said[0])), self.blocks(), f"number of distinct blocks in the block table {said[0]} {when}")
        outside = [block for block in said[0] if not 0 <= block < self.config["num_blocks"]]
        assert_equal(
            (len(said[0]), outside),
            (self.blocks(), []),
            f"number of entries, and entries outside the pool, in the block table {when}",
        )
        return said[0]

    def attends(self, count: int, when: str, group: int = 2) -> None:
        """Check attention for random queries of the last `count` tokens."""
        query = normal(self.subject, count, self.row[0] * self.subject.size("group_size", group), self.row[1])
        self.attends_to(query, default_scale(self.subject), f"of {count} queries {when}")

    def attends_to(self, query: NDArray, scale: float, what: str) -> None:
        dtype = self.config["dtype"]
        keys, values = round_to(self.keys, dtype), round_to(self.values, dtype)
        want, bound = expected_attention(self.subject, query, keys, values, scale=scale, causal=True, ranks=self.columns)
        assert_within(self.cache.attend(query, scale), want, bound, f"attention {what}, on {self.rows} x {self.columns} ranks")
