"""A cache that stores tokens as INT8 codes, with a scale for each row."""

import numpy as np

from kvref.errors import CapacityExceeded, LayerOutOfRange, PositionOutOfRange

KEYS, VALUES = 0, 1


def quantize(rows):
    """Return codes [tokens, heads, dim] and scales of float32 rows [tokens, heads, dim]."""
    largest = np.abs(rows).max(axis=(1, 2), keepdims=True)
    scales = np.maximum(largest / np.float32(127), np.float32(2**-23))
    quotients = rows / scales
    magnitudes = np.abs(quotients)
    whole = np.floor(magnitudes)
    codes = np.sign(quotients) * (whole + (magnitudes - whole >= 0.5))
    return np.clip(codes, -127, 127).astype(np.int8), scales


class Cache:
    """Codes and scales for `capacity` tokens in each layer."""

    def __init__(self, num_layers, capacity, num_kv_heads, head_dim, format, key_scale=None, value_scale=None):
        self.capacity, self.num_layers = capacity, num_layers
        self.codes = np.zeros((2, num_layers, capacity, num_kv_heads, head_dim), np.int8)
        self.scales = np.zeros((2, num_layers, capacity, num_kv_heads, 1), np.float32)
        self.lengths = [0] * num_layers

    def append(self, layer, keys, values):
        """Store tokens in one layer. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        self.require_layer(layer)
        start, stop = self.lengths[layer], self.lengths[layer] + len(keys)
        if stop > self.capacity:
            raise CapacityExceeded(f"{stop} tokens, but the capacity is {self.capacity}")
        for part, rows in ((KEYS, keys), (VALUES, values)):
            codes, scales = quantize(rows)
            self.codes[part, layer, start:stop] = codes
            self.scales[part, layer, start:stop] = scales
        self.lengths[layer] = stop

    def append_step(self, keys, values):
        """Store one token in every layer, or in none. Both arrays: float32 [num_layers, num_kv_heads, head_dim]."""
        if max(self.lengths) == self.capacity:
            raise CapacityExceeded(f"a layer has {self.capacity} tokens, which is the capacity")
        for layer in range(self.num_layers):
            self.append(layer, keys[layer : layer + 1], values[layer : layer + 1])

    def read_tokens(self, layer, positions):
        """Return keys and values at these positions, as float32 [positions, num_kv_heads, head_dim]."""
        self.require_layer(layer)
        for position in positions:
            if not 0 <= position < self.lengths[layer]:
                raise PositionOutOfRange(f"position {position}, but there are {self.lengths[layer]} tokens")
        places = list(positions)
        codes, scales = self.codes[:, layer, places], self.scales[:, layer, places]
        keys, values = codes.astype(np.float32) * scales
        return keys, values

    def length(self, layer):
        self.require_layer(layer)
        return self.lengths[layer]

    def truncate(self, length):
        """Keep the first `length` tokens of every layer."""
        if not 0 <= length <= min(self.lengths):
            raise PositionOutOfRange(f"length {length}, but the layers have {self.lengths} tokens")
        self.lengths = [length] * self.num_layers

    def clear(self):
        self.lengths = [0] * self.num_layers

    def require_layer(self, layer):
        if not 0 <= layer < self.num_layers:
            raise LayerOutOfRange(f"layer {layer}")
