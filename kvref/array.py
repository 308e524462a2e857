"""Type aliases for arrays, and the dtypes that kvref uses.

The Array API standard defines arrays by their behavior. There is no static type that the arrays of NumPy, PyTorch, CuPy and
array_api_strict all satisfy. `Array` is therefore an alias of `Any`: it marks an array of the backend's library, and docstrings
state its shape and dtype.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

Array: TypeAlias = Any
Namespace: TypeAlias = ModuleType
Shape: TypeAlias = tuple[int, ...]

# The unit roundoff of float32: the largest relative error of rounding a number of the normal range to nearest.
UNIT_ROUNDOFF = 2.0**-24


def dtype_name(array: Array, xp: Namespace) -> str:
    """The name of an array's dtype as in the Array API standard ("float32"), also "float16" and "bfloat16"."""
    return next((name for name in ITEM_BYTES if getattr(xp, name, None) == array.dtype), str(array.dtype))


ITEM_BYTES: Mapping[str, int] = {  # bytes per element, by dtype
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
