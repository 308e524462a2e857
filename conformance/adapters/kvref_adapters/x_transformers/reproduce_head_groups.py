"""x-transformers: which kv head a query head reads, and whether `causal=False` has an effect with `flash=True`."""

import torch
from x_transformers.attend import Attend
from x_transformers.x_transformers import Attention

query, keys = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
values = torch.tensor([10.0, 20.0]).reshape(1, 2, 1, 1).expand_as(keys)
print("x-transformers:", Attend()(query, keys, values)[0][0, :, 0, 0].tolist())
theirs = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
print("PyTorch, and Llama:", theirs[0, :, 0, 0].tolist())

given = torch.randn(1, 3, 16)
for flash in (False, True):
    layer = Attention(16, dim_head=8, heads=2, causal=True, flash=flash)
    same = torch.equal(layer(given, causal=False), layer(given))
    print(f"flash={flash}: causal=False", "changes nothing" if same else "has an effect")
