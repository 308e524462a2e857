"""Kernels: the few operations that touch tensor data, behind one protocol.

All bookkeeping (block tables, free lists, tiers) is host-side Python, written once in the caches. A new device is a new file with
these kernels in it. The reference here writes each in pure Array API code, for reading; a backend writes them for speed and is
held to the reference bit for bit (moving and quantizing) or within a derived bound (attention).

Writing kernels return the store, and `out` where it is given: keep what they return. A library with immutable arrays gives a new
one, the others write in place.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from reprlib import repr
from typing import Any, Protocol

import numpy as np
from array_api_compat import array_namespace, is_writeable_array
from array_api_extra import at
from numpy.typing import NDArray

from kvref.array import Array, Namespace, Shape, dtype_name
from kvref.errors import BackendNotFound, DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref.formats import Format, Quantized, SmallFloat

Slots = Sequence[int] | Array  # slot numbers: Python integers, or an integer array [n] of NumPy's or the backend's library


class Backend(Protocol):
    """A store is [num_slots, ...], one token a slot; what goes in or comes out is [n, ...], n tokens of the same shape.

    out: a contiguous array of the result's shape and dtype, to be filled and returned: fresh memory costs as much as a kernel.
    """

    name: str

    @property
    def xp(self) -> Namespace:
        """The array namespace its arrays belong to."""

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """A new array of zeros on this backend's device."""

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        """`values`, from NumPy or this backend's own library, as an array on this backend's device."""

    def to_numpy(self, array: Array) -> Array:
        """The same values as a NumPy array."""

    def address(self, array: Array) -> int | None:
        """Where the array's memory begins, or None where the library does not say."""

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        """[B, H, capacity, D] <- [B, H, n, D] at tokens position .. position + n; returns the buffer."""

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        """store[slots[i]] = new[i]; a negative slot is skipped (KERN-02); returns the store.

        Raises SlotOutOfRange, ShapeMismatch or DtypeMismatch before anything is written (KERN-03, KERN-08).
        """

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        """[n, ...], of which i is store[slots[i]]. Raises as `scatter` does, SlotOutOfRange for a negative slot too."""

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        """Block targets[i] becomes what block sources[i] was before any was written (KERN-09); returns the store.

        A block is block_size slots. Raises SlotOutOfRange, ShapeMismatch or DtypeMismatch before anything is written.
        """

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        """float32 rows [..., width] as they are stored in `format`. Where it raises NonFinite, `out` holds anything."""

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        """The float32 rows [..., width] that `stored` reads back as."""

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        """Codes of single float32 values, no scale: uint8 or uint16, the shape of `values`."""

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        """The float32 values of codes."""

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        """softmax(scale q k') v per query head: [nq, Hq, D], [n, Hkv, D], [n, Hkv, Dv], bool [nq, n] -> [nq, Hq, Dv].

        Query head h reads kv head h // (Hq / Hkv). A token that a query's mask leaves out has no effect on it, NaN included
        (ATTN-07); a query that sees no token gets zeros (ATTN-08). logit_sink [Hq]: exp of it is added to a head's sum of
        weights, once (WIN-08).
        """


