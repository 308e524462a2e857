"""Sizes of caches. The comment before each question has all that is needed to answer it."""

import numpy as np

from kvref import ContiguousCache, ContiguousConfig, LatentCache, LatentConfig, QuantizedCache, QuantizedConfig
from kvref_labs.quiz import ask


def layer_bytes(tokens, num_kv_heads, head_dim, dtype):
    """The bytes that one layer needs for one sequence with room for `tokens` tokens."""
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "initial_capacity": tokens, "max_seq_len": tokens}
    keys, values = ContiguousCache(ContiguousConfig(**sizes, dtype=dtype)).raw()
    return keys.nbytes + values.nbytes


# A model with 32 layers and 8 key-value heads of 128 dimensions, in float16 (2 bytes). Bytes per token?
a_token = 32 * layer_bytes(1, 8, 128, "float16")
ask(1, a_token)

# The same model, one sequence of 32,768 tokens. GiB (2**30 bytes)?
ask(2, a_token * 32768 / 2**30)

# The same in float32 (4 bytes). GiB?
ask(3, 32 * layer_bytes(32768, 8, 128, "float32") / 2**30)

# A model of the same size without grouped-query attention: each of the 32 query heads has a key-value head. float16. GiB?
ask(4, 32 * layer_bytes(32768, 32, 128, "float16") / 2**30)

# A device has 20 GiB left for caches of the first model, in float16. How many sequences of 32,768 tokens fit?
ask(5, 20 * 2**30 // (a_token * 32768))

# Quantized to int8: one byte per number, and one scale of 4 bytes per head, separately for keys and values.
# Bytes per token in one layer?
int8 = QuantizedCache(QuantizedConfig(num_layers=1, capacity=1, num_kv_heads=8, head_dim=128, format="int8"))
ask(6, int8.memory_bytes)

# A latent cache stores one row of 512 + 64 numbers per token and layer, for all heads together, not once for keys and once for
# values. In bfloat16 (2 bytes). Bytes per token in one layer?
latent = LatentCache(LatentConfig(rank=512, rope_dim=64, max_tokens=1, dtype="bfloat16"))
latent.append(np.zeros((1, 512), np.float32), np.zeros((1, 64), np.float32))
ask(7, latent.num_bytes)

# One decoding step reads the whole cache of a sequence once. The memory can be read at 2,048 GiB per second. The sequence of
# question 2: how many tokens per second at most?
ask(8, 2048 / (a_token * 32768 / 2**30))
