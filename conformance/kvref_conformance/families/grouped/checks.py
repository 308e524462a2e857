"""Checks of GROUP-01 to 04 and 07: the blocks of each group, and the tokens that its layers read."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.grouped.fixture import GroupedFixture, groups_of
from kvref_conformance.families.paged.checks_formats import LARGEST, PLACES, is_rounding_decisive, of_each_kind
from kvref_conformance.families.prefix.fixture import prompt, streams
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import ROTATED_FORMATS, dim_of
from kvref_conformance.oracle.formats.small_floats import MAX
from kvref_conformance.oracle.token_storage import expected_tokens
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_true, assert_within, expected_attention, raises
from kvref_conformance.testlib.fixtures import block_table_of
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import content_pair

PIECES = (1, 2, 5, 1, 3, 1, 1, 7, 1, 4)  # tokens per step, used in turn


def reach(subject: Subject, blocks: int = 3, window: int = 7) -> int:
    """Returns a length at which the windows have passed `blocks` blocks."""
    return int(subject.size("window", window) + blocks * subject.size("block_size", 3) + 1)


def with_sequence(subject: Subject, length: int, **sizes: int) -> tuple[GroupedFixture, int]:
    """Returns a cache with room for `length` tokens in every group, and a new sequence in it."""
    fixture = GroupedFixture(subject, length, **sizes)
    return fixture, fixture.create(prompt(length))


@check("GROUP-01a", "grouped")
def block_tables_list_distinct_blocks(subject: Subject) -> None:
    subject.require_size(sequences=2)
    length = reach(subject)
    fixture = GroupedFixture(subject, length, sequences=2)
    sequences = [fixture.create(prompt(length, which)) for which in (1, 2)]
    turn = 0
    while any(each.length < length for each in fixture.sequences.values()):
        for sequence in sequences:
            fixture.step_to(sequence, min(length, fixture.sequences[sequence].length + PIECES[turn % len(PIECES)]), by=9)
        turn += 1
        listed = [
            block
            for sequence in sequences
            for layer in range(fixture.groups)
            for block in block_table_of(fixture.cache, sequence, layer)
            if block != -1
        ]
        assert_equal(
            len(set(listed)),
            len(listed),
            f"number of distinct blocks in the tables of both sequences, which list {sorted(listed)}",
        )
        assert_true(
            all(0 <= block < fixture.total for block in listed),
            "blocks in the tables of both sequences",
            f"numbers in [0, {fixture.total})",
            sorted(listed),
        )


@check("GROUP-01b", "grouped")
def layers_of_a_group_have_one_block_table(subject: Subject) -> None:
    fixture, sequence = with_sequence(subject, reach(subject, 1))
    if len(fixture.layers) == fixture.groups:
        raise NotOffered("two layers in a group, where its limits leave one layer per group")
    fixture.step_to(sequence, reach(subject, 1), by=2)
    for layer in fixture.layers[fixture.groups :]:
        got, want = (block_table_of(fixture.cache, sequence, each) for each in (layer, layer - fixture.groups))
        assert_equal(got, want, f"block table of layer {layer}, which is in the same group as layer {layer - fixture.groups}")


@check("GROUP-01c", "grouped")
def freed_blocks_are_reused_by_any_group(subject: Subject) -> None:
    subject.require_size(sequences=2)
    length = reach(subject)
    fixture, first = with_sequence(subject, length)
    fixture.step_to(first, length)
    second = fixture.create(prompt(length, 2))
    free = fixture.cache.num_free_blocks // fixture.groups * fixture.size
    fixture.step_to(second, min(free, length), by=2)
    for sequence in (first, second):
        fixture.check_tokens(sequence, f"sequence {sequence}, after a second sequence reused blocks that a window had freed")


@check("GROUP-02ab", "grouped")
def step_frees_the_blocks_before_the_window(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    windows = dict.fromkeys(subject.size("window", wanted) for wanted in (7, 1, size - 1 or 1, size, size + 1, 2 * size + 1))
    for window in windows:
        length = window + 3 * size + 1
        fixture, sequence = with_sequence(subject, length, window=window)
        while fixture.sequences[sequence].length < length:
            fixture.step(sequence, 1)
            when = f"after {fixture.sequences[sequence].length} steps of one token, with a window of {window}"
            fixture.check_free_blocks(when)
            fixture.check_tables(sequence, when)


@check("GROUP-02abc", "grouped")
def step_keeps_the_blocks_that_its_first_query_sees(subject: Subject) -> None:
    size, length = subject.size("block_size", 3), reach(subject, 6)
    fixture, sequence = with_sequence(subject, length)
    for count in (1, 3 * size + 1, 1, 2 * size, fixture.window + size, 1, 1):
        if fixture.sequences[sequence].length + count <= length:
            fixture.step(sequence, count)
            when = f"after a step of {count} tokens to length {fixture.sequences[sequence].length}"
            fixture.check_free_blocks(when)
            fixture.check_tables(sequence, when)


@check("GROUP-02d", "grouped")
def step_of_no_tokens_changes_nothing(subject: Subject) -> None:
    length = reach(subject)
    fixture, sequence = with_sequence(subject, length)
    fixture.step_to(sequence, length, by=5)
    if subject.size("tokens", 0):
        raise NotOffered("a step of 0 tokens, where its limits say at least 1")
    before = fixture.tables(sequence)
    _, values = fixture.compute(sequence, 0, [])
    empty = values[None].repeat(len(fixture.layers), axis=0)
    fixture.cache.step(sequence, empty, empty)
    assert_equal(fixture.tables(sequence), before, "block tables after a step of 0 tokens")
    fixture.check_free_blocks("after a step of 0 tokens")


@check("GROUP-03a", "grouped")
def step_allocates_blocks_for_all_groups_or_none(subject: Subject) -> None:
    """Tests pools in which a step lacks 1, 2, ... blocks, so that the order in which groups allocate does not matter."""
    size, tried = subject.size("block_size", 3), 0
    for missing in range(1, groups_of(subject) + 1):
        groups = groups_of(subject)
        fixture = GroupedFixture(subject, num_blocks=3 * groups - missing)
        length_past_window = min(fixture.total // fixture.groups * size, 2 * size)
        if fixture.total != 3 * groups - missing or length_past_window < size:
            continue
        sequence = fixture.create(prompt(reach(subject, 9)))
        fixture.step_to(sequence, length_past_window, by=2)
        while fixture.count_needed(sequence, 1) <= fixture.total - fixture.count_blocks():
            fixture.step(sequence, 1)
        before = fixture.tables(sequence)
        with raises("OutOfBlocks"):
            fixture.step(sequence, 1)
        when = f"after a step raised OutOfBlocks because {missing} of the {fixture.groups} blocks that it needs were missing"
        assert_equal(fixture.tables(sequence), before, f"block tables {when}")
        fixture.check_free_blocks(when)
        fixture.check_tokens(sequence, f"a sequence {when}")
        fixture.drop(sequence)
        fixture.check_free_blocks(f"{when}, and drop of the sequence")
        tried += 1
    if not tried:
        raise NotOffered("a pool with fewer blocks than a step needs, where its limits allow no such size")


@check("GROUP-03ab", "grouped")
def step_can_use_the_blocks_that_it_frees(subject: Subject) -> None:
    """In small pools of every size, a step raises OutOfBlocks exactly if the pool has no room for it."""
    size, groups, window = subject.size("block_size", 3), groups_of(subject), subject.size("window", 7)
    for spare in range(groups + 1):
        fixture = GroupedFixture(subject, num_blocks=groups * (window // size + 2) + spare)
        fixture.to_be_filled()
        sequence = fixture.create(prompt(reach(subject, 2 * fixture.total)))
        while fixture.count_needed(sequence, 1) <= fixture.total - fixture.count_blocks():
            fixture.step(sequence, 1)
            fixture.check_free_blocks(
                f"after {fixture.sequences[sequence].length} steps of one token in a pool of {fixture.total} blocks"
            )
        with raises("OutOfBlocks"):
            fixture.step(sequence, 1)
        fixture.check_tokens(sequence, f"a sequence that fills a pool of {fixture.total} blocks")


@check("GROUP-03a", "grouped")
def step_that_needs_the_blocks_of_a_fork_changes_nothing(subject: Subject) -> None:
    """The blocks that leave the window of a sequence are not freed if a fork shares them."""
    subject.require_size(sequences=2)
    groups, size, window = groups_of(subject), subject.size("block_size", 3), subject.size("window", 7)
    length, tried = -(-window // size) * size, 0
    for free in range(groups):
        for extra in (0, size):
            total = groups * ((length + extra) // size) + free
            fixture = GroupedFixture(subject, num_blocks=total)
            if fixture.total != total:
                continue
            sequence = fixture.create(prompt(reach(subject, length + extra + 1)))
            fixture.step_to(sequence, length + extra, by=size)
            left = fixture.total - fixture.count_blocks()
            if fixture.count_needed(sequence, 1) > left or left >= groups:
                continue
            fork = fixture.fork(sequence, fixture.sequences[sequence].tokens)
            before = [fixture.tables(each) for each in (sequence, fork)]
            with raises("OutOfBlocks"):
                fixture.step(sequence, 1)
            when = f"after a step without room because a fork shares the blocks that left the window, with {left} free blocks"
            assert_equal([fixture.tables(each) for each in (sequence, fork)], before, f"block tables {when}")
            assert_equal(fixture.cache.num_free_blocks, left, f"free blocks {when}")
            for each in (sequence, fork):
                fixture.check_tokens(each, f"a sequence {when}")
            tried += 1
    if not tried:
        raise NotOffered("a pool in which a step has room without a fork only")


@check("GROUP-04ab", "grouped")
def read_returns_the_positions_that_the_group_stores(subject: Subject) -> None:
    length = reach(subject)
    fixture, sequence = with_sequence(subject, length)
    turn = 0
    while fixture.sequences[sequence].length < length:
        fixture.step_to(sequence, min(length, fixture.sequences[sequence].length + PIECES[turn % len(PIECES)]), by=9)
        fixture.check_tokens(sequence, f"a sequence after step {turn + 1}")
        fixture.check_freed_positions(sequence)
        turn += 1


@check("GROUP-04a", "grouped")
def read_returns_positions_in_the_requested_order(subject: Subject) -> None:
    length = reach(subject)
    fixture, sequence = with_sequence(subject, length)
    fixture.step_to(sequence, length, by=4)
    for layer in fixture.layers:
        stored = [*range(fixture.sequences[sequence].freed[layer % fixture.groups] * fixture.size, length)]
        for asked in (stored[::-1], stored[-1:] + stored[:1] + stored[-1:]):
            want = fixture.compute(sequence, layer, asked)
            assert_pair(fixture.cache.read(sequence, layer, asked), want, f"layer {layer}, positions {asked}")


@check("GROUP-04c", "grouped")
def attend_sees_the_window_of_each_query(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for window in dict.fromkeys(subject.size("window", wanted) for wanted in (7, 1, size, size + 1)):
        attend_in_steps(subject, window)
    attend_in_steps(subject, subject.size("window", 7), num_groups=3, num_layers=6)


def attend_in_steps(subject: Subject, window: int, **sizes: int) -> None:
    size = subject.size("block_size", 3)
    length = window + 5 * size
    fixture, sequence = with_sequence(subject, length, window=window, **sizes)
    for count in (1, size + 1, 1, 2, window, 1, 2 * size, 1):
        if fixture.sequences[sequence].length + count > length:
            continue
        appended = fixture.step(sequence, count)
        what = f"a step of {appended} tokens to length {fixture.sequences[sequence].length}, with a window of {window}"
        for asked in dict.fromkeys((1, appended // 2, appended)):
            fixture.check_attention(sequence, asked, f"the last {asked} tokens of {what}")


@check("GROUP-04d", "grouped")
def attend_to_freed_positions_raises(subject: Subject) -> None:
    length = reach(subject)
    fixture, sequence = with_sequence(subject, length)
    fixture.step_to(sequence, length)
    query = fixture.queries(length + 1)
    for layer in fixture.layers:
        freed = fixture.sequences[sequence].freed[layer % fixture.groups] * fixture.size
        counts = [length + 1, *([length - freed - fixture.window + 2] if freed else [])]
        for count in counts:
            with raises("PositionOutOfRange"):
                fixture.cache.attend(sequence, layer, query[:count], 1.0)
        if freed:  # with one query fewer, all that they see is stored
            fixture.check_attention(sequence, counts[-1] - 1, "the largest number of queries whose windows are stored", [layer])


@check("GROUP-07bc", "grouped")
def truncate_can_remove_the_tokens_of_the_last_step(subject: Subject) -> None:
    subject.require_size(tokens=2)
    size = subject.size("block_size", 3)
    for begun in (subject.size("window", 7) + size, subject.size("window", 7) + 2 * size + 1):
        for back in range(1, size + 3):
            fixture = GroupedFixture(subject, begun + 2 * size + 4)
            sequence = fixture.create(prompt(begun + size + 2))
            fixture.step_to(sequence, begun)
            appended = fixture.step(sequence, size + 2)
            if back > appended:
                continue
            fixture.truncate(sequence, begun + appended - back)
            when = f"after truncate removed {back} of the {appended} tokens of the last step"
            fixture.check_tables(sequence, when)
            fixture.check_free_blocks(when)
            fixture.check_tokens(sequence, f"a sequence {when}")
            state = fixture.sequences[sequence]
            state.tokens = [*state.tokens[: state.length], *prompt(size + 2, 5)]
            fixture.step(sequence, 1)
            fixture.check_tokens(sequence, f"a sequence {when}, and a step of one token")
            fixture.check_attention(sequence, 1, f"a token appended {when}")


@check("GROUP-07ab", "grouped")
def truncate_below_freed_positions_raises(subject: Subject) -> None:
    length = reach(subject)
    fixture, sequence = with_sequence(subject, length)
    if fixture.groups == 1:
        raise NotOffered("a windowed group, where its limits say num_groups 1")
    fixture.step_to(sequence, length)
    least = (
        fixture.sequences[sequence].freed[0] * fixture.size + fixture.window - 1
    )  # its window begins with the first stored block
    before = fixture.tables(sequence)
    for short in dict.fromkeys((least - 1, fixture.size, 1)):
        with raises("NotTruncatable"):
            fixture.cache.truncate(sequence, short)
        assert_equal(
            fixture.tables(sequence),
            before,
            f"block tables after truncate to {short} raised NotTruncatable",
        )
        fixture.check_tokens(sequence, f"a sequence after truncate to {short} raised NotTruncatable")
    if least <= length:
        fixture.truncate(sequence, least)
        fixture.check_tables(sequence, f"after truncate to {least}, the shortest possible length")
        fixture.check_tokens(sequence, f"a sequence after truncate to {least}, the shortest possible length")
        fixture.check_attention(sequence, 0, "0 queries")
    fixture.truncate(sequence, 0)
    fixture.check_free_blocks("after truncate to 0")
    fixture.check_tables(sequence, "after truncate to 0")
    fixture.step_to(sequence, length)
    fixture.check_tokens(sequence, "a sequence after truncate to 0 and appends of its tokens")


@check("GROUP-07bc", "grouped")
def truncate_frees_blocks_of_every_group(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    fixture, sequence = with_sequence(subject, 4 * size, window=5 * size)
    if fixture.window < 4 * size:
        raise NotOffered(f"a window of {4 * size}, where its limits say {subject.limits.limit('grouped', 'window')}")
    fixture.step_to(sequence, 4 * size, by=4)
    for length in (3 * size + 1, 3 * size, size + 1, 1, 0):
        fixture.truncate(sequence, length)
        fixture.check_free_blocks(f"after truncate to {length} tokens")
        fixture.check_tables(sequence, f"after truncate to {length} tokens")
        fixture.check_tokens(sequence, f"a sequence after truncate to {length} tokens")


# Checks of GROUP-08: the grouped cache in formats with scales.


def in_formats(subject: Subject, tokens: int, sequences: int = 1, **sizes: int) -> Iterator[tuple[str, GroupedFixture]]:
    """Yields one supported format of each kind (one scale per head, one per token, one per group), and a cache in it."""
    for name in of_each_kind(subject, PLACES):
        yield name, GroupedFixture(subject, tokens, sequences, dtype=name, head_dim=dim_of(name, 1), **sizes)


@check("GROUP-08a", "grouped")
def tokens_read_back_as_their_format_defines(subject: Subject) -> None:
    length = reach(subject)
    for name, fixture in in_formats(subject, length):
        for which in (1, 2):  # the second reuses the blocks of the first
            sequence = fixture.begin(prompt(length, which))
            fixture.step_to(sequence, length, by=fixture.size + 1)
            fixture.check_tokens(sequence, f"a sequence of {length} tokens in {name}")
            fixture.drop(sequence)


@check("GROUP-08a", "grouped")
def hit_and_fork_have_the_scales_of_their_blocks(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for name, fixture in in_formats(subject, 3 * subject.size("block_size", 3), 2, num_layers=2):
        tokens = [*prompt(fixture.size + 1), *prompt(fixture.size, 2)]
        first = fixture.begin(tokens)
        fixture.step_to(first, fixture.size + 1, commit=True)
        second = fixture.begin(tokens)
        fixture.check_tokens(second, f"the hit of a sequence in {name}")
        fixture.drop(second)
        child = fixture.fork(first, [*tokens[: fixture.size + 1], *prompt(fixture.size, 3)])
        fixture.step(child, 1)
        fixture.step(first, 1)
        for sequence in (child, first):
            fixture.check_tokens(sequence, f"a sequence after fork and a step of each sharer, in {name}")


@check("GROUP-08b", "grouped")
def attend_uses_the_values_that_read_returns(subject: Subject) -> None:
    length = reach(subject)
    for name, fixture in in_formats(subject, length):
        sequence, query, scale = fixture.begin(prompt(length)), fixture.queries(1), 2.5 / fixture.row[1]
        fixture.step_to(sequence, length, by=fixture.size + 1)
        for layer in fixture.layers:
            first = max(0, length - fixture.window) if fixture.is_windowed(layer) else 0
            keys, values = fixture.cache.read(sequence, layer, list(range(first, length)))
            want, bound = expected_attention(subject, query, keys, values, scale=scale, rotated=name in ROTATED_FORMATS)
            assert_within(
                fixture.cache.attend(sequence, layer, query, scale), want, bound, f"attention over {name} tokens, layer {layer}"
            )


@check("GROUP-08c", "grouped")
def step_of_unstorable_tokens_changes_nothing(subject: Subject) -> None:
    for name, fixture in in_formats(subject, reach(subject), num_layers=2):
        sequence = fixture.begin(prompt(reach(subject)))
        fixture.step_to(sequence, fixture.window, by=fixture.size)
        state = fixture.sequences[sequence]
        while fixture.unseen(state.length) == state.freed and state.length < reach(subject) - 1:
            fixture.step(sequence, 1)  # until the next step frees blocks
        free = fixture.cache.num_free_blocks
        for rows in _not_storable(subject, (len(fixture.layers), 1, *fixture.row), name):
            with raises("NonFinite"):
                fixture.cache.step(sequence, rows, rows)
            assert_equal(fixture.cache.num_free_blocks, free, f"free blocks after a step of tokens that {name} cannot store")
            fixture.check_tokens(sequence, f"a sequence after a step of tokens that {name} cannot store")


def _not_storable(subject: Subject, shape: tuple[int, ...], format: str) -> Iterator[NDArray]:
    """Yields rows with a NaN in the last layer, and finite rows that would read back infinite, if the format has such rows."""
    rows = np.zeros(shape, np.float32)
    rows[-1, ..., -1] = np.nan
    yield rows
    large = np.full(shape, MAX.get(subject.dtype, LARGEST), np.float32)
    large[..., ::2] *= -1
    decided = subject.level == "exact" or not is_rounding_decisive(format)
    if decided and not np.isfinite(expected_tokens(large[0], format).values).all():
        yield large


# Checks of LAW-18: windows of hundreds of tokens and blocks of 16, in sequences of thousands of tokens.

LONG = 4200  # tokens; not a multiple of the block size
PREFILL = 700  # tokens of a step
CALLS = 400  # steps of one token


def production_cache(subject: Subject, tokens: int, **sizes: Any) -> GroupedFixture:
    wanted = {"block_size": 16, "num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "window": 512} | sizes
    return GroupedFixture(subject, tokens, **wanted)


def read_edges(fixture: GroupedFixture, sequence: int, what: str) -> None:
    """Reads, in every layer, the first and last stored positions and positions at block boundaries."""
    state = fixture.sequences[sequence]
    for layer in fixture.layers:
        first = state.freed[layer % fixture.groups] * fixture.size
        ends = {
            first,
            first + 1,
            first + fixture.size,
            (first + state.length) // 2,
            state.length - fixture.size,
            state.length - 1,
        }
        positions = sorted(position for position in ends if first <= position < state.length)
        want = content_pair(streams(state.tokens, state.salt)[positions], layer, positions, *fixture.row)
        assert_pair(fixture.cache.read(sequence, layer, positions), want, f"{what}, layer {layer}, positions {positions}")


def check_long_sequence(subject: Subject, fixture: GroupedFixture, length: int) -> None:
    """Appends a prompt in long steps, then token by token. Counts blocks after each step, and reads rows where blocks end."""
    sequence, decoded = fixture.create(prompt(length)), min(CALLS, length // 4)
    while fixture.sequences[sequence].length < length - decoded:
        fixture.step(sequence, min(PREFILL, length - decoded - fixture.sequences[sequence].length))
        fixture.check_free_blocks(f"after a long step to length {fixture.sequences[sequence].length}")
    fixture.check_tokens(sequence, "a long prompt")
    fixture.check_freed_positions(sequence)
    while fixture.sequences[sequence].length < length:
        fixture.step(sequence, 1)
        when = f"after a step of one token to length {fixture.sequences[sequence].length}"
        fixture.check_free_blocks(when)
        if fixture.sequences[sequence].length % fixture.size in (0, 1, fixture.size - 1):
            read_edges(fixture, sequence, f"a sequence {when}")
    fixture.check_tables(sequence, f"after steps of {length} tokens in total")
    fixture.check_tokens(sequence, f"a sequence of {length} tokens")
    fixture.check_freed_positions(sequence)
    fixture.check_attention(sequence, 1, f"a sequence of {length} tokens")
    fixture.drop(sequence)
    fixture.check_free_blocks("after drop of all sequences")


@check("LAW-18", "grouped")
def window_of_hundreds_passes_thousands_of_tokens(subject: Subject) -> None:
    length = affordable_tokens(subject, LONG)
    check_long_sequence(subject, production_cache(subject, length), length)


@check("LAW-18", "grouped")
def long_prompt_reads_the_same_after_each_hit(subject: Subject) -> None:
    """The prompt is computed once, and then found three times. Other prompts fill the pool in between."""
    length = affordable_tokens(subject, LONG // 2, 4)
    fixture = production_cache(subject, length + length // 4)
    tokens = prompt(length)
    whole = tokens[: length // fixture.size * fixture.size]
    for time in range(4):
        sequence = fixture.begin([*tokens, 70 + time])
        fixture.check_tokens(sequence, f"the hit of call {time + 1} of begin with a long prompt")
        fixture.step_to(sequence, length + 1, by=PREFILL // 2, commit=True)
        fixture.check_tokens(sequence, f"a long prompt after call {time + 1} of begin with it")
        fixture.check_attention(sequence, 1, f"a long prompt after call {time + 1} of begin with it")
        fixture.drop(sequence)
        hit = fixture.match(whole)
        assert_true(
            hit < len(whole), f"match of a prompt of full blocks only, in round {time + 1}", f"less than {len(whole)}", hit
        )
        fixture.drop(fixture.serve(prompt(length // 8, 10 + time), by=PREFILL))
    assert_equal(fixture.cache.num_free_blocks, fixture.total, "free blocks after drop of all sequences")


@check("LAW-18", "grouped")
def pool_of_thousands_of_blocks_stores_every_row(subject: Subject) -> None:
    """Blocks with any id store their rows: many sequences are appended in turn, then all of them are read."""
    fixture = production_cache(subject, 16 * 1100, num_kv_heads=1, head_dim=8)
    each = fixture.window + 3 * fixture.size
    count = min(
        fixture.total // (fixture.groups * -(-each // fixture.size)),
        subject.size("sequences", 24),
        affordable_tokens(subject, 30, each),
    )
    if count < 1:
        raise NotOffered(f"room for a sequence of {each} tokens")
    sequences = [fixture.create(prompt(each, which + 1)) for which in range(count)]
    for sequence in sequences:
        fixture.step_to(sequence, each, by=PREFILL)
    for sequence in sequences:
        fixture.check_tokens(sequence, f"sequence {sequence} of {count} in a pool of {fixture.total} blocks")
        fixture.step_to(sequence, each, by=1)
    fixture.check_free_blocks(f"with {count} sequences of {each} tokens")
    for sequence in sequences:
        fixture.drop(sequence)
    fixture.check_free_blocks("after drop of all sequences")


@check("LAW-18", "grouped", real=True)
def windows_of_six_groups_pass_thousands_of_tokens(subject: Subject) -> None:
    """Six groups and a window of 1024, as in a model in which every sixth layer sees every token."""
    length = affordable_tokens(subject, LONG)
    check_long_sequence(
        subject, production_cache(subject, length, num_layers=6, num_groups=6, window=1024, num_kv_heads=2), length
    )
