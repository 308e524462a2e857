"""The cache of a decoder with cross-attention: tokens of the decoder, and beside them the source that every query of a row reads.

An encoder computes its outputs once per request. Their keys and values in one layer of the decoder are the *source* of a row:
they are written once, have no positions, and are not masked causally. The tokens of the decoder are those of a ragged batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvref.array import Array
from kvref.attention import attention
from kvref.backend import Backend, reference
from kvref.errors import (
    CapacityExceeded,
    PositionOutOfRange,
    RowOutOfRange,
    ShapeMismatch,
    SourceAlreadyWritten,
    SourceNotWritten,
    in_range,
    whole_fields,
)
from kvref.ragged import RaggedCache, RaggedConfig
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class CrossConfig:
    """Sizes of a CrossCache. Raises ConfigError (LAW-12).

    - `batch_size`: rows of a new cache.
    - `max_tokens`: tokens of the decoder per row, at most.
    - `max_source`: entries of a source, at most.
    """

    batch_size: int = 1
    num_kv_heads: int = 8
    head_dim: int = 128
    max_tokens: int = 448
    max_source: int = 1500

    def __post_init__(self) -> None:
        whole_fields(self, "batch_size", "num_kv_heads", "head_dim", "max_tokens", "max_source")


class CrossCache:
    """A cache of one layer with cross-attention, for a batch of rows (chapter CROSS). Keys and values are float32."""

    def __init__(self, config: CrossConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        sizes = {name: getattr(config, name) for name in ("batch_size", "num_kv_heads", "head_dim", "max_tokens")}
        self._tokens = RaggedCache(RaggedConfig(**sizes), backend)
        self._sources: list[tuple[Array, Array] | None] = [None] * config.batch_size  # [num_kv_heads, entries, head_dim] each

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return len(self._sources)

    def write_source(self, rows: Sequence[int], keys: Array, values: Array, counts: Sequence[int] | None = None) -> None:
        """Write the source of each row in `rows`: the first counts[i] columns of keys and values for rows[i] (CROSS-01).

        keys, values: [len(rows), num_kv_heads, n, head_dim]. counts: one integer in [0, n] per row of the arrays, n by default.
        The other columns are padding, which is not stored.

        Raises RowOutOfRange, ShapeMismatch, DtypeMismatch, PositionOutOfRange, CapacityExceeded if a source would have more than
        max_source entries, or SourceAlreadyWritten, also if a row repeats (CROSS-03).
        """
        config, xp = self.config, self._backend.xp
        chosen = [self._row(row) for row in rows]
        keys, values = accept_pair(keys, values, (len(chosen), config.num_kv_heads, "n", config.head_dim), self._backend)
        columns = keys.shape[2]
        counted = [columns] * len(chosen) if counts is None else list(counts)
        if len(counted) != len(chosen):
            raise ShapeMismatch(f"counts: expected {len(chosen)} counts, one per row, got {len(counted)}")
        counted = [in_range(count, columns + 1, PositionOutOfRange, "count") for count in counted]
        if (most := max(counted, default=0)) > config.max_source:
            raise CapacityExceeded(f"write_source: expected at most {config.max_source} entries in a source, got {most}")
        for at, row in enumerate(chosen):
            if self._sources[row] is not None or row in chosen[:at]:
                raise SourceAlreadyWritten(f"row {row} already has a source: clear the row before another one is written")
        for at, (row, count) in enumerate(zip(chosen, counted, strict=True)):
            new_keys, new_values = (xp.asarray(part[at, :, :count, :], copy=True) for part in (keys, values))
            self._sources[row] = new_keys, new_values

    def source_length(self, row: int) -> int:
        """Return the number of entries in the source of a row. Raises RowOutOfRange or SourceNotWritten."""
        return int(self._source(row)[0].shape[1])

    def read_source(self, row: int) -> tuple[Array, Array]:
        """Return the keys and values of a row's source as copies: float32 [num_kv_heads, source_length, head_dim] each.

        Raises RowOutOfRange or SourceNotWritten.
        """
        keys, values = self._source(row)
        xp = self._backend.xp
        return xp.asarray(keys, copy=True), xp.asarray(values, copy=True)

    def attend_source(self, query: Array, scale: float | None = None) -> Array:
        """Return cross-attention of each row over its whole source: float32 [batch_size, num_query_heads, num_queries, head_dim].

        query: [batch_size, num_query_heads, num_queries, head_dim]. scale: 1 / sqrt(head_dim) by default. Raises ShapeMismatch,
        DtypeMismatch, or SourceNotWritten if a row of the batch has no source.
        """
        xp = self._backend.xp
        query = accept("query", query, (self.batch_size, "num_query_heads", "num_queries", self.config.head_dim), self._backend)
        sources = [self._source(row) for row in range(self.batch_size)]
        attended = []
        for row, pair in enumerate(sources):
            asked, keys, values = (xp.permute_dims(each, (1, 0, 2)) for each in (query[row, ...], *pair))
            attended.append(xp.permute_dims(attention(asked, keys, values, scale=scale, backend=self._backend), (1, 0, 2)))
        return xp.stack(attended)

    def append(self, keys: Array, values: Array, counts: Sequence[int] | None = None) -> None:
        """Append counts[r] tokens of the decoder to each row r, whether or not it has a source (CROSS-08).

        Arguments and errors: as in `RaggedCache.append`, with padding on the right.
        """
        self._tokens.append(keys, values, counts)

    def trim(self, counts: Sequence[int]) -> None:
        """Remove the last counts[r] tokens of each row r. Sources stay (CROSS-04). Raises ShapeMismatch or PositionOutOfRange."""
        self._tokens.trim(counts)

    def length(self, row: int) -> int:
        """Return the number of tokens of a row, which is the position of its next token. Raises RowOutOfRange."""
        return self._tokens.length(row)

    def read(self, row: int) -> tuple[Array, Array]:
        """Return the keys and values of a row's tokens as copies: float32 [num_kv_heads, length, head_dim] each.

        Raises RowOutOfRange.
        """
        return self._tokens.read(row)

    def filter(self, rows: Sequence[int]) -> None:
        """Replace row i by the former row `rows[i]`, its source and its tokens, for all i at the same time (CROSS-06).

        rows: at least one, in any order. A row can repeat, and rows that are not listed are removed. Raises RowOutOfRange, also
        if there are no rows.
        """
        self._tokens.filter(rows)
        self._sources = [self._sources[self._row(row)] for row in rows]

    def clear(self, row: int) -> None:
        """Remove the source and the tokens of a row (CROSS-07). Raises RowOutOfRange."""
        row = self._row(row)
        self._tokens.trim([self.length(each) if each == row else 0 for each in range(self.batch_size)])
        self._sources[row] = None

    def _row(self, row: int) -> int:
        return in_range(row, self.batch_size, RowOutOfRange, "row")

    def _source(self, row: int) -> tuple[Array, Array]:
        """The source of a row. Raises RowOutOfRange or SourceNotWritten."""
        source = self._sources[self._row(row)]
        if source is None:
            raise SourceNotWritten(f"row {row} has no source: write it first, with 0 entries if there is none")
        return source
