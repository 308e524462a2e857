"""keras.ops.dot_product_attention and slice_update. Run with KERAS_BACKEND=numpy, torch or jax."""

import keras
import numpy as np
from keras import ops


def attend(heads, kv_heads, value_heads, tokens=2, mask=None, first=1.0, key=0.0):
    query = np.full((1, 1, heads, 1), first, np.float32)
    keys, values = np.full((1, tokens, kv_heads, 1), key, np.float32), np.full((1, tokens, value_heads, 1), 7.0, np.float32)
    try:
        out = ops.dot_product_attention(query, keys, values, scale=1.0, mask=None if mask is None else ops.array([[[mask]]]))
        return ops.convert_to_numpy(out).ravel().tolist()
    except Exception as error:
        return type(error).__name__


print(keras.backend.backend(), "4 query heads over 2:", attend(4, 2, 2), "over 1:", attend(4, 1, 1))
print("keys of 2 heads, values of 1:", attend(2, 2, 1), "all tokens masked:", attend(1, 1, 1, mask=[False, False]))
print("no tokens:", attend(1, 1, 1, tokens=0), "a score of -1e40:", attend(1, 1, 1, tokens=1, first=1e20, key=-1e20))
array = ops.zeros(3)
ops.slice_update(array, [1], ops.ones(1))
print("the input of slice_update, an array of zeros, afterwards:", ops.convert_to_numpy(array).tolist())
