"""Checks of GROUP-05 and 06: the hit of all groups together, and the blocks of cached prefixes."""

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.grouped.checks import one, reach
from kvref_conformance.families.grouped.fixture import GroupedFixture, GroupedSequence, groups_of
from kvref_conformance.families.prefix.fixture import declared_order, prompt
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, raises, true
from kvref_conformance.testlib.fixtures import blocks_of
from kvref_conformance.testlib.registry import check

OTHER = 77  # a token that is in no prompt


def finds(grown: GroupedFixture, tokens: list[int], count: int, what: str, salt: str = "") -> None:
    """Raises Broken unless the hit is `count` tokens, and these read and attend as if they had just been appended."""
    assert_equal(grown.match(tokens, salt), count, f"match of {what}")
    sequence = grown.begin(tokens, salt)
    assert_equal(grown.sequences[sequence].length, count, f"length of a sequence begun with {what}")
    grown.holds(sequence, f"after begin with {what}")
    grown.look(sequence, f"the hit of {what}")
    if count and grown.cache.num_free_blocks >= grown.groups:
        grown.step(sequence, 1)
        grown.attends(sequence, 1, f"one token after the hit of {what}")
    grown.drop(sequence)


def servable(grown: GroupedFixture, kept: list[set[int]], tokens: int) -> int:
    """Returns the hit of `tokens` tokens if `kept` contains the cached entries of each group. It tries every number of blocks."""
    for blocks in range((tokens - 1) // grown.size, 0, -1):
        if all(
            entry in found or (entry + 1) * grown.size <= first
            for group, found in enumerate(kept)
            for first in [0 if group == grown.groups - 1 else blocks * grown.size - grown.window + 1]
            for entry in range(blocks)
        ):
            return blocks * grown.size
    return 0


@check("GROUP-05ab", "grouped")
def a_hit_ends_where_blocks_do_and_a_token_is_left(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    length = reach(subject)
    grown = GroupedFixture(subject, length, sequences=3)
    tokens, size = prompt(length), grown.size
    grown.serve(tokens)
    for count in sorted({0, 1, size, size + 1, 2 * size, grown.window, grown.window + size, length - 1, length}):
        hit = max(0, count - 1) // size * size
        finds(grown, tokens[:count], hit, f"{count} tokens of a prompt that was committed at every step")
    finds(grown, [*tokens, OTHER], length // size * size, "a prompt that continues after the committed tokens")


@check("GROUP-05ab", "grouped")
def a_window_needs_no_block_that_it_does_not_see(subject: Subject) -> None:
    """The blocks before the window have been reused, and the hit still has its full length."""
    declared_order(subject)
    length, tokens = reach(subject, 6), prompt(reach(subject, 6))
    size, groups, window = subject.size("block_size", 3), groups_of(subject), subject.size("window", 7)
    full, seen = -(-length // size), -(-window // size) + 2
    grown = GroupedFixture(subject, num_blocks=full + (groups - 1) * seen)  # the fewest that the prompt needs
    if groups == 1 or grown.total < full + (groups - 1) * seen:
        raise NotOffered("a pool that is smaller than all blocks of all groups of a prompt, where its limits allow no such size")
    grown.drop(grown.serve(tokens))
    finds(grown, tokens, (length - 1) // size * size, "a prompt whose windows freed blocks, in a pool of the minimal size")
    beginning = tokens[: 2 * size + 1]
    hit = grown.match(beginning)
    sequence = grown.begin(beginning)
    assert_equal(grown.sequences[sequence].length, hit, "length of a sequence begun with the first two blocks of the prompt")
    grown.look(sequence, "the hit of the first two blocks of the prompt")


@check("GROUP-05ab", "grouped")
def no_group_is_asked_for_what_it_has_not(subject: Subject) -> None:
    """The prompt is committed only at its end, after the windows have freed their first blocks."""
    subject.need(sequences=2)
    for by, wanted in ((1, 7), (2, 8), (1, 9)):  # a window can begin anywhere in a block
        window = subject.size("window", wanted)
        length = reach(subject, 5, window)
        grown = GroupedFixture(subject, length, sequences=3, window=window)
        tokens, size = prompt(length), grown.size
        sequence = grown.begin(tokens)
        grown.up_to(sequence, length, by=by)
        kept = [set(range(gone, length // size)) for gone in grown.sequences[sequence].gone]
        grown.commit(sequence)
        for blocks in range(length // size + 1):
            asked = [*tokens[: blocks * size], OTHER]
            finds(
                grown,
                asked,
                servable(grown, kept, len(asked)),
                f"the first {blocks} blocks of a prompt that was committed after its last token",
            )


@check("GROUP-05ab", "grouped")
def other_tokens_and_other_salts_are_not_found(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=2)
    grown = GroupedFixture(subject, reach(subject), sequences=4)
    tokens, size = prompt(2 * grown.size), grown.size
    grown.serve(tokens, by=size)
    for at in range(len(tokens)):
        other = [*tokens[:at], OTHER, *tokens[at + 1 :], OTHER]
        hit = at // size * size
        finds(grown, other, hit, f"a prompt with another token at position {at}")
    finds(grown, [*tokens, OTHER], 0, "a prompt with another salt", "a")


@check("GROUP-05b", "grouped")
def a_prompt_answers_the_same_each_time(subject: Subject) -> None:
    """The prompt is computed once, and then found three times. Other prompts allocate blocks in between."""
    length = reach(subject, 4)
    grown = GroupedFixture(subject, length + length // 2)
    size, tokens = grown.size, prompt(length)
    for time in range(4):
        sequence = grown.begin([*tokens, OTHER + time])
        hit = grown.sequences[sequence].length
        true(
            hit % size == 0 and hit <= length,
            f"the hit of call {time + 1} of begin with one prompt",
            f"a multiple of {size}, at most {length}",
            hit,
        )
        grown.look(sequence, f"the hit of call {time + 1} of begin with one prompt")
        grown.up_to(sequence, length + 1, by=3, commit=True)
        grown.look(sequence, f"the whole prompt after call {time + 1} of begin with it")
        grown.attends(sequence, 1, f"the whole prompt after call {time + 1} of begin with it")
        grown.drop(sequence)
        grown.drop(grown.serve(prompt(2 * size, 10 + time), by=2))
        assert_equal(grown.cache.num_free_blocks, grown.total, f"free blocks after drop of all sequences in round {time + 1}")


@check("GROUP-06a", "grouped")
def what_was_matched_is_not_taken(subject: Subject) -> None:
    """Neither the steps of another sequence nor its own reuse the blocks of a hit."""
    subject.need(sequences=2)
    length = reach(subject)
    for own in (True, False):
        grown = GroupedFixture(subject, length + 2 * subject.size("block_size", 3))
        grown.to_be_filled()
        size, tokens = grown.size, prompt(length)
        grown.drop(grown.serve(tokens, by=2))
        sequence = grown.begin([*tokens[: length - 1], *prompt(grown.total * size, 3)])
        hit, free = grown.sequences[sequence].length, grown.cache.num_free_blocks
        assert_equal(free, grown.total - grown.held(), f"free blocks after begin with a hit of {hit} tokens")
        grown.look(sequence, f"a hit of {hit} tokens")
        taker = sequence if own else grown.create(prompt(grown.total * size, 4))
        while grown.needed(taker, 1) <= grown.total - grown.held():
            grown.step(taker, 1)
        with raises("OutOfBlocks"):
            grown.step(taker, 1)
        grown.counted("after steps allocated all free blocks")
        grown.look(sequence, f"a hit of {hit} tokens, after steps allocated all free blocks")
        if not own:
            grown.look(taker, "the sequence that allocated all free blocks")


@check("GROUP-06b", "grouped")
def what_no_one_holds_is_free_and_found(subject: Subject) -> None:
    declared_order(subject)
    subject.need(sequences=3)
    length = reach(subject)
    grown = GroupedFixture(subject, length, sequences=3)
    size, tokens = grown.size, prompt(length)
    hit = (length - 1) // size * size
    first = grown.serve(tokens)
    free, held = grown.cache.num_free_blocks, grown.held()
    second = grown.begin(tokens)
    shared = [block for layer in range(grown.groups) for block in blocks_of(grown.cache, second, layer) if block != -1]
    listed = {block for layer in range(grown.groups) for block in blocks_of(grown.cache, first, layer)}
    back = sum(block not in listed for block in shared)  # freed by the first sequence, and seen by the second
    assert_equal(
        grown.cache.num_free_blocks, free - back, f"free blocks after begin with a hit, {back} blocks of which were free"
    )
    grown.drop(first)
    grown.look(second, "a hit in blocks that another sequence committed before drop")
    grown.drop(second)
    assert_equal(
        grown.cache.num_free_blocks,
        grown.total,
        f"free blocks after drop of both sequences, of which the first held {held} blocks",
    )
    finds(grown, tokens, hit, "a cached prompt that no live sequence contains")
    grown.cache.reset()
    finds(grown, tokens, 0, "a prompt after reset")


@check("GROUP-06c", "grouped")
def what_was_given_back_longest_ago_is_taken_first(subject: Subject) -> None:
    declared_order(subject)
    size, groups = subject.size("block_size", 3), groups_of(subject)
    if subject.size("window", 7) < size:
        raise NotOffered("a window of at least one block")
    grown = GroupedFixture(subject, num_blocks=5 * groups)
    if grown.total != 5 * groups:
        raise NotOffered(f"a pool of {5 * groups} blocks")
    prompts = [prompt(size, which) for which in (1, 2, 3)]
    for tokens in prompts:
        grown.drop(grown.serve(tokens, by=size))
    assert_equal(grown.match([*prompts[0], OTHER]), size, "match of the oldest of three prompts")  # match does not delay eviction
    taker = grown.create(prompt(5 * size, 9))
    for entries, left in enumerate(([1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]), 1):
        if entries > 1 and grown.unseen((entries - 1) * size)[0]:
            break  # from here on it reuses blocks that it freed itself, before those of the prompts
        grown.up_to(taker, entries * size, by=size)
        found = [grown.match([*tokens, OTHER]) // size for tokens in prompts]
        assert_equal(
            found, left, f"numbers of cached blocks of three prompts after {entries} blocks were allocated in each group"
        )


@check("GROUP-06c", "grouped")
def losing_a_block_of_one_group_is_enough(subject: Subject) -> None:
    """Blocks of later positions are evicted first, and at the same position those of earlier groups.

    If the block of one group is evicted, the last group's block at that position cannot be used.
    """
    declared_order(subject)
    size, groups = subject.size("block_size", 3), groups_of(subject)
    if groups == 1 or subject.size("window", 7) <= size:
        raise NotOffered("two groups, and a window of more than one block")
    grown = GroupedFixture(subject, num_blocks=3 * groups + 1)
    if grown.total != 3 * groups + 1:
        raise NotOffered(f"a pool of {3 * groups + 1} blocks")
    tokens = prompt(2 * size)
    grown.drop(grown.serve(tokens, by=size))
    taker = grown.create(prompt(2 * size, 9))
    grown.up_to(taker, size, by=size)  # groups + 1 blocks were never allocated: one of them is left
    assert_equal(grown.match([*tokens, OTHER]), 2 * size, "match before any block of the prompt is evicted")
    grown.step(taker, 1)  # evicts groups - 1 blocks of the second entry
    assert_equal(grown.match([*tokens, OTHER]), size, "match after a block was evicted in every group but the last")
    finds(grown, [*tokens, OTHER], size, "a prompt of which only the first block is cached in every group")


# Checks of PAGED, PREFIX, SHARE and EDIT for the grouped cache: these clauses hold in every group.


@check("PAGED-01ab", "grouped")
def ids_never_come_back(subject: Subject) -> None:
    grown, given = GroupedFixture(subject, 20), list[int]()
    for tokens in ([], prompt(2), prompt(4), []):
        for sequence in (
            (grown.begin(tokens), grown.create(tokens)) if subject.size("sequences", 2) > 1 else (grown.begin(tokens),)
        ):
            true(sequence not in given, "the id of a new sequence", f"an id not in {given}", sequence)
            given.append(sequence)
        for sequence in list(grown.sequences):
            grown.drop(sequence)
            with raises("SequenceNotFound"):
                grown.cache.length(sequence)


@check("PAGED-07ab", "grouped")
def dropping_gives_back_the_blocks_of_every_group(subject: Subject) -> None:
    for length in (1, subject.size("block_size", 3), reach(subject)):
        grown, sequence = one(subject, length)
        for _ in range(3):
            grown.up_to(sequence, length, by=2)
            grown.drop(sequence)
            grown.counted(f"after drop of a sequence of {length} tokens")
            sequence = grown.create(prompt(length))


@check("PREFIX-02abc", "grouped")
def commits_say_what_was_stepped_through(subject: Subject) -> None:
    declared_order(subject)
    grown = GroupedFixture(subject, 4 * reach(subject))
    size, tokens = grown.size, prompt(3 * grown.size)
    sequence = grown.begin(tokens)
    grown.up_to(sequence, 2 * size, by=size)
    with raises("PositionOutOfRange"):
        grown.cache.commit(sequence, tokens[: 2 * size + 1])
    assert_equal(grown.match(tokens), 0, "match after commit raised PositionOutOfRange")
    grown.commit(sequence)
    with raises("TokenMismatch"):
        grown.cache.commit(sequence, [OTHER, *tokens[1 : 2 * size]])
    grown.drop(sequence)
    finds(grown, tokens, 2 * size, "a prompt of which two blocks were committed")
    later = grown.begin(tokens)
    with raises("TokenMismatch"):
        grown.cache.commit(later, [OTHER])


@check("PREFIX-11ab", "grouped")
def reset_forgets_what_every_group_held(subject: Subject) -> None:
    grown = GroupedFixture(subject, 4 * reach(subject))
    tokens = prompt(2 * grown.size + 1)
    sequence = grown.serve(tokens)
    with raises("InUse"):
        grown.cache.reset()
    grown.look(sequence, "a sequence after reset raised InUse")
    grown.drop(sequence)
    grown.cache.reset()
    finds(grown, tokens, 0, "a prompt after reset")
    assert_equal(grown.cache.num_free_blocks, grown.total, "free blocks after reset")


@check("PREFIX-14ab", "grouped")
def what_can_be_found_is_never_stepped_into(subject: Subject) -> None:
    declared_order(subject)
    size = long_window(subject, 2)
    for length in range(1, 2 * size, max(1, size // 4)):
        grown = GroupedFixture(subject, 6 * size, window=3 * size + 1)
        tokens = prompt(2 * size)
        sequence = grown.serve(tokens, by=2)
        grown.truncate(sequence, length)
        grown.sequences[sequence].tokens = [*tokens[:length], *prompt(size, 5)]
        grown.step(sequence, 1)
        grown.look(sequence, f"a sequence after truncate to {length} tokens and a step of one token")
        grown.drop(sequence)
        finds(
            grown,
            [*tokens, OTHER],
            2 * size,
            f"a committed prompt after its sequence was truncated to {length} tokens and one token appended",
        )


@check("PREFIX-03c", "grouped")
def a_fork_has_the_salt_of_what_it_comes_from(subject: Subject) -> None:
    subject.need(sequences=2)
    size = subject.size("block_size", 3)
    for begun in (size - 1, size):  # before the first block is full, the fork inherits only the salt
        grown = GroupedFixture(subject, 3 * size, sequences=4)
        tokens = prompt(2 * size)
        parent = grown.begin(tokens, "a")
        grown.up_to(parent, begun, by=2, commit=True)
        child: int = grown.cache.fork(parent)
        like = grown.sequences[parent]
        grown.sequences[child] = GroupedSequence(tokens, "a", like.length, list(like.gone))
        grown.up_to(child, 2 * size, by=2, commit=True)
        finds(grown, [*tokens, OTHER], 2 * size, "a prompt that a fork committed, with its parent's salt", "a")
        finds(grown, [*tokens, OTHER], 0, "a prompt that a fork committed, without a salt")


@check("PREFIX-15b", "grouped")
def what_is_no_token_is_refused(subject: Subject) -> None:
    grown = GroupedFixture(subject, 20)
    tokens = prompt(grown.size)
    grown.serve(tokens)
    sequence = grown.begin(prompt(grown.size, 2))
    grown.up_to(sequence, 1)  # not committed, so that a commit contradicts no earlier one
    free = grown.cache.num_free_blocks
    for wrong in [*subject.integers(-1), *([] if subject.by_value else [2**63])]:
        for name, arguments in (("match", ([*tokens, wrong],)), ("begin", ([wrong, *tokens],)), ("commit", (sequence, [wrong]))):
            with raises("TokenOutOfRange"):
                getattr(grown.cache, name)(*arguments)
    assert_equal(grown.cache.num_free_blocks, free, "free blocks after invalid tokens were rejected")
    assert_equal(grown.match([*tokens, OTHER]), grown.size, "match of the committed prompt")


@check("SHARE-03bc", "grouped")
def a_fork_reads_as_its_parent_in_every_layer(subject: Subject) -> None:
    subject.need(sequences=2)
    length = reach(subject)
    for begun in (1, grown_to(subject), length):
        grown = GroupedFixture(subject, 3 * length)
        parent = grown.create(prompt(length + 2))
        grown.up_to(parent, begun, by=2)
        free = grown.cache.num_free_blocks
        child: int = grown.cache.fork(parent)
        like = grown.sequences[parent]
        other = [*like.tokens[:begun], *prompt(length, 6)]
        grown.sequences[child] = GroupedSequence(other, "", like.length, list(like.gone))
        assert_equal(grown.cache.num_free_blocks, free, "free blocks after a fork")
        grown.look(child, f"a fork of {begun} tokens")
        for sequence in (child, parent, child, parent):
            grown.step(sequence, 1)
            for each, name in ((child, "the fork"), (parent, "the parent")):
                grown.look(each, f"{name} after a fork at {begun} tokens and steps of both")
                grown.attends(each, 1, f"{name} after a fork at {begun} tokens and steps of both")
        grown.drop(parent)
        grown.look(child, f"a fork at {begun} tokens after drop of its parent")
        grown.drop(child)
        assert_equal(grown.cache.num_free_blocks, grown.total, "free blocks after drop of both sequences")


def long_window(subject: Subject, blocks: int) -> int:
    """Returns the block size. Raises NotOffered unless a window can be longer than `blocks` blocks."""
    size: int = subject.size("block_size", 3)
    if subject.size("window", 3 * size + 1) <= blocks * size:
        raise NotOffered(f"a window of {blocks * size + 1}, where its limits say {subject.limits.of('grouped', 'window')}")
    return size


def grown_to(subject: Subject) -> int:
    """Returns a length that is past the window and ends inside a block."""
    return int(subject.size("window", 7) + subject.size("block_size", 3) // 2 + 1)


@check("EDIT-01ac", "grouped")
def what_is_truncated_never_came(subject: Subject) -> None:
    size = long_window(subject, 3)
    for length in (0, 1, size, size + 1, 2 * size):
        grown, sequence = one(subject, 4 * size, window=3 * size + 1)
        grown.up_to(sequence, 3 * size, by=2)
        grown.truncate(sequence, length)
        grown.look(sequence, f"a sequence after truncate to {length} tokens")
        grown.sequences[sequence].tokens = [*prompt(length), *prompt(4 * size, 2)]
        grown.up_to(sequence, 3 * size + 1, by=2)
        grown.look(sequence, f"a sequence after truncate to {length} tokens and appends of other tokens")
        grown.attends(sequence, 1, f"a sequence after truncate to {length} tokens and appends of other tokens")
