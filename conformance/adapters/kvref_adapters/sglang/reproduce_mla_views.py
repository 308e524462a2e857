"""SGLang's `set_mla_kv_buffer_triton`, interpreted: latents whose numbers are not next to each other in memory."""

import kvref_adapters.sglang.triton_modules  # noqa: F401 # isort: skip - first: stands in for CUDA, and starts Triton's interpreter

import torch
from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

buffer, slots = torch.zeros(2, 1, 6), torch.tensor([1])
wide = torch.arange(8.0).view(1, 1, 8)
latent, rope = wide[..., ::2], torch.tensor([[[10.0, 11.0]]])
set_mla_kv_buffer_triton(buffer, slots, latent, rope)
print(latent.flatten().tolist(), "and", rope.flatten().tolist(), "are stored as", buffer[1].flatten().tolist())
