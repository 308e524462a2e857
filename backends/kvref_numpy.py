"""The kernels in NumPy: in place, without a temporary of the size of the data, bit for bit the reference's.

Data moves by one take or one indexed assignment. Rows are quantized and read back some thousand values at a time, in scratch that
stays in the processor's second-level cache; what limits them then is the number of passes over it, so there are few:

- the largest magnitude is found among integers, for the patterns of floats that are not negative are in the order of the floats,
  with infinity and then NaN above all of them; so it also tells whether the row is finite;
- INT8 is rounded as magnitudes, and gets its signs as bytes;
- FP8 codes come from a table of 2^14, by the upper 14 bits of the float32 pattern.

Formats of groups are the exception: they are the reference's code, with temporaries.
"""

import threading
from collections.abc import Iterator
from functools import cache

import array_api_compat.numpy as xp
import numpy as np
from numpy.typing import NDArray

from kvref.array import Array, Namespace, Shape
from kvref.backend import Slots, blocks_to_copy, check_new, host_slots, reference, slots_to_gather
from kvref.errors import NonFinite
from kvref.formats import Format, Quantized, SmallFloat
from kvref.formats.affine import LEAST_SCALE as LEAST_AFFINE_SCALE
from kvref.formats.affine import AffineRow
from kvref.formats.base import check_read_back, stored_as, widen
from kvref.formats.rotated import Rotated, hadamard
from kvref.formats.small_float import BFLOAT16, ELEMENTS, FLOAT16
from kvref.formats.static import StaticFloat8
from kvref.formats.symmetric import LEAST_SCALE, SymmetricRow
from kvref_numpy_attention import all_finite, grouped_attention

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like best
BLOCK = 2**16  # values at a time: 256 KiB of float32
BELOW_HALF = np.float32(0.49999997)  # the float32 below one half: trunc(y + this) rounds halves away from zero, for y >= 0
INFINITY_BITS = 0x7F800000
KEPT_BITS = 14  # of a float32 pattern: sign, exponent and 5 bits of mantissa, two more than any FP8 has

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

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        slots = host_slots(slots, store.shape[0], self.to_numpy)
        check_new(store, len(slots), new)
        named = slots >= 0
        if named.all():
            store[slots] = new
        else:
            store[slots[named]] = new[named]
        return store

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        slots = slots_to_gather(slots, store.shape[0], self.to_numpy)
        return np.take(store, slots, axis=0, out=out, mode="clip")  # checked above: "raise" would go by way of a buffer

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        read, written, shape = blocks_to_copy(store, sources, targets, block_size, self.to_numpy)
        blocks = _own(store, *store.shape[1:])[: shape[0] * block_size].reshape(shape)
        blocks[written] = blocks[read]
        return store

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        if rows.dtype != np.float32:
            rows = widen(rows)
        if format.granularity == "element":
            return Quantized(self._cast(rows, format.name, out and out.codes))
        if isinstance(format, Rotated):
            return self.quantize(format.turned(rows), format.inner, out)
        if isinstance(format, StaticFloat8):
            return Quantized(self.encode(format.quotient(rows), format.small, out and out.codes))
        if not isinstance(format, AffineRow | SymmetricRow) or rows.ndim == 0 or rows.size == 0:
            return reference.quantize(rows, format, out)
        if out is None:
            out = Quantized(*(np.empty(shape, dtype) for shape, dtype in stored_as(format, rows.shape, xp)))
        codes, *scales = (part for part in out if part is not None)
        pieces = _pieces(rows.reshape(-1, rows.shape[-1]), _own(codes, codes.shape[-1]), *(_own(each, 1) for each in scales))
        if isinstance(format, AffineRow):
            for x, part, scale, zero in pieces:
                _affine(x, part, scale, zero, format)
        else:
            for x, part, scale in pieces:
                _symmetric(x, part, scale, format)
        return out

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        codes = stored.codes
        if format.name == "float32" and out is None:
            return codes
        if isinstance(format, Rotated):
            values = self.dequantize(stored, width, format.inner, out)
            values[...] = hadamard(values)
            return values
        if isinstance(format, StaticFloat8):
            values = self.decode(codes, format.small, out)
            values *= format.scale
            return values
        if format.granularity == "group" or (format.granularity != "element" and codes.size == 0):
            return reference.dequantize(stored, width, format, out)
        if out is None:
            out = np.empty((*codes.shape[:-1], width), np.float32)
        if format.name in ("float32", "float16"):
            np.copyto(out, codes)
        elif format.name == "bfloat16":
            self.decode(codes, BFLOAT16, out)
        else:
            scales = [part.reshape(-1, 1) for part in stored[1:] if part is not None]
            for y, part, scale, *zero in _pieces(_own(out, width), codes.reshape(-1, codes.shape[-1]), *scales):
                if format.name == "q4":
                    y[:, 0::2] = part[:, : -(-width // 2)] & 15
                    y[:, 1::2] = part[:, : width // 2] >> 4
                elif format.name in ("int8", "q8"):
                    np.copyto(y, part)
                else:
                    _decode(part, y, ELEMENTS[format.name])
                np.multiply(y, scale, out=y)
                if zero:
                    np.add(y, zero[0], out=y)  # a second rounding, never fused with the first (FMT-AFF-04)
        return out

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        values = widen(values)
        out = np.empty(values.shape, f"uint{element.bits}") if out is None else out
        if element is FLOAT16:
            self._cast(values, "float16", out.view(np.float16))
            return out
        for x, part in _pieces(values.reshape(-1), _own(out)):
            (_encode_bfloat16 if element is BFLOAT16 else _encode)(x, part, element)
        return out

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        out = np.empty(codes.shape, np.float32) if out is None else out
        if element is FLOAT16:
            np.copyto(out, codes.view(np.float16))
        elif element is BFLOAT16:
            bits = out.view(np.uint32)
            np.copyto(bits, codes)
            np.left_shift(bits, 16, out=bits)
        else:
            for y, part in _pieces(_own(out), codes.reshape(-1)):
                _decode(part, y, element)
        return out

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        return grouped_attention(np, query, keys, values, scale, mask, logit_sink)

    def _cast(self, rows: F32, name: str, out: Array | None) -> Array:
        if name == "bfloat16":
            return self.encode(rows, BFLOAT16, out)
        if out is None and name == "float32":
            return rows
        if out is None:
            out = np.empty(rows.shape, name)
        with np.errstate(over="ignore"):  # overflow to infinity is what the clause asks for
            np.copyto(out, rows, casting="same_kind")
        return out


def backend() -> NumPyBackend:
    return NumPyBackend()


class _Scratch(threading.local):
    """Room for one piece of the data, a thread: made once, for fresh memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._memory = [np.empty(0, np.int64) for _ in range(3)]

    def like(self, x: Array, dtype: type, which: int = 0) -> Array:
        """An array of the shape of `x`."""
        if self._memory[which].nbytes < 8 * x.size:
            self._memory[which] = np.empty(max(BLOCK, x.size), np.int64)
        return self._memory[which].view(dtype)[: x.size].reshape(x.shape)


_scratch = _Scratch()


def _own(array: Array, *row: int) -> Array:
    """An array that is written to, [..., *row], as [n, *row]: it must not become a copy."""
    if not array.flags.c_contiguous:
        raise ValueError("out: expected a C-contiguous array")
    return array.reshape(-1, *row)


def _pieces(*arrays: Array) -> Iterator[list[Array]]:
    """Matching pieces of arrays with the same first axis: about BLOCK values of the first."""
    rows = max(1, BLOCK * len(arrays[0]) // max(1, arrays[0].size))
    for start in range(0, len(arrays[0]), rows):
        yield [each[start : start + rows] for each in arrays]


def _symmetric(x: F32, codes: Array, scale: F32, format: SymmetricRow) -> None:
    magnitude = _scratch.like(x, np.float32)
    np.abs(x, out=magnitude)
    largest = np.maximum.reduce(magnitude.view(np.int32), axis=-1, keepdims=True)
    if largest.max() >= INFINITY_BITS:
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    np.divide(largest.view(np.float32), np.full(largest.shape, format.limit, np.float32), out=scale)
    np.maximum(scale, np.float32(LEAST_SCALE), out=scale)
    with np.errstate(over="ignore"):
        check_read_back(format.name, scale.max() * np.full(1, format.limit, np.float32))
    if format.name != "int8":
        np.divide(x, scale, out=magnitude)  # at most an ulp beyond the largest code, which rounds back to it
        _encode(magnitude, codes, ELEMENTS[format.name])
        return
    np.divide(magnitude, scale, out=magnitude)
    np.add(magnitude, BELOW_HALF, out=magnitude)
    np.copyto(codes, magnitude, casting="unsafe")  # truncates
    negative = _scratch.like(x, np.int8)
    np.less(x, 0, out=negative.view(np.bool_))
    np.negative(negative, out=negative)  # -1 where x is negative: (q ^ -1) - -1 is -q
    np.bitwise_xor(codes, negative, out=codes)
    np.subtract(codes, negative, out=codes)


def _affine(x: F32, codes: Array, scale: F32, zero: F32, format: AffineRow) -> None:
    np.min(x, axis=-1, keepdims=True, out=zero)
    most = np.max(x, axis=-1, keepdims=True)
    if not all_finite(np, zero, most):
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    steps = np.float32(2**format.bits - 1)
    with np.errstate(over="ignore"):
        np.divide(most - zero, np.full_like(most, steps), out=scale)
        np.maximum(scale, np.float32(LEAST_AFFINE_SCALE), out=scale)
        check_read_back(format.name, scale * steps + zero)
    quotient = _scratch.like(x, np.float32)
    np.subtract(x, zero, out=quotient)
    np.divide(quotient, scale, out=quotient)
    np.add(quotient, BELOW_HALF, out=quotient)
    np.minimum(quotient, steps, out=quotient)
    if format.bits == 8:
        np.copyto(codes, quotient, casting="unsafe")
        return
    whole = _scratch.like(x, np.uint8, 1)
    np.copyto(whole, quotient, casting="unsafe")
    np.copyto(codes, whole[:, 0::2])
    codes[:, : x.shape[-1] // 2] |= whole[:, 1::2] << 4


def _encode(values: F32, codes: Array, element: SmallFloat) -> None:
    """Codes by the upper bits of the float32 pattern, the last of them set where a lower one is.

    That is rounding to odd at two bits more than the format has, from which it rounds as from the value itself; a table does it.
    """
    bits = values.view(np.uint32)
    upper, lower = _scratch.like(values, np.uint32, 1), _scratch.like(values, np.uint32, 2)
    shift = 32 - KEPT_BITS
    rest = np.uint32(2**shift - 1)
    np.bitwise_and(bits, rest, out=lower)
    np.add(lower, rest, out=lower)
    np.right_shift(lower, shift, out=lower)  # 1 where any lower bit is set
    np.right_shift(bits, shift, out=upper)
    np.bitwise_or(upper, lower, out=upper)
    index = _scratch.like(values, np.intp, 2)
    np.copyto(index, upper)
    np.take(_codes(element.name), index, out=codes, mode="clip")


def _encode_bfloat16(values: F32, codes: Array, element: SmallFloat) -> None:
    bits = values.view(np.uint32)
    upper, odd = _scratch.like(values, np.uint32, 1), _scratch.like(values, np.uint32, 2)
    np.right_shift(bits, 16, out=upper)
    np.bitwise_and(upper, np.uint32(1), out=odd)
    np.add(odd, np.uint32(0x7FFF), out=odd)
    np.add(bits, odd, out=odd)  # a half of the last place, and one more where the code would be odd: ties to even
    np.right_shift(odd, 16, out=odd)
    np.copyto(codes, odd, casting="unsafe")
    nan = np.isnan(values)
    if nan.any():
        codes[nan] = upper[nan] | np.uint32(element.nan or 0)


def _decode(codes: Array, values: F32, element: SmallFloat) -> None:
    index = _scratch.like(values, np.intp)
    np.copyto(index, codes)
    np.take(_values(element.name), index, out=values, mode="clip")


@cache
def _codes(name: str) -> Array:
    """The code of every float32 whose lower bits are zero, by its upper bits. uint8 [2^KEPT_BITS]."""
    patterns = np.arange(2**KEPT_BITS, dtype=np.uint32) << (32 - KEPT_BITS)
    return np.asarray(ELEMENTS[name].encode(patterns.view(np.float32)))


@cache
def _values(name: str) -> Array:
    """The value of every code. float32 [256]."""
    return np.asarray(ELEMENTS[name].decode(np.arange(256, dtype=np.uint8)))
