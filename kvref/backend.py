"""Kernels: the protocol for all operations on tensor data, its reference implementation, and the lookup of backends by name.

Bookkeeping (block tables, free lists, tiers) is Python code on the host, written once in the caches. To support another device or
library, implement the methods of `Backend`. ReferenceBackend implements each of them in plain Array API code, to be read. A fast
backend must agree with it bit for bit when it moves, quantizes and dequantizes, and within a derived bound when it attends.

Kernels that write return the store (or `out`, if given). Callers continue with the returned array: libraries with immutable
arrays return a new one, the others write in place.
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

Slots = Sequence[int] | Array  # slot numbers [n]: Python integers, or an integer array of NumPy or of the backend's library


class Backend(Protocol):
    """The kernels that a cache needs, on the arrays of one library and device.

    A *store* is an array [num_slots, ...] with one token per slot; the tokens that a kernel reads or writes are [n, ...]. Slots
    are integers, as a sequence or an integer array of NumPy or of the backend's library.

    `out`, where a kernel has it, is a contiguous array of the result's shape and dtype (for `quantize` a Quantized of such
    arrays). The kernel fills and returns it; allocating fresh memory often takes as long as the kernel itself.
    """

    name: str

    @property
    def xp(self) -> Namespace:
        """The Array API namespace of the backend's arrays."""

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """Return a new array of zeros on the backend's device. dtype: a name, such as "float32"."""

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        """Return `values`, an array of NumPy or of the backend's library, on its device. dtype: a name, or None to keep it."""

    def to_numpy(self, array: Array) -> Array:
        """Return the values as a NumPy array."""

    def address(self, array: Array) -> int | None:
        """Return the address of the array's memory, or None if the library does not expose it."""

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        """Write `new` [B, H, n, D] to tokens `[position, position + n)` of `buffer` [B, H, capacity, D]; return the buffer."""

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        """Write `new[i]` [n, ...] to slot `slots[i]` of `store` [num_slots, ...], and return the store.

        A negative slot is skipped (KERN-02). If a slot occurs several times, it contains one of its tokens (KERN-07). Raises
        SlotOutOfRange, ShapeMismatch or DtypeMismatch before anything is written (KERN-03, KERN-08).
        """

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        """Return the tokens `store[slots[i]]`, [n, ...] with the dtype of the store.

        Raises SlotOutOfRange, also for a negative slot, ShapeMismatch or DtypeMismatch (KERN-03, KERN-08).
        """

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        """Copy block `sources[i]` to block `targets[i]` for every i, and return the store (KERN-09).

        A block is `block_size` consecutive slots. All sources are read before the first target is written, so that the two lists
        can overlap. Raises SlotOutOfRange, ShapeMismatch or DtypeMismatch before anything is written.
        """

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        """Quantize float32, float16 or bfloat16 rows [..., width] in `format`: the same bits as `format.quantize`.

        Raises as `format.quantize` does. If it raises NonFinite, the contents of `out` are unspecified.
        """

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        """Return the float32 rows [..., width] that `stored` reads back as: the same bits as `format.dequantize`."""

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        """Return the codes of float32 values, without a scale: uint8 or uint16, in the shape of `values`."""

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        """Return the float32 values of codes, in the shape of `codes`."""

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        """Return softmax(scale q k') v for each query head: float32 [num_queries, num_query_heads, value_dim].

        query [num_queries, num_query_heads, head_dim], keys [n, num_kv_heads, head_dim] and values [n, num_kv_heads, value_dim]
        are float32. Query head h reads kv head h // (num_query_heads / num_kv_heads). mask: bool [num_queries, n], true where
        the query sees the token. Other tokens have no effect, even if they contain NaN (ATTN-07). A query that sees no token
        gets zeros (ATTN-08). logit_sink: float32 [num_query_heads]; its exponential is added once to a head's sum of weights
        (WIN-08).
        """


