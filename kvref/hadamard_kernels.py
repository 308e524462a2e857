"""Rotated formats for backends with writable arrays: rotates rows here, and calls the backend's kernels for the inner format.

The result is that of `kvref.formats.hadamard`, with the same order of additions. On a CPU, rows are processed in chunks that fit
into the processor's cache, and there is no rotated copy of all rows.
"""

from collections.abc import Iterator

import numpy as np
from array_api_compat import array_namespace, device

from kvref.array import Array, Namespace
from kvref.backend import Backend
from kvref.formats import Quantized
from kvref.formats.base import stored_as, widen
from kvref.formats.hadamard import REACH, HadamardFormat, block_of

# Numbers per chunk on a CPU. Not a power of two: the columns of a chunk would compete for the same lines of the cache.
PIECE = 31 * 2**15


def quantize_rotated(backend: Backend, rows: Array, format: HadamardFormat, out: Quantized | None) -> Quantized:
    """`Backend.quantize` of rows [..., width] in a rotated format. Raises as `format.quantize` does."""
    rows = widen(rows)
    if len(rows.shape) == 0 or 0 in rows.shape:
        return backend.quantize(format.turned(rows), format.inner, out)
    xp, width = array_namespace(rows), rows.shape[-1]
    if out is None:
        parts = stored_as(format, rows.shape, xp)
        out = Quantized(*(xp.empty(shape, dtype=getattr(xp, dtype), device=device(rows)) for shape, dtype in parts))
    stored = [xp.reshape(part, (-1, *part.shape[rows.ndim - 1 :]), copy=False) for part in out if part is not None]
    rows, most = xp.reshape(rows, (-1, width)), REACH / block_of(width)
    turned, room = _room(xp, rows)
    for some in _pieces(rows):
        x = rows[some]
        if not bool(xp.max(xp.abs(x)) <= most):
            format.turned(x)  # raises the error, except for rows with a block of 1, which are not rotated
        rotate(x, turned[: len(x)], room)
        backend.quantize(turned[: len(x)], format.inner, Quantized(*(part[some] for part in stored)))
    return out


def dequantize_rotated(backend: Backend, stored: Quantized, width: int, format: HadamardFormat, out: Array | None) -> Array:
    """`Backend.dequantize` in a rotated format: float32 [..., width]."""
    codes = stored.codes
    if codes.ndim == 0 or 0 in codes.shape:
        return backend.dequantize(stored, width, format.inner, out)
    xp = array_namespace(codes)
    if out is None:
        out = xp.empty((*codes.shape[:-1], width), dtype=xp.float32, device=device(codes))
    parts = [xp.reshape(part, (-1, *part.shape[codes.ndim - 1 :])) for part in stored if part is not None]
    rows = xp.reshape(out, (-1, width), copy=False)
    turned, room = _room(xp, rows)
    for some in _pieces(rows):
        y = rows[some]
        with np.errstate(over="ignore", invalid="ignore"):  # as in the reference
            backend.dequantize(Quantized(*(part[some] for part in parts)), width, format.inner, turned[: len(y)])
            rotate(turned[: len(y)], y, room)
    return out


def rotate(rows: Array, out: Array, room: Array) -> None:
    """Write hadamard(rows) to `out`, both float32 [n, width]. room: scratch memory, float32 [2, at least n * width]."""
    xp, block = array_namespace(rows), block_of(rows.shape[-1])
    size = rows.shape[0] * rows.shape[1]
    turned, sums = room[0, :size], room[1, :size]
    xp.reshape(turned, (block, -1), copy=False)[...] = xp.reshape(rows, (-1, block)).T  # libraries add long rows fastest
    span = 1
    while span < block:  # pairs that are 1, 2, 4, ... apart
        shape = block // (2 * span), 2, -1
        pairs, added = xp.reshape(turned, shape), xp.reshape(sums, shape, copy=False)
        xp.add(pairs[:, 0, :], pairs[:, 1, :], out=added[:, 0, :])
        xp.subtract(pairs[:, 0, :], pairs[:, 1, :], out=added[:, 1, :])
        turned, sums, span = sums, turned, 2 * span
    if block > 1:
        turned *= block**-0.5
    xp.reshape(out, (-1, block), copy=False)[...] = xp.reshape(turned, (block, -1)).T


def _pieces(rows: Array) -> Iterator[slice]:
    """Chunks of rows."""
    count = _rows_at_once(rows)
    for start in range(0, rows.shape[0], count):
        yield slice(start, start + count)


def _rows_at_once(rows: Array) -> int:
    """Rows per chunk: on a CPU about PIECE numbers, elsewhere all rows."""
    count, width = rows.shape
    return int(min(count, max(1, PIECE // width)) if str(device(rows)) == "cpu" else count)


def _room(xp: Namespace, rows: Array) -> tuple[Array, Array]:
    """Scratch memory for one chunk of n rows: [n, width], and [2, n * width] for `rotate`."""
    count, width = _rows_at_once(rows), rows.shape[1]
    new = {"dtype": xp.float32, "device": device(rows)}
    return xp.empty((count, width), **new), xp.empty((2, count * width), **new)
