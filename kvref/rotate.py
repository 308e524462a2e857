"""Rotated formats in a backend whose arrays can be written to: its kernels for the format inside, of rows that are rotated here.

It is what `kvref.formats.rotated` says, in the same order of additions, in place and some rows at a time: no rotated copy of all
rows is made, and what there is of one stays in the processor's cache.
"""

from collections.abc import Iterator

import numpy as np
from array_api_compat import array_namespace, device

from kvref.array import Array, Namespace
from kvref.backend import Backend
from kvref.formats import Quantized
from kvref.formats.base import stored_as, widen
from kvref.formats.rotated import REACH, Rotated, block_of

# Values at a time on a CPU. Were it a power of two, the columns of a piece would fall on the same lines of the cache.
PIECE = 31 * 2**15


def quantize_rotated(backend: Backend, rows: Array, format: Rotated, out: Quantized | None) -> Quantized:
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
            format.turned(x)  # raises, and says why, unless rows are not rotated at all
        rotate(x, turned[: len(x)], room)
        backend.quantize(turned[: len(x)], format.inner, Quantized(*(part[some] for part in stored)))
    return out


def dequantize_rotated(backend: Backend, stored: Quantized, width: int, format: Rotated, out: Array | None) -> Array:
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
    """hadamard(rows) in `out`, both [n, width], by way of `room`, two of their size."""
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
    count = _rows_at_once(rows)
    for start in range(0, rows.shape[0], count):
        yield slice(start, start + count)


def _rows_at_once(rows: Array) -> int:
    count, width = rows.shape
    return int(min(count, max(1, PIECE // width)) if str(device(rows)) == "cpu" else count)


def _room(xp: Namespace, rows: Array) -> tuple[Array, Array]:
    """For a piece: [n, width], and [2, n * width] for `rotate`."""
    count, width = _rows_at_once(rows), rows.shape[1]
    new = {"dtype": xp.float32, "device": device(rows)}
    return xp.empty((count, width), **new), xp.empty((2, count * width), **new)
