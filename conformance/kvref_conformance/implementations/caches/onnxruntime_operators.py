"""Adapters of ONNX Runtime's kernels of standard ONNX operators, on a CPU: casts, access by slot, attention, and a cache.

E4M3FN is cast with the default options, and E5M2 with `saturate=0`, which keeps infinities: a KV cache would use both. Each
combination of types and each scale is a graph of its own. The adapter validates nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_conformance.implementations.caches import onnx_nodes
from kvref_conformance.implementations.caches.onnx_nodes import Growing, Kernels, Operators
from kvref_conformance.interface import Level

TO = {
    "float8_e4m3fn": (TensorProto.FLOAT8E4M3FN, np.uint8), "float8_e5m2": (TensorProto.FLOAT8E5M2, np.uint8),
    "bfloat16": (TensorProto.BFLOAT16, np.uint16), "float16": (TensorProto.FLOAT16, np.uint16),
}  # fmt: skip


def run(model: bytes, given: Mapping[str, Any]) -> list[Any]:
    try:
        return list(_session(model).run(None, dict(given)))
    except (Fail, InvalidArgument, InvalidGraph, RuntimeException) as error:
        said = str(error)
        kind = (
            DtypeMismatch if "Type Error" in said or "Unexpected input data type" in said
            else SlotOutOfRange if "invalid indice" in said or "out of data bounds" in said
            else ShapeMismatch
        )  # fmt: skip
        raise kind(said) from error


@lru_cache(256)
def _session(model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Runtime:
    version = onnxruntime.__version__
    language = "c++"
    project = "onnxruntime"
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32",)

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array


class Cast(Runtime):
    """Codes are bytes, because NumPy does not have these types."""

    name = "onnxruntime-cast"
    formats = tuple(TO)

    def elements(self) -> "Cast":
        return self

    def encode(self, values: Any, format: str) -> Any:
        of, bits = TO[format]
        codes = np.empty(values.shape, bits)
        _cast((values, _type(values)), (codes, of), saturate=int(format != "float8_e5m2"))
        return codes

    def decode(self, codes: Any, format: str) -> Any:
        numbers = np.empty(codes.shape, np.float32)
        _cast((np.ascontiguousarray(codes), TO[format][0]), (numbers, TensorProto.FLOAT), saturate=1)
        return numbers


def _type(array: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _cast(source: tuple[Any, int], target: tuple[Any, int], saturate: int) -> None:
    """Cast values in memory of one type into memory of another type."""
    attributes = (("to", target[1]), ("saturate", saturate))
    types = (("x", source[1], (None,) * source[0].ndim),)
    session = _session(onnx_nodes.one_node("Cast", ("x",), types, ("y",), "", onnx_nodes.OPSET, attributes))
    values = [onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(*each) for each in (source, target)]
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", values[0])
    binding.bind_ortvalue_output("y", values[1])
    session.run_with_iobinding(binding)


class Scatter(Runtime):
    name = "onnxruntime-scatter"

    def kernels(self) -> Kernels:
        return Kernels(Operators(run))


class Attention(Runtime):
    name = "onnxruntime-attention"
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}}  # a model has at least one token

    def attention(self) -> onnx_nodes.Attention:
        return onnx_nodes.Attention(Operators(run))

    def contiguous(self, **config: Any) -> Growing:
        return Growing(Operators(run), config)


class AttentionFloat16(Runtime):
    name = "onnxruntime-attention-float16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float16"], "tokens": {"least": 1}}

    def attention(self) -> onnx_nodes.Attention:
        return onnx_nodes.Attention(Operators(run))

    def contiguous(self, **config: Any) -> Growing:
        return Growing(Operators(run), config, "float16")
