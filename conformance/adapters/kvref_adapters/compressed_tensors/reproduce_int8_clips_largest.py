"""compressed-tensors 0.20: INT8 codes range from -128 to 127, and the largest number of a row is clipped."""

import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

args = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
row = torch.tensor([[[1.0, -1.0, 0.25]]])
for _ in range(3):  # like a block that is swapped out and in repeatedly
    scale, zero = compute_dynamic_scales_and_zp(row, args, None)
    row = fake_quantize(row, scale, zero, args)
    print(row.flatten().tolist())
