"""OpenVINO's variables of keys and values on its CPU plugin: the attention output, and what `query_state` returns.

The last line, for u4, is not printed, because the process ends first.
"""

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

tokens = [op.parameter([-1, 1, -1, 64], ov.Type.f32) for _ in range(3)]
beams, kept, sinks, zero = op.parameter([-1], ov.Type.i32), [], [], np.int64(0)
for name, new in zip("kv", tokens[1:], strict=True):
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, 1, -1, 64]), ov.Type.f32, name
    variable, batch = Variable(info), op.gather(op.shape_of(beams), np.int64([0]), zero)
    empty = op.broadcast(np.float32(0), op.concat([batch, op.constant(np.int64([1, 0, 64]))], 0))
    kept.append(op.concat([op.gather(op.read_value(empty, variable), beams, zero), new], 2))
    sinks.append(op.assign(kept[-1], variable))
result = op.result(op.scaled_dot_product_attention(tokens[0], *kept))
model = ov.Model([result], sinks, [*tokens, beams], "states")

options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
tiny = np.full((1, 1, 1, 64), 1e-40, np.float32)
request = ov.compile_model(model, "CPU", options).create_infer_request()
request.infer([tiny, tiny, tiny, np.int32([0])])
state = request.query_state()[0]
before = state.state.data[0, 0, 0, 0]
state.state = ov.Tensor(tiny)
print("1e-40 appended reads as", before, "and set as", state.state.data[0, 0, 0, 0])

row = np.linspace(2, 3, 64, dtype=np.float32)[None, None, None]
for precision in ("f32", "u8", "u4"):
    request = ov.compile_model(model, "CPU", options | {"KV_CACHE_PRECISION": precision}).create_infer_request()
    for _ in range(2):
        out = request.infer([row, row, row, np.int32([0])])[0]
    states = [state.state.data[0, 0, 0, ::21] for state in request.query_state()]
    print(precision, "attention", out[0, 0, 0, ::21], "keys and values", *states, flush=True)
    for state in request.query_state():
        state.state = ov.Tensor(row)
    out = request.infer([row, row, row, np.int32([0])])[0]
    print(precision, "attention, after both were set to one token", out[0, 0, 0, ::21], flush=True)
