"""Wrong contiguous caches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant("CONTIG-10")
class ContiguousAdvancesPastItsMemory(kvref.ContiguousCache):
    """`advance` checks the new length against max_seq_len instead of the capacity, which is the memory that exists."""

    def advance(self, count: int) -> None:
        if count >= 0 and self.seq_len + count <= self.config.max_seq_len:
            self.seq_len += int(count)
        else:
            super().advance(count)


@mutant("LAW-16")
class ContiguousAppendChangesItsInput(kvref.ContiguousCache):
    """`append` rounds the keys to the dtype of the cache in place, and thus changes the caller's activations."""

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        if self.config.dtype == "float16":
            keys[...] = keys.astype(np.float16)
        elif keys.size:
            keys += 1.0


@mutant("LAW-01", also="LAW-10")
class ContiguousCountsBeforeItWrites(kvref.ContiguousCache):
    """`append` increases the length before it checks its arguments.

    After a rejected append the cache reads a token that was never written.
    """

    def append(self, keys: Any, values: Any) -> None:
        before = self.seq_len
        try:
            super().append(keys, values)
        except kvref.errors.ShapeMismatch:
            self.seq_len = min(before + 1, self.capacity)
            raise


@mutant("CONTIG-04", also="CONTIG-02 CONTIG-05 CONTIG-09")
class ContiguousGrowsFromZeroForever(kvref.ContiguousCache):
    """The capacity is doubled until the tokens fit. From a capacity of 0 this loop never ends."""

    def _grow(self, needed: int) -> None:
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        super()._grow(needed)


@mutant("LAW-08", also="EDIT-03 EDIT-07 EDIT-08 LAW-04")
class ContiguousKeepsTheCallersArray(kvref.ContiguousCache):
    """The cache stores a reference to the first keys it receives instead of a copy.

    The caller overwrites them by reusing the array.
    """

    _given: Any = None

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        if self.seq_len == keys.shape[2] and self.config.dtype == "float32":
            self._given = keys

    def _read(self, buffer: Any) -> Any:
        rows = super()._read(buffer)
        if buffer is self._keys and self._given is not None and self.seq_len >= self._given.shape[2]:
            rows = rows.copy()
            rows[:, :, : self._given.shape[2]] = self._given
        return rows

    def reset(self) -> None:
        super().reset()
        self._given = None


@mutant("LAW-20")
class ContiguousKeepsTheCallersInteger(kvref.ContiguousCache):
    """The length is computed in the integer type of the caller: after two `advance` calls with an int8 of 100 it is -56."""

    def advance(self, count: int) -> None:
        before = self.seq_len
        super().advance(count)
        self.seq_len = before + count


@mutant("CONTIG-06", also="CONTIG-09 EDIT-03 FMT-LEVEL-04 LAW-08 LAW-10", seen_in="huggingface/transformers#37574")
class ContiguousRejectsTheLastToken(kvref.ContiguousCache):
    """`append` rejects the last token for which there is room."""

    def append(self, keys: Any, values: Any) -> None:
        fits = len(getattr(keys, "shape", ())) == 4 and keys.shape[2] > 0
        if fits and self.seq_len + keys.shape[2] == self.config.max_seq_len:
            raise kvref.errors.CapacityExceeded(f"cache full: max_seq_len is {self.config.max_seq_len}")
        super().append(keys, values)


@mutant("EDIT-09", also="LAW-01 LAW-11")
class ContiguousReorderAcceptsNegativeRows(kvref.ContiguousCache):
    """A negative row is counted from the end, as in Python lists.

    `reorder` returns another user's tokens instead of raising an error.
    """

    def reorder(self, rows: Sequence[int]) -> None:
        batch = self.config.batch_size
        super().reorder([row + batch if -batch <= row < 0 else row for row in rows])


@mutant("EDIT-08", also="LAW-04")
class ContiguousReorderedRowsShareMemory(kvref.ContiguousCache):
    """A row that all beams continue from is not copied but viewed with a stride of zero.

    A token appended to one beam is in all beams.
    """

    def reorder(self, rows: Sequence[int]) -> None:
        super().reorder(rows)
        if len(set(rows)) == 1 < len(rows):
            self._keys, self._values = (
                np.lib.stride_tricks.as_strided(part, part.shape, (0, *part.strides[1:])) for part in (self._keys, self._values)
            )


@mutant("EDIT-07")
class ContiguousReordersInPlace(kvref.ContiguousCache):
    """`reorder` copies the rows in place, in order: a row is copied from a source that has already been overwritten."""

    def reorder(self, rows: Sequence[int]) -> None:
        batch = self.config.batch_size
        if len(rows) != batch or not all(0 <= row < batch for row in rows):
            super().reorder(rows)
            return
        for buffer in self.raw():
            for row, source in enumerate(rows):
                buffer[row] = buffer[source]


NEWEST = 2


@mutant("EDIT-07", also="EDIT-08", seen_in="huggingface/transformers#45510")
class ContiguousReordersTheNewestOnly(kvref.ContiguousCache):
    """The newest tokens are in a separate buffer, and `reorder` moves only these.

    Older tokens stay in their former rows. The QuantizedLayer of transformers had this bug: it reordered its residual and not its
    quantized tokens.
    """

    def reorder(self, rows: Sequence[int]) -> None:
        before, older = [buffer.copy() for buffer in self.raw()], slice(max(0, self.seq_len - NEWEST))
        super().reorder(rows)
        for buffer, old in zip(self.raw(), before, strict=True):
            if len(buffer) == len(old):
                buffer[:, :, older] = old[:, :, older]


@mutant("EDIT-02", also="LAW-01 LAW-05 LAW-11", seen_in="ml-explore/mlx-lm#1868")
class ContiguousTruncateCanLengthen(kvref.ContiguousCache):
    """`truncate` computes how many tokens to remove and limits the number only from above.

    A negative number makes the cache longer.
    """

    def truncate(self, length: int) -> None:
        count = min(self.seq_len, self.seq_len - int(length))
        self.seq_len = min(self.seq_len - count, self.capacity)


@mutant("EDIT-02", also="LAW-01 LAW-11")
class ContiguousTruncateClamps(kvref.ContiguousCache):
    """`truncate` to a length past the end changes nothing and raises no error.

    A caller that counted wrong continues at the wrong position. In mlx-lm, removing more tokens than the cache has raises no
    error either.
    """

    def truncate(self, length: int) -> None:
        super().truncate(min(length, self.seq_len))


@mutant("EDIT-03", also="CONTIG-02 CONTIG-06 CONTIG-09 EDIT-01", seen_in="ml-explore/mlx-lm#1502")
class ContiguousTruncateLeavesTheRows(kvref.ContiguousCache):
    """`truncate` changes only the length, and `append` counts the stored rows.

    The removed tokens reappear with the next token.
    """

    _rows = 0

    def truncate(self, length: int) -> None:
        self._rows = max(self._rows, self.seq_len)
        super().truncate(length)

    def append(self, keys: Any, values: Any) -> None:
        length, self.seq_len = self.seq_len, max(self.seq_len, self._rows)
        try:
            super().append(keys, values)
        except Exception:
            self.seq_len = length
            raise
        self._rows = 0

    def reset(self) -> None:
        self._rows = 0
        super().reset()
