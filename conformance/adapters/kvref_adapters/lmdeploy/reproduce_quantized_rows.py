"""LMDeploy's kernels for 8-bit keys and values, interpreted: a row of equal numbers, and a row far from zero."""

import kvref_adapters.lmdeploy.triton_kernels  # noqa: F401 # isort: skip - first: imports the kernels alone, and starts Triton's interpreter

import torch
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache
from lmdeploy.pytorch.kernels.cuda.flatten_kv_cache import flatten_kv_cache


def read_back(row, policy, dtype=torch.float32):
    """Store a row as the key and the value of one token, and return its scale and zero, and the row that is read back."""
    token, one, table = torch.tensor(row, dtype=dtype).view(1, 1, -1), torch.tensor([1]), torch.tensor([[0]])
    stored = len(row) // 2 if policy == QuantPolicy.INT4 else len(row)
    caches = [torch.zeros(1, 8, 1, stored, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(1, 8, 1, 2, dtype=dtype) for _ in range(2)]
    fill_kv_cache(token, token, *caches, torch.tensor([0]), one, one, 1, table, *scales, policy)
    keys, _ = flatten_kv_cache(
        *caches, one, table, out_size=1, out_dtype=dtype, k_scales_zeros=scales[0], v_scales_zeros=scales[1], quant_policy=policy
    )  # fmt: skip
    return scales[0][0, 0, 0].tolist(), keys.flatten().tolist()


for policy in (QuantPolicy.INT8, QuantPolicy.INT4):
    for row in ([0.0, 0.0, 0.0, 0.0], [1.5, 1.5, 1.5, 1.5], [1.0, 2.0, 3.0, 4.0]):
        scale, got = read_back(row, policy)
        print(policy.name, row, "has the scale and zero", scale, "and reads back as", got)
for dtype in (torch.float32, torch.float16):
    scale, got = read_back([1000.0, 1000.25, 1000.5, 1001.0], QuantPolicy.INT8, dtype)
    print("INT8 in", dtype, "[1000.0, 1000.25, 1000.5, 1001.0] has the scale and zero", scale, "and reads back as", got)
