"""torchao 0.18: codes are computed with the reciprocal of a 16-bit scale, which is rounded to 16 bits."""

import torch
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine

rows, block = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0)), (1, 64)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    scale, zero = choose_qparams_affine(rows, MappingType.SYMMETRIC, block, torch.int8, -127, 127, scale_dtype=dtype)
    codes = quantize_affine(rows, block, scale, zero, torch.int8, -127, 127)
    wide = quantize_affine(rows, block, scale.float(), zero, torch.int8, -127, 127)
    errors = [(dequantize_affine(each, block, scale, zero, torch.int8) - rows).square().mean().sqrt() for each in (codes, wide)]
    print(dtype, f"{(codes != wide).float().mean():.4f} of the codes", *(f"{error:.5f}" for error in errors))
