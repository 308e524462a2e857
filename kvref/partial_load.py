"""Saving and loading a sequence in parts: ranges of layers, tokens and heads, loaded in any order (MOVE-05, RECUR-17)."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from kvref.errors import ConfigError, FileDamaged, HeadOutOfRange, KVRefError, LayerOutOfRange, PositionOutOfRange, in_range
from kvref.snapshot import SavedState, counter

Span = Sequence[int] | None  # [start, stop), or None for all
FURTHEST = 2**31  # the largest first position of a file: the table has an entry for every block before it


@dataclass(frozen=True)
class SavedSequence:
    """The extent of a saved sequence: the first position that was not released (WIN-09), and the length of each layer."""

    first: int
    lengths: tuple[int, ...]

    def tokens(self, part: "Part", layer: int) -> range:
        """Return the positions of a part that have tokens in a layer."""
        start, stop = max(self.first, part.tokens.start), min(self.lengths[layer], part.tokens.stop)
        return range(start, max(start, stop))

    def size(self, part: "Part") -> int:
        """Return the number of rows in a part: one per token, layer and head."""
        return len(part.heads) * sum(len(self.tokens(part, layer)) for layer in part.layers)

    def describe(self, part: "Part") -> str:
        """Return the ranges of a part as words."""
        return ", ".join(f"{name} [{span.start}, {span.stop})" for name, span in vars(part).items())

    def __str__(self) -> str:
        return f"a sequence with the layer lengths {list(self.lengths)}, from position {self.first} on"


@dataclass(frozen=True)
class SavedRecurrentState(SavedSequence):
    """The extent of a saved recurrent state: one row per layer and head, whose position is the length of the state."""

    @classmethod
    def at(cls, length: int, num_layers: int) -> "SavedRecurrentState":
        """Return the extent of a state at this length."""
        return cls(length, (length + 1,) * num_layers)

    def describe(self, part: "Part") -> str:
        return f"layers [{part.layers.start}, {part.layers.stop}), heads [{part.heads.start}, {part.heads.stop})"

    def __str__(self) -> str:
        return f"a state at length {self.first}"


@dataclass(frozen=True)
class Part:
    """A part of a sequence: ranges of layers, positions and heads."""

    layers: range
    tokens: range
    heads: range

    @classmethod
    def of(cls, extent: SavedSequence, num_heads: int, layers: Span = None, tokens: Span = None, heads: Span = None) -> "Part":
        """Return the part of `extent` with these ranges, None for all.

        Raises LayerOutOfRange, PositionOutOfRange or HeadOutOfRange for a range outside the sequence.
        """
        return cls(
            checked_range("layers", layers, len(extent.lengths), LayerOutOfRange),
            checked_range("tokens", tokens, max(extent.lengths), PositionOutOfRange),
            checked_range("heads", heads, num_heads, HeadOutOfRange),
        )

    def to_json(self) -> dict[str, list[int]]:
        """Return the part as JSON values for a file's state."""
        return {name: [span.start, span.stop] for name, span in vars(self).items()}


@dataclass
class PendingLoad:
    """New contents of a sequence, of which only some parts are loaded.

    The sequence keeps its old contents meanwhile. The new ones are in a `room` of their own, the number of a table or, in a
    recurrent cache, of a block. When all parts are loaded, they replace the contents of the sequence. No two parts overlap, and
    all parts are of the same saved sequence, `extent`.

    num_rows: the rows that are loaded, one per token, layer and head.
    """

    room: int
    extent: SavedSequence
    num_rows: int = 0
    _loaded: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)  # token ranges by layer and head, sorted

    def check(self, extent: SavedSequence, part: Part) -> None:
        """Raise ConfigError if `extent` differs from the first part's, or if `part` overlaps a part that is loaded."""
        if extent != self.extent:
            raise ConfigError(f"load: expected a part of {self.extent}, like the earlier parts, got one of {extent}")
        if self.overlaps(part):
            raise ConfigError(f"load: expected a part that does not overlap the earlier parts, got {extent.describe(part)}")

    def overlaps(self, part: Part) -> bool:
        """Return whether a token of a layer and head of `part` is loaded."""
        for place in product(part.layers, part.heads) if part.tokens else ():
            ranges = self._loaded.get(place, [])
            at = bisect_left(ranges, (part.tokens.stop, 0))  # the ranges before it begin before the part ends
            if at and ranges[at - 1][1] > part.tokens.start:
                return True
        return False

    def add(self, part: Part) -> None:
        """Record that a part is loaded. It must not overlap another."""
        self.num_rows += self.extent.size(part)
        for place in product(part.layers, part.heads) if part.tokens else ():
            insort(self._loaded.setdefault(place, []), (part.tokens.start, part.tokens.stop))

    def is_complete(self, everything: Part) -> bool:
        """Return whether all parts are loaded. everything: the part that is the whole sequence."""
        return self.num_rows == self.extent.size(everything)


def read_part(saved: SavedState, num_layers: int, num_heads: int) -> tuple[SavedSequence, Part]:
    """Return the extent of the saved sequence and the part that a file contains. Raises FileDamaged."""
    extent = SavedSequence(saved.number("first", FURTHEST), tuple(saved.numbers("lengths", num_layers)))
    spans = {name: saved.numbers(name, 2) for name in ("layers", "tokens", "heads")}
    try:
        part = Part.of(extent, num_heads, **spans)
    except KVRefError as error:
        raise FileDamaged(f"file: {error}") from None
    for layer in part.layers:
        counter(saved.count(f"layers.{layer}.keys") - len(extent.tokens(part, layer)), f"tokens of layer {layer}", most=0)
    return extent, part


def checked_range(name: str, given: Span, stop: int, error: type[KVRefError]) -> range:
    """Return `given`, [start, stop), as a range within [0, stop), and None as all of it. Raises `error`."""
    if given is None:
        return range(stop)
    if not hasattr(given, "__len__") or len(given) != 2:
        raise error(f"{name}: expected [start, stop], got {given!r}")
    end = in_range(given[1], stop + 1, error, f"{name}, stop")
    return range(in_range(given[0], end + 1, error, f"{name}, start"), end)
