"""A backend in CuPy: moves data with `take` and indexed assignment, and quantizes with the CUDA kernels of kernels.cu.

Everything runs on CuPy's current stream. Slots are checked on the host (KERN-03). If they are integers on the host, as the caches
pass them, no operation synchronizes with the device, with two exceptions: formats with a scale, which must reject NaN before
anything is written (LAW-14), and attention, in which a number that is not finite must not affect queries that do not see it
(ATTN-07).
"""

from functools import cache
from pathlib import Path
from typing import Any

import array_api_compat.cupy as xp
import cupy
import numpy as np

from kvref.array import Array, Namespace, Shape
from kvref.backend import Slots, blocks_to_copy, check_new, host_slots, last_writes, reference, slots_to_gather
from kvref.errors import BackendNotFound, NonFinite
from kvref.formats import Format, Quantized, SmallFloat
from kvref.formats.base import stored_as, widen
from kvref.formats.ggml import GGML, IQ4_VALUES, IQ4NL
from kvref.formats.group_scales import LEAST, GroupFormat
from kvref.formats.hadamard import HadamardFormat
from kvref.formats.microscaling import NVFP4, Microscaled
from kvref.formats.row_scales import LEAST_SCALE, SymmetricRow
from kvref.formats.small_float import ELEMENTS
from kvref.formats.static_scales import StaticFloat8
from kvref.formats.token_scales import LEAST_SCALE as LEAST_AFFINE_SCALE
from kvref.formats.token_scales import AffineRow
from kvref.hadamard_kernels import dequantize_rotated, quantize_rotated
from kvref_numpy.attention import grouped_attention

SOURCE = Path(__file__).with_name("kernels.cu")
WARP = 32
THREADS = 256  # per CUDA block
KNOWN = SymmetricRow | AffineRow | GroupFormat | GGML | Microscaled  # formats with kernels in kernels.cu
NO_ELEMENT = (0, 0, 0, 0, 0, 0)


