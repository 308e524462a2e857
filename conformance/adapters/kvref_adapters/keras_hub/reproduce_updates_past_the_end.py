"""KerasHub's CachedMultiHeadAttention with updates past the end of its cache. Run with KERAS_BACKEND=jax, torch or numpy."""

import keras
import numpy as np
from keras_hub.layers import CachedMultiHeadAttention

layer = CachedMultiHeadAttention(1, 1, use_bias=False, kernel_initializer="ones")


def told(cache, at, *tokens, keys=None):
    given = np.array(tokens, np.float32).reshape(1, -1, 1)
    return layer(given, given, given[:, :keys], cache=cache, cache_update_index=at)[1]


empty = keras.ops.zeros((1, 2, 4, 1, 1))
print(keras.backend.backend(), "1, 2, 3, 4:", keras.ops.convert_to_numpy(told(empty, 0, 1, 2, 3, 4)).ravel().tolist())
for count in (1, 2):
    try:
        after = told(told(empty, 0, 1, 2, 3, 4), 5 - count, *[9.0] * count)
        print(f"{count} more at index {5 - count}:", keras.ops.convert_to_numpy(after).ravel().tolist())
    except Exception as error:
        print(f"{count} more at index {5 - count}:", type(error).__name__)
after = told(empty, 0, 5.0, 6.0, keys=1)
print("one key, two values:", keras.ops.convert_to_numpy(after).ravel().tolist())
