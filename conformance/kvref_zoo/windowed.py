"""Wrong windowed caches."""

from dataclasses import replace
from typing import Any

import numpy as np

import kvref
from kvref.attention import Read
from kvref_zoo.mutant import mutant


@mutant("MOVE-01", seen_in="ml-explore/mlx-swift-lm#443")
class MovingLoadRestartsPositions(kvref.WindowedCache):
    """`load` restores keys and values and not the number of evicted tokens before them: later tokens get wrong positions."""

    def load(self, data: Any) -> None:
        super().load(data)
        held = self._store.read(self._slots(self._positions()))
        self.clear()
        self.append(*held)


@mutant("WIN-07", also="WIN-06")
class WindowedChunkIsAWindow(kvref.WindowedCache):
    """Chunked attention is computed with a sliding window of the same length.

    The first tokens of a chunk see the chunk before.
    """

    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(config)
        self._sight = kvref.Sight(config.window, config.sinks)


@mutant("WIN-04", also="MOVE-01 WIN-05")
class WindowedCountsCalls(kvref.WindowedCache):
    """The window is counted in calls instead of tokens.

    A prompt is one call, and is stored until as many further calls were made.
    """

    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(replace(config, rollback=2**12))
        self.config, self._ends = config, list[int]()

    def _write(self, keys: Any, values: Any) -> None:
        super()._write(keys, values)
        self._ends.append(self.length)
        kept = self.config.window + self.config.rollback
        if len(self._ends) > kept:
            self._first = max(self._first, min(self._ends[-kept - 1], self.length - kept))


@mutant("WIN-05", also="LAW-04 LAW-05 MOVE-01 WIN-03 WIN-06 WIN-07 WIN-10")
class WindowedEvictsSinks(kvref.WindowedCache):
    """The ring uses all slots, also those of the sink tokens: sink tokens are overwritten."""

    def _slots(self, positions: Any) -> Any:
        return np.asarray(positions) % (self.config.sinks + self._ring)


@mutant(
    "WIN-03",
    also="EDIT-02 LAW-04 LAW-05 MOVE-01 WIN-01 WIN-02 WIN-05 WIN-06 WIN-07 WIN-10",
    seen_in="huggingface/transformers#37574",
)
class WindowedFullRingOverwritesTheNewest(kvref.WindowedCache):
    """A ring that is exactly full is treated as having room: the next token overwrites the newest token instead of the oldest."""

    def _slots(self, positions: Any) -> Any:
        behind, ring = np.asarray(positions) - self.config.sinks, self._ring
        place = np.where(behind == ring, ring - 1, behind % ring)
        return np.where(behind < 0, positions, self.config.sinks + place)


@mutant("WIN-02", also="LAW-05 WIN-01 WIN-03 WIN-05 WIN-06 WIN-07 WIN-10", seen_in="pytorch/executorch#20346")
class WindowedLongStepOverwrites(kvref.WindowedCache):
    """A long step is written to the ring before it is read: tokens that its first queries see are overwritten."""

    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        if not len(at):
            return super()._attended(query, at, read, positions, scale)
        left = np.flatnonzero((positions < self.config.sinks) | (positions > at[-1] - self._ring))
        keys, values = (part[left] for part in read(0, len(positions)))
        return super()._attended(query, at, lambda start, stop: (keys[start:stop], values[start:stop]), positions[left], scale)


@mutant("WIN-01", also="MOVE-01 WIN-02 WIN-03 WIN-05 WIN-06")
class WindowedMaskBySlot(kvref.WindowedCache):
    """The mask uses slots of the ring as positions: after the ring has wrapped, the wrong tokens are masked."""

    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        if self.config.chunk or len(at) != 1:
            return super()._attended(query, at, read, positions, scale)
        slots = self._slots(positions)
        order = np.argsort(slots)
        last = np.full(1, slots.max(initial=-1))
        keys, values = (part[order] for part in read(0, len(positions)))
        return super()._attended(query, last, lambda start, stop: (keys[start:stop], values[start:stop]), slots[order], scale)


@mutant("WIN-01", also="ATTN-07 LAW-05 MOVE-01 WIN-02 WIN-03 WIN-05 WIN-06 WIN-10")
class WindowedOneTooLong(kvref.WindowedCache):
    """The window counts the tokens before the query without the query's own: each query sees one token too many."""

    class Sight(kvref.Sight):
        def first(self, query: Any) -> Any:
            return super().first(query) - (not self.chunk)

    def __init__(self, config: kvref.WindowedConfig) -> None:
        super().__init__(config)
        self._sight = self.Sight(config.window, config.sinks, config.chunk)


@mutant("WIN-01", also="EDIT-02 LAW-05 LAW-08 LAW-17 MOVE-01 WIN-02 WIN-03 WIN-04 WIN-05 WIN-06 WIN-07 WIN-10")
class WindowedOneTooShort(kvref.WindowedCache):
    """The ring contains as many tokens as the window before the next token is added.

    The oldest token is evicted one step too early.
    """

    def _write(self, keys: Any, values: Any) -> None:
        super()._write(keys, values)
        if self.config.window > 1:
            self._first = max(self._first, min(self.length, self.length - self._ring + 2))


@mutant("WIN-02", also="LAW-05 WIN-01 WIN-03 WIN-05 WIN-06 WIN-07 WIN-10", seen_in="Lightning-AI/litgpt#2182")
class WindowedPromptSeesAhead(kvref.WindowedCache):
    """All queries of a prompt see every token in the ring, also tokens after their own position."""

    def _attended(self, query: Any, at: Any, read: Read, positions: Any, scale: float | None) -> Any:
        return super()._attended(query, np.full(len(at), positions.max(initial=-1)), read, positions, scale)


@mutant("WIN-03", also="LAW-04 LAW-05 WIN-05 WIN-06 WIN-10")
class WindowedReadsSlots(kvref.WindowedCache):
    """`read` uses positions as slots of the ring, which is wrong after the ring has wrapped."""

    def read(self, positions: Any) -> Any:
        super().read(positions)
        return self._store.read(np.array(positions, np.int64) % (self.config.sinks + self._ring))


@mutant("WIN-05", also="LAW-04 WIN-02 WIN-06")
class WindowedSinksFillTheWindow(kvref.WindowedCache):
    """Sink tokens use slots of the window: if there are as many sink tokens as the window has slots, no new token is stored."""

    def _write(self, keys: Any, values: Any) -> None:
        if self.config.sinks >= self.config.window and self.length >= self.config.sinks:
            keys, values = np.zeros_like(keys), np.zeros_like(values)
        super()._write(keys, values)


@mutant("WIN-06", also="MOVE-01 WIN-03")
class WindowedTruncatesToOverwrittenTokens(kvref.WindowedCache):
    """`truncate` changes only the length: tokens that a rejected draft has overwritten are treated as still stored."""

    def truncate(self, length: int) -> None:
        if isinstance(length, int) and 0 <= length < self.length:
            self._first = max(self.config.sinks, min(self._first, length - self._ring))
        super().truncate(length)
