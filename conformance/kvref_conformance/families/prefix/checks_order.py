"""PREFIX: for how long something is found, and what it costs."""

from contextlib import suppress

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import reserve
from kvref_conformance.families.prefix.served import Served, declared_order, exactly, prompt
from kvref_conformance.outcome import NotOffered

OTHER = 77  # a token that no prompt has


def blocks(served: Served, *which: int) -> list[int]:
    """A prompt of full blocks, each its own."""
    return [token for each in which for token in prompt(served.size, each)]


def found(served: Served, *prompts: list[int]) -> list[int]:
    """How many blocks of each are."""
    return [served.match([*tokens, OTHER]) // served.size for tokens in prompts]


@check("PREFIX-05", "prefix")
def matching_leaves_the_order_as_it_is(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 3)
    prompts = [blocks(served, which) for which in (1, 2, 3)]
    served.seen(*prompts)
    equal(found(served, *prompts, prompts[0]), [1, 1, 1, 1], "blocks found of three prompts, and of the first again")
    sequence = served.taking(1)
    equal(
        found(served, *prompts), [0, 1, 1], "blocks found after one was taken: the first was released first, and only looked for"
    )
    served.cache.drop(sequence)


@check("PREFIX-05", "prefix")
def matching_takes_nothing(subject: Subject) -> None:
    declared_order(subject)
    served = Served(subject)
    tokens = blocks(served, 1, 2, 3)
    served.seen(tokens)
    free = served.cache.num_free_blocks
    for _ in range(3):
        equal(found(served, tokens), [3], "blocks found again and again")
        equal(served.cache.num_free_blocks, free, "free blocks after looking for a prompt")
    sequence = served.taking(1)
    equal(served.match(tokens), 2 * served.size, "match beside a sequence")
    served.cache.drop(sequence)
    served.cache.reset()  # had matching made a sequence, this would be refused


@check("PREFIX-06", "prefix")
def what_nobody_holds_is_free_and_found(subject: Subject) -> None:
    served = Served(subject)
    tokens, total, cache = blocks(served, 1, 2), served.cache.config["num_blocks"], served.cache
    for time in ("once", "twice", "a third time"):
        sequence = served.serve([*tokens, OTHER])
        equal(cache.num_free_blocks, total - 3 * len(served.layers), f"free blocks while a prompt is served {time}")
        cache.drop(sequence)
        equal(cache.num_free_blocks, total, f"free blocks after a prompt was served {time}")
        equal(cache.utilization, 0.0, f"utilization after a prompt was served {time}")
        served.finds([*tokens, OTHER], 2 * served.size, f"a prompt served {time}")


@check("PREFIX-06", "prefix")
def every_free_block_can_be_taken(subject: Subject) -> None:
    served = exactly(subject, 4)
    served.seen(blocks(served, 1, 2), blocks(served, 3, 4))
    sequence = served.taking(4)  # raises OutOfBlocks where some are kept back
    equal(found(served, blocks(served, 1, 2), blocks(served, 3, 4)), [0, 0], "blocks found when all were taken")
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
            equal(found(served, tokens), [0], f"blocks found after all were taken by {way}")


@check("PREFIX-07", "prefix")
def what_was_taken_is_never_found_again(subject: Subject) -> None:
    served = exactly(subject, 3)
    prompts = [blocks(served, which, which + 10, which + 20) for which in range(1, 6)]
    for number, tokens in enumerate(prompts):
        served.seen(tokens)
        equal(
            found(served, *prompts[:number]),
            [0] * number,
            f"blocks found of the prompts before the one served as number {number}",
        )
        served.finds([*tokens, OTHER][: 3 * served.size], 2 * served.size, "the prompt served last")


@check("PREFIX-08", "prefix")
def what_is_not_found_is_taken_first(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 5)
    tokens = blocks(served, 1, 2)
    served.seen(tokens)
    first = served.taking(3)
    equal(found(served, tokens), [2], "blocks found after all others were taken")
    served.cache.drop(first)
    again = served.taking(3)
    equal(found(served, tokens), [2], "blocks found after all others were taken again, which were released later")
    served.cache.drop(again)


@check("PREFIX-08", "prefix")
def what_was_released_longest_ago_is_taken_first(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 6)
    prompts = [blocks(served, 1, 2), blocks(served, 3, 4), blocks(served, 5, 6)]
    served.seen(*prompts)
    served.seen([*prompts[0][: served.size], *prompts[0][served.size :]])  # the first is in use again, and released as the last
    sequence = served.cache.create()
    for entries, left in enumerate(([2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]), 1):
        reserve(subject, served.cache, sequence, entries)
        equal(found(served, *prompts), left, f"blocks found after {entries} were taken")


@check("PREFIX-08", "prefix")
def what_a_sequence_gives_back_goes_from_its_end(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 4)
    tokens = blocks(served, 1, 2, 3, 4)
    served.seen(tokens)
    sequence = served.cache.create()
    for entries in (1, 2, 3, 4):
        reserve(subject, served.cache, sequence, entries)
        equal(found(served, tokens), [4 - entries], f"blocks found of a prompt of four after {entries} were taken")


@check("PREFIX-08", "prefix")
def a_block_in_use_is_never_taken(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 4)
    tokens, cache = blocks(served, 1, 2), served.cache
    served.seen(tokens)
    sequence, hit = served.begin([*tokens[: served.size + 1]])
    equal(hit, served.size, "the hit of a prompt")
    other = served.taking(2)
    with raises("OutOfBlocks"):
        reserve(subject, cache, other, 3)
    served.look(sequence, hit, "a sequence after all other blocks were taken")
    equal(found(served, tokens)[0] >= 1, True, "whether a block in use is found")


@check("PREFIX-09", "prefix")
def without_what_came_before_nothing_is_found(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 5)
    tokens, cache = blocks(served, 1, 2, 3), served.cache
    sequence = served.serve(tokens)
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 1))  # goes to a copy: the block that is found is nobody's
    for layer in served.layers[1:]:
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, 1))
    with suppress(NotOffered):
        declared_order(subject)
        equal(found(served, tokens), [3], "blocks found after the first one's sequence has a copy")
    served.taking(2)
    equal(found(served, tokens), [0], "blocks found after the first one was taken, while a sequence holds the others")


