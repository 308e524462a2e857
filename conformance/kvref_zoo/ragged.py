"""Wrong ragged batches."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant

AFTER_READ = "RAGGED-03 RAGGED-05 RAGGED-06 RAGGED-07 RAGGED-08 RAGGED-09 RAGGED-10"  # their checks read rows


def pad_left(array: Any, count: int) -> Any:
    """Put `count` columns of zeros before the tokens of a row."""
    return np.pad(array, ((0, 0), (count, 0), (0, 0)))


@mutant("RAGGED-01", also=AFTER_READ, seen_in="ml-explore/mlx-lm#1746")
class RaggedReadsRightPadding(kvref.RaggedCache):
    """Padding on the right is moved to the left by the next call that changes something. Rows that are read before it
    contain the padding."""

    _padding: Any = None  # per row of the last append

    def append(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        super().append(keys, values, counts, left)
        moved = counts is None or left
        self._padding = None if moved else [(keys[row, :, n:], values[row, :, n:]) for row, n in enumerate(counts)]

    def extend(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        super().extend(keys, values, counts, left)
        self._padding = None

    def filter(self, rows: Any) -> None:
        super().filter(rows)
        self._padding = None

    def trim(self, counts: Any) -> None:
        super().trim(counts)
        self._padding = None

    def read(self, row: int) -> tuple[Any, Any]:
        keys, values = super().read(row)
        if self._padding is not None:
            keys, values = (np.concatenate(parts, axis=1) for parts in zip((keys, values), self._padding[row], strict=True))
        return keys, values


@mutant("RAGGED-02", also=f"RAGGED-01 {AFTER_READ}", seen_in="unslothai/unsloth#3699")
class RaggedOneLengthForAllRows(kvref.RaggedCache):
    """The position of the next token is computed for the whole batch: shorter rows generate from wrong positions."""

    def length(self, row: int) -> int:
        super().length(row)
        return max(int(keys.shape[1]) for keys, _ in self._rows)

    def trim(self, counts: Any) -> None:
        length = self.length
        self.length = super().length  # type: ignore[method-assign]
        try:
            super().trim(counts)
        finally:
            self.length = length  # type: ignore[method-assign]


@mutant("RAGGED-04", also="RAGGED-03 RAGGED-06 RAGGED-07 RAGGED-08", seen_in="Blaizzy/mlx-vlm#1946")
class RaggedAttendsToPadding(kvref.RaggedCache):
    """The mask does not exclude the padding before shorter rows: the output of a row depends on the lengths of the others."""

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        rows = self._rows
        longest = max(keys.shape[1] for keys, _ in rows)
        self._rows = [tuple(pad_left(part, longest - part.shape[1]) for part in row) for row in rows]
        try:
            return super().attend(query, scale, causal)
        finally:
            self._rows = rows


@mutant("RAGGED-04", seen_in="lablup/mlxcel#75")
class RaggedMaskOfOneRow(kvref.RaggedCache):
    """The offset of the causal mask is that of the first row, for all rows: queries see later tokens, or too few."""

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        if not causal:
            return super().attend(query, scale)
        rows, out = self._rows, []
        for number in range(query.shape[2]):
            end = rows[0][0].shape[1] - query.shape[2] + number + 1
            self._rows = [(keys[:, : max(0, end)], values[:, : max(0, end)]) for keys, values in rows]
            try:
                out.append(super().attend(query[:, :, number : number + 1], scale))
            finally:
                self._rows = rows
        return np.concatenate(out, axis=2) if out else super().attend(query, scale)


@mutant("RAGGED-06", also="RAGGED-03 RAGGED-07", seen_in="Blaizzy/mlx-vlm#1889")
class RaggedPaddingIsNotFiltered(kvref.RaggedCache):
    """`filter` selects rows of the arrays, and leaves the list with the padding of each row as it was."""

    def filter(self, rows: Any) -> None:
        before = self._rows
        super().filter(rows)
        lengths = [before[row][0].shape[1] for row in range(min(len(before), len(self._rows)))]
        kept = zip(self._rows, lengths, strict=False)
        shown = [
            tuple(pad_left(part, max(0, length - part.shape[1]))[:, max(0, part.shape[1] - length) :] for part in row)
            for row, length in kept
        ]
        self._rows = shown + self._rows[len(shown) :]


@mutant("RAGGED-07", also="RAGGED-03 RAGGED-10", seen_in="ml-explore/mlx-lm#1141")
class RaggedExtendByEmptyRows(kvref.RaggedCache):
    """If one side has no tokens yet, its placeholder has as many rows as the other side."""

    def extend(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        old, new = self._rows, keys.shape[0]
        super().extend(keys, values, counts, left)
        added = self._rows[len(old) :]
        if any(row[0].shape[1] for row in old) and not any(row[0].shape[1] for row in added):
            self._rows = old + [added[0]] * len(old)
        elif any(row[0].shape[1] for row in added) and not any(row[0].shape[1] for row in old):
            self._rows = [old[0]] * new + added


@mutant("RAGGED-08", also="RAGGED-04", seen_in="Blaizzy/mlx-vlm#1962")
class RaggedTrimZeroesTokens(kvref.RaggedCache):
    """All rows are trimmed by the smallest count. The other rejected tokens become zeros, which attention still sees."""

    _zeros: Any = ()

    def trim(self, counts: Any) -> None:
        super().trim(counts)
        self._zeros = [count - min(counts) for count in counts]

    def append(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        super().append(keys, values, counts, left)
        self._zeros = ()

    def extend(self, keys: Any, values: Any, counts: Any = None, left: bool = False) -> None:
        super().extend(keys, values, counts, left)
        self._zeros = ()

    def filter(self, rows: Any) -> None:
        super().filter(rows)
        self._zeros = ()

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        if not self._zeros or causal:
            return super().attend(query, scale, causal)
        rows = self._rows
        self._rows = [
            tuple(np.pad(part, ((0, 0), (0, count), (0, 0))) for part in row)  # type: ignore[misc]
            for row, count in zip(rows, self._zeros, strict=True)
        ]
        try:
            return super().attend(query, scale)
        finally:
            self._rows = rows
