"""Formats that are another's, with something done before and after: a backend has no kernels for them but those of the other."""

from collections.abc import Callable

from array_api_compat import array_namespace, device

from kvref.array import Array
from kvref.backend import Backend
from kvref.formats import Format, Quantized
from kvref.formats.rotated import Rotated, hadamard
from kvref.formats.static import StaticFloat8

PIECE = 2**16  # values at a time on a CPU: what is made of them on the way stays in its cache


def quantize_composed(backend: Backend, rows: Array, format: Format, out: Quantized | None) -> Quantized | None:
    """`rows` in a rotated format, or in one whose scale is given, by the backend's other kernels; None for all others."""
    if isinstance(format, Rotated):
        return backend.quantize(_in_pieces(format.turned, rows), format.inner, out)
    if isinstance(format, StaticFloat8):
        return Quantized(backend.encode(_in_pieces(format.quotient, rows), format.small, out and out.codes))
    return None


def dequantize_composed(backend: Backend, stored: Quantized, width: int, format: Format, out: Array | None) -> Array | None:
    """What they read back as; None for all others. Arrays have to be of a library in which they can be written to."""
    if isinstance(format, Rotated):
        values = backend.dequantize(stored, width, format.inner, out)
        return _in_pieces(hadamard, values, values)
    if isinstance(format, StaticFloat8):
        values = backend.decode(stored.codes, format.small, out)
        values *= format.scale
        return values
    return None


def _in_pieces(function: Callable[[Array], Array], rows: Array, out: Array | None = None) -> Array:
    """function(rows), float32 of their shape, in `out` if it is given; some rows at a time where they lie in a CPU's memory."""
    xp, shape = array_namespace(rows), rows.shape
    if len(shape) == 0 or 0 in shape:
        return function(rows)
    result = xp.empty(shape, dtype=xp.float32, device=device(rows)) if out is None else out
    source, target = (xp.reshape(each, (-1, shape[-1])) for each in (rows, result))
    count = max(1, PIECE // shape[-1]) if str(device(rows)) == "cpu" else source.shape[0]
    for start in range(0, source.shape[0], count):
        target[start : start + count, :] = function(source[start : start + count, :])
    return result
