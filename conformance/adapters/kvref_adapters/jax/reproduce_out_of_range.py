"""JAX: attention with masked tokens, and indices and casts that are out of range."""

import jax
import jax.numpy as jnp

query, keys = jnp.ones((1, 1, 1)), jnp.zeros((2, 1, 1))
for values, length in (([3.0, 5.0], 1), ([3.0, jnp.nan], 1), ([3.0, 5.0], 0)):
    out = jax.nn.dot_product_attention(
        query, keys, jnp.array(values).reshape(2, 1, 1), key_value_seq_lengths=jnp.array([length], jnp.int32)
    )
    print(f"values {values}, of which the first {length} are visible:", out.item())
print("a query of two axes, [heads, dim]:", jax.nn.dot_product_attention(query[0], keys, keys).shape)

store, new = jnp.zeros((3, 2, 1)), jnp.array([5.0, 6.0]).reshape(2, 1, 1)  # slots of two heads, tokens of one
print("slots 1 and 9:", store.at[jnp.array([1, 9])].set(new, mode="drop", wrap_negative_indices=False).ravel().tolist())
print("slots True, False, True:", store.at[jnp.array([True, False, True])].set(new).ravel().tolist())
print("gathered from -1 and 9:", jnp.take(store, jnp.array([-1, 9]), axis=0).ravel().tolist())
print("300.7 in int8:", jnp.zeros(1, jnp.int8).at[jnp.array([0])].set(jnp.array([300.7])).tolist())
print("448, 464, 480 as float8_e4m3fn:", jnp.array([448.0, 464.0, 480.0]).astype("float8_e4m3fn").astype("float32").tolist())
