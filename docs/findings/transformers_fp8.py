"""transformers 5.23: the FP8 cache clips whatever is larger than the first update, and a number of it may end as none."""

import torch
from transformers import LlamaConfig, QuantizedCache

for first in (1.0, 0.0):
    cache = QuantizedCache("fp8", LlamaConfig(num_hidden_layers=1))
    for value in (first, 4.0, float("inf")):
        token = torch.full((1, 1, 1, 8), value)
        keys, _ = cache.update(token, token, 0)
    print(keys[0, 0, :, 0].tolist())  # and it was 1, 4 and infinity; 0, 4 and infinity
