"""Conversion of the raw buffers of a cache. If an array library lacks a dtype, a buffer contains its codes as integers."""

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.elements import decoded, encode
from kvref_conformance.oracle.expected import CODED


def numbers(buffer: NDArray, dtype: str) -> NDArray:
    """Returns the numbers in a buffer of this dtype, as float32 if the buffer contains codes."""
    return decoded(dtype)[buffer] if _codes(buffer, dtype) else buffer


def as_stored(rows: NDArray, buffer: NDArray, dtype: str) -> NDArray:
    """Returns `rows` as they are written into a buffer of this dtype."""
    return encode(rows, dtype).astype(buffer.dtype) if _codes(buffer, dtype) else rows


def _codes(buffer: NDArray, dtype: str) -> bool:
    return dtype in CODED and buffer.dtype.kind in "iu"
