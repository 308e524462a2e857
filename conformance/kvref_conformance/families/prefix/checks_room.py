"""Checks of PREFIX: reset, room for new prompts, and writes to cached blocks."""

from contextlib import suppress

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import reserve
from kvref_conformance.families.prefix.served import Served, declared_order, exactly, prompt
from kvref_conformance.outcome import NotOffered

OTHER = 77  # a token that is in no prompt


def blocks(served: Served, *which: int) -> list[int]:
    """Returns a prompt that consists of these full blocks."""
    return [token for each in which for token in prompt(served.size, each)]


def found(served: Served, *prompts: list[int]) -> list[int]:
    """Returns the number of blocks that match finds of each prompt."""
    return [served.match([*tokens, OTHER]) // served.size for tokens in prompts]


@check("PREFIX-11a", "prefix")
def reset_is_refused_while_a_sequence_lives(subject: Subject) -> None:
    served = Served(subject)
    tokens, cache = blocks(served, 1, 2), served.cache
    sequence = served.serve(tokens)
    with raises("InUse"):
        cache.reset()
    served.look(sequence, len(tokens), "a live sequence after a rejected reset")
    equal(found(served, tokens), [2], "number of cached blocks after a rejected reset")
    cache.drop(sequence)
    with suppress(NotOffered):
        sequence = cache.create()
        with raises("InUse"):
            cache.reset()
        cache.drop(sequence)
    cache.reset()


@check("PREFIX-11b", "prefix")
def reset_forgets_everything(subject: Subject) -> None:
    served = Served(subject)
    tokens, other, cache = blocks(served, 1, 2), blocks(served, 3), served.cache
    served.seen(tokens)
    served.seen(other, salt="a")
    cache.reset()
    equal(
        (found(served, tokens), served.match([*other, OTHER], "a")),
        ([0], 0),
        "number of cached blocks, and match of a salted prompt, after reset",
    )
    equal(cache.num_free_blocks, cache.config["num_blocks"], "free blocks after reset")
    changed = served.begin(tokens)[0]
    served.told[changed] = tokens, "other weights"
    served.write(changed, 0, len(tokens))
    cache.commit(changed, tokens)
    served.look(changed, len(tokens), "tokens computed with other weights")
    cache.drop(changed)
    again, hit = served.begin([*tokens, OTHER])
    equal(hit, 2 * served.size, "the hit of a prompt committed after reset")
    served.told[again] = tokens, "other weights"
    served.look(again, hit, "the hit of a prompt that was committed after reset")
    cache.drop(again)
    cache.reset()
    equal(found(served, tokens), [0], "number of cached blocks after a second reset")


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
    equal(cache.num_free_blocks, free, "free blocks after begin raised OutOfBlocks")
    equal(found(served, tokens), [2], "number of cached blocks after begin raised OutOfBlocks")
    sequence, hit = served.begin([*tokens, *blocks(served, 3)])
    equal(hit, 2 * served.size, "the hit of a prompt that needs every free block")
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
        equal(
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
    equal(hit, 2 * served.size, "the hit of a prompt whose blocks a live sequence lists")
    equal(served.cache.num_free_blocks // len(served.layers), 0, "free blocks per layer after begin")
    served.cache.drop(first)
    served.look(second, hit, "a sequence whose blocks were shared")
    equal(found(served, tokens), [2], "number of cached blocks after drop of the first of two sharers")


@check("PREFIX-14ab", "prefix")
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
            pair(cache.gather(sequence, layer), (want[0], want[1]), f"layer {layer} after an overwrite of position {position}")
        equal(cache.num_free_blocks, free, "free blocks after one copy per layer, with the cached blocks evictable")
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after an overwrite of its position {position}")
        cache.drop(sequence)
        served.finds([*tokens, OTHER], 2 * size, f"a prompt after an overwrite of its position {position} and drop")


@check("PREFIX-14b", "prefix")
def what_was_found_is_never_written_to(subject: Subject) -> None:
    subject.need(sequences=3)
    served = Served(subject)
    tokens, size, cache = blocks(served, 1, 2), served.size, served.cache
    served.there(tokens)
    sequence, hit = served.begin([*tokens, OTHER])
    equal(hit, 2 * size, "the hit of the prompt")
    for layer in served.layers:
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, hit))
    served.finds([*tokens, OTHER], 2 * size, "a prompt after an overwrite of a sequence that began with it")


@check("PREFIX-14b", "prefix")
def what_can_be_found_is_never_removed_or_cut(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    made = 0
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
            made += 1
    if not made:
        raise NotOffered("truncate or remove")