def host_slots(slots: Slots, stop: int, to_numpy: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Return slots to write to as int64 [n] on the host. Each is below `stop`; negative ones are to be skipped.

    to_numpy converts an array of the backend's library. Raises ShapeMismatch, DtypeMismatch or SlotOutOfRange (KERN-03,
    KERN-08).
    """
    numbers = _on_host(slots, to_numpy)
    ShapeMismatch.check("slots", numbers.shape, ("n",))
    if numbers.dtype.kind not in "iu":
        raise DtypeMismatch(f"slots: expected integers, got {numbers.dtype}")
    if numbers.size and numbers.max() >= stop:
        raise SlotOutOfRange(f"slot: expected an integer below {stop}, got {numbers.max()}")
    return numbers.astype(np.int64, copy=False)


def _on_host(slots: Any, to_numpy: Callable[[Array], Array]) -> NDArray[Any]:
    """The slots as a NumPy array. Raises DtypeMismatch, SlotOutOfRange, or ShapeMismatch for lists of different lengths."""
    if isinstance(slots, np.ndarray | np.generic | memoryview):
        return np.asarray(slots)
    if hasattr(slots, "shape"):
        xp = array_namespace(slots)
        if not xp.isdtype(slots.dtype, "integral"):  # before the conversion to NumPy, which may lack the dtype
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
        raise DtypeMismatch(f"slots: expected integers, got {repr(slots)}")  # NumPy would convert a boolean among integers
    return numbers


def slots_to_gather(slots: Slots, stop: int, to_numpy: Callable[[Array], Array]) -> NDArray[np.int64]:
    """Return slots to read from as int64 [n] on the host, each in `[0, stop)`. Raises as `host_slots` does."""
    numbers = host_slots(slots, stop, to_numpy)
    if numbers.min(initial=0) < 0:
        raise SlotOutOfRange(f"slot: expected an integer of at least 0 to gather, got {numbers.min()}")
    return numbers


def blocks_to_copy(
    store: Array, sources: Slots, targets: Slots, block_size: int, to_numpy: Callable[[Array], Array]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Shape]:
    """Check the arguments of `Backend.copy`; return source and target blocks, int64 [n], and the store's shape by blocks.

    The shape is [blocks, block_size, ...]. Slots after the last whole block do not count. Raises as `copy` does.
    """
    blocks = store.shape[0] // block_size
    read, written = (slots_to_gather(numbers, blocks, to_numpy) for numbers in (sources, targets))
    ShapeMismatch.check("targets", written.shape, read.shape)
    return read, written, (blocks, block_size, *store.shape[1:])


def last_writes(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of the writes that count: none to a negative slot, and the last one to each other slot.

    For backends that write in parallel: a slot then contains exactly one of its tokens (KERN-07).
    """
    kept = np.flatnonzero(numbers >= 0)
    return kept[len(kept) - 1 - np.unique(numbers[kept][::-1], return_index=True)[1]]


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive slots: the first slot of each run, and the range [start, stop) of its tokens in the list."""
    start = 0
    for stop in range(1, len(slots) + 1):
        if stop == len(slots) or slots[stop] != slots[stop - 1] + 1 or slots[stop - 1] < 0:
            if slots[start] >= 0:
                yield slots[start], start, stop
            start = stop


def check_new(store: Array, count: int, new: Array) -> None:
    """Raise ShapeMismatch or DtypeMismatch unless `new` is [count, ...] with the store's slot shape and dtype (KERN-03)."""
    ShapeMismatch.check("new", tuple(new.shape), (count, *store.shape[1:]))
    if new.dtype != store.dtype:
        xp = array_namespace(store)
        raise DtypeMismatch(f"new: expected the store's {dtype_name(store, xp)}, got {dtype_name(new, xp)}")


def _filled(out: Array | None, result: Array) -> Array:
    return result if out is None else at(out)[...].set(result)


