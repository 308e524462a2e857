"""transformers 5.23: the error of a prompt that HQQ quantizes repeatedly, and what raises in 4 bits."""

import torch
from transformers import LlamaConfig, QuantizedCache

one = LlamaConfig(num_hidden_layers=1)
prompt, *tokens = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0)).reshape(32, 1, 1, 64, 64)
for backend, axis in (("hqq", 0), ("hqq", 1), ("quanto", 0)):
    cache = QuantizedCache(backend, one, residual_length=64, axis_key=axis, axis_value=axis)
    cache.update(prompt, prompt, 0)
    errors = [(cache.update(part, part, 0)[0][:, :, :64] - prompt).pow(2).mean().sqrt().item() for part in tokens]
    print(backend, axis, [round(errors[at], 3) for at in (0, 1, 3, 7, 15, 30)])  # after 0, 1, 3, 7, 15, 30 flushes
cache = QuantizedCache("quanto", one, residual_length=4)
keys = [cache.update(prompt[:, :, at : at + 1], prompt[:, :, at : at + 1], 0)[0] for at in range(8)][-1]
print("which of the newest tokens are exact:", (keys == prompt[:, :, :8]).all(-1).flatten().tolist())
try:
    QuantizedCache("hqq", one, axis_key=1, axis_value=1).update(prompt[:, :, :5], prompt[:, :, :5], 0)
except RuntimeError as error:
    print(error)
