"""NumPy arrays as the judge uses them: of any dtype, since values, codes and bits go the same ways."""

from typing import Any, TypeAlias

import numpy.typing

NDArray: TypeAlias = numpy.typing.NDArray[Any]


def same_bits(one: NDArray, other: NDArray) -> bool:
    """Whether two arrays are the same to the bit, dtype and shape included: what is nearly always so, at the least price."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
