"""OpenVINO's Convert on its CPU plugin, in float32: the codes of some numbers in bfloat16 and in the two FP8 formats."""

import numpy as np
import openvino as ov
from openvino import opset13 as op


def converted(values: object, source: str, target: str) -> np.ndarray:
    given = op.parameter([-1], getattr(ov.Type, source))
    model = ov.Model([op.result(op.convert(given, target))], [given], "convert")
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled.create_infer_request().infer({0: values})[0].copy()


numbers = np.float32([3.14, 1.0078124, 2**-133 * 0.75])
print("bf16", numbers, [hex(code) for code in converted(numbers, "f32", "bf16").view(np.uint16)])
for name, some in (("f8e4m3", [0.0029296873, 464, 480]), ("f8e5m2", [61439.996, 7.629394e-06, 7.6293945e-06])):
    print(name, some, converted(np.float32(some), "f32", name))
nan = np.uint32([0x7FC00000, 0x7F800001]).view(np.float32)
print("f8e5m2", nan, converted(nan, "f32", "f8e5m2"), "where 124 is infinity")
