"""Checks of PREFIX: how long blocks are found, and in which order they are evicted."""

from contextlib import suppress

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import reserve
from kvref_conformance.families.prefix.fixture import PrefixFixture, declared_order, exactly, prompt
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import pair_of_tokens
from kvref_conformance.testlib.registry import check

OTHER = 77  # a token that is in no prompt


def blocks(served: PrefixFixture, *which: int) -> list[int]:
    """Returns a prompt that consists of these full blocks."""
    return [token for each in which for token in prompt(served.size, each)]


def found(served: PrefixFixture, *prompts: list[int]) -> list[int]:
    """Returns the number of blocks that match finds of each prompt."""
    return [served.match([*tokens, OTHER]) // served.size for tokens in prompts]


@check("PREFIX-05b", "prefix")
def matching_leaves_the_order_as_it_is(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 3)
    prompts = [blocks(served, which) for which in (1, 2, 3)]
    served.seen(*prompts)
    assert_equal(
        found(served, *prompts, prompts[0]), [1, 1, 1, 1], "numbers of cached blocks of three prompts, and of the first one again"
    )
    sequence = served.taking(1)
    assert_equal(
        found(served, *prompts),
        [0, 1, 1],
        "numbers of cached blocks after an allocation, which evicts the block that was released first",
    )
    served.cache.drop(sequence)


@check("PREFIX-05ab", "prefix")
def matching_takes_nothing(subject: Subject) -> None:
    declared_order(subject)
    served = PrefixFixture(subject)
    tokens = blocks(served, 1, 2, 3)
    served.seen(tokens)
    free = served.cache.num_free_blocks
    for _ in range(3):
        assert_equal(found(served, tokens), [3], "number of cached blocks that repeated calls of match return")
        assert_equal(served.cache.num_free_blocks, free, "free blocks after match")
    sequence = served.taking(1)
    assert_equal(served.match(tokens), 2 * served.size, "match after an allocation")
    served.cache.drop(sequence)
    served.cache.reset()  # raises InUse if match had created a sequence


@check("PREFIX-06ab", "prefix")
def what_nobody_holds_is_free_and_found(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, total, cache = blocks(served, 1, 2), served.cache.config["num_blocks"], served.cache
    for time in ("once", "twice", "three times"):
        sequence = served.serve([*tokens, OTHER])
        assert_equal(cache.num_free_blocks, total - 3 * len(served.layers), f"free blocks while a prompt is served {time}")
        cache.drop(sequence)
        assert_equal(cache.num_free_blocks, total, f"free blocks after a prompt was served {time}")
        assert_equal(cache.utilization, 0.0, f"utilization after a prompt was served {time}")
        served.finds([*tokens, OTHER], 2 * served.size, f"a prompt served {time}")


@check("PREFIX-06c", "prefix")
def every_free_block_can_be_taken(subject: Subject) -> None:
    served = exactly(subject, 4)
    served.seen(blocks(served, 1, 2), blocks(served, 3, 4))
    sequence = served.taking(4)  # raises OutOfBlocks if some blocks are not evicted
    assert_equal(
        found(served, blocks(served, 1, 2), blocks(served, 3, 4)),
        [0, 0],
        "numbers of cached blocks of two prompts after all blocks were allocated",
    )
    served.cache.drop(sequence)


@check("PREFIX-07", "prefix")
def what_is_taken_is_not_found(subject: Subject) -> None:
    subject.need(sequences=2)
    for way in ("ensure_capacity", "write", "append", "begin"):
        served = exactly(subject, 2)
        tokens, cache, size = blocks(served, 1, 2), served.cache, served.size
        served.seen(tokens)
        with suppress(NotOffered):
            if way == "begin":
                served.begin(blocks(served, 3, 4))
            else:
                sequence = cache.create()
                if way == "ensure_capacity":
                    cache.ensure_capacity(sequence, 2 * size)
                elif way == "write":
                    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 2 * size))
                else:
                    for _ in range(2 * size):
                        cache.append([sequence], 0, *pair_of_tokens(subject, 1))
            assert_equal(found(served, tokens), [0], f"number of cached blocks after {way} allocated every block")


@check("PREFIX-07", "prefix")
def what_was_taken_is_never_found_again(subject: Subject) -> None:
    served = exactly(subject, 3)
    prompts = [blocks(served, which, which + 10, which + 20) for which in range(1, 6)]
    for number, tokens in enumerate(prompts):
        served.seen(tokens)
        assert_equal(
            found(served, *prompts[:number]),
            [0] * number,
            f"numbers of cached blocks of the prompts before prompt {number}, which needs the whole pool",
        )
        served.finds([*tokens, OTHER][: 3 * served.size], 2 * served.size, "the last prompt")


@check("PREFIX-08a", "prefix")
def what_is_not_found_is_taken_first(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 5)
    tokens = blocks(served, 1, 2)
    served.seen(tokens)
    first = served.taking(3)
    assert_equal(found(served, tokens), [2], "number of cached blocks after all others were allocated")
    served.cache.drop(first)
    again = served.taking(3)
    assert_equal(found(served, tokens), [2], "number of cached blocks after all others were released and allocated again")
    served.cache.drop(again)


