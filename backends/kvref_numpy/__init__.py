"""A backend in NumPy: in place, without full-size temporaries, bit-identical to the reference.

Data is moved with one `take` or one indexed assignment. Rows are quantized and dequantized in chunks of some ten thousand
numbers, in scratch memory that stays in the processor's second-level cache. The time then depends on the number of passes over a
chunk, so that there are few:

- The largest magnitude is found among the bit patterns as integers. The patterns of non-negative floats have the same order as
  the floats, with infinity and NaN above all of them, so that the maximum also shows whether the row is finite.
- INT8 rounds magnitudes, and applies the signs to the bytes.
- FP8 codes are looked up in a table of 2^14 entries, by the upper 14 bits of the float32 pattern.
"""

from collections.abc import Callable, Iterator

import array_api_compat.numpy as xp
import numpy as np

from kvref.array import Array, Namespace, Shape
from kvref.backend import Slots, blocks_to_copy, check_new, host_slots, reference, slots_to_gather
from kvref.formats import Format, Quantized, SmallFloat
from kvref.formats.base import stored_as, widen
from kvref.formats.ggml import GGML, IQ4NL
from kvref.formats.group_scales import GroupFormat
from kvref.formats.hadamard import HadamardFormat
from kvref.formats.microscaling import MX, NVFP4
from kvref.formats.row_scales import SymmetricRow
from kvref.formats.small_float import BFLOAT16, FLOAT16
from kvref.formats.static_scales import StaticFloat8
from kvref.formats.token_scales import AffineRow
from kvref.hadamard_kernels import dequantize_rotated, quantize_rotated
from kvref_numpy.attention import grouped_attention
from kvref_numpy.ggml import dequantize_ggml, quantize_ggml, quantize_iq4_nl
from kvref_numpy.groups import dequantize_groups, dequantize_microscaled, quantize_groups, quantize_microscaled
from kvref_numpy.rows import (
    BLOCK,
    F32,
    decode,
    dequantize_row,
    dequantize_static,
    encode,
    encode_bfloat16,
    quantize_affine,
    quantize_static,
    quantize_symmetric,
)

ALIGNMENT = 64  # bytes: a cache line, and the alignment for vector instructions
# By class of format: the functions that quantize and dequantize [n, width], where `width` numbers share a scale.
KERNELS: dict[type, tuple[Callable[..., None], Callable[..., None]]] = {
    SymmetricRow: (quantize_symmetric, dequantize_row),
    AffineRow: (quantize_affine, dequantize_row),
    StaticFloat8: (quantize_static, dequantize_static),
    GroupFormat: (quantize_groups, dequantize_groups),
    GGML: (quantize_ggml, dequantize_ggml),
    IQ4NL: (quantize_iq4_nl, dequantize_ggml),
    MX: (quantize_microscaled, dequantize_microscaled),
    NVFP4: (quantize_microscaled, dequantize_microscaled),
}


class NumPyBackend:
    """The kernels of `kvref.Backend` in NumPy, on the CPU."""

    name = "numpy"
    xp: Namespace = xp

    def zeros(self, shape: Shape, dtype: str) -> Array:
        """Return an array of zeros at an address that is a multiple of 64 bytes (BUF-02). Its pages are allocated lazily."""
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
        return np.take(store, slots, axis=0, out=out, mode="clip")  # slots are valid; mode "raise" would copy to a buffer first

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
        if isinstance(format, HadamardFormat):
            return quantize_rotated(self, rows, format, out)
        kernel = KERNELS.get(type(format))
        if kernel is None or rows.ndim == 0 or rows.size == 0 or rows.shape[-1] % (format.group or 1):
            return reference.quantize(rows, format, out)
        if out is None:
            out = Quantized(*(np.empty(shape, dtype) for shape, dtype in stored_as(format, rows.shape, xp)))
        codes, *scales = (part for part in out if part is not None)
        width = format.group or rows.shape[-1]  # numbers per scale
        scales = [_own(each, 1) for each in scales]
        for pieces in _pieces(rows.reshape(-1, width), _own(codes, format.code_width(width)), *scales):
            kernel[0](*pieces, format=format)
        return out

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        codes = stored.codes
        if format.name == "float32" and out is None:
            return codes
        if isinstance(format, HadamardFormat):
            return dequantize_rotated(self, stored, width, format, out)
        kernel = KERNELS.get(type(format))
        if format.granularity != "element" and (kernel is None or codes.size == 0 or width % (format.group or 1)):
            return reference.dequantize(stored, width, format, out)
        if out is None:
            out = np.empty((*codes.shape[:-1], width), np.float32)
        if format.name in ("float32", "float16"):
            np.copyto(out, codes)
        elif format.name == "bfloat16":
            self.decode(codes, BFLOAT16, out)
        elif kernel:
            width = format.group or width
            scales = [part.reshape(-1, 1) for part in stored[1:] if part is not None]
            for pieces in _pieces(_own(out, width), codes.reshape(-1, format.code_width(width)), *scales):
                kernel[1](*pieces, format=format)
        return out

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        values = widen(values)
        out = np.empty(values.shape, f"uint{element.bits}") if out is None else out
        if element is FLOAT16:
            self._cast(values, "float16", out.view(np.float16))
            return out
        for x, part in _pieces(values.reshape(-1), _own(out)):
            (encode_bfloat16 if element is BFLOAT16 else encode)(x, part, element)
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
                decode(part, y, element)
        return out

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        return grouped_attention(np, query, keys, values, scale, mask, logit_sink)

    def _cast(self, rows: F32, name: str, out: Array | None) -> Array:
        """Rows in a format without scales."""
        if name == "bfloat16":
            return self.encode(rows, BFLOAT16, out)
        if out is None and name == "float32":
            return rows
        if out is None:
            out = np.empty(rows.shape, name)
        with np.errstate(over="ignore"):  # FMT-CAST-01 requires infinity on overflow
            np.copyto(out, rows, casting="same_kind")
        return out


def backend() -> NumPyBackend:
    """Return the backend: the entry point "numpy"."""
    return NumPyBackend()


def _own(array: Array, *row: int) -> Array:
    """An output array [..., *row] as [n, *row], without a copy. Raises ValueError unless it is C-contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("out: expected a C-contiguous array")
    return array.reshape(-1, *row)


def _pieces(*arrays: Array) -> Iterator[list[Array]]:
    """Divide arrays with the same first axis into chunks: about BLOCK numbers of the first array each."""
    rows = max(1, BLOCK * len(arrays[0]) // max(1, arrays[0].size))
    for start in range(0, len(arrays[0]), rows):
        yield [each[start : start + rows] for each in arrays]
