"""Checks of GROUP-01 to 04 and 07: the blocks of each group, and the tokens that its layers read."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.grouped.fixture import GroupedFixture, GroupedSequence, groups_of
from kvref_conformance.families.paged.checks_formats import LARGEST, PLACES, is_rounding_decisive, of_each_kind
from kvref_conformance.families.prefix.fixture import prompt, streams
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import ROTATED, dim_of
from kvref_conformance.oracle.formats.small_floats import MAX
from kvref_conformance.oracle.token_storage import tokens_as
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_within, expected_attention, raises, true
from kvref_conformance.testlib.fixtures import blocks_of
from kvref_conformance.testlib.production_sizes import affordable
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import pair_of_content

PIECES = (1, 2, 5, 1, 3, 1, 1, 7, 1, 4)  # tokens per step, used in turn


def reach(subject: Subject, blocks: int = 3, window: int = 7) -> int:
    """Returns a length at which the windows have passed `blocks` blocks."""
    return int(subject.size("window", window) + blocks * subject.size("block_size", 3) + 1)


def one(subject: Subject, length: int, **sizes: int) -> tuple[GroupedFixture, int]:
    """Returns a cache with room for `length` tokens in every group, and a new sequence in it."""
    grown = GroupedFixture(subject, length, **sizes)
    return grown, grown.create(prompt(length))


@check("GROUP-01a", "grouped")
def no_block_is_listed_twice(subject: Subject) -> None:
    subject.need(sequences=2)
    length = reach(subject)
    grown = GroupedFixture(subject, length, sequences=2)
    sequences = [grown.create(prompt(length, which)) for which in (1, 2)]
    turn = 0
    while any(each.length < length for each in grown.sequences.values()):
        for sequence in sequences:
            grown.up_to(sequence, min(length, grown.sequences[sequence].length + PIECES[turn % len(PIECES)]), by=9)
        turn += 1
        listed = [
            block
            for sequence in sequences
            for layer in range(grown.groups)
            for block in blocks_of(grown.cache, sequence, layer)
            if block != -1
        ]
        assert_equal(
            len(set(listed)),
            len(listed),
            f"number of distinct blocks in the tables of both sequences, which list {sorted(listed)}",
        )
        true(
            all(0 <= block < grown.total for block in listed),
            "blocks in the tables of both sequences",
            f"numbers in [0, {grown.total})",
            sorted(listed),
        )


@check("GROUP-01b", "grouped")
def layers_of_a_group_share_a_table(subject: Subject) -> None:
    grown, sequence = one(subject, reach(subject, 1))
    if len(grown.layers) == grown.groups:
        raise NotOffered("two layers in a group, where its limits leave one layer per group")
    grown.up_to(sequence, reach(subject, 1), by=2)
    for layer in grown.layers[grown.groups :]:
        got, want = (blocks_of(grown.cache, sequence, each) for each in (layer, layer - grown.groups))
        assert_equal(got, want, f"block table of layer {layer}, which is in the same group as layer {layer - grown.groups}")


@check("GROUP-01c", "grouped")
def what_one_group_gave_back_another_takes(subject: Subject) -> None:
    subject.need(sequences=2)
    length = reach(subject)
    grown, first = one(subject, length)
    grown.up_to(first, length)
    second = grown.create(prompt(length, 2))
    free = grown.cache.num_free_blocks // grown.groups * grown.size
    grown.up_to(second, min(free, length), by=2)
    for sequence in (first, second):
        grown.look(sequence, f"sequence {sequence}, after a second sequence reused blocks that a window had freed")


@check("GROUP-02ab", "grouped")
def a_window_gives_back_what_it_sees_no_more(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    windows = dict.fromkeys(subject.size("window", wanted) for wanted in (7, 1, size - 1 or 1, size, size + 1, 2 * size + 1))
    for window in windows:
        length = window + 3 * size + 1
        grown, sequence = one(subject, length, window=window)
        while grown.sequences[sequence].length < length:
            grown.step(sequence, 1)
            when = f"after {grown.sequences[sequence].length} steps of one token, with a window of {window}"
            grown.counted(when)
            grown.holds(sequence, when)


@check("GROUP-02abc", "grouped")
def a_long_step_is_held_until_the_next(subject: Subject) -> None:
    size, length = subject.size("block_size", 3), reach(subject, 6)
    grown, sequence = one(subject, length)
    for count in (1, 3 * size + 1, 1, 2 * size, grown.window + size, 1, 1):
        if grown.sequences[sequence].length + count <= length:
            grown.step(sequence, count)
            when = f"after a step of {count} tokens to length {grown.sequences[sequence].length}"
            grown.counted(when)
            grown.holds(sequence, when)


@check("GROUP-02d", "grouped")
def a_step_of_no_tokens_changes_nothing(subject: Subject) -> None:
    length = reach(subject)
    grown, sequence = one(subject, length)
    grown.up_to(sequence, length, by=5)
    if subject.size("tokens", 0):
        raise NotOffered("a step of 0 tokens, where its limits say at least 1")
    before = [blocks_of(grown.cache, sequence, layer) for layer in grown.layers]
    _, values = grown.computed(sequence, 0, [])
    empty = values[None].repeat(len(grown.layers), axis=0)
    grown.cache.step(sequence, empty, empty)
    assert_equal(
        [blocks_of(grown.cache, sequence, layer) for layer in grown.layers], before, "block tables after a step of 0 tokens"
    )
    grown.counted("after a step of 0 tokens")


@check("GROUP-03a", "grouped")
def a_step_takes_blocks_for_all_groups_or_none(subject: Subject) -> None:
    """Tests pools in which a step lacks 1, 2, ... blocks, so that the order in which groups allocate does not matter."""
    size, tried = subject.size("block_size", 3), 0
    for missing in range(1, groups_of(subject) + 1):
        groups = groups_of(subject)
        grown = GroupedFixture(subject, num_blocks=3 * groups - missing)
        grown_to = min(grown.total // grown.groups * size, 2 * size)
        if grown.total != 3 * groups - missing or grown_to < size:
            continue
        sequence = grown.create(prompt(reach(subject, 9)))
        grown.up_to(sequence, grown_to, by=2)
        while grown.needed(sequence, 1) <= grown.total - grown.held():
            grown.step(sequence, 1)
        before = [blocks_of(grown.cache, sequence, layer) for layer in grown.layers]
        with raises("OutOfBlocks"):
            grown.step(sequence, 1)
        when = f"after a step raised OutOfBlocks because {missing} of the {grown.groups} blocks that it needs were missing"
        assert_equal([blocks_of(grown.cache, sequence, layer) for layer in grown.layers], before, f"block tables {when}")
        grown.counted(when)
        grown.look(sequence, f"a sequence {when}")
        grown.drop(sequence)
        grown.counted(f"{when}, and drop of the sequence")
        tried += 1
    if not tried:
        raise NotOffered("a pool with fewer blocks than a step needs, where its limits allow no such size")


@check("GROUP-03ab", "grouped")
def what_a_step_gives_back_is_room_for_it(subject: Subject) -> None:
    """In small pools of every size, a step raises OutOfBlocks exactly if the pool has no room for it."""
    size, groups, window = subject.size("block_size", 3), groups_of(subject), subject.size("window", 7)
    for spare in range(groups + 1):
        grown = GroupedFixture(subject, num_blocks=groups * (window // size + 2) + spare)
        grown.to_be_filled()
        sequence = grown.create(prompt(reach(subject, 2 * grown.total)))
        while grown.needed(sequence, 1) <= grown.total - grown.held():
            grown.step(sequence, 1)
            grown.counted(f"after {grown.sequences[sequence].length} steps of one token in a pool of {grown.total} blocks")
        with raises("OutOfBlocks"):
            grown.step(sequence, 1)
        grown.look(sequence, f"a sequence that fills a pool of {grown.total} blocks")


@check("GROUP-04ab", "grouped")
def each_layer_reads_what_its_group_holds(subject: Subject) -> None:
    length = reach(subject)
    grown, sequence = one(subject, length)
    turn = 0
    while grown.sequences[sequence].length < length:
        grown.up_to(sequence, min(length, grown.sequences[sequence].length + PIECES[turn % len(PIECES)]), by=9)
        grown.look(sequence, f"a sequence after step {turn + 1}")
        grown.refuses(sequence)
        turn += 1


@check("GROUP-04a", "grouped")
def positions_are_read_in_the_order_they_are_asked_for(subject: Subject) -> None:
    length = reach(subject)
    grown, sequence = one(subject, length)
    grown.up_to(sequence, length, by=4)
    for layer in grown.layers:
        held = [*range(grown.sequences[sequence].gone[layer % grown.groups] * grown.size, length)]
        for asked in (held[::-1], held[-1:] + held[:1] + held[-1:]):
            want = grown.computed(sequence, layer, asked)
            assert_pair(grown.cache.read(sequence, layer, asked), want, f"layer {layer}, positions {asked}")


@check("GROUP-04c", "grouped")
def each_query_sees_its_window(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for window in dict.fromkeys(subject.size("window", wanted) for wanted in (7, 1, size, size + 1)):
        seen_in_steps(subject, window)


@check("GROUP-04c", "grouped")
def each_of_three_groups_sees_what_it_has_to(subject: Subject) -> None:
    seen_in_steps(subject, subject.size("window", 7), num_groups=3, num_layers=6)


def seen_in_steps(subject: Subject, window: int, **sizes: int) -> None:
    size = subject.size("block_size", 3)
    length = window + 5 * size
    grown, sequence = one(subject, length, window=window, **sizes)
    for count in (1, size + 1, 1, 2, window, 1, 2 * size, 1):
        if grown.sequences[sequence].length + count > length:
            continue
        taken = grown.step(sequence, count)
        what = f"a step of {taken} tokens to length {grown.sequences[sequence].length}, with a window of {window}"
        for asked in dict.fromkeys((1, taken // 2, taken)):
            grown.attends(sequence, asked, f"the last {asked} tokens of {what}")


@check("GROUP-04d", "grouped")
def who_sees_what_is_gone_is_refused(subject: Subject) -> None:
    length = reach(subject)
    grown, sequence = one(subject, length)
    grown.up_to(sequence, length)
    query = grown.queries(length + 1)
    for layer in grown.layers:
        gone = grown.sequences[sequence].gone[layer % grown.groups] * grown.size
        counts = [length + 1, *([length - gone - grown.window + 2] if gone else [])]
        for count in counts:
            with raises("PositionOutOfRange"):
                grown.cache.attend(sequence, layer, query[:count], 1.0)
        if gone:  # with one query fewer, all that they see is stored
            grown.attends(sequence, counts[-1] - 1, "the largest number of queries whose windows are stored", [layer])


@check("GROUP-07bc", "grouped")
def all_tokens_of_the_last_step_can_go(subject: Subject) -> None:
    subject.need(tokens=2)
    size = subject.size("block_size", 3)
    for begun in (subject.size("window", 7) + size, subject.size("window", 7) + 2 * size + 1):
        for back in range(1, size + 3):
            grown = GroupedFixture(subject, begun + 2 * size + 4)
            sequence = grown.create(prompt(begun + size + 2))
            grown.up_to(sequence, begun)
            taken = grown.step(sequence, size + 2)
            if back > taken:
                continue
            grown.truncate(sequence, begun + taken - back)
            when = f"after truncate removed {back} of the {taken} tokens of the last step"
            grown.holds(sequence, when)
            grown.counted(when)
            grown.look(sequence, f"a sequence {when}")
            one = grown.sequences[sequence]
            one.tokens = [*one.tokens[: one.length], *prompt(size + 2, 5)]
            grown.step(sequence, 1)
            grown.look(sequence, f"a sequence {when}, and a step of one token")
            grown.attends(sequence, 1, f"a token appended {when}")


@check("GROUP-07ab", "grouped")
def what_windows_need_cannot_come_back(subject: Subject) -> None:
    length = reach(subject)
    grown, sequence = one(subject, length)
    if grown.groups == 1:
        raise NotOffered("a windowed group, where its limits say num_groups 1")
    grown.up_to(sequence, length)
    least = grown.sequences[sequence].gone[0] * grown.size + grown.window - 1  # its window begins with the first stored block
    before = [blocks_of(grown.cache, sequence, layer) for layer in grown.layers]
    for short in dict.fromkeys((least - 1, grown.size, 1)):
        with raises("NotTruncatable"):
            grown.cache.truncate(sequence, short)
        assert_equal(
            [blocks_of(grown.cache, sequence, layer) for layer in grown.layers],
            before,
            f"block tables after truncate to {short} raised NotTruncatable",
        )
        grown.look(sequence, f"a sequence after truncate to {short} raised NotTruncatable")
    if least <= length:
        grown.truncate(sequence, least)
        grown.holds(sequence, f"after truncate to {least}, the shortest possible length")
        grown.look(sequence, f"a sequence after truncate to {least}, the shortest possible length")
        grown.attends(sequence, 0, "0 queries")
    grown.truncate(sequence, 0)
    grown.counted("after truncate to 0")
    grown.holds(sequence, "after truncate to 0")
    grown.up_to(sequence, length)
    grown.look(sequence, "a sequence after truncate to 0 and appends of its tokens")


@check("GROUP-07bc", "grouped")
def what_is_cut_off_is_free_in_every_group(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    grown, sequence = one(subject, 4 * size, window=5 * size)
    if grown.window < 4 * size:
        raise NotOffered(f"a window of {4 * size}, where its limits say {subject.limits.of('grouped', 'window')}")
    grown.up_to(sequence, 4 * size, by=4)
    for length in (3 * size + 1, 3 * size, size + 1, 1, 0):
        grown.truncate(sequence, length)
        grown.counted(f"after truncate to {length} tokens")
        grown.holds(sequence, f"after truncate to {length} tokens")
        grown.look(sequence, f"a sequence after truncate to {length} tokens")


# Checks of GROUP-08: the grouped cache in formats with scales.


def in_formats(subject: Subject, tokens: int, sequences: int = 1, **sizes: int) -> Iterator[tuple[str, GroupedFixture]]:
    """Yields one supported format of each kind (one scale per head, one per token, one per group), and a cache in it."""
    for name in of_each_kind(subject, PLACES):
        yield name, GroupedFixture(subject, tokens, sequences, dtype=name, head_dim=dim_of(name, 1), **sizes)


@check("GROUP-08a", "grouped")
def what_groups_hold_reads_back_as_its_format_says(subject: Subject) -> None:
    length = reach(subject)
    for name, grown in in_formats(subject, length):
        for which in (1, 2):  # the second reuses the blocks of the first
            sequence = grown.begin(prompt(length, which))
            grown.up_to(sequence, length, by=grown.size + 1)
            grown.look(sequence, f"a sequence of {length} tokens in {name}")
            grown.drop(sequence)


@check("GROUP-08a", "grouped")
def scales_are_found_and_copied_with_their_blocks(subject: Subject) -> None:
    subject.need(sequences=2)
    for name, grown in in_formats(subject, 3 * subject.size("block_size", 3), 2, num_layers=2):
        tokens = [*prompt(grown.size + 1), *prompt(grown.size, 2)]
        first = grown.begin(tokens)
        grown.up_to(first, grown.size + 1, commit=True)
        second = grown.begin(tokens)
        grown.look(second, f"the hit of a sequence in {name}")
        grown.drop(second)
        child, like = grown.cache.fork(first), grown.sequences[first]
        grown.sequences[child] = GroupedSequence(
            [*tokens[: grown.size + 1], *prompt(grown.size, 3)], like.salt, like.length, list(like.gone)
        )
        grown.step(child, 1)
        grown.step(first, 1)
        for sequence in (child, first):
            grown.look(sequence, f"a sequence after fork and a step of each sharer, in {name}")


@check("GROUP-08b", "grouped")
def attention_over_groups_with_scales_is_over_what_they_read_as(subject: Subject) -> None:
    length = reach(subject)
    for name, grown in in_formats(subject, length):
        sequence, query, scale = grown.begin(prompt(length)), grown.queries(1), 2.5 / grown.row[1]
        grown.up_to(sequence, length, by=grown.size + 1)
        for layer in grown.layers:
            first = max(0, length - grown.window) if grown.is_windowed(layer) else 0
            keys, values = grown.cache.read(sequence, layer, list(range(first, length)))
            want, bound = expected_attention(subject, query, keys, values, scale=scale, rotated=name in ROTATED)
            assert_within(
                grown.cache.attend(sequence, layer, query, scale), want, bound, f"attention over {name} tokens, layer {layer}"
            )


@check("GROUP-08c", "grouped")
def a_step_that_a_format_cannot_hold_changes_nothing(subject: Subject) -> None:
    for name, grown in in_formats(subject, reach(subject), num_layers=2):
        sequence = grown.begin(prompt(reach(subject)))
        grown.up_to(sequence, grown.window, by=grown.size)
        like = grown.sequences[sequence]
        while grown.unseen(like.length) == like.gone and like.length < reach(subject) - 1:
            grown.step(sequence, 1)  # until the next step frees blocks
        free = grown.cache.num_free_blocks
        for rows in _not_storable(subject, (len(grown.layers), 1, *grown.row), name):
            with raises("NonFinite"):
                grown.cache.step(sequence, rows, rows)
            assert_equal(grown.cache.num_free_blocks, free, f"free blocks after a step of tokens that {name} cannot store")
            grown.look(sequence, f"a sequence after a step of tokens that {name} cannot store")


def _not_storable(subject: Subject, shape: tuple[int, ...], format: str) -> Iterator[NDArray]:
    """Yields rows with a NaN in the last layer, and finite rows that would read back infinite, if the format has such rows."""
    rows = np.zeros(shape, np.float32)
    rows[-1, ..., -1] = np.nan
    yield rows
    large = np.full(shape, MAX.get(subject.dtype, LARGEST), np.float32)
    large[..., ::2] *= -1
    decided = subject.level == "exact" or not is_rounding_decisive(format)
    if decided and not np.isfinite(tokens_as(large[0], format).values).all():
        yield large


# Checks of LAW-18: windows of hundreds of tokens and blocks of 16, in sequences of thousands of tokens.

LONG = 4200  # tokens; not a multiple of the block size
PREFILL = 700  # tokens of a step
CALLS = 400  # steps of one token


def served(subject: Subject, tokens: int, **sizes: Any) -> GroupedFixture:
    wanted = {"block_size": 16, "num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "window": 512} | sizes
    return GroupedFixture(subject, tokens, **wanted)


def held_at_its_edges(grown: GroupedFixture, sequence: int, what: str) -> None:
    """Reads, in every layer, the first and last stored positions and positions at block boundaries."""
    one = grown.sequences[sequence]
    for layer in grown.layers:
        first = one.gone[layer % grown.groups] * grown.size
        ends = {first, first + 1, first + grown.size, (first + one.length) // 2, one.length - grown.size, one.length - 1}
        positions = sorted(position for position in ends if first <= position < one.length)
        want = pair_of_content(streams(one.tokens, one.salt)[positions], layer, positions, *grown.row)
        assert_pair(grown.cache.read(sequence, layer, positions), want, f"{what}, layer {layer}, positions {positions}")


def passing(subject: Subject, grown: GroupedFixture, length: int) -> None:
    """Appends a prompt in long steps, then token by token. Counts blocks after each step, and reads rows where blocks end."""
    sequence, decoded = grown.create(prompt(length)), min(CALLS, length // 4)
    while grown.sequences[sequence].length < length - decoded:
        grown.step(sequence, min(PREFILL, length - decoded - grown.sequences[sequence].length))
        grown.counted(f"after a long step to length {grown.sequences[sequence].length}")
    grown.look(sequence, "a long prompt")
    grown.refuses(sequence)
    while grown.sequences[sequence].length < length:
        grown.step(sequence, 1)
        when = f"after a step of one token to length {grown.sequences[sequence].length}"
        grown.counted(when)
        if grown.sequences[sequence].length % grown.size in (0, 1, grown.size - 1):
            held_at_its_edges(grown, sequence, f"a sequence {when}")
    grown.holds(sequence, f"after steps of {length} tokens in total")
    grown.look(sequence, f"a sequence of {length} tokens")
    grown.refuses(sequence)
    grown.attends(sequence, 1, f"a sequence of {length} tokens")
    grown.drop(sequence)
    grown.counted("after drop of all sequences")


@check("LAW-18", "grouped")
def a_window_of_hundreds_passes_over_thousands(subject: Subject) -> None:
    length = affordable(subject, LONG)
    passing(subject, served(subject, length), length)


@check("LAW-18", "grouped")
def a_long_prompt_answers_the_same_each_time(subject: Subject) -> None:
    """The prompt is computed once, and then found three times. Other prompts fill the pool in between."""
    length = affordable(subject, LONG // 2, 4)
    grown = served(subject, length + length // 4)
    tokens = prompt(length)
    whole = tokens[: length // grown.size * grown.size]
    for time in range(4):
        sequence = grown.begin([*tokens, 70 + time])
        grown.look(sequence, f"the hit of call {time + 1} of begin with a long prompt")
        grown.up_to(sequence, length + 1, by=PREFILL // 2, commit=True)
        grown.look(sequence, f"a long prompt after call {time + 1} of begin with it")
        grown.attends(sequence, 1, f"a long prompt after call {time + 1} of begin with it")
        grown.drop(sequence)
        hit = grown.match(whole)
        true(hit < len(whole), f"match of a prompt of full blocks only, in round {time + 1}", f"less than {len(whole)}", hit)
        grown.drop(grown.serve(prompt(length // 8, 10 + time), by=PREFILL))
    assert_equal(grown.cache.num_free_blocks, grown.total, "free blocks after drop of all sequences")


@check("LAW-18", "grouped")
def a_pool_of_thousands_of_blocks_is_found_and_held(subject: Subject) -> None:
    """Blocks with any id store their rows: many sequences are appended in turn, then all of them are read."""
    grown = served(subject, 16 * 1100, num_kv_heads=1, head_dim=8)
    each = grown.window + 3 * grown.size
    count = min(
        grown.total // (grown.groups * -(-each // grown.size)), subject.size("sequences", 24), affordable(subject, 30, each)
    )
    if count < 1:
        raise NotOffered(f"room for a sequence of {each} tokens")
    sequences = [grown.create(prompt(each, which + 1)) for which in range(count)]
    for sequence in sequences:
        grown.up_to(sequence, each, by=PREFILL)
    for sequence in sequences:
        grown.look(sequence, f"sequence {sequence} of {count} in a pool of {grown.total} blocks")
        grown.up_to(sequence, each, by=1)
    grown.counted(f"with {count} sequences of {each} tokens")
    for sequence in sequences:
        grown.drop(sequence)
    grown.counted("after drop of all sequences")


@check("LAW-18", "grouped", real=True)
def layers_as_a_model_has_them_go_over_thousands(subject: Subject) -> None:
    """Six groups and a window of 1024, as in a model in which every sixth layer sees every token."""
    length = affordable(subject, LONG)
    passing(subject, served(subject, length, num_layers=6, num_groups=6, window=1024, num_kv_heads=2), length)
