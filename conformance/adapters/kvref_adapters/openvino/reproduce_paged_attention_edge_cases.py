"""OpenVINO's PagedAttention on its CPU plugin: one sequence of two tokens of width 1, in the first of two blocks."""

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op import _PagedAttentionExtension

KINDS = ["f32"] * 3 + ["dynamic"] * 2 + ["i32"] * 4 + ["f32", "i32", "i32"]
none, floats, zero = (op.constant(each) for each in (np.zeros(0, np.int32), np.zeros(0, np.float32), np.int32(0)))
sinks, bytes_ = op.constant(np.zeros((0,) * 4, np.float32)), op.constant(np.zeros(0, np.uint8))


def attention(query: list[float], keys: list[float], values: list[float], scale: float, kv_heads: int = 1) -> np.ndarray:
    tokens = [np.float32(rows).reshape(2, -1) for rows in (query, keys, values)]
    pools = [np.full((2, kv_heads, 32, 1), 77, np.float32) for _ in range(2)]
    told = [np.int32(each) for each in ([0], [0, 2], [0], [0, 1])] + [np.float32(scale), np.int32(0), np.int32(2)]
    shapes = [[-1, rows.shape[1]] for rows in tokens] + [[-1] * 4] * 2 + [[-1]] * 4 + [[]] * 3
    given = [op.parameter(shape, getattr(ov.Type, kind)) for shape, kind in zip(shapes, KINDS, strict=True)]
    inputs = [*given[:11], floats, given[11], *[none] * 3, *[floats] * 2, *[zero] * 2, sinks, zero, *[none] * 4, bytes_, none]
    node = _PagedAttentionExtension([each.output(0) for each in inputs])
    for name, size in (("num_k_heads", kv_heads), ("num_v_heads", kv_heads), ("k_head_size", 1), ("v_head_size", 1)):
        node.get_rt_info()[name] = size
    model = ov.Model([op.result(node.output(0))], given, "paged")
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    request = ov.compile_model(model, "CPU", options).create_infer_request()
    for n, array in enumerate([*tokens, *pools, *told]):
        request.set_tensor(given[n].output(0), ov.Tensor(np.asarray(array), shared_memory=n in (3, 4)))
    request.infer()
    return request.get_output_tensor(0).data.copy()


print("scale 1, and scale 0:", *(attention([1, 1], [2, 3], [4, 5], scale)[1] for scale in (1.0, 0.0)))
print("scores of -1e40, beyond float32:", attention([1e20, 1e20], [-1e20, -1e20], [4, 5], 1.0)[1])
print("the first query, where the second value is NaN:", attention([1, 1], [2, 3], [4, np.nan], 1.0)[0])
print("three query heads over two kv heads of 4:", attention([1] * 6, [2] * 4, [4] * 4, 1.0, 2)[1])
