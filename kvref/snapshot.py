"""Descriptions of what is saved and loaded: tensors and the slots of their tokens, sizes, formats and counters.

`kvref.serialization` writes files from these descriptions, and reads files into them.
"""

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
from kvref.formats.static_scales import StaticFloat8
from kvref.token_store import SlotStore, TokenStore

CHUNK_BYTES = 2**22  # bytes that are copied at a time
EVERY_DTYPE = cast(Namespace, SimpleNamespace(**dict.fromkeys(("float32", "float16", "bfloat16"))))  # all dtypes of files
SCALES = ("key_scale", "value_scale")  # fields of a config
Bits: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class TokenSpan:
    """Tokens in slots of a store, which are saved as tensors with a common name.

    - `name`: the first part of the tensors' names, such as "layers.0.keys".
    - `slots`: the slots of the tokens, in the order of positions.
    - `heads`: the heads that belong to a part (MOVE-05), or None for all. In a recurrent cache, the rows of these heads.
    """

    name: str
    store: SlotStore
    slots: NDArray[np.int64]
    heads: range | None = None

    def fields(self) -> Iterator[tuple[str, Shape, str]]:
        """Yield the name ("codes", "scale", "zero"), the shape per token and the dtype of each tensor."""
        parts = stored_as(self.store.format, self.store.rows, EVERY_DTYPE)
        for name, (shape, dtype) in zip(self.store.fields, parts, strict=True):
            yield name, shape if self.heads is None else (len(self.heads), *shape[1:]), dtype

    def chunks(self, token_bytes: int) -> Iterator[NDArray[np.int64]]:
        """Yield the slots in chunks of at most CHUNK_BYTES. token_bytes: the size of a token in the tensor."""
        count = max(1, CHUNK_BYTES // max(1, token_bytes))
        for start in range(0, len(self.slots), count):
            yield self.slots[start : start + count]

    def get(self, name: str, slots: NDArray[np.int64]) -> Array:
        """Return one field of these slots, of `heads` only."""
        whole = self.store.field(name, slots)
        return whole if self.heads is None else whole[:, self.heads.start : self.heads.stop, ...]

    def put(self, name: str, slots: NDArray[np.int64], new: Array, backend: Backend) -> None:
        """Write one field of these slots, of `heads` only."""
        if self.heads is not None:
            whole, heads = self.store.field(name, slots), self.heads
            new = backend.xp.concat([whole[:, : heads.start, ...], new, whole[:, heads.stop :, ...]], axis=1)
        self.store.put_field(name, slots, new)


def key_and_value_spans(name: str, store: TokenStore, slots: NDArray[np.int64], heads: range | None = None) -> list[TokenSpan]:
    """Return the keys and the values of tokens in the same slots, as two spans."""
    return [TokenSpan(f"{name}.{part}", each, slots, heads) for part, each in (("keys", store.keys), ("values", store.values))]


@dataclass(frozen=True)
class Contents:
    """What is saved of a cache or a sequence.

    - `kind`: the kind of cache, such as "paged".
    - `shape`: the sizes and formats that a loading cache must have too (MOVE-02).
    - `state`: lengths and counters.
    - `spans`: the tokens.
    """

    kind: str
    shape: Mapping[str, int | float | str]
    state: Mapping[str, Any]
    spans: Sequence[TokenSpan]


def shape_of(config: Any, *room: str, formats: Sequence[Format] = ()) -> dict[str, int | float | str]:
    """Return the fields of a config that a loading cache must have too (MOVE-02): all but those in `room`.

    formats: the formats of keys and of values. The scales of static formats are included as the formats store them: rounded to
    float32, and 1.0 by default.
    """
    found = {name: size for name, size in asdict(config).items() if name not in (*room, *SCALES)}
    return found | {name: format.scale for name, format in zip(SCALES, formats, strict=False) if isinstance(format, StaticFloat8)}


@dataclass(frozen=True)
class SavedState:
    """The counters of a file and the lengths of its tensors, before the checksum is verified.

    Header and tensors are consistent with each other, but all numbers can be wrong. The methods raise FileDamaged for impossible
    ones.
    """

    state: Mapping[str, Any]
    counts: Mapping[str, int] = field(default_factory=dict)  # tokens per tensor, by name

    def count(self, span: str) -> int:
        """Return the number of tokens of the span with this name. Raises FileDamaged if there is none."""
        if f"{span}.codes" not in self.counts:
            raise FileDamaged(f"file: expected a tensor {span}.codes, got none")
        return self.counts[f"{span}.codes"]

    def number(self, name: str, most: int | None = None) -> int:
        """Return the counter `name`. Raises FileDamaged unless it is an integer from 0 to `most`."""
        return counter(self.state.get(name), name, most)

    def numbers(self, name: str, count: int) -> list[int]:
        """Return the list of counters `name`. Raises FileDamaged unless it has `count` integers of at least 0."""
        found = self.state.get(name)
        if not isinstance(found, list) or len(found) != count:
            raise FileDamaged(f"file: {name}: expected {count} numbers, got {found!r}")
        return [counter(each, name) for each in found]


def counter(value: object, name: str, most: int | None = None) -> int:
    """Return `value`, a number from a file. Raises FileDamaged unless it is an integer from 0 to `most`."""
    number = integer(value)
    if number is None or number < 0 or (most is not None and number > most) or number >= 2**63:
        raise FileDamaged(f"file: {name}: expected a count{'' if most is None else f' of at most {most}'}, got {value!r}")
    return number


def to_bits(array: Array, backend: Backend) -> Bits:
    """Return the bytes of an array, little-endian and in C order: uint8 [n]."""
    if getattr(backend.xp, "bfloat16", None) == array.dtype:
        array = array.view(backend.xp.uint16)  # NumPy has no such dtype
    host = np.ascontiguousarray(backend.to_numpy(array))
    return host.astype(host.dtype.newbyteorder("<"), copy=False).reshape(-1).view(np.uint8)


def from_bits(bits: Bits, shape: Shape, dtype: str, backend: Backend) -> Array:
    """Return the array of this shape with these bytes. dtype: the dtype of the store, which can be uint16 for bfloat16."""
    there = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    array = backend.asarray(bits.view(there.newbyteorder("<")).astype(there, copy=False).reshape(shape))
    return array.view(backend.xp.bfloat16) if dtype == "bfloat16" else array
