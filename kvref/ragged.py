"""The ragged batch: a cache whose rows have different lengths, as batches of prompts that are padded.

Arrays have one row per sequence, [batch_size, num_kv_heads, n, head_dim]. Of the n columns of a row, `counts` tells how many are
tokens; the others are padding, before the tokens or after them. Implementations often store the padding and mask it. This one
stores each row's tokens alone, which is what the others have to be equal to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.errors import CapacityExceeded, PositionOutOfRange, RowOutOfRange, ShapeMismatch, in_range, whole_fields
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class RaggedConfig:
    """Sizes of a RaggedCache. Raises ConfigError (LAW-12).

    - `batch_size`: rows of a new cache.
    - `max_tokens`: tokens per row, at most. Padding does not count.
    """

    batch_size: int = 1
    num_kv_heads: int = 8
    head_dim: int = 128
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        whole_fields(self, "batch_size", "num_kv_heads", "head_dim", "max_tokens")


class RaggedCache:
    """A cache of one layer for a batch of rows with lengths of their own (chapter RAGGED). Keys and values are float32."""

    def __init__(self, config: RaggedConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        none = backend.zeros((config.num_kv_heads, 0, config.head_dim), "float32")
        self._rows: list[tuple[Array, Array]] = [(none, none)] * config.batch_size  # [num_kv_heads, length, head_dim] each

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def length(self, row: int) -> int:
        """Return the number of tokens of a row, which is the position of its next token (RAGGED-02). Raises RowOutOfRange."""
        return int(self._rows[self._row(row)][0].shape[1])

    def append(self, keys: Array, values: Array, counts: Sequence[int] | None = None, left: bool = False) -> None:
        """Append counts[r] tokens to each row r (RAGGED-01).

        keys, values: [batch_size, num_kv_heads, n, head_dim]. counts: one integer in [0, n] per row, n by default. The tokens of
        a row are its first counts[r] columns, or with `left` its last ones. The other columns are padding, which is not stored.

        Raises ShapeMismatch, DtypeMismatch, PositionOutOfRange, or CapacityExceeded if a row would have more than max_tokens.
        """
        new = self._new_rows(keys, values, counts, left, self.batch_size, "append")
        concat = self._backend.xp.concat
        self._rows = [
            (concat([old_keys, keys], axis=1), concat([old_values, values], axis=1))
            for (old_keys, old_values), (keys, values) in zip(self._rows, new, strict=True)
        ]

    def extend(self, keys: Array, values: Array, counts: Sequence[int] | None = None, left: bool = False) -> None:
        """Add rows after the present ones, with the tokens of keys and values [rows, num_kv_heads, n, head_dim] (RAGGED-07).

        counts, left, and errors: as in `append`.
        """
        self._rows += self._new_rows(keys, values, counts, left, "rows", "extend")

    def filter(self, rows: Sequence[int]) -> None:
        """Replace row i by the former row `rows[i]`, for all i at the same time (RAGGED-06).

        rows: at least one, in any order. A row can repeat, and rows that are not listed are removed. Raises RowOutOfRange, also
        if there are no rows.
        """
        chosen = [self._row(row) for row in rows]
        if not chosen:
            raise RowOutOfRange("rows: expected at least one row, got none")
        self._rows = [self._rows[row] for row in chosen]

    def trim(self, counts: Sequence[int]) -> None:
        """Remove the last counts[r] tokens of each row r (RAGGED-08). Raises ShapeMismatch or PositionOutOfRange."""
        lengths = [self.length(row) for row in range(self.batch_size)]
        kept = [length - count for length, count in zip(lengths, _checked_counts(counts, lengths), strict=True)]
        self._rows = [
            (keys[:, :length, :], values[:, :length, :]) for (keys, values), length in zip(self._rows, kept, strict=True)
        ]

    def read(self, row: int) -> tuple[Array, Array]:
        """Return the keys and values of a row, without padding, as copies: float32 [num_kv_heads, length, head_dim] each.

        Raises RowOutOfRange.
        """
        keys, values = self._rows[self._row(row)]
        xp = self._backend.xp
        return xp.asarray(keys, copy=True), xp.asarray(values, copy=True)

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention, for each row over its own tokens: float32 [batch_size, num_query_heads, num_queries, head_dim].

        query: [batch_size, num_query_heads, num_queries, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are
        those of the last tokens of their row, and each sees the tokens up to its own (RAGGED-04). Raises ShapeMismatch or
        DtypeMismatch.
        """
        xp = self._backend.xp
        query = accept("query", query, (self.batch_size, "num_query_heads", "num_queries", self.config.head_dim), self._backend)
        attended = []
        for row, pair in enumerate(self._rows):
            asked, keys, values = (xp.permute_dims(each, (1, 0, 2)) for each in (query[row, ...], *pair))
            out = attention(asked, keys, values, scale=scale, causal=causal, backend=self._backend)
            attended.append(xp.permute_dims(out, (1, 0, 2)))
        return xp.stack(attended)

    def _new_rows(
        self, keys: Array, values: Array, counts: Sequence[int] | None, left: bool, rows: int | str, what: str
    ) -> list[tuple[Array, Array]]:
        """The tokens of each row of keys and values, as copies. Raises as `append` does."""
        config, xp = self.config, self._backend.xp
        keys, values = accept_pair(keys, values, (rows, config.num_kv_heads, "n", config.head_dim), self._backend)
        number, _, columns, _ = keys.shape
        counted = [columns] * number if counts is None else _checked_counts(counts, [columns] * number)
        old = [self.length(row) for row in range(number)] if what == "append" else [0] * number
        if (most := max(map(sum, zip(old, counted, strict=True)), default=0)) > config.max_tokens:
            raise CapacityExceeded(f"{what}: expected at most {config.max_tokens} tokens in a row, got {most}")
        parts = []
        for row, count in enumerate(counted):
            start = columns - count if left else 0
            chosen = self._backend.asarray(np.arange(start, start + count))
            new_keys, new_values = (xp.take(part[row, ...], chosen, axis=1) for part in (keys, values))  # copies
            parts.append((new_keys, new_values))
        return parts

    def _row(self, row: int) -> int:
        return in_range(row, self.batch_size, RowOutOfRange, "row")


def _checked_counts(counts: Sequence[int], most: Sequence[int]) -> list[int]:
    """Counts as integers. Raises ShapeMismatch unless there is one per row, PositionOutOfRange unless each is in [0, most]."""
    if len(counts) != len(most):
        raise ShapeMismatch(f"counts: expected {len(most)} counts, one per row, got {len(counts)}")
    return [in_range(count, limit + 1, PositionOutOfRange, "count") for count, limit in zip(counts, most, strict=True)]
