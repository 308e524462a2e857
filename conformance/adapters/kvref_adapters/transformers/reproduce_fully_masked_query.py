"""transformers' attention functions: the output for a query that sees no token, or one token whose score is beyond float32."""

from types import SimpleNamespace

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

layer = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=False)
one, values = torch.ones(1, 1, 2, 1), torch.tensor([7.0, 9.0]).reshape(1, 1, 2, 1)
padded = {"batch_size": 1, "q_length": 2, "kv_length": 2, "attention_mask": torch.tensor([[False, True]])}
for forward, mask in ((eager_attention_forward, eager_mask), (sdpa_attention_forward, sdpa_mask)):
    seen = forward(layer, one, one, values, mask(**padded), scaling=1.0)[0].flatten().tolist()
    last = forward(layer, one[:, :, :1], one[:, :, :1] * -1e39, values[:, :, :1], None, scaling=1.0)[0].item()
    print(f"{forward.__name__}: over padding alone {seen[0]}, over one token whose score is -inf {last}")
