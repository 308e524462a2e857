"""Behavior of the prefix cache beyond the clauses."""

import hashlib

import numpy as np
import pytest

import kvref
from kvref.errors import ConfigError, TokenMismatch
from kvref.prefix import block_keys
from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of

RNG = np.random.default_rng(4)


def rows(count):
    return RNG.normal(size=(count, 1, 2)).astype(np.float32)


@pytest.fixture
def cache():
    return kvref.PrefixCache(kvref.PagedConfig(num_blocks=8, num_layers=1, num_kv_heads=1, head_dim=2, block_size=2))


def begun(cache, tokens, salt=""):
    """A sequence with these tokens, all committed."""
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


@pytest.mark.parametrize("told", [1, 3])  # with blocks of two: no full block, and one
def test_a_fork_goes_on_with_the_salt_of_what_it_comes_from(cache, told):
    child = cache.fork(begun(cache, [1, 2, 3][:told], "tenant"))
    cache.write(child, 0, told, rows(4 - told), rows(4 - told))
    cache.commit(child, [1, 2, 3, 4])
    assert (cache.match([1, 2, 3, 4, 0], "tenant"), cache.match([1, 2, 3, 4, 0])) == (4, 0)


def test_no_tokens_are_removed_and_all_are_known_as_before(cache):
    sequence = begun(cache, [1, 2, 3, 4])
    cache.remove(sequence, 2, 2)
    with pytest.raises(TokenMismatch, match="token at position 3: 5 differs from the committed token 4"):
        cache.commit(sequence, [1, 2, 3, 5])


@pytest.mark.parametrize("kind", [kvref.PagedCache, kvref.PrefixCache])
def test_keys_are_turned_by_halves_unless_asked_otherwise(cache, kind):
    both = kind(cache.config), kind(cache.config)
    keys, values = rows(6), rows(6)
    for each, layout in zip(both, ({}, {"layout": "halves"}), strict=True):
        sequence = each.create()
        each.write(sequence, 0, 0, keys, values)
        each.remove(sequence, 1, 3, frequencies=[1.0], **layout)
    (own, _), (asked, _) = (each.gather(0, 0) for each in both)
    assert np.array_equal(own, asked)
    assert not np.array_equal(own, np.delete(keys, [1, 2], axis=0))


def test_no_salt_goes_on_where_a_block_ends():
    """This tenant's digest is valid text.

    A salt that consists of the digest and a block's tokens must not give the keys of that tenant.
    """
    tenant = "tenant-299823584"
    salt = (hashlib.sha256(tenant.encode()).digest() + np.array([7, 8], "<i8").tobytes()).decode()
    assert list(block_keys([9, 10], 2, salt)) != list(block_keys([7, 8, 9, 10], 2, tenant))[1:]


@pytest.mark.parametrize("label", [lambda text: (text,), lambda text: ("", text), lambda text: ("", "", [[0, 3, text]])])
def test_lone_surrogates_are_characters_like_others(cache, label):
    """JSON strings can contain them, and UTF-8 cannot."""
    sequence = cache.begin([9, 9, 9], *label("\ud800"))
    cache.write(sequence, 0, 0, rows(3), rows(3))
    cache.commit(sequence, [9, 9, 9])
    assert [cache.match([9, 9, 9], *label(text)) for text in ("\ud800", "\ud801", "?")] == [2, 0, 0]


@pytest.mark.parametrize("tokens", [[9], [9, 9, 9]])  # without and with a full block
@pytest.mark.parametrize(
    ("label", "name"),
    [({"salt": None}, "salt"), ({"adapter": 1}, "adapter"), ({"media": [[0, 1, 5]]}, "content of media")],
)
def test_labels_that_are_no_strings_change_nothing(cache, tokens, label, name):
    for call in (cache.match, cache.begin):
        with pytest.raises(ConfigError, match=f"{name}: expected a string, got"):
            call(tokens, **label)
    assert cache.num_free_blocks == cache.config.num_blocks


@pytest.mark.parametrize("frequencies", [[10**400], [float("nan")], [1.0] * 20, [], 1.0, "1"])
def test_what_cannot_be_frequencies_changes_nothing(cache, frequencies):
    parent = begun(cache, [1, 2, 3])
    child = cache.fork(parent)
    before = cache.block_table(child, 0), cache.num_free_blocks
    with pytest.raises(ConfigError, match=r"frequencies: expected 1 to \d+ finite numbers, got "):
        cache.remove(child, 0, 1, frequencies)
    assert (cache.block_table(child, 0), cache.num_free_blocks) == before


@pytest.mark.parametrize("integer", [np.uint8, np.int32, np.uint64, ">i8"])
def test_keys_of_any_integer_type_are_those_of_pythons_own_and_no_salt_is_the_empty_one(integer):
    tokens = [5, 0, 255, 7, 9]
    wanted, salt = [], hashlib.sha256(hashlib.sha256(2 * hashlib.sha256(b"").digest()).digest()).digest()
    for pair in (tokens[:2], tokens[2:4]):
        wanted.append(hashlib.sha256((wanted or [salt])[-1] + b"".join(token.to_bytes(8, "little") for token in pair)).digest())
    assert list(block_keys(np.array(tokens, integer), 2)) == wanted
    assert list(block_keys(tokens, 2, "")) == wanted


