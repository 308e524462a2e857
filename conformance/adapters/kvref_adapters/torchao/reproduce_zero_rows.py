"""torchao 0.18: a row of zeros becomes NaN in float8; the largest INT8 number is clipped; a row of one number raises."""

import torch
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow

print(Float8Tensor.from_hp(torch.tensor([[0.5, -1.0], [0.0, 0.0]]), granularity=PerRow()).dequantize().tolist())
row = torch.tensor([[1.0, -1.0, 0.25]])
for _ in range(3):  # like a block that is swapped out and in repeatedly
    row = Int8Tensor.from_hp(row, PerRow()).dequantize()
    print(row.tolist())
try:
    Int8Tensor.from_hp(torch.tensor([[1.0], [2.0]]), PerRow())
except RuntimeError as error:
    print(error)
