"""Checks of GROUP-05 and 06: the hit of all groups together, and the blocks of cached prefixes."""

from itertools import product

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.grouped.checks import reach, with_sequence
from kvref_conformance.families.grouped.fixture import GroupedFixture, groups_of
from kvref_conformance.families.prefix.fixture import OTHER, need_declared_order, prompt
from kvref_conformance.testlib.assertions import assert_equal, assert_true, raises
from kvref_conformance.testlib.fixtures import block_table_of
from kvref_conformance.testlib.registry import check


def finds(fixture: GroupedFixture, tokens: list[int], count: int, what: str, salt: str = "") -> None:
    """Raises ClauseViolation unless the hit is `count` tokens, and these read and attend as if they had just been appended."""
    assert_equal(fixture.match(tokens, salt), count, f"match of {what}")
    sequence = fixture.begin(tokens, salt)
    assert_equal(fixture.sequences[sequence].length, count, f"length of a sequence begun with {what}")
    fixture.check_tables(sequence, f"after begin with {what}")
    fixture.check_tokens(sequence, f"the hit of {what}")
    if count and fixture.cache.num_free_blocks >= fixture.groups:
        fixture.step(sequence, 1)
        fixture.check_attention(sequence, 1, f"one token after the hit of {what}")
    fixture.drop(sequence)


