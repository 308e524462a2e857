"""PyTorch's attention on a CPU: a key of NaN, a masked token of NaN, and keys and values of different shapes."""

import warnings

import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

warnings.filterwarnings("ignore")


def tokens(*values):
    return torch.tensor(values).reshape(1, 1, len(values), 1)


def said(query, keys, values, **options):
    out = [
        attend(query, keys, values, **options) for attend in (scaled_dot_product_attention, flex_attention)[: 2 - bool(options)]
    ]
    return " and ".join(str(each.flatten().tolist()) for each in out)


print("a key of NaN, and a value of 7:", said(tokens(1.0), tokens(torch.nan), tokens(7.0)))
print("a key of -infinity, and a value of 7:", said(tokens(1.0), tokens(-torch.inf), tokens(7.0)))
print("a last token of NaN, causal:", said(tokens(1.0, 1.0), tokens(1.0, torch.nan), tokens(7.0, torch.nan), is_causal=True))
heads = torch.ones(1, 2, 1, 1)
print("two key heads and one value head:", said(heads, heads, tokens(7.0)))

buffer, query = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 1, 8)
values = torch.arange(4.0).reshape(1, 1, 4, 1).repeat(1, 1, 1, 8)
for after in (0.0, 9.0):
    buffer[:, :, 2:] = after  # the memory after the two keys
    out = scaled_dot_product_attention(query, buffer[:, :, :2], values)
    print(f"two keys followed by memory of {after}, and four values:", out[0, 0, 0, 0].item())
