"""Checks of PREFIX: how long blocks are found, in which order they are evicted, and copies of cached blocks."""

from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import need_tokens, reserve
from kvref_conformance.families.prefix.fixture import OTHER, PrefixFixture, need_declared_order, prompt, with_free_entries
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_true, raises
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.registry import check


def blocks(served: PrefixFixture, *which: int) -> list[int]:
    """Returns a prompt that consists of these full blocks."""
    return [token for each in which for token in prompt(served.size, each)]


@check("PREFIX-05b", "prefix")
def match_keeps_the_eviction_order(subject: Subject) -> None:
    need_declared_order(subject)
    served = with_free_entries(subject, 3)
    prompts = [blocks(served, which) for which in (1, 2, 3)]
    served.serve_and_drop(*prompts)
    assert_equal(served.count_cached(*prompts, prompts[0]), [1, 1, 1, 1], "cached blocks of three prompts and of the first again")
    served.allocate(1)
    assert_equal(served.count_cached(*prompts), [0, 1, 1], "cached blocks after the block that was released first was evicted")


@check("PREFIX-05ab", "prefix")
def match_allocates_nothing(subject: Subject) -> None:
    need_declared_order(subject)
    served = PrefixFixture(subject)
    tokens = blocks(served, 1, 2, 3)
    served.serve_and_drop(tokens)
    free = served.cache.num_free_blocks
    for _ in range(3):
        assert_equal(served.count_cached(tokens), [3], "cached blocks by repeated calls of match")
        assert_equal(served.cache.num_free_blocks, free, "free blocks after match")
    sequence = served.allocate(1)
    assert_equal(served.match(tokens), served.hit(3 * served.size - 1), "match after an allocation")
    served.cache.drop(sequence)
    served.cache.reset()  # raises InUse if match had created a sequence


