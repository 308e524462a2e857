"""The words of errors, whole: they are what somebody reads who made the mistake, and no clause says them."""

import numpy as np
import pytest

import kvref
from kvref import errors
from kvref.rotary import Rotary


def paged(kind=kvref.PagedCache, tokens=5):
    """One sequence of five tokens in blocks of four, two of six blocks; three entries' room."""
    cache = kind(kvref.PagedConfig(num_blocks=6, block_size=4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"))
    cache.create()
    cache.write(0, 0, 0, *2 * [np.ones((tokens, 1, 2), np.float32)])
    return cache


def pool():
    found = kvref.BlockPool(3)
    found.allocate()
    return found


NUMBER = "expected an integer in"
WORDS = [
    (lambda: paged().truncate(0, 6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (lambda: paged().truncate(1, 0), errors.SequenceNotFound, "sequence: expected one that was created and not dropped, got 1"),
    (lambda: paged().remove(0, 1, 6), errors.PositionOutOfRange, f"stop: {NUMBER} [0, 6), got 6"),
    (lambda: paged().remove(0, 3, 2), errors.PositionOutOfRange, f"start: {NUMBER} [0, 3), got 3"),
    (lambda: paged().slot_mapping(0, 0, -1, 1), errors.PositionOutOfRange, "start: expected an integer of at least 0, got -1"),
    (lambda: paged().slot_mapping(0, 0, 0, -1), errors.PositionOutOfRange, "count: expected an integer of at least 0, got -1"),
    (lambda: paged().slot_mapping(0, 0, 7, 2), errors.PositionOutOfRange, f"start + count: {NUMBER} [0, 9), got 9"),
    (
        lambda: paged().write(0, 0, 6, *2 * [np.ones((1, 1, 2), np.float32)]),
        errors.PositionOutOfRange,
        f"start: {NUMBER} [0, 6), got 6",
    ),
    (lambda: paged().ensure_capacity(0, 25), errors.OutOfBlocks, "blocks: expected 5 free ones, got 4"),
    (lambda: pool().share(2), errors.BlockNotAllocated, "share: expected a block that is held, got 2"),
    (lambda: pool().free(1), errors.BlockNotAllocated, "free: expected a block that is held, got 1"),
    (lambda: Rotary(1), errors.ConfigError, "head_dim: expected an integer of at least 2, got 1"),
    (lambda: Rotary(3), errors.ConfigError, "head_dim: expected an even number to turn in pairs, got 3"),
    (lambda: Rotary(4, float("inf")), errors.ConfigError, "theta: expected a positive number, got inf"),
    (lambda: Rotary(4, True), errors.ConfigError, "theta: expected a positive number, got True"),
    (lambda: Rotary(4, 10.0, "both"), errors.ConfigError, "layout: expected one of halves, pairs, got 'both'"),
    (lambda: paged(kvref.PrefixCache).reset(), errors.InUse, "reset: expected no sequence, got 1"),
    (lambda: paged(kvref.PrefixCache).commit(0, [1] * 6), errors.PositionOutOfRange, f"tokens committed: {NUMBER} [0, 6), got 6"),
    (lambda: paged(kvref.PrefixCache).match([1, -2]), errors.TokenOutOfRange, f"token: {NUMBER} [0, {2**63}), got -2"),
    (lambda: paged(kvref.PrefixCache).begin([1] * 25), errors.OutOfBlocks, "blocks: expected 7 free ones, got 4"),
]


@pytest.mark.parametrize(("call", "kind", "words"), WORDS)
def test_an_error_says_what_was_expected_and_what_came(call, kind, words):
    with pytest.raises(errors.KVRefError) as raised:
        call()
    assert (type(raised.value), str(raised.value)) == (kind, words)