@check("PREFIX-08bc", "prefix")
def what_was_released_longest_ago_is_taken_first(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 6)
    prompts = [blocks(served, 1, 2), blocks(served, 3, 4), blocks(served, 5, 6)]
    served.seen(*prompts)
    served.seen([*prompts[0][: served.size], *prompts[0][served.size :]])  # the first prompt is released again, as the last
    sequence = served.cache.create()
    for entries, left in enumerate(([2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]), 1):
        reserve(subject, served.cache, sequence, entries)
        assert_equal(found(served, *prompts), left, f"numbers of cached blocks after {entries} blocks per layer were allocated")


@check("PREFIX-08c", "prefix")
def what_a_sequence_gives_back_goes_from_its_end(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 4)
    tokens = blocks(served, 1, 2, 3, 4)
    served.seen(tokens)
    sequence = served.cache.create()
    for entries in (1, 2, 3, 4):
        reserve(subject, served.cache, sequence, entries)
        assert_equal(
            found(served, tokens),
            [4 - entries],
            f"number of cached blocks of a prompt of four after {entries} blocks per layer were allocated",
        )


@check("PREFIX-08d", "prefix")
def a_block_in_use_is_never_taken(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 4)
    tokens, cache = blocks(served, 1, 2), served.cache
    served.seen(tokens)
    sequence, hit = served.begin([*tokens[: served.size + 1]])
    assert_equal(hit, served.size, "the hit of the prompt")
    other = served.taking(2)
    with raises("OutOfBlocks"):
        reserve(subject, cache, other, 3)
    served.look(sequence, hit, "a sequence after all other blocks were allocated")
    assert_equal(found(served, tokens)[0] >= 1, True, "whether an allocated cached block is found")


@check("PREFIX-09a", "prefix")
def without_what_came_before_nothing_is_found(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 5)
    tokens, cache = blocks(served, 1, 2, 3), served.cache
    sequence = served.serve(tokens)
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 1))  # goes to a copy: no table lists the cached block any more
    for layer in served.layers[1:]:
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, 1))
    with suppress(NotOffered):
        declared_order(subject)
        assert_equal(found(served, tokens), [3], "number of cached blocks after a write to a copy of the first block")
    served.taking(2)
    assert_equal(
        found(served, tokens), [0], "number of cached blocks after the first was evicted, while a sequence lists the others"
    )


@check("PREFIX-09b", "prefix")
def losing_the_end_leaves_the_beginning(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 4)
    tokens = blocks(served, 1, 2, 3)
    served.seen(tokens)
    sequence = served.taking(2)
    assert_equal(found(served, tokens), [2], "number of cached blocks of a prompt of three after the last was evicted")
    served.cache.drop(sequence)
    served.finds(tokens, 2 * served.size, "a prompt whose last block was evicted")


@check("PREFIX-10", "prefix")
def losing_a_copy_loses_nothing(subject: Subject) -> None:
    subject.need(sequences=3)
    for goes in (0, 1):
        served = exactly(subject, 6)
        tokens = blocks(served, 1, 2)
        twice = [served.begin([*tokens, OTHER])[0] for _ in range(2)]
        for sequence in twice:
            served.write(sequence, 0, len(tokens))
            served.cache.commit(sequence, tokens)
        assert_equal(found(served, tokens), [2], "number of cached blocks of a prompt that two sequences committed")
        served.cache.drop(twice[goes])
        served.taking(3)  # all free blocks, if equal blocks were not merged
        served.look(twice[1 - goes], len(tokens), "the remaining sequence")
        assert_equal(found(served, tokens), [2], "number of cached blocks of a prompt with two copies, after one was evicted")


# Checks of PREFIX: reset, room for new prompts, and writes to cached blocks.


