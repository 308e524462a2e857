"""ONNX Runtime's Cast to 8 bits with saturate=0: the codes of numbers near the largest number of each type."""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

FLOAT = TensorProto.FLOAT
for to, numbers in (
    (TensorProto.FLOAT8E5M2, [61439, 61440, 65535, 65536]),
    (TensorProto.FLOAT8E4M3FN, [464, 479, 480, 496]),
):
    node = helper.make_node("Cast", ["x"], ["y"], to=to, saturate=0)
    infos = (helper.make_tensor_value_info("x", FLOAT, ["n"]), helper.make_tensor_value_info("y", to, ["n"]))
    graph = helper.make_graph([node], "cast", infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    codes, binding = np.zeros(len(numbers), np.uint8), session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(np.array(numbers, np.float32)))
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy_with_onnx_type(codes, to))
    session.run_with_iobinding(binding)
    print(TensorProto.DataType.Name(to), {number: hex(code) for number, code in zip(numbers, codes.tolist(), strict=True)})