@check("PREFIX-09", "prefix")
def losing_the_end_leaves_the_beginning(subject: Subject) -> None:
    declared_order(subject)
    served = exactly(subject, 4)
    tokens = blocks(served, 1, 2, 3)
    served.seen(tokens)
    sequence = served.taking(2)
    equal(found(served, tokens), [2], "blocks found of three after the last was taken")
    served.cache.drop(sequence)
    served.finds(tokens, 2 * served.size, "a prompt whose last block was taken")


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
        equal(found(served, tokens), [2], "blocks found of what two committed")
        served.cache.drop(twice[goes])
        served.taking(3)  # all that is free, where equal blocks did not become one
        served.look(twice[1 - goes], len(tokens), "the sequence that stayed")
        equal(found(served, tokens), [2], "blocks found of what two committed, after one was dropped and its blocks taken")


@check("PREFIX-11", "prefix")
def reset_is_refused_while_a_sequence_lives(subject: Subject) -> None:
    served = Served(subject)
    tokens, cache = blocks(served, 1, 2), served.cache
    sequence = served.serve(tokens)
    with raises("InUse"):
        cache.reset()
    served.look(sequence, len(tokens), "a sequence that lived when reset was refused")
    equal(found(served, tokens), [2], "blocks found after reset was refused")
    cache.drop(sequence)
    with suppress(NotOffered):
        sequence = cache.create()
        with raises("InUse"):
            cache.reset()
        cache.drop(sequence)
    cache.reset()


