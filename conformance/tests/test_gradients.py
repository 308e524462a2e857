"""Tensors that require a gradient, passed to every cache: a cache stores numbers, not their autograd graph."""

import pytest

import kvref

pytestmark = pytest.mark.torch
BACKENDS = ["torch", "reference:torch"]


def filled(shape):
    import torch

    return torch.ones(shape, requires_grad=True) * 2


def contiguous(backend):
    cache = kvref.ContiguousCache(kvref.ContiguousConfig(2, 4, max_seq_len=8), backend)
    cache.append(filled((1, 2, 3, 4)), filled((1, 2, 3, 4)))
    cache.append_fused(filled((2, 1, 2, 3, 4)))
    return [*cache.read(), *cache.raw(), cache.attend(filled((1, 2, 1, 4)))]


def paged(backend):
    cache = kvref.PagedCache(kvref.PagedConfig(4, 1, 2, 4), backend)
    sequence = cache.create()
    cache.write(sequence, 0, 0, filled((3, 2, 4)), filled((3, 2, 4)))
    cache.append_step([sequence], filled((1, 1, 2, 4)), filled((1, 1, 2, 4)))
    return [*cache.gather(sequence, 0), cache.attend(sequence, 0, filled((1, 2, 4)))]


def quantized(backend):
    cache = kvref.QuantizedCache(kvref.QuantizedConfig(1, 8, 2, 4), backend)
    cache.append(0, filled((3, 2, 4)), filled((3, 2, 4)))
    return [*cache.read_tokens(0, range(3)), cache.attend(0, filled((1, 2, 4)))]


def tiered(backend):
    cache = kvref.TieredCache(kvref.TieredConfig(2, 4, max_tokens=8, tail_length=2, tail_dtype="float32"), backend)
    cache.append(filled((3, 2, 4)), filled((3, 2, 4)))
    return [*cache.read(), cache.attend(filled((1, 2, 4)))]


def pooled(backend):
    cache = kvref.PooledCache(kvref.PooledConfig(2, 4, tokens_per_block=2, max_tokens=8), backend=backend)
    cache.append(filled((3, 2, 4)), filled((3, 2, 4)))
    return [*cache.read(), cache.attend(filled((1, 2, 4)))]


def windowed(backend):
    cache = kvref.WindowedCache(kvref.WindowedConfig(2, 4, window=2, sinks=1), backend)
    cache.append(filled((3, 2, 4)), filled((3, 2, 4)))
    return [cache.step(*[filled((2, 2, 4))] * 3), *cache.read([0, 4]), cache.attend(filled((1, 2, 4)))]


def grouped(backend):
    cache = kvref.GroupedCache(kvref.GroupedConfig(8, 2, 2, 2, num_kv_heads=2, head_dim=4, block_size=2), backend)
    sequence = cache.create()
    cache.step(sequence, filled((2, 3, 2, 4)), filled((2, 3, 2, 4)))
    return [*cache.read(sequence, 1, range(3)), cache.attend(sequence, 0, filled((1, 2, 4)))]


def latent(backend):
    cache = kvref.LatentCache(kvref.LatentConfig(4, 2, max_tokens=8), backend)
    cache.append(filled((3, 4)), filled((3, 2)))
    return [cache.read(), cache.records(), cache.attend(filled((1, 2, 5)), filled((2, 3, 4)), filled((2, 3, 4)))]


def channels(backend):
    cache = kvref.ChannelCache(kvref.ChannelConfig(1, 32, 40, residual=32), backend)
    cache.append(filled((34, 1, 32)), filled((34, 1, 32)))
    return [*cache.read([0, 33]), cache.attend(filled((1, 2, 32)))]


def sharded(backend):
    cache = kvref.ShardedCache(kvref.ShardedConfig(2, 4, 2, 2, head_ranks=2, token_ranks=2), backend)
    cache.append(filled((3, 2, 4)), filled((3, 2, 4)))
    return [*cache.read(), *cache.read_rank(3), cache.attend(filled((1, 2, 4)), 1.0)]


def recurrent(backend):
    cache = kvref.RecurrentCache(kvref.RecurrentConfig(4, 1, 2, 4, 2, 4, 4, max_drafts=2), backend)
    sequence = cache.create()
    tokens = [filled((1, 3, 2, width)) for width in (4, 4, 4)]
    cache.append(sequence, *tokens, filled((1, 3, 2, 2)) / 4)
    cache.append_batch([sequence], [1], *(each[:, None] for each in tokens), filled((1, 1, 3, 2, 2)) / 4)
    return [cache.read_inputs(sequence, 0), cache.read_matrix(sequence, 0), cache.apply(sequence, 0, filled((1, 2, 4)))]


def buffer(backend):
    held = kvref.BufferPool(backend=backend).acquire(64)
    held.extend(filled((3,)))
    return [held.values()]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "reads",
    [contiguous, paged, quantized, tiered, pooled, windowed, grouped, latent, channels, sharded, recurrent, buffer],
    ids=lambda reads: reads.__name__,
)
def test_what_is_read_belongs_to_no_graph(name, reads):
    got = reads(kvref.backend(name))
    assert got
    assert not any(array.requires_grad for array in got)
