"""The hybrid cache: a hit needs blocks and a state at the same boundary, and a call changes both caches or neither."""

import numpy as np
import pytest

import kvref
from kvref.errors import ConfigError, NonFinite, NotTruncatable, OutOfBlocks, SequenceNotFound, ShapeMismatch

ATTENTION = {"num_blocks": 24, "num_layers": 2, "num_groups": 2, "window": 3, "num_kv_heads": 1, "head_dim": 1, "block_size": 2}
STATE = {
    "num_blocks": 6,
    "num_layers": 1,
    "num_heads": 1,
    "channels": 1,
    "num_inputs": 2,
    "key_dim": 1,
    "value_dim": 1,
    "interval": 4,
}


def hybrid(attention=(), **state):
    return kvref.HybridCache(
        kvref.HybridConfig(kvref.GroupedConfig(**ATTENTION | dict(attention)), kvref.RecurrentConfig(**STATE | state))
    )


def step(cache, sequence, *numbers):
    """The keys and values, inputs and values of the state are the number; the matrix is their sum."""
    rows = np.array([numbers] * 2, np.float32)[:, :, None, None]
    tokens = np.array([numbers], np.float32)[:, :, None, None]
    cache.step(sequence, (rows, rows), (tokens, 0 * tokens + 1, tokens, np.ones((1, len(numbers), 1, 2), np.float32)))


def serve(cache, tokens, checkpoints=True):
    sequence = cache.begin(tokens)
    for at in range(cache.length(sequence), len(tokens)):
        step(cache, sequence, tokens[at])
        if checkpoints and (at + 1) % 4 == 0:
            cache.checkpoint(sequence)
        cache.commit(sequence, tokens[: at + 1])
    return sequence


def check(cache, sequence, tokens):
    """Every layer that sees all tokens reads them, and the state is that of the same tokens."""
    attention, state = cache.ids(sequence)
    keys, _ = cache.attention.read(attention, 1, range(len(tokens)))
    assert keys.ravel().tolist() == tokens
    assert cache.length(sequence) == cache.attention.length(attention) == cache.recurrent.length(state) == len(tokens)
    assert cache.recurrent.read_inputs(state, 0).ravel().tolist() == [0, 0, *tokens][-2:]
    assert cache.recurrent.read_matrix(state, 0).item() == sum(tokens)


def test_a_hit_has_blocks_and_a_state():
    cache, prompt = hybrid(), list(range(1, 12))
    cache.drop(serve(cache, prompt))
    assert cache.match(prompt) == 8
    begun = cache.begin(prompt)
    check(cache, begun, prompt[:8])
    step(cache, begun, 9, 10)
    check(cache, begun, prompt[:10])


def test_no_hit_without_a_state():
    cache, prompt = hybrid(), list(range(1, 12))
    cache.drop(serve(cache, prompt, checkpoints=False))
    assert cache.attention.match(prompt) == 10
    assert cache.match(prompt) == 0


def test_no_hit_without_blocks():
    cache, prompt = hybrid({"num_blocks": 14}), list(range(1, 12))
    cache.drop(serve(cache, prompt))
    assert cache.match(prompt) == 8
    other, token = cache.attention.create(), np.ones((2, 1, 1, 1), np.float32)
    while cache.attention.match(prompt) >= 8:
        cache.attention.step(other, token, token)  # evicts the blocks of the newest tokens first
    assert cache.recurrent.match(prompt) == 8
    hit = cache.match(prompt)
    assert hit in (0, 4) and hit <= cache.attention.match(prompt)
    cache.attention.drop(other)
    check(cache, cache.begin(prompt), prompt[:hit])


def test_a_hit_is_found_below_the_hits_of_both():
    """The state hits at 8 and 4, and attention at 6: the hit is 4, and not the smaller of both."""
    cache, prompt = hybrid(), list(range(1, 12))
    first = serve(cache, prompt[:6])
    state = cache.recurrent.create()
    tokens = np.array([prompt[:8]], np.float32)[:, :, None, None]
    for part in (slice(4), slice(4, 8)):
        arrays = tokens[:, part]
        cache.recurrent.append(state, arrays, 0 * arrays + 1, arrays, np.ones((1, 4, 1, 2), np.float32))
        cache.recurrent.checkpoint(state)
    cache.recurrent.commit(state, prompt[:8])
    assert (cache.recurrent.match(prompt), cache.attention.match(prompt)) == (8, 6)
    assert cache.match(prompt) == 4
    check(cache, cache.begin(prompt), prompt[:4])
    check(cache, first, prompt[:6])


def test_forks_and_drafts_are_of_one_length():
    cache = hybrid(max_drafts=2)
    sequence = cache.create()
    step(cache, sequence, 1, 2, 3)
    child = cache.fork(sequence)
    step(cache, sequence, 4, 5)
    cache.truncate(sequence, 4)
    check(cache, sequence, [1, 2, 3, 4])
    check(cache, child, [1, 2, 3])
    step(cache, child, 7)
    check(cache, child, [1, 2, 3, 7])
    cache.drop(sequence)
    with pytest.raises(SequenceNotFound):
        cache.length(sequence)
    check(cache, child, [1, 2, 3, 7])


def test_a_call_that_raises_changes_neither_cache():
    cache = hybrid({"num_blocks": 5}, max_drafts=1, num_blocks=1)
    sequence = cache.create()
    step(cache, sequence, 1, 2)
    one, bad = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), np.nan, np.float32)
    rows, gates = np.ones((2, 1, 1, 1), np.float32), np.ones((1, 1, 1, 2), np.float32)
    two = tuple(np.repeat(each, 2, axis=1) for each in (one, one, one, gates))
    calls = (
        (OutOfBlocks, lambda: step(cache, sequence, *range(9))),
        (NonFinite, lambda: cache.step(sequence, (rows, rows), (bad, one, one, gates))),
        (ShapeMismatch, lambda: cache.step(sequence, (rows, rows), two)),
        (OutOfBlocks, lambda: cache.fork(sequence)),
        (OutOfBlocks, cache.create),
        (OutOfBlocks, lambda: cache.begin([1])),
    )
    for error, call in calls:
        with pytest.raises(error):
            call()
        check(cache, sequence, [1, 2])
    step(cache, sequence, 3)
    with pytest.raises(NotTruncatable):
        cache.truncate(sequence, 1)
    check(cache, sequence, [1, 2, 3])


def test_reset_needs_no_live_sequence_and_boundaries_need_blocks():
    cache, prompt = hybrid(), [1, 2, 3, 4, 5]
    sequence = serve(cache, prompt)
    with pytest.raises(kvref.errors.InUse):
        cache.reset()
    cache.drop(sequence)
    cache.reset()
    assert cache.match(prompt) == 0
    with pytest.raises(ConfigError, match="interval: expected a multiple of block_size 2, got 3"):
        hybrid(interval=3)
