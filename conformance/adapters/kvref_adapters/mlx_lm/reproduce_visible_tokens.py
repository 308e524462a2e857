"""mlx-lm's windowed caches: which tokens a query sees if tokens are passed at once or one by one.

Every key is 0, so that all visible tokens have equal weights, and token p has the value 2^p: the output shows which were visible.
"""

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchRotatingKVCache, ChunkedKVCache, RotatingKVCache, trim_prompt_cache


def seen(cache, first, count, row=0):
    """The positions that each of `count` queries sees, with the calls of a layer: a mask, an update, attention."""
    values = mx.array([[[[2.0 ** (first + each)] for each in range(count)]]] * (row + 1))
    mask = create_attention_mask(mx.zeros((1, count, 1)), cache)
    _, values = cache.update_and_fetch(mx.zeros_like(values), values)
    found, rows = [], values.shape[2]
    for query in range(count):
        weights = [
            scaled_dot_product_attention(
                mx.zeros((row + 1, 1, count, 1)), mx.zeros_like(values), (mx.arange(rows) == each).reshape(1, 1, rows, 1)
                * mx.ones((row + 1, 1, rows, 1)), cache=cache, scale=1.0, mask=mask,
            )[row, 0, query, 0].item()
            for each in range(rows)
        ]  # fmt: skip
        found.append(sorted(round(mx.log2(values[row, 0, each, 0]).item()) for each in range(rows) if weights[each] > 0))
    return found


mx.set_default_device(mx.cpu)

print("RotatingKVCache(max_size=6, keep=2), tokens 0 to 9:")
cache = RotatingKVCache(max_size=6, keep=2)
print("  one by one, the last sees", [seen(cache, each, 1)[0] for each in range(10)][-1])
print("  at once, the last sees   ", seen(RotatingKVCache(max_size=6, keep=2), 0, 10)[-1])

print("BatchRotatingKVCache of max_size 6, a row of 6 tokens and one of 1, then a token to each:")
for size in (1, 2):
    rows = [RotatingKVCache(max_size=6) for _ in range(2)]
    for row, count in zip(rows, (6, 1), strict=True):
        row.update_and_fetch(*[mx.array([2.0**each for each in range(count)]).reshape(1, 1, count, 1)] * 2)
    batch = BatchRotatingKVCache.merge(rows)
    seen(batch, 1, 1, row=1)
    print(f"  in a step of {size}, token 2 sees", seen(batch, 2, size, row=1)[0])

print("ChunkedKVCache(4), trimmed as a prompt cache from 9 tokens to 2:")
cache = ChunkedKVCache(4)
for first in range(9):
    cache.maybe_trim_front()
    cache.update_and_fetch(*[mx.full((1, 1, 1, 1), 2.0**first)] * 2)
print("  is_trimmable", cache.is_trimmable(), "removed", trim_prompt_cache([cache], 7), "of 7, and continues at", cache.offset)
