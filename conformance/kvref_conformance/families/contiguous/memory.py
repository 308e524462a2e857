"""Numbers as they lie in the cache's own buffers: where a library lacks the dtype, as codes."""

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.elements import decoded, encode
from kvref_conformance.oracle.expected import CODED


def numbers(buffer: NDArray, dtype: str) -> NDArray:
    """What a buffer of this dtype holds: float32, where these are codes."""
    return decoded(dtype)[buffer] if _codes(buffer, dtype) else buffer


def as_stored(rows: NDArray, buffer: NDArray, dtype: str) -> NDArray:
    """Numbers of this dtype as they are written into a buffer of it."""
    return encode(rows, dtype).astype(buffer.dtype) if _codes(buffer, dtype) else rows


def _codes(buffer: NDArray, dtype: str) -> bool:
    return dtype in CODED and buffer.dtype.kind in "iu"
