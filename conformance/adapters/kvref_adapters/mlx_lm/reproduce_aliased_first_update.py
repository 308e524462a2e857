"""mlx-lm 0.32.2: two caches store the array of the first update itself instead of a copy.

pip install "mlx[cpu]" mlx-lm
"""

import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache

for cache in (KVCache(), RotatingKVCache(max_size=8), ConcatenateKVCache()):
    keys = mx.ones((1, 1, 3, 2))
    cache.update_and_fetch(keys, keys)
    keys[:] = 77
    print(type(cache).__name__, cache.keys[0, 0, :3, 0].tolist())  # KVCache: [1, 1, 1]; the other two: [77, 77, 77]
