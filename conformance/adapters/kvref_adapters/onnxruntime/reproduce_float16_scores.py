"""ONNX Runtime: two tokens whose scores are 1024.25 and 1024, of which the second has the value 1, in float32 and in float16."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

Q, K = np.array([[[[1, 1]]]]), np.array([[[[1024, 0.25], [1024, 0]]]])
V = np.array([[[[0], [1]]]])
for of in (TensorProto.FLOAT, TensorProto.FLOAT16):
    *infos, out = [helper.make_tensor_value_info(name, of, None) for name in "QKVY"]
    graph = helper.make_graph([helper.make_node("Attention", [*"QKV"], ["Y"], scale=1.0)], "attention", infos, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for factor in (1, 64):
        given = {
            name: array.astype(helper.tensor_dtype_to_np_dtype(of)) for name, array in (("Q", Q * factor), ("K", K), ("V", V))
        }
        print(TensorProto.DataType.Name(of), f"scores * {factor}:", session.run(None, given)[0].item())
