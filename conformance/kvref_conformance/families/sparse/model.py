"""The reference model of the family `sparse`: per sequence a list of tokens, each with three rows."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import Level, NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Errors,
    Expectation,
    ExpectedArrays,
    ExpectedOrError,
    UnjudgedReply,
    all_finite,
    array_errors,
    count_tokens,
    dtype_errors,
    exact_reads,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.offloadable_sequences import OffloadableSequences
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.shared_blocks import Used, count_used, expect_free_blocks

SEEN = ("length", "read", "read_index")


class Token(NamedTuple):
    """The rows of a token: key and value [num_kv_heads, head_dim], index key [index_dim]."""

    key: NDArray
    value: NDArray
    index_key: NDArray


@dataclass
class SparseSequence:
    """A sequence. relatives: the id of the sequence from which it and its related sequences were forked (SPARSE-08)."""

    relatives: int
    tokens: list[Token]


class Sparse(OffloadableSequences):
    family = "sparse"
    sequence_clause, copy_clause = "SPARSE-06", "SPARSE-07"
    clause_by_observation: ClassVar = {
        **{(did, seen): "SPARSE-05" for did in ("fork", "drop") for seen in SEEN},
        **{("truncate", seen): "SPARSE-06" for seen in SEEN},
        **{(did, seen): "SPARSE-07" for did in ("offload", "restore", "discard") for seen in SEEN},
        **dict.fromkeys(SEEN, "SPARSE-01"),
        "num_free_blocks": "SPARSE-08",
    }

    def __init__(self, *, num_blocks: int, num_kv_heads: int, head_dim: int, index_dim: int, top_k: int, block_size: int) -> None:
        super().__init__()
        self.blocks, self.size, self.row = num_blocks, block_size, (num_kv_heads, head_dim)
        self.index_dim, self.top_k = index_dim, top_k
        self.sequences: dict[int, SparseSequence]

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {})]
        for sequence in self.sequences:
            found += [(name, {"sequence": sequence}) for name in SEEN]
        return found

    # Blocks.

    def used(self, changed: Any = None, more: int = 0) -> Used:
        """The fewest and the most blocks that can be in use, with `more` tokens added to the sequence `changed`."""
        sequences = self.sequences.items()
        return count_used(
            (state.relatives, self.filled(len(state.tokens) + (more if id == changed else 0))) for id, state in sequences
        )

    def filled(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def num_free_blocks(self) -> Expectation:
        return expect_free_blocks(self.clause_of("num_free_blocks"), self.blocks, self.used())

    def block_errors(self, used: Used, expected: Expectation) -> Expectation:
        """The expectation of a call after which between `used[0]` and `used[1]` blocks are in use; `expected` if they suffice."""
        if used[0] > self.blocks:
            return self.expect_error([("OutOfBlocks", "SPARSE-08")])
        if used[1] > self.blocks:
            return ExpectedOrError(
                expected.clause, expected.on_result, kinds=("OutOfBlocks",), on_error=lambda: self.note_unchanged("refused"),
                expected=expected,
            )  # fmt: skip
        return expected

    # Sequences.

    def _open(self, id: int, tokens: list[Token]) -> None:
        """Add a sequence without relatives."""
        self.sequences[id] = SparseSequence(id, tokens)

    def create(self) -> Expectation:
        def change(id: int) -> None:
            self._open(id, [])

        return self.new_id("SPARSE-01", "create", change)

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        parent = self.sequences[sequence]

        def change(id: int) -> None:
            self.sequences[id] = SparseSequence(parent.relatives, list(parent.tokens))

        expected = self.new_id("SPARSE-05", "fork", change)
        fewest, most = self.used()
        return self.block_errors((fewest, most + self.filled(len(parent.tokens))), expected)

    def append(self, sequence: Any, keys: Any, values: Any, index_keys: Any) -> Expectation:
        given = (keys, (None, *self.row)), (values, (None, *self.row)), (index_keys, (None, self.index_dim))
        wrong = self.unknown(sequence) + [
            (kind, "SPARSE-01" if kind == "ShapeMismatch" else clause) for kind, clause in array_errors(*given)
        ]
        used = self.used(sequence, count_tokens(*given))
        if wrong:
            wrong += finite_errors(keys, values, index_keys)
            return self.expect_error(wrong + ([("OutOfBlocks", "SPARSE-08")] if used[1] > self.blocks else []))
        new = [Token(*rows) for rows in zip(*map(to_float32, (keys, values, index_keys)), strict=True)]
        then = self.on_success("append", lambda ok: self.sequences[sequence].tokens.extend(new))
        if all_finite(*map(np.asarray, (keys, values, index_keys))):
            return self.block_errors(used, Expectation("SPARSE-01", then))
        if used[0] > self.blocks:
            return self.expect_error([("OutOfBlocks", "SPARSE-08"), ("NonFinite", "LAW-14")])
        kinds = ("NonFinite", "OutOfBlocks") if used[1] > self.blocks else ("NonFinite",)
        return AcceptedOrError("SPARSE-01", then, kinds=kinds, on_error=lambda: self.note_unchanged("refused"))

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        wrong = self.unknown(sequence)
        stop = None if wrong else len(self.sequences[sequence].tokens) + 1
        if wrong := wrong + range_errors(length, stop, "PositionOutOfRange", "SPARSE-06"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            del self.sequences[sequence].tokens[length:]

        return Expectation("SPARSE-06", self.on_success("truncate", change))

    def read(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        keys, values, _ = self.arrays(sequence)
        return ExpectedArrays(self.clause_of("read"), names=("keys", "values"), parts=(exact_reads(keys), exact_reads(values)))

    def read_index(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        return ExpectedArrays(self.clause_of("read_index"), parts=(exact_reads(self.arrays(sequence)[2]),))

    def arrays(self, sequence: int) -> tuple[NDArray, NDArray, NDArray]:
        """Keys and values [length, num_kv_heads, head_dim], and index keys [length, index_dim]."""
        tokens = self.sequences[sequence].tokens
        parts = ([token[part] for token in tokens] for part in range(3))
        shapes = (self.row, self.row, (self.index_dim,))
        keys, values, index = (np.array(part, np.float32).reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))
        return keys, values, index

    # Selections.

    def select(self, sequence: Any, index_queries: Any, weights: Any, causal: Any = False) -> Expectation:
        wrong = self.unknown(sequence) + self._index_errors(index_queries, weights)
        if wrong:
            return self.expect_error(wrong + finite_errors(index_queries, weights))
        rows = self._rankings(sequence, index_queries, weights, causal)
        return (
            UnjudgedReply("SPARSE-02") if rows is None else ExpectedSelection("SPARSE-02", rankings=tuple(rows), width=self.top_k)
        )

    def attend(
        self, sequence: Any, query: Any, index_queries: Any, weights: Any, scale: float | None = None, causal: Any = False
    ) -> Expectation:
        wrong = self.unknown(sequence) + query_errors(query, *self.row) + self._index_errors(index_queries, weights)
        if not wrong and len(query) != len(index_queries):
            wrong.append(("ShapeMismatch", "SPARSE-04"))
        if wrong:
            return self.expect_error(wrong + finite_errors(query, index_queries, weights))
        rows = self._rankings(sequence, index_queries, weights, causal)
        if rows is None or not all(row.is_clear(self.top_k) for row in rows):
            return UnjudgedReply("SPARSE-04")
        keys, values, _ = self.arrays(sequence)
        views = [np.array(row.best(self.top_k), np.int64) for row in rows]
        scale = self.row[1] ** -0.5 if scale is None else scale
        return expect_attend("SPARSE-04", query, exact_reads(keys), exact_reads(values), scale, views)

    def _index_errors(self, index_queries: Any, weights: Any) -> Errors:
        shape = np.shape(index_queries)
        fits = len(shape) == 3 and shape[1] > 0 and shape[2] == self.index_dim and np.shape(weights) == shape[:2]
        return [*([] if fits else [("ShapeMismatch", "SPARSE-04")]), *dtype_errors(index_queries), *dtype_errors(weights)]

    def _rankings(self, sequence: int, index_queries: Any, weights: Any, causal: bool) -> "list[Ranking] | None":
        """What each query sees; None if a number is not finite."""
        index_keys = self.arrays(sequence)[2]
        queries, gates = to_float32(index_queries), to_float32(weights)
        if not all_finite(index_keys, queries, gates):
            return None
        count, length = len(queries), len(index_keys)
        seen = [max(0, length - count + 1 + row) if causal else length for row in range(count)]
        return [ranked(index_keys[:end], query, gate) for end, query, gate in zip(seen, queries, gates, strict=True)]

    # Offloaded copies.

    def restore(self, handle: Any) -> Expectation:
        if wrong := self.unknown_handle(handle):
            return self.expect_error(wrong)
        tokens = list(self.copies[handle])

        def change(id: int) -> None:
            self._open(id, tokens)

        expected = self.new_id("SPARSE-07", "restore", change)
        fewest, most = (each + self.filled(len(tokens)) for each in self.used())
        return self.block_errors((fewest, most), expected)


@dataclass(frozen=True)
class Ranking:
    """The exact index scores of the tokens that one query sees. error: how much a float32 score can differ; 0 if it is exact."""

    scores: tuple[Fraction, ...]
    error: Fraction

    def best(self, count: int) -> list[int]:
        """The positions of the largest scores; of equal scores, the earlier ones."""
        return sorted(sorted(range(len(self.scores)), key=lambda at: (-self.scores[at], at))[:count])

    def is_clear(self, count: int) -> bool:
        """Whether only one selection is correct."""
        descending = sorted(self.scores, reverse=True)
        return len(descending) <= count or descending[count - 1] - descending[count] > 2 * self.error

    def accepts(self, chosen: list[int], count: int) -> bool:
        """Whether this selection is correct."""
        others = set(range(len(self.scores))) - set(chosen)
        if len(chosen) != min(count, len(self.scores)) or chosen != sorted(set(range(len(self.scores))) - others):
            return False
        if not chosen or not others:
            return True
        return min(self.scores[at] for at in chosen) >= max(self.scores[at] for at in others) - 2 * self.error


def ranked(index_keys: NDArray, queries: NDArray, weights: NDArray) -> Ranking:
    """The ranking of tokens with these index keys for a query [index_heads, index_dim] with weights [index_heads]."""
    keys, rows, gates = (
        [[*map(Fraction, row)] for row in np.atleast_2d(part).tolist()] for part in (index_keys, queries, weights)
    )
    scores, largest = list[Fraction](), Fraction(0)
    for key in keys if len(index_keys) else []:
        products = [[q * k for q, k in zip(row, key, strict=True)] for row in rows]
        scores.append(
            sum((gate * max(Fraction(0), sum(each)) for gate, each in zip(gates[0], products, strict=True)), Fraction(0))
        )
        size = sum((abs(gate) * sum(map(abs, each)) for gate, each in zip(gates[0], products, strict=True)), Fraction(0))
        largest = max(largest, size)
    whole = all(number.denominator == 1 for part in (keys, rows, gates) for row in part for number in row)
    exact = whole and largest < 2**24
    rounding = Fraction(index_keys.shape[1] + len(queries) + 1, 2**23)
    return Ranking(tuple(scores), Fraction(0) if exact else rounding * largest)


@dataclass(frozen=True)
class ExpectedSelection(Expectation):
    """The positions that each query chooses: integers [num_queries, width], ascending and followed by -1."""

    rankings: tuple[Ranking, ...] = ()
    width: int = 0

    def compare(self, ok: Any, op: str, level: Level) -> None:
        got = np.asarray(ok)
        if got.dtype.kind not in "iu":
            raise ClauseViolation(op, "integers", str(got.dtype), self.clause)
        if got.shape != (len(self.rankings), self.width):
            raise ClauseViolation(op, f"shape {[len(self.rankings), self.width]}", f"shape {list(got.shape)}", self.clause)
        for row, ranking in enumerate(self.rankings):
            numbers = got[row].astype(np.int64).tolist()
            chosen = numbers[: min(self.width, len(ranking.scores))]
            if not ranking.accepts(chosen, self.width) or any(number != -1 for number in numbers[len(chosen) :]):
                raise ClauseViolation(f"row {row} of {op}", str(self._row(ranking)), str(numbers), self.clause)

    def to_json(self) -> dict[str, Any]:
        if not all(ranking.is_clear(self.width) for ranking in self.rankings):
            return {"any": True}
        return {"ok": np.array([self._row(each) for each in self.rankings], np.int32).reshape(-1, self.width)}

    def _row(self, ranking: Ranking) -> list[int]:
        best = ranking.best(self.width)
        return best + [-1] * (self.width - len(best))
