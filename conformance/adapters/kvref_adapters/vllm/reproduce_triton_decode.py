"""vLLM's Triton attention for decoding, interpreted: no tokens, and large scores whose splits are merged."""

import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read by Triton and vLLM when they are imported

import torch
from vllm.platforms import current_platform

torch.cuda.get_device_capability = lambda *args: (9, 0)  # vLLM asks for these two, also of kernels that are interpreted
type(current_platform).has_device_capability = classmethod(lambda cls, *args: True)

from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd  # noqa: E402

SPLITS = 4


def decode(score, values):
    """Attention of one query over tokens of one head, whose scores are all equal."""
    query, count = torch.full((1, 1, 1), 1.0), len(values)
    keys = torch.full((1, 8, 1, 1), score)
    page = torch.zeros(1, 8, 1, 1)
    page[0, :count, 0, 0] = torch.tensor(values)
    out, lse = torch.empty(1, 1, 1), torch.empty(1, 1)
    decode_attention_fwd(
        query, keys, page, out, lse, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([count], dtype=torch.int32),
        torch.empty(1, 1, SPLITS, 2), SPLITS, 1.0, 8,
    )  # fmt: skip
    return out.item(), lse.item()


print("no tokens: output and log-sum-exp", decode(1.0, []))
for score in (-1.0, -1000.0, -32768.0, -1e20):
    print(f"five tokens with a score of {score} each, whose mean is 68.2:", decode(score, [1.0, 4.0, 16.0, 64.0, 256.0])[0])
