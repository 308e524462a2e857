"""What kvref means by an array.

The Array API standard defines arrays by behaviour, and no static type for them exists that NumPy, PyTorch, CuPy and
array_api_strict all satisfy. `Array` is therefore `Any` with a name: it stands wherever an array of the backend's library goes,
and every docstring gives the shape and dtype that a type checker cannot.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

Array: TypeAlias = Any
Namespace: TypeAlias = ModuleType
Shape: TypeAlias = tuple[int, ...]

# float32's unit roundoff: rounding to nearest moves a number by at most this, relatively (in the normal range).
UNIT_ROUNDOFF = 2.0**-24


def dtype_name(array: Array, xp: Namespace) -> str:
    """The standard's name of an array's dtype ("float32"), with float16 and bfloat16 where the library has them."""
    return next((name for name in ITEM_BYTES if getattr(xp, name, None) == array.dtype), str(array.dtype))


ITEM_BYTES: Mapping[str, int] = {  # bytes an element, by dtype
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
