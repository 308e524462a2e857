"""ONNX's reference evaluator: Attention over masked tokens or wrong shapes, and ScatterND with updates of wrong shapes."""

import numpy as np
from onnx import checker, parser
from onnx.reference import ReferenceEvaluator

HEAD = '<ir_version: 11, opset_import: ["" : 25]>'
ATTENTION = "(float[b,h,n,d] Q, float[b,i,t,d] K, float[b,j,t,d] V, int64[b] length) => (float[b,h,n,d] Y)"
SCATTER = "(float[s,d] data, int64[n,1] at, float[m,e] new) => (float[s,d] Y)"
attention = parser.parse_model(f"{HEAD} attention {ATTENTION} {{ Y = Attention (Q, K, V, , , , length) }}")
scatter = parser.parse_model(f"{HEAD} scatter {SCATTER} {{ Y = ScatterND (data, at, new) }}")


def run(model, **given):
    checker.check_model(model, full_check=True)
    return ReferenceEvaluator(model).run(None, given)[0].reshape(-1).tolist()


def tokens(*values, heads=1):
    return np.tile(np.array(values, np.float32).reshape(1, 1, -1, 1), (1, heads, 1, 1))


one, none = np.array([1]), np.array([0])
print("NaN past the length:", run(attention, Q=tokens(1), K=tokens(1, np.nan), V=tokens(7, np.nan), length=one))
print("a score of -1e40:", run(attention, Q=tokens(1e20), K=tokens(-1e20), V=tokens(7), length=one))
print("two heads of keys, one of values:", run(attention, Q=tokens(1, heads=2), K=tokens(1, heads=2), V=tokens(7), length=one))
updates = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
for what, new in (("two updates", updates), ("one too narrow", updates[:1, :1])):
    print(f"one index, {what}:", run(scatter, data=np.zeros((3, 2), np.float32), at=np.array([[1]]), new=new))
try:
    run(attention, Q=tokens(1), K=tokens(), V=tokens(), length=none)
except ValueError as error:
    print("no tokens:", error)