def test_no_tokens_written_over_others_take_nothing_back(cache):
    sequence = begun(cache, [1, 2, 3])
    cache.write(sequence, 0, 1, rows(0), rows(0))
    with pytest.raises(TokenMismatch, match="token at position 2: 4 differs from the committed token 3"):
        cache.commit(sequence, [1, 2, 4])


def test_blocks_that_are_handed_out_are_int32(cache):
    dropped = [begun(cache, tokens) for tokens in ([1, 2], [3, 4, 5])]
    for sequence in dropped:
        cache.drop(sequence)
    for count in (0, 7, 1):  # none; plain blocks, and one that is evicted
        taken = cache.pool.allocate_many(count)
        assert (taken.shape, taken.dtype) == ((count,), np.int32)


@pytest.mark.parametrize("kind", [kvref.PagedCache, kvref.PrefixCache])
def test_what_a_cache_gives_is_of_its_own_library(cache, kind):
    """Whatever array type is passed in: a cache must not switch to another array library."""
    strict = kvref.backend("reference", namespace="array_api_strict")
    mine, own = kind(cache.config, strict), kind(cache.config)
    first, over, query = rows(5), rows(2), rows(1)
    for each in (mine, own):
        sequence = each.create()
        each.write(sequence, 0, 0, first, first)
        if kind is kvref.PrefixCache:
            each.commit(sequence, [1, 2, 3, 4, 5])
        each.write(sequence, 0, 3, *2 * [strict.asarray(over) if each is mine else over])
        each.remove(sequence, 1, 2, frequencies=[1.0])
    arrays = mine.gather(0, 0), own.gather(0, 0)
    arrays = [*zip(*arrays, strict=True), (mine.attend(0, 0, strict.asarray(query)), own.attend(0, 0, query))]
    arrays += [(mine.lengths([0], 0), own.lengths([0], 0)), (mine.block_tables([0], 0), own.block_tables([0], 0))]
    arrays += list(zip(mine.gather_batch([0], 0), own.gather_batch([0], 0), strict=True))
    for one, other in arrays:
        assert type(one) is type(strict.asarray(first))
        assert np.array_equal(strict.to_numpy(one), other)
    if kind is kvref.PrefixCache:
        mine.commit(0, [1, 7])  # overwritten and removed tokens are no longer committed


def test_fewer_tokens_committed_again_take_nothing_back(cache):
    sequence = begun(cache, [1, 2, 3])
    cache.commit(sequence, [1])
    with pytest.raises(TokenMismatch, match="token at position 2: 4 differs from the committed token 3"):
        cache.commit(sequence, [1, 2, 4])


@pytest.fixture
def written_over():
    """A sequence whose only block was committed and then overwritten in the first of two layers: its old block stays cached."""
    cache = kvref.PrefixCache(kvref.PagedConfig(num_blocks=5, num_layers=2, num_kv_heads=1, head_dim=2, block_size=2))
    sequence = cache.begin([1, 2])
    for layer in (0, 1):
        cache.write(sequence, layer, 0, rows(2), rows(2))
    cache.commit(sequence, [1, 2])
    before = cache.block_table(sequence, 0)
    cache.write(sequence, 0, 1, rows(1), rows(1))
    assert (cache.match([1, 2, 0]), cache.block_table(sequence, 0) != before) == (2, True)
    return cache


def test_a_block_is_written_to_in_place_once_what_it_was_part_of_is_lost(written_over):
    table = written_over.block_table(0, 1)
    written_over.pool.allocate_many(3)  # the first layer's old block among them
    assert (written_over.match([1, 2, 0]), written_over.num_free_blocks) == (0, 0)
    written_over.write(0, 1, 1, rows(1), rows(1))
    assert written_over.block_table(0, 1) == table


def test_a_block_that_is_part_of_two_stays_as_it_is_when_one_of_them_is_lost(written_over):
    written_over.commit(0, [1, 3])
    table, (keys, _) = written_over.block_table(0, 1), written_over.gather(0, 1)
    taken = written_over.pool.allocate_many(3)
    assert [written_over.match([1, last, 0]) for last in (2, 3)] == [0, 2]
    written_over.pool.free_many(taken)
    written_over.write(0, 1, 1, rows(1), rows(1))
    assert written_over.block_table(0, 1) != table
    again = written_over.begin([1, 3, 0])
    assert np.array_equal(written_over.gather(again, 1)[0], keys)


@pytest.mark.parametrize("count", range(4))
def test_of_a_copy_that_is_lost_no_more_blocks_are_taken_than_asked_for(count):
    cache = kvref.PrefixCache(kvref.PagedConfig(num_blocks=3, num_layers=3, num_kv_heads=1, head_dim=2, block_size=2))
    sequence = cache.begin([1, 2])
    for layer in range(3):
        cache.write(sequence, layer, 0, rows(2), rows(2))
    cache.commit(sequence, [1, 2])
    cache.drop(sequence)
    taken = cache.pool.allocate_many(count)
    assert (len(set(taken.tolist())), len(taken), cache.num_free_blocks) == (count, count, 3 - count)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("numpy:token-hits", "passed"), ("reference:strict:token-hits", "passed"), ("numpy", "not offered")],
)
def test_token_hits_are_judged_where_they_are_declared(name, expected):
    ((_, checks),) = select_checks("PREFIX-19").items()
    judge = CheckRunner(load_implementation(name))
    assert judge.implementation.name == name
    assert verdict_of(judge.judge_clause([check for check in checks if check.run])) == expected
