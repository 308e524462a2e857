"""ONNX Runtime: attention over two tokens of value 1 and a third that is masked, and with all tokens masked."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

LENGTHS = {"Attention": ("", "nonpad_kv_seqlen", np.int64), "MultiHeadAttention": ("com.microsoft", "key_padding_mask", np.int32)}
for op, (domain, length, dtype) in LENGTHS.items():
    names = ["Q", "K", "V", *[""] * (1 if domain else 3), length]
    node = helper.make_node(op, names, ["Y"], domain=domain, **({"num_heads": 1} if domain else {}))
    types = {length: helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    infos = [helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), None) for name in [*names, "Y"] if name]
    domains = [helper.make_opsetid("", 24), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "masked", infos[:-1], infos[-1:])
    model = helper.make_model(graph, opset_imports=domains, ir_version=11).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    for past_the_end, count in ((5.0, 2), (np.nan, 2), (1e5, 2), (5.0, 0)):
        tokens = np.array([1, 1, past_the_end], np.float32).reshape((1, 3, 1) if domain else (1, 1, 3, 1))
        given = {"Q": tokens[..., :1, :], "K": tokens, "V": tokens, length: np.array([count], dtype)}
        print(op, f"with {past_the_end} past the end, {count} tokens:", session.run(None, given)[0].item())
