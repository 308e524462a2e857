"""Wrong caches with cross-attention."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant("CROSS-01", also="CROSS-02 CROSS-03 CROSS-04 CROSS-05 CROSS-06 CROSS-07 CROSS-09", seen_in="RBLN-SW/vllm-rbln#549")
class CrossSourcesByOrderOfTheCall(kvref.CrossCache):
    """The first source of a call is read by the first row that has none, whichever row it was written for."""

    def write_source(self, rows: Any, keys: Any, values: Any, counts: Any = None) -> None:
        super().write_source(rows, keys, values, counts)
        new = [self._sources[row] for row in rows]
        for row, source in zip(sorted(rows), new, strict=True):
            self._sources[row] = source


@mutant("CROSS-03", seen_in="guandeh17/Self-Forcing#78")
class CrossSourceIsWrittenAtEveryStep(kvref.CrossCache):
    """The flag that a source is present is lost: a second source replaces the first."""

    def write_source(self, rows: Any, keys: Any, values: Any, counts: Any = None) -> None:
        before = self._sources
        known = set(rows) & set(range(len(before)))
        self._sources = [None if row in known else source for row, source in enumerate(before)]
        try:
            super().write_source(rows, keys, values, counts)
        except BaseException:
            self._sources = before
            raise


@mutant("CROSS-04", seen_in="huggingface/transformers#31166")
class CrossTrimCutsSources(kvref.CrossCache):
    """Rejected drafts are removed from both parts: the end of the source is lost."""

    def trim(self, counts: Any) -> None:
        super().trim(counts)
        for row, (source, count) in enumerate(zip(self._sources, counts, strict=True)):
            if source is not None and count:
                keys, values = source
                kept = max(0, keys.shape[1] - count)
                self._sources[row] = keys[:, :kept], values[:, :kept]


@mutant("CROSS-05", also="CROSS-02 CROSS-06 CROSS-07 LAW-10", seen_in="sgl-project/sglang#25045")
class CrossLengthOfTheFirstSource(kvref.CrossCache):
    """Attention uses the length of the first row's source for all rows: longer sources are cut."""

    def attend_source(self, query: Any, scale: float | None = None) -> Any:
        sources = self._sources
        if None in [source if source is None else 0 for source in sources]:
            return super().attend_source(query, scale)
        first = self.source_length(0)
        self._sources = [source and (source[0][:, :first], source[1][:, :first]) for source in sources]
        try:
            return super().attend_source(query, scale)
        finally:
            self._sources = sources


@mutant("CROSS-05", also="CROSS-02 CROSS-04 CROSS-06 CROSS-07 LAW-10", seen_in="ggml-org/whisper.cpp#3941")
class CrossPaddingIsNotMasked(kvref.CrossCache):
    """Sources are padded to a multiple of 4 entries, and the padding is not masked: keys of zeros get a part of the weight."""

    def attend_source(self, query: Any, scale: float | None = None) -> Any:
        sources = self._sources
        self._sources = [source and tuple(_pad(part) for part in source) for source in sources]
        try:
            return super().attend_source(query, scale)
        finally:
            self._sources = sources


def _pad(part: Any) -> Any:
    """Entries [num_kv_heads, n, head_dim] with zeros up to the next multiple of 4."""
    return np.pad(part, ((0, 0), (0, -part.shape[1] % 4), (0, 0)))


@mutant("CROSS-06", also="CROSS-05", seen_in="facebookresearch/fairseq2#307")
class CrossSourcesAreNotReordered(kvref.CrossCache):
    """Sources are selected only if the number of rows changes, as if all rows were beams of one request."""

    def filter(self, rows: Any) -> None:
        before = self._sources
        super().filter(rows)
        if len(rows) == len(before):
            self._sources = before


@mutant("CROSS-07", also="CROSS-01 CROSS-06", seen_in="ggml-org/whisper.cpp#3941")
class CrossOldEntriesFollowAShorterSource(kvref.CrossCache):
    """A source is read with the length of the former one if it is shorter: old entries follow it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._old: dict[int, Any] = {}

    def clear(self, row: int) -> None:
        source = self._sources[row] if row in range(self.batch_size) else None
        super().clear(row)
        self._old[row] = source

    def filter(self, rows: Any) -> None:
        super().filter(rows)
        self._old = {}

    def write_source(self, rows: Any, keys: Any, values: Any, counts: Any = None) -> None:
        super().write_source(rows, keys, values, counts)
        for row in rows:
            old, new = self._old.pop(row, None), self._sources[row]
            if old is not None and new is not None:
                keys, values = (
                    np.concatenate([part, before[:, part.shape[1] :]], axis=1) for part, before in zip(new, old, strict=True)
                )
                self._sources[row] = keys, values
