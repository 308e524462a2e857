"""compressed-tensors 0.20: scale_dtype=torch.bfloat16 raises for float16 rows."""

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

args = QuantizationArgs(num_bits=4, strategy="group", group_size=64, scale_dtype=torch.bfloat16)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    try:
        print(dtype, compute_dynamic_scales_and_zp(torch.ones(1, 64, dtype=dtype), args, None)[0].tolist())
    except RuntimeError as error:
        print(dtype, error)
