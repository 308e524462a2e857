"""Content that identifies its place: each number is a hash of its stream, layer, position, head, element, and key or value.

The expected number of any place can be computed, so that nothing has to be stored however many tokens there are, and the right
place of a misplaced row can be found. A number is never 0, has 8 significant bits and a magnitude between 2^-8 and 2^7, so that
float16, bfloat16 and float32 represent it exactly. Each row has a power of two as a common factor, so that quantized rows differ
in their scales, and a scale in the place of another shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.testlib.assertions import assert_shape

LEAST_EXPONENT = -8
KEYS, VALUES = 0, 1
PREFIXES = 2**20  # streams with this number or a larger one are prefixes that several sequences share
EDITED = 2**21  # stream n + k * EDITED has the tokens that sequence n appended after its k-th edit
MAX_EDITS = 100  # of one sequence: token ids, which depend on the stream, stay below 2^52
PARTS = ("keys", "values")
MAX_SHOWN_NUMBERS = 4  # elements of a row that messages show, and by which a row is looked up
MAX_SHIFT = 8  # the largest shift of a row, in elements, that is recognized

Positions = Sequence[int] | NDArray


class TokenCoordinates(NamedTuple):
    """The place of a row of head_dim numbers. stream: the number of a sequence, cache or request, chosen by the check."""

    stream: int
    layer: int
    position: int
    head: int
    part: int  # KEYS or VALUES

    def __str__(self) -> str:
        edits, number = divmod(self.stream, EDITED)
        stream = f"sequence {number}" if number < PREFIXES else f"shared prefix {number - PREFIXES}"
        stream += f" after edit {edits}" if edits else ""
        return f"{stream}, position {self.position}, layer {self.layer}, head {self.head}, {PARTS[self.part]}"


def token_content(stream: Positions | int, layer: int, positions: Positions, heads: int, dim: int, part: int) -> NDArray:
    """The keys or values at these positions, float32 [n, heads, dim]. stream: one for all positions, or one per position."""
    streams = np.asarray(stream)[..., None]
    return _numbers(_rows(streams, layer, np.asarray(positions)[:, None], np.arange(heads), part), np.arange(dim))


def content_pair(stream: Positions | int, layer: int, positions: Positions, heads: int, dim: int) -> tuple[NDArray, NDArray]:
    """Keys and values, float32 [n, heads, dim] each."""
    return token_content(stream, layer, positions, heads, dim, KEYS), token_content(stream, layer, positions, heads, dim, VALUES)


def _rows(stream: NDArray | int, layer: NDArray | int, position: NDArray, head: NDArray, part: NDArray | int) -> NDArray:
    """The hash of each row, uint32. The coordinates broadcast against each other."""
    mixed = np.zeros((), np.uint32)
    for coordinate in (part, stream, layer, head, position):
        mixed = _mix_bits(mixed ^ (np.asarray(coordinate).astype(np.uint32) + np.uint32(0x9E3779B9)))
    return mixed


def _numbers(rows: NDArray, elements: NDArray) -> NDArray:
    """The numbers float32 [..., elements]: sign, exponent and 7 bits of mantissa are taken from the hash of each element."""
    mixed = _mix_bits(rows[..., None] + elements.astype(np.uint32) * np.uint32(0x9E3779B9))
    exponent = (mixed >> np.uint32(20)) & np.uint32(7)
    exponent += (rows >> np.uint32(29))[..., None] + np.uint32(127 + LEAST_EXPONENT)
    exponent <<= np.uint32(23)
    exponent |= mixed & np.uint32(0x80000000)
    exponent |= (mixed & np.uint32(0x7F)) << np.uint32(16)
    return exponent.view(np.float32)


def _mix_bits(x: NDArray) -> NDArray:
    """Mix the bits of 32-bit integers (Chris Wellons' hash lowbias32, a bijection)."""
    with np.errstate(over="ignore"):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x ^= x >> np.uint32(15)
        x = x * np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
    return x


class ContentRun(NamedTuple):
    """Tokens from position `start` of a sequence on: those of `stream`, from its position `first` on."""

    start: int
    stream: int
    first: int


@dataclass
class SequenceContent:
    """The content of a sequence that is forked, truncated and cut: a list of runs, of which the last one has no end.

    number: the stream of the tokens that it appends itself; another one after each truncation, so that tokens that were removed
    differ from those that are appended in their places.
    """

    number: int
    runs: list[ContentRun] = field(default_factory=list)
    edits: int = 0

    def __post_init__(self) -> None:
        self.runs = self.runs or [ContentRun(0, self.number, 0)]

    @classmethod
    def after_prefix(cls, number: int, prefix: int, shared: int) -> "SequenceContent":
        """The content of a sequence whose first `shared` tokens are those of the stream `prefix`."""
        return cls(number, [ContentRun(0, prefix, 0), ContentRun(shared, number, shared)] if shared else [])

    def at(self, positions: Positions) -> tuple[NDArray, NDArray]:
        """The stream of each of these positions, and the position in that stream."""
        where = np.asarray(positions, np.int64)
        runs = np.array(self.runs, np.int64)
        runs = runs[np.searchsorted(runs[:, 0], where, side="right") - 1].reshape(-1, 3)
        return runs[:, 1], where - runs[:, 0] + runs[:, 2]

    def end(self, length: int) -> tuple[int, int]:
        """The stream of the next token of a sequence with `length` tokens, and its position in that stream."""
        return self.runs[-1].stream, length - self.runs[-1].start + self.runs[-1].first

    def pair(self, layer: int, positions: Positions, heads: int, dim: int) -> tuple[NDArray, NDArray]:
        """Keys and values, float32 [n, heads, dim] each."""
        streams, places = self.at(positions)
        return content_pair(streams, layer, places, heads, dim)

    def fork(self, number: int, length: int) -> "SequenceContent":
        """The content of a child, which appends its own tokens at `length`."""
        return SequenceContent(number, self._before(length, number))

    def truncate(self, length: int) -> None:
        self.edits += 1
        self.runs = self._before(length, self.number + self.edits * EDITED)

    def remove(self, start: int, stop: int) -> None:
        """Remove the tokens at [start, stop). Later tokens move to the front."""
        (stream,), (first,) = self.at([stop])
        moved = [run._replace(start=run.start - (stop - start)) for run in self.runs if run.start > stop]
        self.runs = [run for run in self.runs if run.start < start] + [ContentRun(start, int(stream), int(first)), *moved]

    def _before(self, length: int, number: int) -> list[ContentRun]:
        return [run for run in self.runs if run.start < length] + [ContentRun(length, number, length)]


@dataclass
class WrittenContent:
    """The places that were written, in which rows are looked up.

    tokens: the number of tokens by stream and layer, including tokens that were removed since.
    """

    heads: int
    dim: int
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_up_to(self, stream: int, layer: int, stop: int) -> None:
        """Record that positions [0, stop) were written."""
        self.tokens[stream, layer] = max(stop, self.tokens.get((stream, layer), 0))

    def add_range(self, content: SequenceContent, layer: int, positions: range) -> None:
        """Record that these positions of a sequence were written."""
        streams, places = content.at(positions)
        for stream in np.unique(streams):
            self.add_up_to(int(stream), layer, int(places[streams == stream].max()) + 1)

    def find_place(self, row: NDArray) -> TokenCoordinates | None:
        """The place whose content equals the row [dim], or None."""
        for (stream, layer), count in self.tokens.items():
            for part in (KEYS, VALUES):
                rows = _rows(stream, layer, np.arange(count)[:, None], np.arange(self.heads), part)
                alike = (_numbers(rows, np.arange(min(MAX_SHOWN_NUMBERS, self.dim))) == row[:MAX_SHOWN_NUMBERS]).all(axis=-1)
                for position, head in np.argwhere(alike):
                    found = TokenCoordinates(stream, layer, int(position), int(head), part)
                    if np.array_equal(row_at(found, self.dim), row):
                        return found
        return None


def row_at(place: TokenCoordinates, dim: int) -> NDArray:
    """The row at this place, float32 [dim]."""
    row = _rows(place.stream, place.layer, np.asarray(place.position), np.asarray(place.head), place.part)
    return _numbers(row, np.arange(dim))


def describe_row(row: NDArray, place: TokenCoordinates, written: WrittenContent) -> str:
    """A description of a wrong row: the row of another place, zeros, the right row shifted or partly wrong, or unknown."""
    own = row_at(place, len(row))
    if not row.any():
        return "zeros"
    if (owner := written.find_place(row)) is not None:
        return f"the row of {owner}"
    differs = np.flatnonzero(row != own)
    first, last = int(differs[0]), int(differs[-1])
    if len(differs) < len(row) and not row[differs].any():
        return f"its own row, but zeros in {len(differs)} elements, from {first} to {last}"
    for by in range(1, min(MAX_SHIFT, len(row) // 2) + 1):
        if np.array_equal(row[by:], own[:-by]) or np.array_equal(row[:-by], own[by:]):
            return f"its own row, shifted by {by} element{'s' if by > 1 else ''}"
    if len(differs) <= len(row) // 2:
        return f"its own row, except {len(differs)} elements, from {first} to {last}"
    return f"an unknown row, {_format_row(row)}"


def _format_row(row: NDArray) -> str:
    more = ", ..." if len(row) > MAX_SHOWN_NUMBERS else ""
    return f"[{', '.join(str(number) for number in row[:MAX_SHOWN_NUMBERS].astype(np.float32))}{more}]"


def assert_content(
    got: tuple[NDArray, NDArray], stream: Positions | int, layer: int, positions: Positions, written: WrittenContent,
    exact: bool = True, wanted: tuple[ExpectedReads, ExpectedReads] | None = None,
) -> None:  # fmt: skip
    """Raise ClauseViolation unless the keys and values [n, heads, dim] are the content of these positions.

    wanted: the expected values, if they differ from what was written (as in a quantized cache). exact: whether they must be equal
    to the bit; otherwise they must be within `wanted.slack`.
    """
    for part in (KEYS, VALUES):
        want = token_content(stream, layer, positions, written.heads, written.dim, part)
        what = f"{PARTS[part]} of {'a sequence' if np.ndim(stream) else f'sequence {stream}'}, layer {layer}"
        array = np.asarray(assert_shape(got[part], want.shape, what))
        if array.dtype.kind != "f":
            raise ClauseViolation(what, "float32 or a narrower float", str(array.dtype))
        array = array.astype(np.float32, copy=False)
        kept = wanted is None or (np.array_equal(wanted[part].values, want) and not wanted[part].slack.any())
        if wanted is None or kept:
            wrong = array != want
        elif exact:
            wrong = array != wanted[part].values
        else:
            wrong = ~(np.abs(array.astype(np.float64) - wanted[part].values) <= wanted[part].slack)
        if wrong.any():
            rows = wrong.any(axis=2)
            n, head = (int(i) for i in np.argwhere(rows)[0])
            place = TokenCoordinates(int(np.broadcast_to(stream, len(rows))[n]), layer, int(positions[n]), head, part)
            own = want[n, head] if wanted is None else wanted[part].values[n, head]
            said = describe_row(array[n, head], place, written) if kept else _describe_quantized_row(array[n, head], place)
            raise ClauseViolation(
                f"{place} ({int(rows.sum())} of {rows.size} rows differ)", f"its own row, {_format_row(own)}", said
            )


def _describe_quantized_row(row: NDArray, place: TokenCoordinates) -> str:
    """A description of a wrong row of a quantized cache, with the row that was written."""
    return "zeros" if not row.any() else f"{_format_row(row)}, of {_format_row(row_at(place, len(row)))}"
