"""vLLM's Triton kernels that write the cache, interpreted: a cache of fp8_e5m2, strides of heads, and the least scale."""

import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read by Triton and vLLM when they are imported

import kvref_adapters.vllm.import_stubs  # noqa: F401 # isort: skip - before vLLM, because packages of its server may be missing

import torch
from vllm.platforms import current_platform

torch.cuda.get_device_capability = lambda *args: (9, 0)  # vLLM asks for these two, also of kernels that are interpreted
type(current_platform).has_device_capability = classmethod(lambda cls, *args: True)

from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (  # noqa: E402
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_per_token_head_quant,
)
from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: E402

one, slots = torch.ones(1), torch.arange(1)
numbers = torch.tensor([1.0, 2.0, 3.5, 0.25])
cache, other = (torch.zeros(1, 1, 1, 4, dtype=torch.uint8) for _ in range(2))
triton_reshape_and_cache_flash(numbers.view(1, 1, 4), numbers.view(1, 1, 4), cache, other, slots, "fp8_e5m2", one, one)
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    print(f"fp8_e5m2: {numbers.tolist()} stored, read as {dtype}:", cache.view(dtype).float().flatten().tolist())

heads_first = torch.arange(8.0).view(2, 2, 2)  # [heads, tokens, dim]
tokens = heads_first.transpose(0, 1)
cache, other = (torch.zeros(1, 2, 2, 2) for _ in range(2))
triton_reshape_and_cache_flash(tokens, tokens, cache, other, torch.arange(2), "auto", one, one)
print("tokens", tokens.tolist(), "that are a view of [heads, tokens, dim] are stored as", cache[0].tolist())

small = torch.full((1, 1, 4), 1e-5)
cache, other = (torch.zeros(1, 1, 1, 4, dtype=torch.int8) for _ in range(2))
scales = [torch.zeros(1, 1, 1) for _ in range(2)]
mode = KVQuantMode.INT8_PER_TOKEN_HEAD
triton_reshape_and_cache_flash_per_token_head_quant(small, small, cache, other, *scales, slots, mode)
print("int8 of 1e-5: codes", cache.flatten().tolist(), "scale", scales[0].item())
