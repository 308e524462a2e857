"""The type of NumPy arrays in the judge: any dtype, because values, codes and bits use the same functions."""

from typing import Any, TypeAlias

import numpy.typing

NDArray: TypeAlias = numpy.typing.NDArray[Any]


def same_bits(one: NDArray, other: NDArray) -> bool:
    """Whether two arrays have the same dtype, shape and bits. Fast, because this is nearly always the case."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
