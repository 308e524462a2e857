"""ONNX Runtime's GroupQueryAttention, a window of 2: the outputs after an infinite token has left the window."""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

TYPES = {"query": 1, "key": 1, "value": 1, "past_key": 1, "past_value": 1, "seqlens_k": 6, "total_sequence_length": 6}
OUTPUTS = ["output", "present_key", "present_value"]

node = helper.make_node(
    "GroupQueryAttention", list(TYPES), OUTPUTS, domain="com.microsoft", num_heads=1, kv_num_heads=1, local_window_size=2
)
graph = helper.make_graph(
    [node], "window", [helper.make_tensor_value_info(name, of, None) for name, of in TYPES.items()],
    [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS],
)  # fmt: skip
domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

for first in (1.0, np.inf):
    past, seen = [np.zeros((1, 1, 0, 8), np.float32)] * 2, []
    for total in range(1, 7):
        token = np.full((1, 1, 8), first if total == 1 else 1.0, np.float32)
        sizes = {"seqlens_k": np.array([total - 1], np.int32), "total_sequence_length": np.array([total], np.int32)}
        given = {"query": np.ones_like(token), "key": np.ones_like(token), "value": token}
        out, *past = session.run(None, given | sizes | {"past_key": past[0], "past_value": past[1]})
        seen.append(float(out[0, 0, 0]))
    print(f"a first value of {first}: the six queries get", seen)
