"""hqq 0.2.8: groups continue into the next row, and how a row is stored depends on the other rows."""

import torch
from hqq.core.quantize import Quantizer


def read_back(rows, **options):
    codes, meta = Quantizer.quantize(rows, 8, axis=1, bitpack=False, device="cpu", **options)
    return Quantizer.dequantize(codes, meta | {"compute_dtype": torch.float32})


rows = torch.tensor([[0.001, 0.002] * 20, [1000.0, -1000.0] * 20, *[[0.0] * 40] * 2])
print((read_back(rows, group_size=32, optimize=False)[0] - rows[0]).abs().max().item())
for optimize in (False, True):
    differ = 0
    for seed in range(100):
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        alone, beside = (read_back(part, group_size=64, optimize=optimize)[0] for part in (rows[:1], rows))
        differ += bool((alone != beside).any())
    print(optimize, differ, "of 100")
