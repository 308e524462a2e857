"""What the prefix cache does beyond what the judge's clauses meet of it."""

import hashlib

import numpy as np
import pytest

import kvref
from kvref.errors import ConfigError, TokenMismatch
from kvref.prefix import block_keys

RNG = np.random.default_rng(4)


def rows(count):
    return RNG.normal(size=(count, 1, 2)).astype(np.float32)


@pytest.fixture
def cache():
    return kvref.PrefixCache(kvref.PagedConfig(num_blocks=8, num_layers=1, num_kv_heads=1, head_dim=2, block_size=2))


def begun(cache, tokens, salt=""):
    """A sequence of these tokens, all of them committed."""
    sequence = cache.begin(tokens, salt)
    count = len(tokens) - cache.length(sequence, 0)
    cache.write(sequence, 0, cache.length(sequence, 0), rows(count), rows(count))
    cache.commit(sequence, tokens)
    return sequence


def test_a_list_written_over_what_was_committed_takes_it_back(cache):
    sequence = begun(cache, [1, 2])
    row = [[[3.0, 4.0]]]
    cache.write(sequence, 0, 1, row, row)
    cache.commit(sequence, [1, 3])
    assert (cache.match([1, 2, 0]), cache.match([1, 3, 0])) == (2, 2)


@pytest.mark.parametrize("told", [1, 3])  # of blocks of two: none that is full, and one
def test_a_fork_goes_on_with_the_salt_of_what_it_comes_from(cache, told):
    child = cache.fork(begun(cache, [1, 2, 3][:told], "tenant"))
    cache.write(child, 0, told, rows(4 - told), rows(4 - told))
    cache.commit(child, [1, 2, 3, 4])
    assert (cache.match([1, 2, 3, 4, 0], "tenant"), cache.match([1, 2, 3, 4, 0])) == (4, 0)


def test_no_tokens_are_removed_and_all_are_known_as_before(cache):
    sequence = begun(cache, [1, 2, 3, 4])
    cache.remove(sequence, 2, 2)
    with pytest.raises(TokenMismatch, match="token at position 3: expected 4, committed before, got 5"):
        cache.commit(sequence, [1, 2, 3, 5])


@pytest.mark.parametrize("kind", [kvref.PagedCache, kvref.PrefixCache])
def test_keys_are_turned_by_halves_unless_asked_otherwise(cache, kind):
    both = kind(cache.config), kind(cache.config)
    keys, values = rows(6), rows(6)
    for each, layout in zip(both, ({}, {"layout": "halves"}), strict=True):
        sequence = each.create()
        each.write(sequence, 0, 0, keys, values)
        each.remove(sequence, 1, 3, theta=100.0, **layout)
    (own, _), (asked, _) = (each.gather(0, 0) for each in both)
    assert np.array_equal(own, asked)
    assert not np.array_equal(own, np.delete(keys, [1, 2], axis=0))


def test_no_salt_goes_on_where_a_block_ends():
    """The digest of this tenant is text, so that a salt can begin with it: behind it, where it is hashed once, comes a block."""
    tenant = "tenant-299823584"
    salt = (hashlib.sha256(tenant.encode()).digest() + np.array([7, 8], "<i8").tobytes()).decode()
    assert list(block_keys([9, 10], 2, salt)) != list(block_keys([7, 8, 9, 10], 2, tenant))[1:]


@pytest.mark.parametrize("theta", [10**400, float("nan")])
def test_what_cannot_be_a_base_changes_nothing(cache, theta):
    parent = begun(cache, [1, 2, 3])
    child = cache.fork(parent)
    before = cache.block_table(child, 0), cache.num_free_blocks
    with pytest.raises(ConfigError, match="theta: expected a positive number, got "):
        cache.remove(child, 0, 1, theta)
    assert (cache.block_table(child, 0), cache.num_free_blocks) == before
