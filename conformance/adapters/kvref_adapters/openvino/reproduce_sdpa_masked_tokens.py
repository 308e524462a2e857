"""OpenVINO's ScaledDotProductAttention on its CPU plugin: over no tokens, over a masked token, and with a masked token of NaN."""

import numpy as np
import openvino as ov
from openvino import opset13 as op

given = [op.parameter([1, 1, -1, 4], ov.Type.f32) for _ in range(3)] + [op.parameter([1, 1, -1, -1], ov.Type.boolean)]
model = ov.Model([op.result(op.scaled_dot_product_attention(*given))], given, "attention")
request = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()


def attended(values: list[float], seen: list[bool]) -> np.ndarray:
    rows = np.repeat(np.float32(values), 4).reshape(1, 1, -1, 4)
    return request.infer([np.ones((1, 1, 1, 4), np.float32), np.ones_like(rows), rows, np.array(seen).reshape(1, 1, 1, -1)])[
        0
    ].copy()


print("a token of 7:", attended([7], [True])[0, 0])
print("no tokens:", attended([], [])[0, 0])
print("a token of 7 that is masked:", attended([7], [False])[0, 0])
print("a token of 7, and one of NaN that is masked:", attended([7, np.nan], [True, False])[0, 0])
