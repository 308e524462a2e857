"""optimum-quanto 0.2.7: a row of zeros becomes NaN in float8."""

import torch
from optimum.quanto import AbsmaxOptimizer, qfloat8_e4m3fn, qint8, quantize_weight

rows = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0]])
for qtype in (qfloat8_e4m3fn, qint8):
    print(qtype, quantize_weight(rows, qtype, 0, AbsmaxOptimizer()(rows, qtype, axis=0)).dequantize().tolist())
