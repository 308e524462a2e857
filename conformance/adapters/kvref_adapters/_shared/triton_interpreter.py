"""Triton's interpreter, which runs kernels on a CPU, with three faults corrected. Import this module before Triton or torch.

- A load or store outside the tensors that a launch gets raises OutsideTensors. Triton's interpreter accesses that memory, which
  can end the process.
- Numbers in bfloat16 and FP8 are arrays of ml_dtypes, which rounds to nearest, ties to even. A cast to FP8 saturates, as NVIDIA's
  instructions do. Triton 3.9.0 stores their bits as integers: it truncates to bfloat16, casts -1.94 to -1.0 in E4M3, and adds
  and multiplies bfloat16 numbers as integers.
- A comparison returns booleans, so that a mask can be ANDed with the comparison of a scalar. In Triton 3.9.0 the result has the
  type of the operands, and such a mask raises.

The interpreter runs the programs of a launch in order, so that races do not show. Its dots are float32, where a GPU can use TF32.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

TensorHandle = interpreter.TensorHandle
BUILDER = interpreter.InterpreterBuilder
# The bytes of a number -> its type in NumPy, for loads and stores of types that Triton's C++ functions do not know.
AS_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.uint16}
NARROW: dict[str, Any] = {  # by Triton's name of the type
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp8e4b8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(ml_dtypes.float8_e5m2fnuz),
}


class OutsideTensors(Exception):
    """A load or store outside the tensors of its launch. Triton wraps it in an InterpreterError that has its text."""


class Launch:
    """The memory that the current launch may access: from the first to the last element of each tensor."""

    def __init__(self) -> None:
        self.kernel = ""
        self.more: list[tuple[int, int, str]] = []  # memory whose addresses are numbers in a tensor
        self.set([])

    def set(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.extents = sorted([extent for name, tensor in tensors if (extent := _extent(name, tensor))] + self.more)

    def check(self, pointers: Any, mask: Any, action: str) -> None:
        """Raise OutsideTensors if an address that the mask selects is outside. pointers, mask: handles."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data if mask is None else pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        if any(first <= low and high + size <= end for first, end, _ in self.extents):
            return
        for address in map(int, np.unique(addresses)):
            if not any(first <= address and address + size <= end for first, end, _ in self.extents):
                raise OutsideTensors(f"{self.kernel}: {action} of {size} bytes at {self._place(address)}")

    def _place(self, address: int) -> str:
        """Return the address as an offset in the tensor that begins before it, or in the first one."""
        if not self.extents:
            return f"address {address}, without any tensor"
        at = max(0, bisect_right(self.extents, (address, 0, "")) - 1)
        first, end, name = self.extents[at]
        return f"byte {address - first} of {name}, which has bytes 0 to {end - first - 1}"


LAUNCH = Launch()


def _extent(name: str, tensor: Any) -> tuple[int, int, str] | None:
    """Return the address of the first element and the end of the last one. None for a tensor without elements."""
    if not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name


def _tensors(name: str, argument: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(argument, tuple):
        for part in argument:
            yield from _tensors(name, part)
    elif hasattr(argument, "base") and hasattr(argument, "block_shape"):  # a tensor descriptor
        yield name, argument.base
    elif hasattr(argument, "data_ptr"):
        yield name, argument


@contextmanager
def reachable(**tensors: Any) -> Iterator[None]:
    """Allow kernels to access tensors whose addresses they read from another tensor."""
    LAUNCH.more = [extent for name, tensor in tensors.items() if (extent := _extent(name, tensor))]
    try:
        yield
    finally:
        LAUNCH.more = []


def _init_args(self: Any, args: Any, kwargs: Any) -> Any:
    on_host, named = _original_init_args(self, args, kwargs)
    LAUNCH.kernel = self.fn.__name__
    LAUNCH.set(each for pair in [*zip(self.arg_names, on_host, strict=False), *named.items()] for each in _tensors(*pair))
    return on_host, named


def _numpy_dtype(dtype: Any) -> Any:
    return NARROW.get(getattr(dtype.scalar, "name", "")) or _original_numpy_dtype(dtype)


def _as_integers(data: Any) -> Any:
    """Return the bits of numbers in a type of ml_dtypes as integers, and other numbers unchanged."""
    return data.view(AS_INTEGERS[data.dtype.itemsize]) if data.dtype in NARROW.values() else data


def _load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
    LAUNCH.check(pointers, mask, "load")
    dtype = _numpy_dtype(pointers.get_element_ty())
    bits = _as_integers(np.zeros(0, dtype)).dtype
    fill = np.zeros(pointers.data.shape, bits) if other is None else _as_integers(other.data)
    loaded = interpreter._interpreter.load(pointers.data, mask.data, fill, bits)
    return TensorHandle(loaded.view(dtype), pointers.get_element_ty())


def _store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
    LAUNCH.check(pointers, mask, "store")
    return interpreter._interpreter.store(pointers.data, _as_integers(value.data), mask.data)


def _cast(self: Any, source: Any, dtype: Any, rounding: Any = None) -> Any:
    if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError("casts that round toward zero")
    data, target = source.data, _numpy_dtype(dtype)
    if target in NARROW.values() and target.itemsize == 1:
        largest = np.float32(ml_dtypes.finfo(target).max)
        data = np.clip(data.astype(np.float32), -largest, largest)
    return TensorHandle(data.astype(target), dtype.scalar)


def _binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
    result = _original_binary(self, left, right, operation)
    return TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result


def _dot(self: Any, left: Any, right: Any, *options: Any) -> Any:
    wide = [
        TensorHandle(each.data.astype(np.float32), tl.float32) if each.data.dtype in NARROW.values() else each
        for each in (left, right)
    ]
    return _original_dot(self, *wide, *options)


def _atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
    LAUNCH.check(pointers, mask, "atomic access")
    return _original_rmw(self, operation, pointers, value, mask, *options)


def _atomic_cas(self: Any, pointers: Any, *options: Any) -> Any:
    LAUNCH.check(pointers, None, "atomic access")
    return _original_cas(self, pointers, *options)


_original_init_args = interpreter.GridExecutor._init_args_hst
_original_rmw, _original_cas = BUILDER.create_atomic_rmw, BUILDER.create_atomic_cas
_original_numpy_dtype, _original_binary, _original_dot = interpreter._get_np_dtype, BUILDER.binary_op, BUILDER.create_dot
interpreter.GridExecutor._init_args_hst = _init_args
interpreter._get_np_dtype = _numpy_dtype
BUILDER.create_masked_load, BUILDER.create_masked_store = _load, _store
BUILDER.cast_impl, BUILDER.create_fp_to_fp = _cast, _cast
BUILDER.binary_op, BUILDER.create_dot = _binary, _dot
BUILDER.create_atomic_rmw, BUILDER.create_atomic_cas = _atomic_rmw, _atomic_cas