class CuPyBackend:
    """The kernels of `kvref.Backend` in CuPy, on a CUDA device."""

    name = "cupy"
    xp: Namespace = xp

    def zeros(self, shape: Shape, dtype: str) -> Array:
        return cupy.zeros(shape, dtype)

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        return cupy.asarray(values, dtype=dtype)

    def to_numpy(self, array: Array) -> Array:
        return cupy.asnumpy(array)

    def address(self, array: Array) -> int | None:
        return int(array.data.ptr)

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        buffer[:, :, position : position + new.shape[2], :] = new
        return buffer

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        numbers = host_slots(slots, store.shape[0], self.to_numpy)
        check_new(store, len(numbers), new)
        kept = last_writes(numbers)
        if len(kept) < len(numbers):
            numbers, new = numbers[kept], cupy.take(new, cupy.asarray(kept), axis=0)
        if len(numbers):
            store[cupy.asarray(numbers)] = new
        return store

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        numbers = slots_to_gather(slots, store.shape[0], self.to_numpy)
        return cupy.take(store, cupy.asarray(numbers), axis=0, out=out)

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        read, written, shape = blocks_to_copy(store, sources, targets, block_size, self.to_numpy)
        last = last_writes(written)
        blocks = store[: shape[0] * block_size].reshape(shape)
        if len(last):
            blocks[cupy.asarray(written[last])] = cupy.take(blocks, cupy.asarray(read[last]), axis=0)
        return store

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        rows = widen(rows)
        if format.granularity == "element":
            return Quantized(self._cast(rows, format, out and out.codes))
        if isinstance(format, HadamardFormat):
            return quantize_rotated(self, rows, format, out)
        if isinstance(format, StaticFloat8):
            return Quantized(self.encode(format.quotient(rows), format.small, out and out.codes))
        if not isinstance(format, KNOWN) or rows.ndim == 0 or rows.size == 0 or rows.shape[-1] % (format.group or 1):
            return reference.quantize(rows, format, out)
        width = format.group or rows.shape[-1]  # numbers per scale
        if out is None:
            out = Quantized(*(cupy.empty(shape, dtype) for shape, dtype in stored_as(format, rows.shape, xp)))
        refused = cupy.zeros(1, np.int32)
        rows = cupy.ascontiguousarray(rows)
        count = rows.size // width
        given = (rows, *(_own(part) for part in out if part is not None), refused, np.int64(count), np.int32(width))
        if format.granularity == "group":
            name, arrays, how = _of_groups(format, Quantized(*(part if part is None else _own(part) for part in out)))
            _launch(f"quantize_{name}", count * WARP, rows, *arrays, refused, np.int64(count), *how)
        elif isinstance(format, AffineRow):
            _launch("quantize_affine", count * WARP, *given, np.int32(format.bits), np.float32(LEAST_AFFINE_SCALE))
        elif isinstance(format, SymmetricRow):
            limits = np.float32(format.limit), np.float32(LEAST_SCALE)
            _launch("quantize_symmetric", count * WARP, *given, *limits, *_element(format.name))
        if int(refused[0]):
            raise NonFinite("rows: expected finite values whose dequantized values are finite, got other values")
        return out

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        codes = stored.codes
        if format.granularity == "element":
            if codes.dtype.kind == "f":
                return codes.astype(np.float32, copy=False) if out is None else _filled(out, codes)
            return self.decode(codes, ELEMENTS[format.name], out)
        if isinstance(format, HadamardFormat):
            return dequantize_rotated(self, stored, width, format, out)
        if isinstance(format, StaticFloat8):
            values = self.decode(codes, format.small, out)
            values *= format.scale
            return values
        if not isinstance(format, KNOWN) or codes.size == 0 or width % (format.group or 1):
            return reference.dequantize(stored, width, format, out)
        out = cupy.empty((*codes.shape[:-1], width), np.float32) if out is None else out
        if format.granularity == "group":
            dense = Quantized(*(part if part is None else cupy.ascontiguousarray(part) for part in stored))
            name, dense_arrays, how = _of_groups(format, dense, reading=True)
            _launch(f"dequantize_{name}", out.size, *dense_arrays, _own(out), np.int64(out.size // (format.group or 1)), *how)
            return out
        scale = cupy.ascontiguousarray(stored.scale)
        zero = scale if stored.zero is None else cupy.ascontiguousarray(stored.zero)
        affine_bits = format.bits if stored.zero is not None else 0
        sizes = np.int64(scale.size), np.int32(width), np.int32(affine_bits)
        arrays = cupy.ascontiguousarray(codes), scale, zero, _own(out)
        _launch("dequantize", out.size, *arrays, *sizes, *_element(format.name))
        return out

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        values = cupy.ascontiguousarray(widen(values)).reshape(values.shape)
        out = cupy.empty(values.shape, element.code_dtype) if out is None else out
        _launch("encode_values", values.size, values, _own(out), np.int64(values.size), *_element(element.name))
        return out

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        out = cupy.empty(codes.shape, np.float32) if out is None else out
        codes = cupy.ascontiguousarray(codes)
        _launch("decode_values", codes.size, codes, _own(out), np.int64(codes.size), *_element(element.name))
        return out

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        return grouped_attention(cupy, query, keys, values, scale, mask, logit_sink)

    def _cast(self, rows: Array, format: Format, out: Array | None) -> Array:
        """Rows in a format without scales."""
        dtype = format.code_dtype(xp)
        if dtype != format.name:
            return self.encode(rows, ELEMENTS[format.name], out)
        return rows.astype(dtype, copy=False) if out is None else _filled(out, rows)


def backend() -> CuPyBackend:
    """Return the backend: the entry point "cupy". Raises BackendNotFound if there is no GPU, or no driver for it."""
    try:
        cupy.zeros(1)
    except Exception as error:  # CuPy raises different errors, depending on what is missing
        raise BackendNotFound(f"backend cupy: expected a CUDA device, got {type(error).__name__}: {error}") from None
    return CuPyBackend()


def _of_groups(format: Format, stored: Quantized, reading: bool = False) -> tuple[str, list[Array], list[Any]]:
    """For a format of groups: the name of its kernels, the stored arrays, and the kernels' last arguments."""
    sizes = [np.int32(format.group or 1), np.int32(format.bits)]
    if isinstance(format, GGML):
        tabled = isinstance(format, IQ4NL)
        return "ggml", [stored.codes, _iq4_values()], [sizes[1], np.int32(format.affine), np.int32(tabled)]
    if isinstance(format, GroupFormat):
        assert stored.scale is not None
        scales = [stored.scale, stored.scale if stored.zero is None else stored.zero]
        dtype = str(scales[0].dtype).replace("uint16", "bfloat16")  # as stored, possibly by another backend
        least = [] if reading else [np.float32(LEAST[format.scale.name])]
        return "groups", [stored.codes, *scales], [*sizes, np.int32(format.affine), *least, *_element(dtype)]
    assert isinstance(format, Microscaled)
    limit = [] if reading else [np.float32(format.small.max)]
    element = _element(format.small if isinstance(format.small, SmallFloat) else "int8")
    return "microscaled", [stored.codes, stored.scale], [*sizes, np.int32(isinstance(format, NVFP4)), *limit, *element]


@cache
def _iq4_values() -> Array:
    """IQ4_VALUES on the device."""
    return cupy.asarray(np.asarray(IQ4_VALUES, np.float32))


def _launch(name: str, threads: int, *arguments: Any) -> None:
    """Start a kernel with at least `threads` threads."""
    if threads:
        _module().get_function(name)((-(-threads // THREADS),), (THREADS,), arguments)


@cache
def _module() -> Any:
    """The compiled kernels."""
    return cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=("-std=c++17",))


def _element(of: str | SmallFloat) -> tuple[Any, ...]:
    """A float type, as arguments of a kernel: the type itself, or by name; zeros for integer codes and for float32."""
    f = of if isinstance(of, SmallFloat) else ELEMENTS.get(of)
    if f is None:
        return (*map(np.int32, NO_ELEMENT[:3]), *map(np.uint32, NO_ELEMENT[3:]))
    signed = np.int32(f.bits), np.int32(f.mantissa_bits), np.int32(f.bias)
    return *signed, np.uint32(f.largest), np.uint32(f.nan or 0), np.uint32(f.infinity or 0)


def _own(array: Array) -> Array:
    """An output array. Raises ValueError unless it is C-contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("out: expected a C-contiguous array")
    return array


def _filled(out: Array, values: Array) -> Array:
    out[...] = values
    return out
