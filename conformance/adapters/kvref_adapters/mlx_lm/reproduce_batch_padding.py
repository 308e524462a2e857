"""mlx-lm's caches for batches: calls between `prepare` and `finalize`, a `trim` that is too long, and a column with padding."""

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache


def tokens(*rows):
    return [mx.array(rows, mx.float32)[:, None, :, None]] * 2


def padded(kind):
    """Two rows of one and three tokens, with the padding (99) still on the right."""
    cache = kind()
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
    cache.update_and_fetch(*tokens([1, 99, 99], [2, 3, 4]))
    return cache


mx.set_default_device(mx.cpu)
for kind in (lambda: BatchKVCache([0, 0]), lambda: BatchRotatingKVCache(8, [0, 0])):
    name = type(kind()).__name__
    print(f"{name}.extract(0) before finalize:", padded(kind).extract(0).keys.flatten().tolist())
    cache = padded(kind)
    cache.filter([1])
    cache.finalize()
    print(f"{name}.filter([1]) before finalize: {cache.keys.shape[0]} rows, offset {cache.offset.tolist()}")
    cache = padded(kind)
    cache.finalize()
    print(f"{name}.trim(2) of rows of 1 and 3 tokens returns {cache.trim(2)}, offset {cache.offset.tolist()}")
    cache = kind()
    cache.prepare(lengths=[1, 0], right_padding=[0, 1])
    try:
        cache.update_and_fetch(*tokens([1], [99]))
        print(f"{name}: a column that is padding in one row is accepted")
    except RuntimeError as error:
        print(f"{name}: a column that is padding in one row raises", error)