def host_slots(slots: Slots, stop: int, to_numpy: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Slots to write to, int64 [n] on the host: each below `stop`, a negative one to be skipped.

    Raises ShapeMismatch, DtypeMismatch or SlotOutOfRange (KERN-03, KERN-08).
    """
    numbers = _on_host(slots, to_numpy)
    ShapeMismatch.check("slots", numbers.shape, ("n",))
    if numbers.dtype.kind not in "iu":
        raise DtypeMismatch(f"slots: expected integers, got {numbers.dtype}")
    if numbers.size and numbers.max() >= stop:
        raise SlotOutOfRange(f"slot: expected an integer below {stop}, got {numbers.max()}")
    return numbers.astype(np.int64, copy=False)


def _on_host(slots: Any, to_numpy: Callable[[Array], Array]) -> NDArray[Any]:
    """The slots as NumPy's array, of whatever type and shape they are."""
    if isinstance(slots, np.ndarray | np.generic | memoryview):
        return np.asarray(slots)
    if hasattr(slots, "shape"):
        xp = array_namespace(slots)
        if not xp.isdtype(slots.dtype, "integral"):  # before it is NumPy's turn, which may not have the dtype
            raise DtypeMismatch(f"slots: expected integers, got {dtype_name(slots, xp)}")
        return np.asarray(to_numpy(slots))
    try:
        integers = all(kind is not bool and issubclass(kind, int | np.integer) for kind in set(map(type, slots)))
        numbers = np.asarray(slots, np.int64 if integers else None)
    except OverflowError:
        raise SlotOutOfRange(f"slot: expected integers of 64 bits, got {repr(slots)}") from None
    except (TypeError, ValueError):
        raise ShapeMismatch(f"slots: expected shape [n], got {repr(slots)}") from None
    if numbers.ndim == 1 and not integers:
        raise DtypeMismatch(f"slots: expected integers, got {repr(slots)}")  # beside integers a boolean would become one
    return numbers


def slots_to_gather(slots: Slots, stop: int, to_numpy: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Slots to read from: none of them negative either."""
    numbers = host_slots(slots, stop, to_numpy)
    if numbers.min(initial=0) < 0:
        raise SlotOutOfRange(f"slot: expected an integer of at least 0 to gather, got {numbers.min()}")
    return numbers


def blocks_to_copy(
    store: Array, sources: Slots, targets: Slots, block_size: int, to_numpy: Callable[[Array], Array]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Shape]:
    """The blocks to copy from and to, int64 [n], and the shape of the store by blocks, a last one that is not whole left out."""
    blocks = store.shape[0] // block_size
    read, written = (slots_to_gather(numbers, blocks, to_numpy) for numbers in (sources, targets))
    ShapeMismatch.check("targets", written.shape, read.shape)
    return read, written, (blocks, block_size, *store.shape[1:])


def last_writes(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of what parallel writers are to scatter, what counts: nothing that is skipped, and the last for each slot (KERN-07)."""
    kept = np.flatnonzero(numbers >= 0)
    return kept[len(kept) - 1 - np.unique(numbers[kept][::-1], return_index=True)[1]]


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """Where slots follow one another: the first slot, and from where to where the tokens for it and the next ones lie."""
    start = 0
    for stop in range(1, len(slots) + 1):
        if stop == len(slots) or slots[stop] != slots[stop - 1] + 1 or slots[stop - 1] < 0:
            if slots[start] >= 0:
                yield slots[start], start, stop
            start = stop


def check_new(store: Array, count: int, new: Array) -> None:
    """Raise ShapeMismatch or DtypeMismatch unless `new` is `count` times what a slot of the store holds (KERN-03)."""
    ShapeMismatch.check("new", tuple(new.shape), (count, *store.shape[1:]))
    if new.dtype != store.dtype:
        xp = array_namespace(store)
        raise DtypeMismatch(f"new: expected the store's {dtype_name(store, xp)}, got {dtype_name(new, xp)}")


def _filled(out: Array | None, result: Array) -> Array:
    return result if out is None else at(out)[...].set(result)


class ReferenceBackend:
    """Every kernel in operations of the Array API standard 2024.12, on any library that has them."""

    def __init__(self, namespace: str = "numpy", device: object = None) -> None:
        """namespace: "numpy", "torch", "cupy", "jax", or an importable Array API module. Raises BackendNotFound.

        Without jax_enable_x64 JAX makes float32 of float64 before anybody can refuse it.
        """
        self.name = "reference" if namespace == "numpy" else f"reference:{namespace}"
        self._namespace = namespace
        self._device = device
        if namespace != "numpy":
            _ = self.xp  # a library that is missing is said now; NumPy is here, and `import kvref` must not wait for its wrapper

    @cached_property
    def xp(self) -> Namespace:
        return array_namespace_called(self._namespace)

    def zeros(self, shape: Shape, dtype: str) -> Array:
        return self.xp.zeros(shape, dtype=getattr(self.xp, dtype), device=self._device)

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        return self.xp.asarray(values, dtype=dtype and getattr(self.xp, dtype), device=self._device)

    def to_numpy(self, array: Array) -> Array:
        return np.from_dlpack(array, device="cpu")

    def address(self, array: Array) -> int | None:
        return None  # the standard has no addresses

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        return at(buffer)[:, :, position : position + new.shape[2], :].set(new)

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        slots = host_slots(slots, store.shape[0], self.to_numpy).tolist()
        check_new(store, len(slots), new)
        if is_writeable_array(store):
            for slot, start, stop in _runs(slots):
                store[slot : slot + stop - start, ...] = new[start:stop, ...]
            return store
        for i, slot in enumerate(slots):  # one by one: JAX would compile each slice anew
            if slot >= 0:
                store = at(store)[slot, ...].set(new[i, ...])
        return store

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        slots = slots_to_gather(slots, store.shape[0], self.to_numpy).tolist()
        return _filled(out, self.xp.take(store, self.asarray(slots, "int64"), axis=0))

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        read, written, _ = blocks_to_copy(store, sources, targets, block_size, self.to_numpy)
        offsets = np.arange(block_size)
        read, written = ((each[:, None] * block_size + offsets).reshape(-1) for each in (read, written))
        return self.scatter(store, written, self.gather(store, read))

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        stored = format.quantize(rows)
        return Quantized(*map(_filled, out, stored)) if out else stored

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        return _filled(out, format.dequantize(stored, width))

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        return _filled(out, element.encode(values))

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        return _filled(out, element.decode(codes))

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        xp = self.xp
        group = query.shape[1] // keys.shape[1]
        out = self.zeros((query.shape[0], query.shape[1], values.shape[2]), "float32")
        for i in range(query.shape[0]):
            seen = xp.nonzero(mask[i, :])[0]
            if seen.shape[0] == 0:
                continue
            k = xp.repeat(xp.take(keys, seen, axis=0), group, axis=1)  # [tokens, query heads, D]
            v = xp.repeat(xp.take(values, seen, axis=0), group, axis=1)
            scores = xp.sum(query[i : i + 1, ...] * k, axis=-1) * scale
            if logit_sink is not None:  # as the score of a token more, with which nothing is multiplied
                scores = xp.concat([scores, logit_sink[None, :]], axis=0)
            weights = xp.exp(scores - xp.max(scores, axis=0, keepdims=True))  # at most 1: no overflow (ATTN-03)
            weights = (weights / xp.sum(weights, axis=0, keepdims=True))[: k.shape[0], ...]
            out = at(out)[i, ...].set(xp.sum(weights[..., None] * v, axis=0))
        return out


def array_namespace_called(name: str) -> Namespace:
    """array_api_compat's wrapper of the library called `name`, or that module itself, or its `numpy`. Raises BackendNotFound."""
    for module in (f"array_api_compat.{name}", str(name), f"{name}.numpy"):
        try:
            xp = import_module(module)
        except ImportError:
            continue
        if hasattr(xp, "asarray") and hasattr(xp, "take"):
            return xp
    raise BackendNotFound(f"array library: expected an installed Array API library, got {name!r} (pip install {name}?)")


def backend(name: str = "reference", **options: object) -> Backend:
    """The backend called `name`: "reference", "reference:LIBRARY", or one installed under the entry points `kvref.backends`.

    "NAME:DEVICE" asks for a device, and `options` are the backend's own: backend("torch:cuda", compile=True). Raises
    BackendNotFound, naming what is there, or what its library or the machine lacks.
    """
    kind, _, place = name.partition(":")
    factory: Callable[..., Backend] = ReferenceBackend if kind == "reference" else _installed(kind)
    given = {"namespace" if kind == "reference" else "device": place} if place else {}
    try:
        return factory(**given, **options)
    except TypeError as error:
        raise BackendNotFound(f"backend {kind}: expected options it has, got {name!r} and {options}: {error}") from error


def _installed(kind: str) -> Callable[..., Backend]:
    """What makes the backend of an entry point. Raises BackendNotFound."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    installed = {entry.name: entry for entry in entry_points(group="kvref.backends")}
    if kind not in installed:
        raise BackendNotFound(f"backend: expected one of {', '.join(['reference', *sorted(installed)])}, got {kind!r}")
    try:
        factory: Callable[..., Backend] = installed[kind].load()
    except ImportError as error:
        raise BackendNotFound(f"backend {kind}: expected {error.name or 'its library'} to be installed, got {error}") from error
    return factory


reference: Backend = ReferenceBackend()