@check("PREFIX-06ab", "prefix")
def dropped_blocks_are_free_and_cached(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, total, cache = blocks(served, 1, 2), served.cache.config["num_blocks"], served.cache
    for _ in range(3):
        sequence = served.serve([*tokens, OTHER])
        assert_equal(cache.num_free_blocks, total - 3 * len(served.layers), "free blocks while a prompt is served")
        cache.drop(sequence)
        assert_equal(cache.num_free_blocks, total, "free blocks after drop")
        assert_equal(cache.utilization, 0.0, "utilization after drop")
        served.finds([*tokens, OTHER], 2 * served.size)


@check("PREFIX-06c", "prefix")
def every_free_block_can_be_allocated(subject: Subject) -> None:
    served = with_free_entries(subject, 4)
    prompts = blocks(served, 1, 2), blocks(served, 3, 4)
    served.serve_and_drop(*prompts)
    served.allocate(4)  # raises OutOfBlocks if some blocks are not evicted
    assert_equal(served.count_cached(*prompts), [0, 0], "cached blocks after all blocks were allocated")


@check("PREFIX-07", "prefix")
def allocated_blocks_are_not_found(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for operation in ("ensure_capacity", "write", "append", "begin"):
        served = with_free_entries(subject, 2)
        tokens, cache, size = blocks(served, 1, 2), served.cache, served.size
        served.serve_and_drop(tokens)
        with suppress(NotOffered):
            if operation == "begin":
                served.begin(blocks(served, 3, 4))
            else:
                sequence = cache.create()
                if operation == "ensure_capacity":
                    cache.ensure_capacity(sequence, 2 * size)
                elif operation == "write":
                    cache.write(sequence, 0, 0, *random_pair(subject, 2 * size))
                else:
                    for _ in range(2 * size):
                        cache.append([sequence], 0, *random_pair(subject, 1))
            assert_equal(served.count_cached(tokens), [0], f"cached blocks after {operation} allocated every block")


@check("PREFIX-07", "prefix")
def evicted_prompts_are_never_found_again(subject: Subject) -> None:
    served = with_free_entries(subject, 3)
    prompts = [blocks(served, which, which + 10, which + 20) for which in range(1, 6)]
    for number, tokens in enumerate(prompts):  # each needs the whole pool
        served.serve_and_drop(tokens)
        assert_equal(served.count_cached(*prompts[:number]), [0] * number, "cached blocks of the earlier prompts")
        served.finds(tokens, served.hit(3 * served.size - 1))


@check("PREFIX-07", "prefix")
def commit_finds_no_evicted_block_again(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 4)
    size, tokens = served.size, blocks(served, 1, 2, 3)
    sequence, _ = served.begin(tokens)
    served.write(sequence, 0, len(tokens))
    served.cache.commit(sequence, tokens[: 2 * size])
    served.cache.release_before(sequence, 2 * size)
    served.allocate(3)
    served.cache.commit(sequence, tokens)
    assert_equal(served.match([*tokens, 0]), 0, "match after released blocks were evicted and later tokens committed")


@check("PREFIX-08a", "prefix")
def uncached_blocks_are_allocated_first(subject: Subject) -> None:
    need_declared_order(subject)
    served = with_free_entries(subject, 5)
    tokens = blocks(served, 1, 2)
    served.serve_and_drop(tokens)
    for _ in range(2):
        sequence = served.allocate(3)
        assert_equal(served.count_cached(tokens), [2], "cached blocks after all others were allocated")
        served.cache.drop(sequence)


def evict_one_by_one(served: PrefixFixture, prompts: list[list[int]], *counts: list[int]) -> None:
    """Allocates an entry for each item of `counts`: the numbers of blocks of the prompts that must be cached then."""
    sequence = served.cache.create()
    for entries, count in enumerate(counts, 1):
        reserve(served.subject, served.cache, sequence, entries)
        assert_equal(served.count_cached(*prompts), count, f"cached blocks after {entries} blocks per layer were allocated")


@check("PREFIX-08bc", "prefix")
def blocks_are_evicted_in_the_order_of_their_release(subject: Subject) -> None:
    need_declared_order(subject)
    served = with_free_entries(subject, 6)
    prompts = [blocks(served, 1, 2), blocks(served, 3, 4), blocks(served, 5, 6)]
    served.serve_and_drop(*prompts, prompts[0])
    evict_one_by_one(served, prompts, [2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0])


@check("PREFIX-08c", "prefix")
def blocks_of_one_prompt_are_evicted_from_its_end(subject: Subject) -> None:
    need_declared_order(subject)
    for left in (None, 0, 1):  # blocks that a truncation leaves; None: drop
        served = with_free_entries(subject, 4)
        tokens = blocks(served, 1, 2, 3, 4)
        with suppress(NotOffered):
            if left is None:
                served.serve_and_drop(tokens)
            else:
                subject.require_size(sequences=2)
                served.cache.truncate(served.serve(tokens), left * served.size)
            evict_one_by_one(served, [tokens], *([each] for each in range(3, (left or 0) - 1, -1)))


@check("PREFIX-08d", "prefix")
def allocated_blocks_are_never_evicted(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 4)
    tokens = blocks(served, 1, 2)
    served.serve_and_drop(tokens)
    _, hit = served.begin(tokens[: served.size + 1])
    assert_equal(hit, served.size, "the hit of the prompt")
    other = served.allocate(2)
    with raises("OutOfBlocks"):
        reserve(subject, served.cache, other, 3)
    served.look()
    cached = served.count_cached(tokens)[0]
    assert_true(cached >= 1, "cached blocks, the first of which is allocated", "at least 1", cached)


@check("PREFIX-09a", "prefix")
def blocks_after_an_evicted_block_are_not_found(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 5)
    tokens = blocks(served, 1, 2, 3)
    sequence = served.serve(tokens)
    for layer in served.layers:  # goes to a copy: no table lists the cached block any more
        served.cache.write(sequence, layer, 0, *random_pair(subject, 1))
    with suppress(NotOffered):
        need_declared_order(subject)
        assert_equal(served.count_cached(tokens), [3], "cached blocks after a write to a copy of the first block")
    served.allocate(2)
    assert_equal(served.count_cached(tokens), [0], "cached blocks after the first was evicted, while a sequence lists the others")


@check("PREFIX-09b", "prefix")
def eviction_of_the_last_block_keeps_earlier_blocks(subject: Subject) -> None:
    need_declared_order(subject)
    served = with_free_entries(subject, 4)
    tokens = blocks(served, 1, 2, 3)
    served.serve_and_drop(tokens)
    sequence = served.allocate(2)
    assert_equal(served.count_cached(tokens), [2], "cached blocks of a prompt of three after the last was evicted")
    served.cache.drop(sequence)
    served.finds(tokens, 2 * served.size)


@check("PREFIX-10", "prefix")
def eviction_of_a_copy_keeps_the_prompt_cached(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for dropped in (0, 1):
        served = with_free_entries(subject, 6)
        tokens = blocks(served, 1, 2)
        twice = [served.begin([*tokens, OTHER])[0] for _ in range(2)]
        for sequence in twice:
            served.write(sequence, 0, len(tokens))
            served.cache.commit(sequence, tokens)
        assert_equal(served.count_cached(tokens), [2], "cached blocks of a prompt that two sequences committed")
        served.cache.drop(twice[dropped])
        served.allocate(3)  # all free blocks, if equal blocks were not merged
        served.look()
        assert_equal(served.count_cached(tokens), [2], "cached blocks of a prompt with two copies, after one was evicted")


# Checks of PREFIX: reset, room for new prompts, and writes to cached blocks.


@check("PREFIX-11a", "prefix")
def reset_raises_while_a_sequence_lives(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, cache = blocks(served, 1, 2), served.cache
    sequence = served.serve(tokens)
    with raises("InUse"):
        cache.reset()
    served.look()
    assert_equal(served.count_cached(tokens), [2], "cached blocks after a rejected reset")
    cache.drop(sequence)
    with suppress(NotOffered):
        sequence = cache.create()
        with raises("InUse"):
            cache.reset()
        cache.drop(sequence)
    cache.reset()


@check("PREFIX-11a", "prefix")
def reset_raises_while_a_fork_lives(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    parent = served.serve(prompt(served.size))
    child = served.cache.fork(parent)
    served.cache.drop(parent)
    with raises("InUse"):
        served.cache.reset()
    served.cache.drop(child)
    served.cache.reset()


@check("PREFIX-11b", "prefix")
def reset_uncaches_all_blocks(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, other, cache = blocks(served, 1, 2), blocks(served, 3), served.cache
    served.serve_and_drop(tokens)
    served.serve_and_drop(other, salt="a")
    cache.reset()
    assert_equal(served.count_cached(tokens), [0], "cached blocks after reset")
    assert_equal(served.match([*other, OTHER], "a"), 0, "match of a salted prompt after reset")
    assert_equal(cache.num_free_blocks, cache.config["num_blocks"], "free blocks after reset")
    changed = served.begin(tokens)[0]
    served.prompts[changed] = tokens, "other weights"  # the keys and values of equal tokens differ then
    served.write(changed, 0, len(tokens))
    cache.commit(changed, tokens)
    served.look()
    cache.drop(changed)
    served.finds([*tokens, OTHER], 2 * served.size)
    cache.reset()
    assert_equal(served.count_cached(tokens), [0], "cached blocks after a second reset")


@check("PREFIX-13ab", "prefix")
def begin_needs_room_besides_its_hit(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 4)
    tokens, cache = blocks(served, 1, 2), served.cache
    served.serve_and_drop(tokens)
    other = served.allocate(1)  # leaves three free blocks, two of which are cached
    free = cache.num_free_blocks
    with raises("OutOfBlocks"):
        served.begin([*tokens, *blocks(served, 3, 4)])
    assert_equal(cache.num_free_blocks, free, "free blocks after begin raised OutOfBlocks")
    assert_equal(served.count_cached(tokens), [2], "cached blocks after begin raised OutOfBlocks")
    sequence, hit = served.begin([*tokens, *blocks(served, 3)])
    assert_equal(hit, 2 * served.size, "the hit of a prompt that needs every free block")
    served.write(sequence, hit, 3 * served.size)
    served.look()
    cache.drop(sequence)
    cache.drop(other)
    cache.reset()  # raises InUse if a failed begin left a sequence


@check("PREFIX-13a", "prefix")
def begin_without_room_keeps_the_eviction_order(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 4)
    prompts = [blocks(served, which) for which in (1, 2, 3, 4)]
    served.serve_and_drop(*prompts)
    with raises("OutOfBlocks"):
        served.begin([*prompts[0], *blocks(served, 5, 6, 7, 8)])
    evict_one_by_one(served, prompts, [0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1])


@check("LAW-01", "prefix")
def calls_that_raise_evict_nothing(subject: Subject) -> None:
    """All free blocks are cached, so that a call that allocates blocks before it raises an error evicts some of them."""
    need_declared_order(subject)
    need_tokens(subject)
    subject.require_size(sequences=3)
    served = with_free_entries(subject, 5)
    cache, size = served.cache, served.size
    sequence = served.serve(blocks(served, 1, 2))
    prompts = [blocks(served, which) for which in (3, 4, 5)]
    served.serve_and_drop(*prompts)
    many, wrong = random_pair(subject, 4 * size), random_pair(subject, 2 * size, dim=cache.config["head_dim"] + 1)
    calls: list[tuple[str, str, tuple[Any, ...]]] = [
        ("OutOfBlocks", "ensure_capacity", (sequence, 6 * size)),
        ("SequenceNotFound", "append", ([sequence, sequence + 10**6], 0, *random_pair(subject, 2))),
        ("TokenOutOfRange", "begin", ([*blocks(served, 6, 7), 2**63 if not subject.by_value else -1],)),
        ("TokenMismatch", "commit", (sequence, [OTHER])),
    ]
    if subject.size("tokens", 4 * size) == 4 * size:  # the parts of a longer write are written before the last part raises
        calls += [
            ("OutOfBlocks", "write", (sequence, 0, 2 * size, *many)),
            ("ShapeMismatch", "write", (sequence, 0, 2 * size, *wrong)),
            ("PositionOutOfRange", "write", (sequence, 0, 2 * size + 1, *random_pair(subject, size))),
        ]
    with suppress(NotOffered):
        damaged = np.array(cache.save(sequence))
        damaged[-1] ^= 1
        calls.append(("FileDamaged", "load", (sequence, damaged)))
    assert_equal(served.count_cached(*prompts), [1, 1, 1], "cached blocks of three prompts before any call raised")
    for kind, name, args in calls:
        with suppress(NotOffered):
            with raises(kind):
                getattr(cache, name)(*args)
            assert_equal(served.count_cached(*prompts), [1, 1, 1], f"cached blocks of three prompts after {name} raised {kind}")
    served.compare(sequence, 2 * size)
    evict_one_by_one(served, prompts, [0, 1, 1], [0, 0, 1], [0, 0, 0])


@check("PREFIX-13b", "prefix")
def begin_needs_no_room_for_blocks_in_use(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = with_free_entries(subject, 3)
    tokens = blocks(served, 1, 2)
    first = served.serve(tokens)
    _, hit = served.begin([*tokens, OTHER])
    assert_equal(hit, 2 * served.size, "the hit of a prompt whose blocks a live sequence lists")
    assert_equal(served.cache.num_free_blocks // len(served.layers), 0, "free blocks per layer after begin")
    served.cache.drop(first)
    served.look()
    assert_equal(served.count_cached(tokens), [2], "cached blocks after drop of the first of two sharers")


@check("PREFIX-14ab", "prefix")
def write_to_a_cached_block_copies_it(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    for at in (0, 1, 2):
        served = PrefixFixture(subject)
        tokens, size, cache = blocks(served, 1, 2), served.size, served.cache
        sequence = served.serve(tokens)
        position = (0, size - 1, size)[at]
        free = cache.num_free_blocks
        for layer in served.layers:
            row = random_pair(subject, 1)
            cache.write(sequence, layer, position, *row)
            keys, values = served.compute(sequence, layer, range(2 * size))
            keys[position], values[position] = row[0][0], row[1][0]
            assert_pair(cache.gather(sequence, layer), (keys, values), f"layer {layer} after a write to position {position}")
        assert_equal(cache.num_free_blocks, free, "free blocks after one copy per layer, with the cached blocks evictable")
        served.finds([*tokens, OTHER], 2 * size)
        cache.drop(sequence)
        served.finds([*tokens, OTHER], 2 * size)


@check("PREFIX-14b", "prefix")
def write_to_a_hit_copies_its_blocks(subject: Subject) -> None:
    subject.require_size(sequences=3)
    served = PrefixFixture(subject)
    tokens = blocks(served, 1, 2)
    served.make_cached(tokens)
    sequence, hit = served.begin([*tokens, OTHER])
    for layer in served.layers:
        served.cache.write(sequence, layer, 0, *random_pair(subject, hit))
    served.finds([*tokens, OTHER], 2 * served.size)


@check("PREFIX-14b", "prefix")
def truncate_and_remove_keep_cached_blocks(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    provided = 0
    for name in ("write", "append", "append_step", "remove", "remove with frequencies"):  # the first three after truncate
        served = PrefixFixture(subject, head_dim=6 if name == "remove with frequencies" else 5)
        tokens, size, cache = blocks(served, 1, 2, 3), served.size, served.cache
        sequence = served.serve(tokens)
        with suppress(NotOffered):
            if name == "remove":
                cache.remove(sequence, 1, size + 1)
            elif name == "remove with frequencies":
                if cache.config["head_dim"] < 2 or cache.config["dtype"] not in PLAIN_FORMATS:
                    raise NotOffered("keys that the model rotates")
                cache.remove(sequence, 1, size + 1, [1.0])
            else:
                cache.truncate(sequence, size + 1)
                rows = [random_pair(subject, 2 if name == "write" else 1) for _ in served.layers]
                if name == "append_step":
                    cache.append_step([sequence], *(np.stack(part) for part in zip(*rows, strict=True)))
                for layer, row in zip(served.layers, rows, strict=True) if name != "append_step" else ():
                    cache.append([sequence], layer, *row) if name == "append" else cache.write(sequence, layer, size + 1, *row)
            served.finds([*tokens, OTHER], 3 * size)
            provided += 1
    if not provided:
        raise NotOffered("truncate or remove")
