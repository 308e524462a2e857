"""Adapters of JAX's Pallas attention for TPUs in Pallas's interpreter, which runs it on a CPU: `jax-pallas-*`.

- `jax-pallas-paged`: `paged_attention`, the kernel for decoding. Each query is a sequence of a batch, with the number of tokens
  that it sees. Keys and values are in pages of 16 tokens, with the tokens after the last one that a query sees, as pages of an
  earlier sequence may have them. The table has the pages in descending order. The kernel rounds keys and values to bfloat16, so
  that it is judged with bfloat16.
- `jax-pallas-flash`: `flash_attention`, for queries of all tokens.
- `jax-pallas-splash`: splash attention, with its causal and local masks.

Flash and splash attention take blocks of 128 tokens. Tokens are padded with zeros, which belong to another segment.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from kvref_adapters._shared.attention import check_equal_shapes, check_paired_queries
from kvref_adapters.jax.functions import JaxFunctions
from kvref_adapters.jax.pallas_interpreter import interpreted
from kvref_conformance.exceptions import NotOffered

PAGE = 16  # tokens of a page
PAGES_AT_ONCE = 2
BLOCK = 128  # tokens of a block of flash and splash attention


class JaxPallas(JaxFunctions):
    language = "pallas"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}, "threads": False}


class JaxPallasPaged(JaxPallas):
    name = "jax-pallas-paged"
    formats = ("bfloat16",)
    limits: ClassVar[dict[str, Any]] = JaxPallas.limits | {"dtype": ["bfloat16"], "rounded_weights": True}

    def attention(self) -> "PagedDecoding":
        return PagedDecoding()


class PagedDecoding:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        check_inputs(query, keys, values)
        check_paired_queries(query, length)
        count, pages = len(query), -(-len(keys) // PAGE)
        table = -(-pages // PAGES_AT_ONCE) * PAGES_AT_ONCE
        lengths = jnp.arange(length - count + 1, length + 1) if causal else jnp.full(count, length)
        order = jnp.append(jnp.arange(pages)[::-1], jnp.zeros(table - pages, int)).astype(jnp.int32)
        with interpreted():
            return paged_attention(
                query.astype(jnp.float32) * scale, pages_of(keys), pages_of(values),
                lengths.astype(jnp.int32), jnp.tile(order, (count, 1)), pages_per_compute_block=PAGES_AT_ONCE,
            )  # fmt: skip


def pages_of(tokens: Any) -> Any:
    """Return pages [num_kv_heads, pages, PAGE, head_dim], the last tokens in the first page."""
    pages = -(-len(tokens) // PAGE)
    filled = jnp.pad(tokens, ((0, pages * PAGE - len(tokens)), (0, 0), (0, 0)))
    return filled.reshape(pages, PAGE, *tokens.shape[1:])[::-1].transpose(2, 0, 1, 3)


class JaxPallasFlash(JaxPallas):
    name = "jax-pallas-flash"
    limits: ClassVar[dict[str, Any]] = JaxPallas.limits | {"head_dim": {"most": 128}}

    def attention(self) -> "FlashAttention":
        return FlashAttention()


class FlashAttention:
    """Its causal mask puts query 0 at position 0, so that earlier queries are padded."""

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        check_inputs(query, keys, values)
        check_paired_queries(query, length)
        before = length - len(query) if causal else 0
        padded = pad_to_blocks(jnp.pad(query, ((before, 0), (0, 0), (0, 0))))
        tokens = [pad_to_blocks(each[:length].repeat(query.shape[1] // each.shape[1], axis=1)) for each in (keys, values)]
        segments = segments_of(before + len(query), padded), segments_of(length, tokens[0])
        with interpreted():
            found = flash.flash_attention(
                padded[None], *(each[None] for each in tokens), causal=causal, sm_scale=scale,
                segment_ids=flash.SegmentIds(*(each[None] for each in segments)),
            )  # fmt: skip
        return found[0].transpose(1, 0, 2)[before : before + len(query)]


class JaxPallasSplash(JaxPallas):
    name = "jax-pallas-splash"

    def attention(self) -> "SplashAttention":
        return SplashAttention()


class SplashAttention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys[:length], values[:length], scale, (None, 0) if causal else None)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens, and chunks of queries that do not begin at position 0")
        return self._attend(query, keys, values, scale, (window - 1, 0))

    def _attend(self, query: Any, keys: Any, values: Any, scale: float, window: tuple[int | None, int] | None) -> Any:
        check_inputs(query, keys, values)
        check_paired_queries(query, len(keys))
        padded, tokens = pad_to_blocks(query * scale), [pad_to_blocks(each) for each in (keys, values)]
        shape = padded.shape[1], tokens[0].shape[1]
        mask = masks.LocalMask(shape, window, len(keys) - len(query)) if window else masks.FullMask(shape)
        make = splash.make_splash_mqa if keys.shape[1] == 1 else splash.make_splash_mha
        attend = make(masks.MultiHeadMask([mask] * query.shape[1]), head_shards=1, q_seq_shards=1)
        segments = splash.SegmentIds(segments_of(len(query), padded), segments_of(len(keys), tokens[0]))
        with interpreted():
            found = attend(padded, *(each[0] if keys.shape[1] == 1 else each for each in tokens), segment_ids=segments)
        return found.transpose(1, 0, 2)[: len(query)]


def pad_to_blocks(tokens: Any) -> Any:
    """Return tokens [n, heads, dim] as [heads, tokens of whole blocks, dim], padded with zeros at the end."""
    return jnp.pad(tokens, ((0, -len(tokens) % BLOCK), (0, 0), (0, 0))).transpose(1, 0, 2)


def segments_of(count: int, padded: Any) -> Any:
    """Return the segment of each padded token: 0 for the first `count`, 1 for the padding."""
    return (jnp.arange(padded.shape[1]) >= count).astype(jnp.int32)


def check_inputs(query: Any, keys: Any, values: Any) -> None:
    check_equal_shapes(query, keys, values)
    if jnp.float64 in (query.dtype, keys.dtype, values.dtype):
        raise NotOffered("float64: the kernels run without 64-bit types, and JAX then has no such arrays")
