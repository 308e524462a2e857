"""What is saved of a cache, before it is a file and once it is one: names, counts, and where the tokens lie."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array, Namespace, Shape
from kvref.backend import Backend
from kvref.errors import FileDamaged, integer
from kvref.formats import Format
from kvref.formats.base import stored_as
from kvref.formats.static import StaticFloat8
from kvref.slots import SlotStore, TokenStore

PIECE = 2**22  # bytes that are held at a time on their way
EVERY_DTYPE = cast(Namespace, SimpleNamespace(**dict.fromkeys(("float32", "float16", "bfloat16"))))  # of a file's
SCALES = ("key_scale", "value_scale")  # in a config
Bits: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class Stretch:
    """Tokens that lie in slots of a store, in order, and what they are called. heads: of a part, those that it has."""

    name: str
    store: SlotStore
    slots: NDArray[np.int64]
    heads: range | None = None

    def fields(self) -> Iterator[tuple[str, Shape, str]]:
        """Codes, scales and zeros: what each is called in a file, the shape of a token, and its dtype there."""
        parts = stored_as(self.store.format, self.store.rows, EVERY_DTYPE)
        for name, (shape, dtype) in zip(self.store.fields, parts, strict=True):
            yield name, shape if self.heads is None else (len(self.heads), *shape[1:]), dtype

    def pieces(self, token_bytes: int) -> Iterator[NDArray[np.int64]]:
        """The slots, few enough at a time."""
        count = max(1, PIECE // max(1, token_bytes))
        for start in range(0, len(self.slots), count):
            yield self.slots[start : start + count]

    def take(self, name: str, slots: NDArray[np.int64]) -> Array:
        whole = self.store.field(name, slots)
        return whole if self.heads is None else whole[:, self.heads.start : self.heads.stop, ...]

    def put(self, name: str, slots: NDArray[np.int64], new: Array, backend: Backend) -> None:
        if self.heads is not None:
            whole, heads = self.store.field(name, slots), self.heads
            new = backend.xp.concat([whole[:, : heads.start, ...], new, whole[:, heads.stop :, ...]], axis=1)
        self.store.put_field(name, slots, new)


def both(name: str, store: TokenStore, slots: NDArray[np.int64], heads: range | None = None) -> list[Stretch]:
    """Keys and values of the same tokens."""
    return [Stretch(f"{name}.{part}", each, slots, heads) for part, each in (("keys", store.keys), ("values", store.values))]


@dataclass(frozen=True)
class Contents:
    """What goes into a file. shape: sizes and formats that must be the same where it is loaded. state: what is counted."""

    kind: str
    shape: Mapping[str, int | float | str]
    state: Mapping[str, Any]
    stretches: Sequence[Stretch]


def shape_of(config: Any, *room: str, formats: Sequence[Format] = ()) -> dict[str, int | float | str]:
    """Of a cache's config what another has to have in common with it: all but `room`.

    formats: of keys and of values, whose scales, where they are given, count as they are held: in float32, and 1.0 by default.
    """
    found = {name: size for name, size in asdict(config).items() if name not in (*room, *SCALES)}
    return found | {name: format.scale for name, format in zip(SCALES, formats, strict=False) if isinstance(format, StaticFloat8)}


@dataclass(frozen=True)
class Saved:
    """What a file says before its tensors are read: nothing of it is known to be right yet, but that it fits itself."""

    state: Mapping[str, Any]
    counts: Mapping[str, int] = field(default_factory=dict)  # of tokens, by the name of a tensor

    def count(self, stretch: str) -> int:
        """How many tokens there are of keys, values or rows that are called so. Raises FileDamaged without such a tensor."""
        if f"{stretch}.codes" not in self.counts:
            raise FileDamaged(f"file: expected a tensor {stretch}.codes, got none")
        return self.counts[f"{stretch}.codes"]

    def number(self, name: str, most: int | None = None) -> int:
        return counter(self.state.get(name), name, most)

    def numbers(self, name: str, count: int) -> list[int]:
        found = self.state.get(name)
        if not isinstance(found, list) or len(found) != count:
            raise FileDamaged(f"file: {name}: expected {count} numbers, got {found!r}")
        return [counter(each, name) for each in found]


def counter(value: object, name: str, most: int | None = None) -> int:
    """A number in [0, most] that a file says. Raises FileDamaged."""
    number = integer(value)
    if number is None or number < 0 or (most is not None and number > most) or number >= 2**63:
        raise FileDamaged(f"file: {name}: expected a count{'' if most is None else f' of at most {most}'}, got {value!r}")
    return number


def to_bits(array: Array, backend: Backend) -> Bits:
    """An array's bytes, little-endian and in C order."""
    if getattr(backend.xp, "bfloat16", None) == array.dtype:
        array = array.view(backend.xp.uint16)  # NumPy has no such dtype
    host = np.ascontiguousarray(backend.to_numpy(array))
    return host.astype(host.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8)


def from_bits(bits: Bits, shape: Shape, dtype: str, backend: Backend) -> Array:
    """The array that they are. dtype: of the store that they go to."""
    there = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    array = backend.asarray(bits.view(there.newbyteorder("<")).astype(there, copy=False).reshape(shape))
    return array.view(backend.xp.bfloat16) if dtype == "bfloat16" else array
