"""Flax's decoding attention layers: more tokens than the cache length, is_causal=True, and a cache created by nnx.view."""

import jax
import jax.numpy as jnp
from flax import linen, nnx


def layer(**options):
    made = nnx.MultiHeadAttention(1, 1, decode=True, use_bias=False, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    made.init_cache((1, 3, 1))
    return made, [float(made(jnp.full((1, 1, 1), x), **options).item()) for x in (1.0, 2.0, 3.0, 4.0, 5.0)]


made, said = layer()
print("nnx, 5 tokens in a cache of 3:", made.cached_key[...].ravel().tolist(), "index", made.cache_index[...].item())
print("nnx, is_causal=True returns", layer(is_causal=True)[1], "without:", [round(each, 2) for each in said])

old = linen.MultiHeadDotProductAttention(1, decode=True, use_bias=False, kernel_init=jax.nn.initializers.ones)
variables = old.init(jax.random.key(0), jnp.zeros((1, 3, 1)))
for token in (1.0, 2.0, 3.0, 4.0, 5.0):
    variables |= old.apply(variables, jnp.full((1, 1, 1), token), mutable=["cache"])[1]
cache = variables["cache"]
print("linen, 5 tokens in a cache of 3:", cache["cached_key"].ravel().tolist(), "index", cache["cache_index"].item())

fresh = nnx.MultiHeadAttention(1, 1, rngs=nnx.Rngs(0))
try:
    nnx.view(fresh, decode=True, batch_size=1, max_length=3)(jnp.ones((1, 1, 1)))
except ValueError as error:
    print("nnx.view(layer, decode=True, batch_size=1, max_length=3):", error)
