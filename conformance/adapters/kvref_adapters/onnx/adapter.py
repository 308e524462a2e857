"""Adapters of ONNX's reference evaluator: casts, access by slot, and Attention with and without past and present.

E4M3FN is cast with the default options, and E5M2 with `saturate=0`, which keeps infinities: a KV cache would use both. Each graph
is first passed to ONNX's checker, with the types of its inputs. The adapter validates nothing.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import InferenceError

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_adapters._shared.onnx_nodes import OnnxGrowingCache, OnnxNodeKernels, OnnxNodeWindows, OnnxOperators

TO = {
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "float8_e5m2": TensorProto.FLOAT8E5M2,
    "bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16,
}  # fmt: skip


def run(model: bytes, given: Mapping[str, Any]) -> list[Any]:
    try:
        return list(_evaluator(model).run(None, dict(given)))
    except IndexError as error:
        raise (SlotOutOfRange if "out of bounds" in str(error) else DtypeMismatch)(str(error)) from error
    except InferenceError as error:
        raise (DtypeMismatch if "tensor(" in str(error) else ShapeMismatch)(str(error)) from error
    except (ValueError, AssertionError) as error:
        raise ShapeMismatch(str(error)) from error


@lru_cache(256)
def _evaluator(model: bytes) -> Any:
    onnx.checker.check_model(model, full_check=True)
    return ReferenceEvaluator(model)


class _OnnxReference(NumpyArrays):
    version = onnx.__version__
    language = "python"
    project = "onnx"


class OnnxCast(_OnnxReference):
    name = "onnx-cast"
    formats = tuple(TO)

    def elements(self) -> "OnnxCast":
        return self

    def encode(self, values: Any, format: str) -> Any:
        (cast,) = OnnxOperators(run)("Cast", ["y"], x=values, to=TO[format], saturate=int(format != "float8_e5m2"))
        return cast.view(np.uint8 if cast.itemsize == 1 else np.uint16)

    def decode(self, codes: Any, format: str) -> Any:
        narrow = codes.view(np.float16 if format == "float16" else getattr(ml_dtypes, format))
        return OnnxOperators(run)("Cast", ["y"], x=narrow, to=TensorProto.FLOAT)[0]


class OnnxScatter(_OnnxReference):
    name = "onnx-scatter"

    def kernels(self) -> OnnxNodeKernels:
        return OnnxNodeKernels(OnnxOperators(run))


class OnnxAttention(_OnnxReference):
    name = "onnx-attention"
    limits: ClassVar[Mapping[str, Any]] = {"sinks": [0], "chunk": [0], "tokens": {"least": 1}}  # a model has at least one token

    def attention(self) -> OnnxNodeWindows:
        return OnnxNodeWindows(OnnxOperators(run, 25))

    def contiguous(self, **config: Any) -> OnnxGrowingCache:
        return OnnxGrowingCache(OnnxOperators(run, 25), config)
