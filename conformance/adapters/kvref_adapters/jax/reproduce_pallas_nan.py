"""JAX's Pallas attention for TPUs, interpreted on a CPU: NaN in a value that a query does not see, and a score below float32."""

import jax.numpy as jnp
from jax.experimental.pallas import tpu
from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

BLOCK, PAGE, DIM = 128, 16, 128


def flash_causal(query, keys, values):
    """Causal attention of one head, all [tokens, DIM] of one block; the tokens after them are padding of another segment."""
    count = len(query)
    padded = [jnp.pad(each, ((0, BLOCK - count), (0, 0)))[None, None] for each in (query, keys, values)]
    segments = (jnp.arange(BLOCK) >= count).astype(jnp.int32)[None]
    return flash_attention(*padded, causal=True, segment_ids=SegmentIds(segments, segments))[0, 0, :count, 0].tolist()


def splash_causal(query, keys, values):
    count = len(query)
    padded = [jnp.pad(each, ((0, BLOCK - count), (0, 0)))[None] for each in (query, keys, values)]
    segments = (jnp.arange(BLOCK) >= count).astype(jnp.int32)
    mask = masks.MultiHeadMask([masks.CausalMask((BLOCK, BLOCK))])
    attend = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return attend(*padded, segment_ids=splash.SegmentIds(segments, segments))[0, :count, 0].tolist()


def paged_prefixes(query, keys, values):
    """Each query is a sequence of a batch, and sees the tokens up to its own, which are in one page."""
    count = len(query)
    pages = [jnp.pad(each, ((0, PAGE - len(each)), (0, 0)))[None, None] for each in (keys, values)]
    lengths, table = jnp.arange(1, count + 1, dtype=jnp.int32), jnp.zeros((count, 1), jnp.int32)
    return paged_attention(query[:, None], *pages, lengths, table, pages_per_compute_block=1)[:, 0, 0].tolist()


for attend in (flash_causal, splash_causal, paged_prefixes):
    ones = jnp.ones((3, DIM))
    values = ones.at[2].set(jnp.nan)
    large = jnp.full((1, DIM), 1e20)
    with tpu.force_tpu_interpret_mode():
        print(f"{attend.__name__}, NaN in the value of token 2: the queries of tokens 0, 1, 2 get", attend(ones, ones, values))
        said = attend(large, -large, jnp.full((1, DIM), 7.0))
    print(f"{attend.__name__}, one token with the value 7 and a score below float32: the query gets {said}")
