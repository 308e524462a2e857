"""mlx-lm's caches: `trim` that removes nothing, and `trim` with a negative number."""

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache


def told(cache, *numbers):
    return cache.update_and_fetch(*[mx.array(numbers).reshape(1, 1, len(numbers), 1)] * 2)[0].flatten().tolist()


mx.set_default_device(mx.cpu)
for kind in (KVCache, ConcatenateKVCache):
    cache = kind()
    told(cache, 1.0, 2.0, 3.0, 4.0)
    print(kind.__name__, "is_trimmable", cache.is_trimmable(), "trim(2) returns", cache.trim(2), "and then", told(cache, 9.0))
cache = KVCache()
told(cache, 1.0, 2.0, 3.0, 4.0)
cache.trim(-2)
print("after trim(-2) there are", cache.offset, "tokens:", cache.keys_and_values()[0].flatten().tolist())
