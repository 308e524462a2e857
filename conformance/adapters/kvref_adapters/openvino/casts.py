"""Adapter of OpenVINO's Convert on its CPU plugin: casts from and to float32, value by value. Codes are unsigned integers."""

from functools import cache
from typing import Any

import openvino
from openvino import opset15 as op

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters.openvino.paged_attention import OpenVino

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}


class OpenVinoConvert(OpenVino):
    name = "openvino-convert"
    formats = tuple(TYPES)

    def elements(self) -> "OpenVinoConvert":
        return self

    def encode(self, values: Any, format: str) -> Any:
        codes = _converted("f32", TYPES[format], lambda kind: openvino.Tensor(values))
        return codes.view(f"uint{8 * codes.itemsize}")

    def decode(self, codes: Any, format: str) -> Any:
        return _converted(TYPES[format], "f32", lambda kind: openvino.Tensor(codes, codes.shape, kind))


def _converted(source: str, target: str, tensor: Any) -> Any:
    request = _compiled(source, target).create_infer_request()
    try:
        request.set_input_tensor(tensor(getattr(openvino.Type, source)))
        request.infer()
    except RuntimeError as error:
        raise (DtypeMismatch if "precision" in str(error) else ShapeMismatch)(str(error)) from error
    return request.get_output_tensor(0).data.copy()


@cache
def _compiled(source: str, target: str) -> Any:
    values = op.parameter([-1], getattr(openvino.Type, source))
    model = openvino.Model([op.result(op.convert(values, target))], [values], "convert")
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
