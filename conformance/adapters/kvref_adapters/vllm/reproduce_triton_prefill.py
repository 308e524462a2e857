"""vLLM's Triton attention for prompts after a prefix, interpreted: NaN in a later value, and a score below float32."""

import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read by Triton and vLLM when they are imported

import torch
from vllm.platforms import current_platform

torch.cuda.get_device_capability = lambda *args: (9, 0)  # vLLM asks for these two, also of kernels that are interpreted
type(current_platform).has_device_capability = classmethod(lambda cls, *args: True)

from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd  # noqa: E402


def attend(query, keys, values):
    """Causal attention of a prompt without a cached prefix, all [tokens, 1 head, 4]."""
    count, one, out = len(query), torch.ones(1), torch.empty(query.shape)
    cache = [torch.zeros(2, 1, 1, 16, 4), torch.zeros(2, 1, 4, 16)]
    table = torch.arange(2, dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    context_attention_fwd(
        query, keys, values, out, "auto", *cache, table, starts, lengths, count, count, one, one, sm_scale=1.0
    )  # fmt: skip
    return out[:, 0, 0].tolist()


ones, values = torch.ones(3, 1, 4), torch.ones(3, 1, 4)
values[2] = torch.nan
print("NaN in the value of token 2: the queries of tokens 0, 1, 2 get", attend(ones, ones, values))
large = torch.full((1, 1, 4), 1e20)
print("one token with the value 7 and a score of -4e40: the query gets", attend(large, -large, torch.full((1, 1, 4), 7.0)))
