"""Sequences that go in parts: some layers, tokens and heads each, in any order, and whole together (MOVE-05)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvref.contents import Saved, counter
from kvref.errors import ConfigError, FileDamaged, HeadOutOfRange, KVRefError, LayerOutOfRange, PositionOutOfRange, in_range

Span = Sequence[int] | None  # [start, stop], or all
FURTHEST = 2**31  # where the tokens of a file begin, at most: there is a place in a table for every block before


@dataclass(frozen=True)
class Whole:
    """A sequence as it was saved: the first position that was not released, and how long each layer is."""

    first: int
    lengths: tuple[int, ...]

    def tokens(self, part: "Part", layer: int) -> range:
        """The positions of a part that the layer has."""
        start, stop = max(self.first, part.tokens.start), min(self.lengths[layer], part.tokens.stop)
        return range(start, max(start, stop))

    def size(self, part: "Part") -> int:
        """How many rows of heads it has."""
        return len(part.heads) * sum(len(self.tokens(part, layer)) for layer in part.layers)


@dataclass(frozen=True)
class Part:
    layers: range
    tokens: range
    heads: range

    @classmethod
    def of(cls, whole: Whole, num_heads: int, layers: Span = None, tokens: Span = None, heads: Span = None) -> "Part":
        """Raises LayerOutOfRange, PositionOutOfRange or HeadOutOfRange for what the sequence does not have."""
        return cls(
            _span("layers", layers, len(whole.lengths), LayerOutOfRange),
            _span("tokens", tokens, max(whole.lengths), PositionOutOfRange),
            _span("heads", heads, num_heads, HeadOutOfRange),
        )

    def said(self) -> dict[str, list[int]]:
        """What a file says of it."""
        return {name: [span.start, span.stop] for name, span in vars(self).items()}

    def meets(self, other: "Part") -> bool:
        both = ((self.layers, other.layers), (self.tokens, other.tokens), (self.heads, other.heads))
        return all(max(one.start, two.start) < min(one.stop, two.stop) for one, two in both)


@dataclass
class Arriving:
    """A sequence of which some parts have come, in a table of its own that nobody reads."""

    table: int
    whole: Whole
    parts: list[Part] = field(default_factory=list)

    def check(self, whole: Whole, part: Part) -> None:
        """Raise ConfigError for a part of another sequence, or of what has come already."""
        if whole != self.whole:
            raise ConfigError(f"load: expected a part of {self.whole}, like the parts before it, got one of {whole}")
        if any(part.meets(other) for other in self.parts):
            raise ConfigError(f"load: part {part} was loaded already")

    def is_whole(self, everything: Part) -> bool:
        return sum(map(self.whole.size, self.parts)) == self.whole.size(everything)


def read_part(saved: Saved, num_layers: int, num_heads: int) -> tuple[Whole, Part]:
    """What a file has, and of what. Raises FileDamaged."""
    whole = Whole(saved.number("first", FURTHEST), tuple(saved.numbers("lengths", num_layers)))
    spans = {name: saved.numbers(name, 2) for name in ("layers", "tokens", "heads")}
    try:
        part = Part.of(whole, num_heads, **spans)
    except KVRefError as error:
        raise FileDamaged(f"file: {error}") from None
    for layer in part.layers:
        counter(saved.count(f"layers.{layer}.keys") - len(whole.tokens(part, layer)), f"tokens of layer {layer}", most=0)
    return whole, part


def _span(name: str, given: Span, stop: int, error: type[KVRefError]) -> range:
    if given is None:
        return range(stop)
    if not hasattr(given, "__len__") or len(given) != 2:
        raise error(f"{name}: expected [start, stop], got {given!r}")
    end = in_range(given[1], stop + 1, error, f"{name}, stop")
    return range(in_range(given[0], end + 1, error, f"{name}, start"), end)
