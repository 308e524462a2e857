"""ONNX Runtime's MultiHeadAttention with a past of two tokens, keys of width 2: values of other widths in a step, 0 included.

The last line is not printed, because the process ends first.
"""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

INPUTS = ["query", "key", "value", "", "", "", "past_key", "past_value"]
OUTPUTS = ["output", "present_key", "present_value"]
node = helper.make_node("MultiHeadAttention", INPUTS, OUTPUTS, domain="com.microsoft", num_heads=1)
infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in [*INPUTS, *OUTPUTS] if name}
graph = helper.make_graph([node], "step", [infos[name] for name in INPUTS if name], [infos[name] for name in OUTPUTS])
domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
model = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])

past, token = np.array([[[[1, 2], [3, 4]]]], np.float32), np.zeros((1, 1, 2), np.float32)
for width in (2, 1, 4, 0):
    given = {"query": token, "key": token, "value": np.full((1, 1, width), 9, np.float32), "past_key": past, "past_value": past}
    present = session.run(["present_value"], given)[0]
    print(f"values of width {width}: present_value is", present[0, 0].tolist(), flush=True)