@check("PREFIX-11a", "prefix")
def reset_is_refused_while_a_sequence_lives(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, cache = blocks(served, 1, 2), served.cache
    sequence = served.serve(tokens)
    with raises("InUse"):
        cache.reset()
    served.look(sequence, len(tokens), "a live sequence after a rejected reset")
    assert_equal(found(served, tokens), [2], "number of cached blocks after a rejected reset")
    cache.drop(sequence)
    with suppress(NotOffered):
        sequence = cache.create()
        with raises("InUse"):
            cache.reset()
        cache.drop(sequence)
    cache.reset()


@check("PREFIX-11b", "prefix")
def reset_forgets_everything(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, other, cache = blocks(served, 1, 2), blocks(served, 3), served.cache
    served.seen(tokens)
    served.seen(other, salt="a")
    cache.reset()
    assert_equal(
        (found(served, tokens), served.match([*other, OTHER], "a")),
        ([0], 0),
        "number of cached blocks, and match of a salted prompt, after reset",
    )
    assert_equal(cache.num_free_blocks, cache.config["num_blocks"], "free blocks after reset")
    changed = served.begin(tokens)[0]
    served.told[changed] = tokens, "other weights"
    served.write(changed, 0, len(tokens))
    cache.commit(changed, tokens)
    served.look(changed, len(tokens), "tokens computed with other weights")
    cache.drop(changed)
    again, hit = served.begin([*tokens, OTHER])
    assert_equal(hit, 2 * served.size, "the hit of a prompt committed after reset")
    served.told[again] = tokens, "other weights"
    served.look(again, hit, "the hit of a prompt that was committed after reset")
    cache.drop(again)
    cache.reset()
    assert_equal(found(served, tokens), [0], "number of cached blocks after a second reset")


@check("PREFIX-13ab", "prefix")
def what_is_found_is_no_room_for_the_rest(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    served = exactly(subject, 4)
    tokens, cache = blocks(served, 1, 2), served.cache
    served.seen(tokens)
    other = served.taking(1)  # leaves three free blocks, two of which are cached
    free = cache.num_free_blocks
    with raises("OutOfBlocks"):
        served.begin([*tokens, *blocks(served, 3, 4)])
    assert_equal(cache.num_free_blocks, free, "free blocks after begin raised OutOfBlocks")
    assert_equal(found(served, tokens), [2], "number of cached blocks after begin raised OutOfBlocks")
    sequence, hit = served.begin([*tokens, *blocks(served, 3)])
    assert_equal(hit, 2 * served.size, "the hit of a prompt that needs every free block")
    served.write(sequence, hit, 3 * served.size)
    served.look(sequence, 3 * served.size, "a prompt that needs every free block")
    cache.drop(sequence)
    cache.drop(other)
    cache.reset()  # raises InUse if a failed begin left a sequence


@check("PREFIX-13a", "prefix")
def a_prompt_that_does_not_fit_changes_no_order(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    served = exactly(subject, 4)
    prompts = [blocks(served, which) for which in (1, 2, 3, 4)]
    served.seen(*prompts)
    with raises("OutOfBlocks"):
        served.begin([*prompts[0], *blocks(served, 5, 6, 7, 8)])
    sequence = served.cache.create()
    for entries, left in enumerate(([0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]), 1):
        reserve(subject, served.cache, sequence, entries)
        assert_equal(
            found(served, *prompts),
            left,
            f"numbers of cached blocks of four prompts after {entries} blocks per layer were allocated",
        )


@check("PREFIX-13b", "prefix")
def blocks_that_others_hold_need_no_room(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 3)
    tokens = blocks(served, 1, 2)
    first = served.serve(tokens)
    second, hit = served.begin([*tokens, OTHER])
    assert_equal(hit, 2 * served.size, "the hit of a prompt whose blocks a live sequence lists")
    assert_equal(served.cache.num_free_blocks // len(served.layers), 0, "free blocks per layer after begin")
    served.cache.drop(first)
    served.look(second, hit, "a sequence whose blocks were shared")
    assert_equal(found(served, tokens), [2], "number of cached blocks after drop of the first of two sharers")


@check("PREFIX-14ab", "prefix")
def what_can_be_found_is_never_written_to(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    for at in (0, 1, 2):
        served = PrefixFixture(subject)
        tokens, size, cache = blocks(served, 1, 2), served.size, served.cache
        sequence = served.serve(tokens)
        position = (0, size - 1, size)[at]
        free = cache.num_free_blocks
        for layer in served.layers:
            wrote = pair_of_tokens(subject, 1)
            cache.write(sequence, layer, position, *wrote)
            want = [part.copy() for part in served.computed(sequence, layer, range(2 * size))]
            for part, row in zip(want, wrote, strict=True):
                part[position] = row[0]
            assert_pair(
                cache.gather(sequence, layer), (want[0], want[1]), f"layer {layer} after an overwrite of position {position}"
            )
        assert_equal(cache.num_free_blocks, free, "free blocks after one copy per layer, with the cached blocks evictable")
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after an overwrite of its position {position}")
        cache.drop(sequence)
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after an overwrite of its position {position} and drop")


@check("PREFIX-14b", "prefix")
def what_was_found_is_never_written_to(subject: Subject) -> None:
    subject.need(sequences=3)
    served = PrefixFixture(subject)
    tokens, size, cache = blocks(served, 1, 2), served.size, served.cache
    served.there(tokens)
    sequence, hit = served.begin([*tokens, OTHER])
    assert_equal(hit, 2 * size, "the hit of the prompt")
    for layer in served.layers:
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, hit))
    served.finds([*tokens, OTHER], 2 * size, "a prompt after an overwrite of a sequence that began with it")


@check("PREFIX-14b", "prefix")
def what_can_be_found_is_never_removed_or_cut(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    made = 0
    for name in ("truncate", "remove"):
        served = PrefixFixture(subject)
        tokens, size, cache = blocks(served, 1, 2, 3), served.size, served.cache
        sequence = served.serve(tokens)
        with suppress(NotOffered):
            if name == "truncate":
                cache.truncate(sequence, size + 1)
                for layer in served.layers:
                    cache.write(sequence, layer, size + 1, *pair_of_tokens(subject, 2))
            else:
                cache.remove(sequence, 1, size + 1)
            served.finds([*tokens, OTHER], 3 * size, f"a prompt after {name}")
            made += 1
    if not made:
        raise NotOffered("truncate or remove")
