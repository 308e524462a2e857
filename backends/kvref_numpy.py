"""The kernels in NumPy: vectorised, in place, bit for bit the reference's.

Data moves by one fancy-indexed assignment or take. Quantizing works on whole arrays; FP8 and the 16-bit floats are encoded from
the bits of the float32 pattern, which is several times faster than arithmetic on its value and gives the same codes.
"""

from functools import cache

import array_api_compat.numpy as xp
import numpy as np
from numpy.typing import NDArray

from kvref.array import Array, Namespace, Shape
from kvref.backend import Slots, check_rows
from kvref.errors import SlotOutOfRange
from kvref.formats import Format, Quantized, SmallFloat
from kvref.formats.affine import AffineRow
from kvref.formats.base import finite_rows, widen
from kvref.formats.small_float import BFLOAT16, ELEMENTS, FLOAT16
from kvref.formats.symmetric import LEAST_SCALE, SymmetricRow

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like best

F32 = NDArray[np.float32]


class NumPyBackend:
    name = "numpy"
    xp: Namespace = xp

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """Zeroed lazily by the system, and starting at a multiple of 64 bytes (BUF-02)."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        return memory[offset : offset + size].view(dtype).reshape(shape)

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        return np.asarray(values, dtype=dtype)

    def to_numpy(self, array: Array) -> Array:
        return np.asarray(array)

    def address(self, array: Array) -> int | None:
        return int(array.ctypes.data)

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        buffer[:, :, position : position + new.shape[2], :] = new
        return buffer

    def scatter(self, store: Array, slots: Slots, rows: Array) -> Array:
        slots = _checked(slots, store.shape[0])
        check_rows(store, len(slots), rows)
        named = slots >= 0
        store[slots[named]] = rows if named.all() else rows[named]
        return store

    def gather(self, store: Array, slots: Slots) -> Array:
        slots = _checked(slots, store.shape[0])
        if (slots < 0).any():
            raise SlotOutOfRange(f"slot: expected an integer of at least 0 to gather, got {slots.min()}")
        return store.take(slots, axis=0)

    def quantize(self, rows: Array, format: Format) -> Quantized:
        if format.granularity == "element":
            rows = widen(rows)
            return Quantized(self.encode(rows, BFLOAT16) if format.name == "bfloat16" else _cast(rows, format.name))
        if isinstance(format, AffineRow):
            return format.quantize(rows)  # the reference is whole-array arithmetic already
        assert isinstance(format, SymmetricRow)
        return _symmetric(finite_rows(rows), format)

    def dequantize(self, stored: Quantized, width: int, format: Format) -> Array:
        if format.name in ("float32", "float16"):
            return stored.codes.astype(np.float32, copy=False)
        if format.name == "bfloat16":
            return self.decode(stored.codes, BFLOAT16)
        if isinstance(format, AffineRow):
            return format.dequantize(stored, width)
        values = stored.codes.astype(np.float32) if format.name == "int8" else self.decode(stored.codes, ELEMENTS[format.name])
        scale: F32 = np.asarray(stored.scale)
        values *= scale[..., None]
        return values

    def encode(self, values: Array, element: SmallFloat) -> Array:
        if element is FLOAT16:
            return _cast(widen(values), "float16").view(np.uint16)
        return _encode(widen(values), element)

    def decode(self, codes: Array, element: SmallFloat) -> Array:
        if element is FLOAT16:
            return codes.view(np.float16).astype(np.float32)
        if element is BFLOAT16:
            return (codes.astype(np.uint32) << 16).view(np.float32)
        return _values(element.name).take(codes)

    def attend(self, query: Array, keys: Array, values: Array, scale: float, mask: Array) -> Array:
        if not _all_finite(keys, values):
            seen = mask.any(axis=0)
            keys, values, mask = keys[seen], values[seen], mask[:, seen]
            if not _all_finite(keys, values) and not mask.all():
                # A token that is not finite, seen by some queries and not by others: 0 * NaN would reach the others.
                each = [
                    self.attend(query[i : i + 1], keys[sees], values[sees], scale, mask[i : i + 1, sees])
                    for i, sees in enumerate(mask)
                ]
                return np.concatenate(each)
        num_queries, num_query_heads, head_dim = query.shape
        num_tokens, num_kv_heads, value_dim = values.shape
        if num_tokens == 0 or num_queries == 0:
            return np.zeros((num_queries, num_query_heads, value_dim), np.float32)
        # [kv heads, group * queries, D] @ [kv heads, D, tokens], the query heads of a group side by side.
        grouped = query.reshape(num_queries, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
        scores = grouped.reshape(num_kv_heads, -1, head_dim) @ keys.transpose(1, 2, 0)
        scores *= np.float32(scale)
        scores = np.where(mask, scores.reshape(num_kv_heads, -1, num_queries, num_tokens), np.float32(-np.inf))
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isneginf(largest), np.float32(0), largest))
        total = weights.sum(axis=-1, keepdims=True)
        weights /= np.where(total == 0, np.float32(1), total)  # a query that sees nothing: zeros (ATTN-08)
        out = weights.reshape(num_kv_heads, -1, num_tokens) @ values.transpose(1, 0, 2)
        out = out.reshape(num_kv_heads, -1, num_queries, value_dim).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(out.reshape(num_queries, num_query_heads, value_dim))


def backend() -> NumPyBackend:
    return NumPyBackend()


def _checked(slots: Slots, stop: int) -> NDArray[np.int64]:
    numbers = np.asarray(slots, dtype=np.int64)
    if (numbers >= stop).any():
        raise SlotOutOfRange(f"slot: expected an integer below {stop}, got {numbers.max()}")
    return numbers


def _all_finite(*arrays: Array) -> bool:
    return all(bool(np.isfinite(array).all()) for array in arrays)


def _cast(rows: F32, dtype: str) -> Array:
    with np.errstate(over="ignore"):  # overflow to infinity is what the clause asks for
        return rows.astype(dtype, copy=False)


def _symmetric(rows: F32, format: SymmetricRow) -> Quantized:
    limit = np.float32(format.limit)
    largest = np.abs(rows).max(axis=-1, initial=0)
    scale = np.maximum(largest / np.full_like(largest, limit), np.float32(LEAST_SCALE))
    quotient = rows / scale[..., None]
    np.clip(quotient, -limit, limit, out=quotient)
    if format.name != "int8":
        return Quantized(_encode(quotient, ELEMENTS[format.name]), scale)
    # Half away from zero: add the float32 just below one half, towards the sign, and truncate.
    quotient += np.copysign(np.float32(0.49999997), quotient)
    return Quantized(quotient.astype(np.int8), scale)


def _encode(values: F32, element: SmallFloat) -> Array:
    """Codes by the upper half of the float32 pattern, its last bit set where the lower half is not zero.

    That is rounding to odd at 8 bits of precision, from which any format of at most 6 rounds as from the value itself, so a table
    of 2^16 codes does the rest. bfloat16 keeps 8 bits and is rounded on the pattern instead.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    if element is BFLOAT16:
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = np.uint32(element.nan) | (bits >> 16)
        return np.where(np.isnan(values), nan, rounded).astype(np.uint16)
    upper = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return _codes(element.name).take(upper)


@cache
def _codes(name: str) -> Array:
    """The code of every float32 whose lower half is zero, by its upper half. uint8 [65536]."""
    patterns = np.arange(2**16, dtype=np.uint32) << 16
    return np.asarray(ELEMENTS[name].encode(patterns.view(np.float32)))


@cache
def _values(name: str) -> Array:
    """The value of every code. float32 [256]."""
    return np.asarray(ELEMENTS[name].decode(np.arange(256, dtype=np.uint8)))