def longest_hit(fixture: GroupedFixture, cached: list[set[int]], tokens: int) -> int:
    """Returns the hit of `tokens` tokens. cached: the cached entries of each group. It tries every number of blocks."""
    for blocks in range((tokens - 1) // fixture.size, 0, -1):
        if all(
            entry in found or (entry + 1) * fixture.size <= first
            for group, found in enumerate(cached)
            for first in [0 if group == fixture.groups - 1 else blocks * fixture.size - fixture.window + 1]
            for entry in range(blocks)
        ):
            return blocks * fixture.size
    return 0


@check("GROUP-05ab", "grouped")
def match_finds_full_blocks_only(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    length = reach(subject)
    fixture = GroupedFixture(subject, length, sequences=3)
    tokens, size = prompt(length), fixture.size
    fixture.serve(tokens)
    for count in sorted({0, 1, size, size + 1, 2 * size, fixture.window, fixture.window + size, length - 1, length}):
        hit = max(0, count - 1) // size * size
        finds(fixture, tokens[:count], hit, f"{count} tokens of a prompt that was committed at every step")
    finds(fixture, [*tokens, OTHER], length // size * size, "a prompt that continues after the committed tokens")


@check("GROUP-05ab", "grouped")
def hit_needs_no_blocks_before_the_window(subject: Subject) -> None:
    """The blocks before the window have been reused, and the hit still has its full length."""
    need_declared_order(subject)
    length, tokens = reach(subject, 6), prompt(reach(subject, 6))
    size, groups, window = subject.size("block_size", 3), groups_of(subject), subject.size("window", 7)
    full, seen = -(-length // size), -(-window // size) + 2
    fixture = GroupedFixture(subject, num_blocks=full + (groups - 1) * seen)  # the fewest that the prompt needs
    if groups == 1 or fixture.total < full + (groups - 1) * seen:
        raise NotOffered("a pool that is smaller than all blocks of all groups of a prompt, where its limits allow no such size")
    fixture.drop(fixture.serve(tokens))
    finds(fixture, tokens, (length - 1) // size * size, "a prompt whose windows freed blocks, in a pool of the minimal size")
    beginning = tokens[: 2 * size + 1]
    hit = fixture.match(beginning)
    sequence = fixture.begin(beginning)
    assert_equal(fixture.sequences[sequence].length, hit, "length of a sequence begun with the first two blocks of the prompt")
    fixture.check_tokens(sequence, "the hit of the first two blocks of the prompt")


@check("GROUP-05ab", "grouped")
def hit_is_the_longest_that_every_group_can_serve(subject: Subject) -> None:
    """The prompt is committed only at its end, after the windows have freed their first blocks."""
    subject.require_size(sequences=2)
    for by, wanted in ((1, 7), (2, 8), (1, 9)):  # a window can begin anywhere in a block
        window = subject.size("window", wanted)
        length = reach(subject, 5, window)
        fixture = GroupedFixture(subject, length, sequences=3, window=window)
        tokens, size = prompt(length), fixture.size
        sequence = fixture.begin(tokens)
        fixture.step_to(sequence, length, by=by)
        cached = [set(range(freed, length // size)) for freed in fixture.sequences[sequence].freed]
        fixture.commit(sequence)
        for blocks in range(length // size + 1):
            asked = [*tokens[: blocks * size], OTHER]
            finds(
                fixture,
                asked,
                longest_hit(fixture, cached, len(asked)),
                f"the first {blocks} blocks of a prompt that was committed after its last token",
            )


@check("GROUP-05ab", "grouped")
def match_stops_at_other_tokens_and_salts(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=2)
    fixture = GroupedFixture(subject, reach(subject), sequences=4)
    tokens, size = prompt(2 * fixture.size), fixture.size
    fixture.serve(tokens, by=size)
    for at in range(len(tokens)):
        other = [*tokens[:at], OTHER, *tokens[at + 1 :], OTHER]
        hit = at // size * size
        finds(fixture, other, hit, f"a prompt with another token at position {at}")
    finds(fixture, [*tokens, OTHER], 0, "a prompt with another salt", "a")


@check("GROUP-05b", "grouped")
def prompt_reads_the_same_after_each_hit(subject: Subject) -> None:
    """The prompt is computed once, and then found three times. Other prompts allocate blocks in between."""
    length = reach(subject, 4)
    fixture = GroupedFixture(subject, length + length // 2)
    size, tokens = fixture.size, prompt(length)
    for time in range(4):
        sequence = fixture.begin([*tokens, OTHER + time])
        hit = fixture.sequences[sequence].length
        assert_true(
            hit % size == 0 and hit <= length,
            f"the hit of call {time + 1} of begin with one prompt",
            f"a multiple of {size}, at most {length}",
            hit,
        )
        fixture.check_tokens(sequence, f"the hit of call {time + 1} of begin with one prompt")
        fixture.step_to(sequence, length + 1, by=3, commit=True)
        fixture.check_tokens(sequence, f"the whole prompt after call {time + 1} of begin with it")
        fixture.check_attention(sequence, 1, f"the whole prompt after call {time + 1} of begin with it")
        fixture.drop(sequence)
        fixture.drop(fixture.serve(prompt(2 * size, 10 + time), by=2))
        assert_equal(fixture.cache.num_free_blocks, fixture.total, f"free blocks after drop of all sequences in round {time + 1}")


@check("GROUP-06a", "grouped")
def step_never_allocates_the_blocks_of_a_hit(subject: Subject) -> None:
    """Neither the steps of another sequence nor its own reuse the blocks of a hit."""
    subject.require_size(sequences=2)
    length = reach(subject)
    for own in (True, False):
        fixture = GroupedFixture(subject, length + 2 * subject.size("block_size", 3))
        fixture.to_be_filled()
        size, tokens = fixture.size, prompt(length)
        fixture.drop(fixture.serve(tokens, by=2))
        sequence = fixture.begin([*tokens[: length - 1], *prompt(fixture.total * size, 3)])
        hit, free = fixture.sequences[sequence].length, fixture.cache.num_free_blocks
        assert_equal(free, fixture.total - fixture.count_blocks(), f"free blocks after begin with a hit of {hit} tokens")
        fixture.check_tokens(sequence, f"a hit of {hit} tokens")
        other = sequence if own else fixture.create(prompt(fixture.total * size, 4))
        while fixture.count_needed(other, 1) <= fixture.total - fixture.count_blocks():
            fixture.step(other, 1)
        with raises("OutOfBlocks"):
            fixture.step(other, 1)
        fixture.check_free_blocks("after steps allocated all free blocks")
        fixture.check_tokens(sequence, f"a hit of {hit} tokens, after steps allocated all free blocks")
        if not own:
            fixture.check_tokens(other, "the sequence that allocated all free blocks")


@check("GROUP-06b", "grouped")
def dropped_blocks_are_free_and_cached(subject: Subject) -> None:
    need_declared_order(subject)
    subject.require_size(sequences=3)
    length = reach(subject)
    fixture = GroupedFixture(subject, length, sequences=3)
    size, tokens = fixture.size, prompt(length)
    hit = (length - 1) // size * size
    first = fixture.serve(tokens)
    free, stored = fixture.cache.num_free_blocks, fixture.count_blocks()
    second = fixture.begin(tokens)
    shared = [block for layer in range(fixture.groups) for block in block_table_of(fixture.cache, second, layer) if block != -1]
    listed = {block for layer in range(fixture.groups) for block in block_table_of(fixture.cache, first, layer)}
    back = sum(block not in listed for block in shared)  # freed by the first sequence, and seen by the second
    assert_equal(
        fixture.cache.num_free_blocks, free - back, f"free blocks after begin with a hit, {back} blocks of which were free"
    )
    fixture.drop(first)
    fixture.check_tokens(second, "a hit in blocks that another sequence committed before drop")
    fixture.drop(second)
    assert_equal(
        fixture.cache.num_free_blocks,
        fixture.total,
        f"free blocks after drop of both sequences, of which the first stored {stored} blocks",
    )
    finds(fixture, tokens, hit, "a cached prompt that no live sequence contains")
    fixture.cache.reset()
    finds(fixture, tokens, 0, "a prompt after reset")


@check("GROUP-06c", "grouped")
def blocks_are_evicted_in_the_order_of_their_release(subject: Subject) -> None:
    need_declared_order(subject)
    size, groups = subject.size("block_size", 3), groups_of(subject)
    if subject.size("window", 7) < size:
        raise NotOffered("a window of at least one block")
    fixture = GroupedFixture(subject, num_blocks=5 * groups)
    if fixture.total != 5 * groups:
        raise NotOffered(f"a pool of {5 * groups} blocks")
    prompts = [prompt(size, which) for which in (1, 2, 3)]
    for tokens in prompts:
        fixture.drop(fixture.serve(tokens, by=size))
    assert_equal(
        fixture.match([*prompts[0], OTHER]), size, "match of the oldest of three prompts"
    )  # match does not delay eviction
    other = fixture.create(prompt(5 * size, 9))
    for entries, left in enumerate(([1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]), 1):
        if entries > 1 and fixture.unseen((entries - 1) * size)[0]:
            break  # from here on it reuses blocks that it freed itself, before those of the prompts
        fixture.step_to(other, entries * size, by=size)
        found = [fixture.match([*tokens, OTHER]) // size for tokens in prompts]
        assert_equal(
            found, left, f"numbers of cached blocks of three prompts after {entries} blocks were allocated in each group"
        )


@check("GROUP-06c", "grouped")
def eviction_in_one_group_shortens_the_hit(subject: Subject) -> None:
    """Blocks of later positions are evicted first, and at the same position those of earlier groups.

    If the block of one group is evicted, the last group's block at that position cannot be used.
    """
    need_declared_order(subject)
    size, groups = subject.size("block_size", 3), groups_of(subject)
    if groups == 1 or subject.size("window", 7) <= size:
        raise NotOffered("two groups, and a window of more than one block")
    fixture = GroupedFixture(subject, num_blocks=3 * groups + 1)
    if fixture.total != 3 * groups + 1:
        raise NotOffered(f"a pool of {3 * groups + 1} blocks")
    tokens = prompt(2 * size)
    fixture.drop(fixture.serve(tokens, by=size))
    other = fixture.create(prompt(2 * size, 9))
    fixture.step_to(other, size, by=size)  # groups + 1 blocks were never allocated: one of them is left
    assert_equal(fixture.match([*tokens, OTHER]), 2 * size, "match before any block of the prompt is evicted")
    fixture.step(other, 1)  # evicts groups - 1 blocks of the second entry
    assert_equal(fixture.match([*tokens, OTHER]), size, "match after a block was evicted in every group but the last")
    finds(fixture, [*tokens, OTHER], size, "a prompt of which only the first block is cached in every group")


# Checks of PAGED, PREFIX, SHARE and EDIT for the grouped cache: these clauses hold in every group.


@check("PAGED-01ab", "grouped")
def create_and_begin_return_unused_ids(subject: Subject) -> None:
    fixture, given = GroupedFixture(subject, 20), list[int]()
    for tokens in ([], prompt(2), prompt(4), []):
        for sequence in (
            (fixture.begin(tokens), fixture.create(tokens)) if subject.size("sequences", 2) > 1 else (fixture.begin(tokens),)
        ):
            assert_true(sequence not in given, "the id of a new sequence", f"an id not in {given}", sequence)
            given.append(sequence)
        for sequence in list(fixture.sequences):
            fixture.drop(sequence)
            with raises("SequenceNotFound"):
                fixture.cache.length(sequence)


@check("PAGED-07ab", "grouped")
def drop_frees_blocks_of_every_group(subject: Subject) -> None:
    for length in (1, subject.size("block_size", 3), reach(subject)):
        fixture, sequence = with_sequence(subject, length)
        for _ in range(3):
            fixture.step_to(sequence, length, by=2)
            fixture.drop(sequence)
            fixture.check_free_blocks(f"after drop of a sequence of {length} tokens")
            sequence = fixture.create(prompt(length))


@check("PREFIX-02abc", "grouped")
def commit_accepts_appended_tokens_only(subject: Subject) -> None:
    need_declared_order(subject)
    fixture = GroupedFixture(subject, 4 * reach(subject))
    size, tokens = fixture.size, prompt(3 * fixture.size)
    sequence = fixture.begin(tokens)
    fixture.step_to(sequence, 2 * size, by=size)
    with raises("PositionOutOfRange"):
        fixture.cache.commit(sequence, tokens[: 2 * size + 1])
    assert_equal(fixture.match(tokens), 0, "match after commit raised PositionOutOfRange")
    fixture.commit(sequence)
    with raises("TokenMismatch"):
        fixture.cache.commit(sequence, [OTHER, *tokens[1 : 2 * size]])
    fixture.drop(sequence)
    finds(fixture, tokens, 2 * size, "a prompt of which two blocks were committed")
    later = fixture.begin(tokens)
    with raises("TokenMismatch"):
        fixture.cache.commit(later, [OTHER])


@check("PREFIX-02acd", "grouped")
def sharers_commit_independently(subject: Subject) -> None:
    """One sharer edits and commits its tokens. The committed tokens of the other, and what it commits later, do not change."""
    subject.require_size(sequences=3)
    size = long_window(subject, 3)
    for start, editor in product((2 * size, size), (0, 1)):
        fixture = GroupedFixture(subject, 3 * size, sequences=4, window=3 * size + 1)
        tokens = prompt(2 * size)
        parent = fixture.serve(tokens, by=size)
        sharers = parent, fixture.fork(parent, tokens)
        one, other = sharers[editor], sharers[1 - editor]
        fixture.truncate(one, start)
        fixture.sequences[one].tokens = [*tokens[:start], *prompt(3 * size - start, 2)]
        fixture.step_to(one, 3 * size, by=size, commit=True)
        with raises("TokenMismatch"):
            fixture.cache.commit(other, [*tokens[:-1], OTHER])
        fixture.sequences[other].tokens = [*tokens, *prompt(size, 3)]
        fixture.step_to(other, 3 * size, by=size, commit=True)
        for each, name in zip(sharers, ("parent", "fork"), strict=True):
            own = fixture.sequences[each].tokens
            assert_equal(fixture.match([*own, OTHER]), 3 * size, f"match of the prompt that the {name} committed")
            fixture.check_tokens(each, f"the {name} after both sharers committed")


@check("PREFIX-11ab", "grouped")
def reset_uncaches_blocks_of_every_group(subject: Subject) -> None:
    fixture = GroupedFixture(subject, 4 * reach(subject))
    tokens = prompt(2 * fixture.size + 1)
    sequence = fixture.serve(tokens)
    with raises("InUse"):
        fixture.cache.reset()
    fixture.check_tokens(sequence, "a sequence after reset raised InUse")
    fixture.drop(sequence)
    fixture.cache.reset()
    finds(fixture, tokens, 0, "a prompt after reset")
    assert_equal(fixture.cache.num_free_blocks, fixture.total, "free blocks after reset")


@check("PREFIX-14ab", "grouped")
def step_into_a_cached_block_copies_it(subject: Subject) -> None:
    need_declared_order(subject)
    size = long_window(subject, 2)
    for length in range(1, 2 * size, max(1, size // 4)):
        fixture = GroupedFixture(subject, 6 * size, window=3 * size + 1)
        tokens = prompt(2 * size)
        sequence = fixture.serve(tokens, by=2)
        fixture.truncate(sequence, length)
        fixture.sequences[sequence].tokens = [*tokens[:length], *prompt(size, 5)]
        fixture.step(sequence, 1)
        fixture.check_tokens(sequence, f"a sequence after truncate to {length} tokens and a step of one token")
        fixture.drop(sequence)
        finds(
            fixture,
            [*tokens, OTHER],
            2 * size,
            f"a committed prompt after its sequence was truncated to {length} tokens and one token appended",
        )


@check("PREFIX-03c", "grouped")
def fork_has_the_salt_of_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=2)
    size = subject.size("block_size", 3)
    for begun in (size - 1, size):  # before the first block is full, the fork inherits only the salt
        fixture = GroupedFixture(subject, 3 * size, sequences=4)
        tokens = prompt(2 * size)
        parent = fixture.begin(tokens, "a")
        fixture.step_to(parent, begun, by=2, commit=True)
        child = fixture.fork(parent, tokens)
        fixture.step_to(child, 2 * size, by=2, commit=True)
        finds(fixture, [*tokens, OTHER], 2 * size, "a prompt that a fork committed, with its parent's salt", "a")
        finds(fixture, [*tokens, OTHER], 0, "a prompt that a fork committed, without a salt")


@check("PREFIX-15b", "grouped")
def invalid_tokens_raise(subject: Subject) -> None:
    fixture = GroupedFixture(subject, 20)
    tokens = prompt(fixture.size)
    fixture.serve(tokens)
    sequence = fixture.begin(prompt(fixture.size, 2))
    fixture.step_to(sequence, 1)  # not committed, so that a commit contradicts no earlier one
    free = fixture.cache.num_free_blocks
    for wrong in [*subject.integers(-1), *([] if subject.by_value else [2**63])]:
        for name, arguments in (("match", ([*tokens, wrong],)), ("begin", ([wrong, *tokens],)), ("commit", (sequence, [wrong]))):
            with raises("TokenOutOfRange"):
                getattr(fixture.cache, name)(*arguments)
    assert_equal(fixture.cache.num_free_blocks, free, "free blocks after invalid tokens were rejected")
    assert_equal(fixture.match([*tokens, OTHER]), fixture.size, "match of the committed prompt")


@check("SHARE-03bc", "grouped")
def fork_reads_as_its_parent_in_every_layer(subject: Subject) -> None:
    subject.require_size(sequences=2)
    length = reach(subject)
    for begun in (1, length_past_window(subject), length):
        fixture = GroupedFixture(subject, 3 * length)
        parent = fixture.create(prompt(length + 2))
        fixture.step_to(parent, begun, by=2)
        free = fixture.cache.num_free_blocks
        child = fixture.fork(parent, [*prompt(begun), *prompt(length, 6)])
        assert_equal(fixture.cache.num_free_blocks, free, "free blocks after a fork")
        fixture.check_tokens(child, f"a fork of {begun} tokens")
        for sequence in (child, parent, child, parent):
            fixture.step(sequence, 1)
            for each, name in ((child, "the fork"), (parent, "the parent")):
                fixture.check_tokens(each, f"{name} after a fork at {begun} tokens and steps of both")
                fixture.check_attention(each, 1, f"{name} after a fork at {begun} tokens and steps of both")
        fixture.drop(parent)
        fixture.check_tokens(child, f"a fork at {begun} tokens after drop of its parent")
        fixture.drop(child)
        assert_equal(fixture.cache.num_free_blocks, fixture.total, "free blocks after drop of both sequences")


def long_window(subject: Subject, blocks: int) -> int:
    """Returns the block size. Raises NotOffered unless a window can be longer than `blocks` blocks."""
    size: int = subject.size("block_size", 3)
    if subject.size("window", 3 * size + 1) <= blocks * size:
        raise NotOffered(f"a window of {blocks * size + 1}, where its limits say {subject.limits.limit('grouped', 'window')}")
    return size


def length_past_window(subject: Subject) -> int:
    """Returns a length that is past the window and ends inside a block."""
    return int(subject.size("window", 7) + subject.size("block_size", 3) // 2 + 1)


@check("EDIT-01ac", "grouped")
def truncate_forgets_the_removed_tokens(subject: Subject) -> None:
    size = long_window(subject, 3)
    for length in (0, 1, size, size + 1, 2 * size):
        fixture, sequence = with_sequence(subject, 4 * size, window=3 * size + 1)
        fixture.step_to(sequence, 3 * size, by=2)
        fixture.truncate(sequence, length)
        fixture.check_tokens(sequence, f"a sequence after truncate to {length} tokens")
        fixture.sequences[sequence].tokens = [*prompt(length), *prompt(4 * size, 2)]
        fixture.step_to(sequence, 3 * size + 1, by=2)
        fixture.check_tokens(sequence, f"a sequence after truncate to {length} tokens and appends of other tokens")
        fixture.check_attention(sequence, 1, f"a sequence after truncate to {length} tokens and appends of other tokens")
