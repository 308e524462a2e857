"""Formats that are another's, with something done before and after: a backend has no kernels for them but those of the other."""

from kvref.array import Array
from kvref.backend import Backend
from kvref.formats import Format, Quantized
from kvref.formats.rotated import Rotated, hadamard
from kvref.formats.static import StaticFloat8


def quantize_composed(backend: Backend, rows: Array, format: Format, out: Quantized | None) -> Quantized | None:
    """`rows` in a rotated format, or in one whose scale is given, by the backend's other kernels; None for all others."""
    if isinstance(format, Rotated):
        return backend.quantize(format.turned(rows), format.inner, out)
    if isinstance(format, StaticFloat8):
        return Quantized(backend.encode(format.quotient(rows), format.small, out and out.codes))
    return None


def dequantize_composed(backend: Backend, stored: Quantized, width: int, format: Format, out: Array | None) -> Array | None:
    """What they read back as; None for all others. Arrays have to be of a library in which they can be written to."""
    if isinstance(format, Rotated):
        values = backend.dequantize(stored, width, format.inner, out)
        values[...] = hadamard(values)
        return values
    if isinstance(format, StaticFloat8):
        values = backend.decode(stored.codes, format.small, out)
        values *= format.scale
        return values
    return None
