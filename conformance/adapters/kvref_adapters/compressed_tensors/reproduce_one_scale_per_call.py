"""compressed-tensors 0.20: strategy "token" computes one scale per token only for shape [batch, tokens, width]."""

import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

args = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
for shape in ((1, 4, 64), (1, 2, 4, 64), (4, 64)):
    print(shape, "scales", tuple(compute_dynamic_scales_and_zp(torch.randn(shape), args, None)[0].shape))
quiet = torch.full((1, 2, 1, 64), 1e-4)  # the keys of one token, in two heads
for name, keys in (("alone", quiet), ("in a prompt with a louder token", torch.cat([quiet, quiet * 1e6], 2))):
    scale, zero = compute_dynamic_scales_and_zp(keys, args, None)
    print(name, fake_quantize(keys, scale, zero, args)[0, 0, 0, 0].item())
