"""SGLang's Triton attention, interpreted: NaN in a hidden value, a window of one token, a scale of 0, and no tokens."""

import kvref_adapters.sglang.triton_modules  # noqa: F401 # isort: skip - first: stands in for CUDA, and starts Triton's interpreter

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd


def numbers(*values):
    return torch.tensor(values).view(len(values), 1, 1)


def extend(query, keys, values, **options):
    """Causal attention of a prompt without a cached prefix, all [tokens, 1 head, 1]."""
    count, pool, out = len(query), torch.zeros(1, 1, 1), torch.empty(query.shape)
    starts = [torch.tensor([0, last], dtype=torch.int32) for last in (count, 0)]
    slots = torch.zeros(0, dtype=torch.int64)
    scale = options.pop("sm_scale", 1.0)
    extend_attention_fwd(
        query, keys, values, out, pool, pool, *starts, slots, None, True, None, count, 1.0, 1.0, sm_scale=scale, **options
    )  # fmt: skip
    return out.flatten().tolist()


def verify_siblings(values):
    """Attention of a root and two siblings, each of which sees the root and itself."""
    out, pool = torch.empty(3, 1, 1), torch.zeros(1, 1, 1)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    starts = [torch.tensor([0, last], dtype=torch.int32) for last in (3, 0)]
    extend_attention_fwd(
        ones, ones, values, out, pool, pool, *starts, torch.zeros(0, dtype=torch.int64), mask.flatten(), True,
        torch.tensor([0, 9]), 3, 1.0, 1.0, sm_scale=1.0,
    )  # fmt: skip
    return out.flatten().tolist()


def decode_without_tokens():
    """Attention of one query over no tokens."""
    pool, out = torch.zeros(1, 1, 1), torch.empty(1, 1, 1)
    decode_attention_fwd(
        numbers(1.0), pool, pool, out, torch.tensor([0, 0], dtype=torch.int32), torch.zeros(0, dtype=torch.int64),
        torch.empty(1, 1, 4, 1), torch.empty(1, 1, 4), torch.tensor([4], dtype=torch.int32), 4, 1.0, 1.0, 1.0,
    )  # fmt: skip
    return out.item()


ones = numbers(1.0, 1.0, 1.0)
print("NaN in the value of token 2: the queries of tokens 0, 1, 2 get", extend(ones, ones, numbers(1.0, 1.0, torch.nan)))
one_to_three = numbers(1.0, 2.0, 3.0)
print("values 1, 2, 3 of a root and two siblings give", verify_siblings(one_to_three))
print("values 1, 2, NaN of a root and two siblings give", verify_siblings(numbers(1.0, 2.0, torch.nan)))
for size in (1, 0):
    print("values 1, 2, 3 with sliding_window_size", size, "give", extend(ones, ones, one_to_three, sliding_window_size=size))
print("keys and values 1, 2, 3 with a scale of 0 give", extend(ones, one_to_three, one_to_three, sm_scale=0.0))
print("one token with the value 7 and a score of -1e40: the query gets", extend(numbers(1e20), numbers(-1e20), numbers(7.0)))
print("decoding without tokens gives", decode_without_tokens())
