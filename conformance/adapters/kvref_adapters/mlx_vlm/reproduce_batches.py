"""mlx-vlm's caches for batches: the dtype after `extend`, `extract` before `finalize`, and a `trim` that is too long."""

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache, BatchRotatingKVCache


def tokens(*rows, dtype=mx.float32):
    return [mx.array(rows, dtype)[:, None, :, None]] * 2


mx.set_default_device(mx.cpu)
for kind in (lambda: BatchKVCache([0, 0]), lambda: BatchRotatingKVCache(8, [0, 0])):
    cache, name = kind(), type(kind()).__name__
    cache.update_and_fetch(*tokens([1, 2], [3, 4], dtype=mx.bfloat16))
    before = cache.keys.dtype
    cache.extend(kind())  # of requests without cached tokens
    print(f"{name}: {before} before extend by empty rows, {cache.keys.dtype} after it")
    cache = kind()
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
    cache.update_and_fetch(*tokens([1, 99, 99], [2, 3, 4]))
    print(f"{name}.extract(0) before finalize:", cache.extract(0).keys.flatten().tolist())
    cache.finalize()
    print(f"{name}.trim(2) of rows of 1 and 3 tokens returns {cache.trim(2)}, offset {cache.offset.tolist()}")