class ReferenceBackend:
    """Reference implementation of every kernel, in operations of the Array API standard 2024.12.

    It runs on any library with these operations, and is written for clarity, not for speed.
    """

    def __init__(self, namespace: str = "numpy", device: object = None) -> None:
        """namespace: "numpy", "torch", "cupy", "jax", or the name of an importable Array API module. device: a device of it.

        Raises BackendNotFound. JAX converts float64 inputs to float32 unless `jax_enable_x64` is set; they are then accepted
        instead of rejected.
        """
        self.name = "reference" if namespace == "numpy" else f"reference:{namespace}"
        self._namespace = namespace
        self._device = device
        if namespace != "numpy":
            _ = self.xp  # raise now if it is missing; not for NumPy, whose wrapper would slow down `import kvref`

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
        return None  # the Array API standard does not expose addresses

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        return at(buffer)[:, :, position : position + new.shape[2], :].set(new)

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        slots = host_slots(slots, store.shape[0], self.to_numpy).tolist()
        check_new(store, len(slots), new)
        if is_writeable_array(store):
            for slot, start, stop in _runs(slots):
                store[slot : slot + stop - start, ...] = new[start:stop, ...]
            return store
        for i, slot in enumerate(slots):  # one by one: JAX would compile a new function for each length of a slice
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
            if logit_sink is not None:  # the score of one more token, which has no value
                scores = xp.concat([scores, logit_sink[None, :]], axis=0)
            weights = xp.exp(scores - xp.max(scores, axis=0, keepdims=True))  # at most 1: no overflow (ATTN-03)
            weights = (weights / xp.sum(weights, axis=0, keepdims=True))[: k.shape[0], ...]
            out = at(out)[i, ...].set(xp.sum(weights[..., None] * v, axis=0))
        return out


def array_namespace_called(name: str) -> Namespace:
    """Return the Array API namespace of the library `name`.

    It is the wrapper of array_api_compat if there is one, otherwise the module `name`, or its submodule `numpy` (JAX). Raises
    BackendNotFound.
    """
    for module in (f"array_api_compat.{name}", str(name), f"{name}.numpy"):
        try:
            xp = import_module(module)
        except ImportError:
            continue
        if hasattr(xp, "asarray") and hasattr(xp, "take"):
            return xp
    raise BackendNotFound(f"array library: expected an installed Array API library, got {name!r} (pip install {name}?)")


def backend(name: str = "reference", **options: object) -> Backend:
    """Return the backend called `name`.

    name: "reference" (on NumPy), "reference:LIBRARY", "NAME" or "NAME:DEVICE", where NAME is an installed entry point of the
    group `kvref.backends`. options: keyword arguments of that backend, for example `backend("torch:cuda", compile=True)`.

    Raises BackendNotFound if there is no such backend, or if its library, device or option is missing.
    """
    kind, _, place = str(name).partition(":")
    factory: Callable[..., Backend] = ReferenceBackend if kind == "reference" else _installed(kind)
    given = {"namespace" if kind == "reference" else "device": place} if place else {}
    try:
        return factory(**given, **options)
    except TypeError as error:
        raise BackendNotFound(
            f"backend {name!r}: expected options that {kind} accepts, got {given | options}: {error}"
        ) from error


def _installed(kind: str) -> Callable[..., Backend]:
    """The factory of the backend with this entry point. Raises BackendNotFound."""
    from importlib.metadata import entry_points  # imported here because it is slow and rarely needed

    installed = {entry.name: entry for entry in entry_points(group="kvref.backends")}
    if kind not in installed:
        raise BackendNotFound(f"backend: expected one of {', '.join(['reference', *sorted(installed)])}, got {kind!r}")
    try:
        factory: Callable[..., Backend] = installed[kind].load()
    except ImportError as error:
        raise BackendNotFound(f"backend {kind}: expected {error.name or 'its library'} to be installed, got {error}") from error
    return factory


reference: Backend = ReferenceBackend()
