"""Checks of GROUP-01 to 04 and 07: the blocks of each group, and the tokens that its layers read."""

from kvref_conformance.checking.expect import equal, pair, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.grouped.grown import Grown, groups_of
from kvref_conformance.families.prefix.served import prompt
from kvref_conformance.outcome import NotOffered

PIECES = (1, 2, 5, 1, 3, 1, 1, 7, 1, 4)  # tokens per step, used in turn


def reach(subject: Subject, blocks: int = 3, window: int = 7) -> int:
    """Returns a length at which the windows have passed `blocks` blocks."""
    return int(subject.size("window", window) + blocks * subject.size("block_size", 3) + 1)


def one(subject: Subject, length: int, **sizes: int) -> tuple[Grown, int]:
    """Returns a cache with room for `length` tokens in every group, and a new sequence in it."""
    grown = Grown(subject, length, **sizes)
    return grown, grown.create(prompt(length))


@check("GROUP-01a", "grouped")
def no_block_is_listed_twice(subject: Subject) -> None:
    subject.need(sequences=2)
    length = reach(subject)
    grown = Grown(subject, length, sequences=2)
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
        equal(
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
        equal(got, want, f"block table of layer {layer}, which is in the same group as layer {layer - grown.groups}")


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
    equal([blocks_of(grown.cache, sequence, layer) for layer in grown.layers], before, "block tables after a step of 0 tokens")
    grown.counted("after a step of 0 tokens")


@check("GROUP-03a", "grouped")
def a_step_takes_blocks_for_all_groups_or_none(subject: Subject) -> None:
    """Tests pools in which a step lacks 1, 2, ... blocks, so that the order in which groups allocate does not matter."""
    size, tried = subject.size("block_size", 3), 0
    for missing in range(1, groups_of(subject) + 1):
        groups = groups_of(subject)
        grown = Grown(subject, num_blocks=3 * groups - missing)
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
        equal([blocks_of(grown.cache, sequence, layer) for layer in grown.layers], before, f"block tables {when}")
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
        grown = Grown(subject, num_blocks=groups * (window // size + 2) + spare)
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
            pair(grown.cache.read(sequence, layer, asked), want, f"layer {layer}, positions {asked}")


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
            grown = Grown(subject, begun + 2 * size + 4)
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
        equal(
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
