"""Expected replies of the sharded cache, computed from one list of tokens and the grid position of each rank."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    expect_error,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

OBSERVED = ("length", "read", "read_rank", "positions", "block_table", "num_bytes")
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LOST = ("RankLost", "SHARD-04")


class Sharded(ReferenceModel):
    family = "sharded"
    clause_by_observation: ClassVar = {
        **{("truncate", seen): "EDIT-01" for seen in OBSERVED}, **{("lost", seen): "SHARD-04" for seen in OBSERVED},
        ("clear", "read"): "LAW-05", ("clear", "read_rank"): "LAW-05",
        "length": "SHARD-03", "read": "SHARD-01", "read_rank": "SHARD-01", "heads": "SHARD-01", "positions": "SHARD-02",
        "block_table": "SHARD-03", "num_bytes": "SHARD-03",
    }  # fmt: skip

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, head_ranks: int, token_ranks: int, block_size: int, num_blocks: int, dtype: str
    ) -> None:
        super().__init__()
        self.row, self.rows, self.columns = (num_kv_heads, head_dim), head_ranks, token_ranks
        self.size, self.blocks, self.dtype = block_size, num_blocks, dtype
        self.tokens: list[tuple[NDArray, NDArray]] = []  # [num_kv_heads, head_dim] each, as they are stored
        self.lost: set[int] = set()
        self.failing: set[int] = set()  # ranks that fail during the next append
        self.table: list[int] = []  # block table of all ranks, as far as a rank has reported it

    @property
    def ranks(self) -> range:
        return range(self.rows * self.columns)

    @property
    def entries(self) -> int:
        """Number of blocks that every rank uses."""
        return -(-len(self.tokens) // (self.size * self.columns))

    def heads_of(self, rank: int) -> list[int]:
        """The heads of a rank. With fewer heads than rows, `rows // heads` consecutive rows store the same head."""
        row, heads = rank // self.columns, self.row[0]
        return [head for head in range(heads) if head * self.rows // heads == row or row * heads // self.rows == head]

    def positions_of(self, rank: int) -> list[int]:
        return [at for at in range(len(self.tokens)) if at // self.size % self.columns == rank % self.columns]

    def clause_of(self, seen: str) -> str:
        """The clause to report. State after a call that failed because of a lost rank belongs to SHARD-04."""
        return "SHARD-04" if self.last_change == "refused" and self.lost else super().clause_of(seen)

    def observations(self) -> list[ReadCall]:
        of_a_rank = ("positions", "num_bytes", "block_table", "read_rank", *(["heads"] if self.last_change == "new" else []))
        return [("length", {}), ("read", {}), *((name, {"rank": rank}) for rank in self.ranks for name in of_a_rank)]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self.tokens))

    def append(self, keys: Any, values: Any) -> Expectation:
        arrays = (keys, (None, *self.row)), (values, (None, *self.row))
        count = count_tokens(*arrays)
        too_many = len(self.tokens) + count > self.blocks * self.size * self.columns
        wrong = (
            array_errors(*arrays) + ([("CapacityExceeded", "SHARD-03")] if too_many else []) + self._lost_ranks_of(*self.ranks)
        )
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))
        if self.failing and count:
            if not all_finite(keys, values):
                raise ValueError(
                    "append of numbers that are not finite, during which a rank is lost, is not modeled: two errors are valid"
                )
            return ExpectedError("SHARD-04", kinds=("RankLost",), on_error=self._lose_failing_ranks)

        def change(ok: Any) -> None:
            stored = [round_to(to_float32(part), self.dtype) for part in (keys, values)]
            self.tokens += list(zip(*stored, strict=True))

        then = self.on_success("append", change)
        return Expectation("SHARD-03", then) if all_finite(keys, values) else AcceptedOrError("SHARD-03", then)

    def _lose_failing_ranks(self) -> None:
        self.lost, self.failing = self.lost | self.failing, set()
        self.note_change("lost")

    def _lost_ranks_of(self, *ranks: int) -> Errors:
        return [LOST] if self.lost.intersection(ranks) else []

    def _stored_tokens(self, positions: Sequence[int], heads: Sequence[int]) -> tuple[NDArray, NDArray]:
        chosen = [self.tokens[at] for at in positions]
        keys, values = (np.array([token[part] for token in chosen], np.float32).reshape(-1, *self.row) for part in (0, 1))
        return keys[:, heads], values[:, heads]

    def read(self) -> Expectation:
        if wrong := self._lost_ranks_of(*self.ranks):
            return expect_error(wrong, lambda: None)
        return self._expected_tokens("read", range(len(self.tokens)), range(self.row[0]))

    def read_rank(self, rank: Any) -> Expectation:
        if wrong := self._rank_errors(rank):
            return expect_error(wrong, lambda: None)
        return self._expected_tokens("read_rank", self.positions_of(rank), self.heads_of(rank))

    def _expected_tokens(self, name: str, positions: Sequence[int], heads: Sequence[int]) -> Expectation:
        keys, values = self._stored_tokens(positions, heads)
        return ExpectedArrays(self.clause_of(name), names=("keys", "values"), parts=(exact_reads(keys), exact_reads(values)))

    def _rank_errors(self, rank: Any) -> Errors:
        return range_errors(rank, len(self.ranks), "RankOutOfRange", "SHARD-04") or self._lost_ranks_of(rank)

    def heads(self, rank: Any) -> Expectation:
        wrong = self._rank_errors(rank)
        return expect_error(wrong, lambda: None) if wrong else ExactValue(self.clause_of("heads"), value=self.heads_of(rank))

    def positions(self, rank: Any) -> Expectation:
        wrong = self._rank_errors(rank)
        return (
            expect_error(wrong, lambda: None) if wrong else ExactValue(self.clause_of("positions"), value=self.positions_of(rank))
        )

    def num_bytes(self, rank: Any) -> Expectation:
        if wrong := self._rank_errors(rank):
            return expect_error(wrong, lambda: None)
        numbers = self.entries * self.size * len(self.heads_of(rank)) * self.row[1]
        return ExactValue(self.clause_of("num_bytes"), value=2 * NUMBER_BYTES[self.dtype] * numbers)

    def block_table(self, rank: Any) -> Expectation:
        if wrong := self._rank_errors(rank):
            return expect_error(wrong, lambda: None)

        def accepts(got: Any) -> bool:
            blocks = [int(block) for block in got]
            right = len(blocks) == len(set(blocks)) == self.entries and all(0 <= block < self.blocks for block in blocks)
            return right and blocks[: len(self.table)] == self.table

        def note(ok: Any) -> None:
            self.table = [int(block) for block in ok]

        says = f"{self.entries} different blocks in [0, {self.blocks}), the same on every rank, beginning with the old table"
        return AnyOf(self.clause_of("block_table"), note, range_text=says, accepts=accepts)

    def attend(self, query: Any, scale: float) -> Expectation:
        count = len(query) if np.ndim(query) == 3 else 0
        wrong = query_errors(query, *self.row) + self._lost_ranks_of(*self.ranks)
        if count > len(self.tokens):
            wrong.append(("PositionOutOfRange", "SHARD-02"))
        if wrong:
            return expect_error(wrong + finite_errors(query), lambda: None)
        keys, values = map(exact_reads, self._stored_tokens(range(len(self.tokens)), range(self.row[0])))
        views = [np.arange(len(self.tokens) - count + number + 1) for number in range(count)]
        return expect_attend("SHARD-02", query, keys, values, scale, views, self.columns)

    def truncate(self, length: Any) -> Expectation:
        wrong = range_errors(length, len(self.tokens) + 1, "PositionOutOfRange", "EDIT-02") + self._lost_ranks_of(*self.ranks)
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.tokens = self.tokens[:length]
            self.table = self.table[: self.entries]

        return Expectation("EDIT-02" if length == len(self.tokens) else "EDIT-01", self.on_success("truncate", change))

    def clear(self) -> Expectation:
        if wrong := self._lost_ranks_of(*self.ranks):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.tokens, self.table = [], []

        return Expectation("LAW-05", self.on_success("clear", change))

    def lose(self, rank: Any) -> Expectation:
        return self._mark_rank(rank, self.lost)

    def lose_in_append(self, rank: Any) -> Expectation:
        return self._mark_rank(rank, self.failing)

    def _mark_rank(self, rank: Any, marked: set[int]) -> Expectation:
        wrong = self._rank_errors(rank)
        return (
            self.expect_error(wrong) if wrong else Expectation("SHARD-04", self.on_success("lost", lambda ok: marked.add(rank)))
        )
