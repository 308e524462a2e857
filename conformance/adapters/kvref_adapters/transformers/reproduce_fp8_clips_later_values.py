"""transformers 5.23: the FP8 cache clips values that are larger than the first update, and infinity becomes finite."""

import torch
from transformers import LlamaConfig, QuantizedCache

for first in (1.0, 0.0):
    cache = QuantizedCache("fp8", LlamaConfig(num_hidden_layers=1))
    for value in (first, 4.0, float("inf")):
        token = torch.full((1, 1, 1, 8), value)
        keys, _ = cache.update(token, token, 0)
    print(keys[0, 0, :, 0].tolist())  # the input was 1, 4 and infinity; then 0, 4 and infinity