@check("PREFIX-11", "prefix")
def reset_forgets_everything(subject: Subject) -> None:
    served = Served(subject)
    tokens, other, cache = blocks(served, 1, 2), blocks(served, 3), served.cache
    served.seen(tokens)
    served.seen(other, salt="a")
    cache.reset()
    equal((found(served, tokens), served.match([*other, OTHER], "a")), ([0], 0), "what is found after reset")
    equal(cache.num_free_blocks, cache.config["num_blocks"], "free blocks after reset")
    changed = served.begin(tokens)[0]
    served.told[changed] = tokens, "other weights"
    served.write(changed, 0, len(tokens))
    cache.commit(changed, tokens)
    served.look(changed, len(tokens), "what was computed with other weights")
    cache.drop(changed)
    again, hit = served.begin([*tokens, OTHER])
    equal(hit, 2 * served.size, "the hit of what was committed after reset")
    served.told[again] = tokens, "other weights"
    served.look(again, hit, "what was committed after reset")
    cache.drop(again)
    cache.reset()
    equal(found(served, tokens), [0], "blocks found after another reset")


@check("PREFIX-13", "prefix")
def what_is_found_is_no_room_for_the_rest(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    served = exactly(subject, 4)
    tokens, cache = blocks(served, 1, 2), served.cache
    served.seen(tokens)
    other = served.taking(1)  # of the two that were never used; with the two that are found three are free
    free = cache.num_free_blocks
    with raises("OutOfBlocks"):
        served.begin([*tokens, *blocks(served, 3, 4)])
    equal(cache.num_free_blocks, free, "free blocks after a prompt that did not fit")
    equal(found(served, tokens), [2], "blocks found after a prompt that did not fit")
    sequence, hit = served.begin([*tokens, *blocks(served, 3)])
    equal(hit, 2 * served.size, "the hit of a prompt that fits to the block")
    served.write(sequence, hit, 3 * served.size)
    served.look(sequence, 3 * served.size, "a prompt that fits to the block")
    cache.drop(sequence)
    cache.drop(other)
    cache.reset()  # no sequence was left behind


@check("PREFIX-13", "prefix")
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
        equal(found(served, *prompts), left, f"blocks found after {entries} were taken: the first was released first")


@check("PREFIX-13", "prefix")
def blocks_that_others_hold_need_no_room(subject: Subject) -> None:
    subject.need(sequences=2)
    served = exactly(subject, 3)
    tokens = blocks(served, 1, 2)
    first = served.serve(tokens)
    second, hit = served.begin([*tokens, OTHER])
    equal(hit, 2 * served.size, "the hit of a prompt whose blocks another sequence holds")
    equal(served.cache.num_free_blocks // len(served.layers), 0, "entries that are free")
    served.cache.drop(first)
    served.look(second, hit, "a sequence whose blocks another one shared")
    equal(found(served, tokens), [2], "blocks found after the first of two that share them is dropped")


@check("PREFIX-14", "prefix")
def what_can_be_found_is_never_written_to(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    for at in (0, 1, 2):
        served = Served(subject)
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
            pair(cache.gather(sequence, layer), (want[0], want[1]), f"layer {layer} after position {position} was written over")
        equal(cache.num_free_blocks, free, "free blocks after one was copied in each layer, and is held by no one")
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after position {position} of it was written over")
        cache.drop(sequence)
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after position {position} of it was written over and dropped")


@check("PREFIX-14", "prefix")
def what_was_found_is_never_written_to(subject: Subject) -> None:
    subject.need(sequences=3)
    served = Served(subject)
    tokens, size, cache = blocks(served, 1, 2), served.size, served.cache
    served.there(tokens)
    sequence, hit = served.begin([*tokens, OTHER])
    equal(hit, 2 * size, "the hit of a prompt")
    for layer in served.layers:
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, hit))
    served.finds([*tokens, OTHER], 2 * size, "a prompt that a sequence was begun with, and written over")


@check("PREFIX-14", "prefix")
def what_can_be_found_is_never_removed_or_cut(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    for name in ("truncate", "remove"):
        served = Served(subject)
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
