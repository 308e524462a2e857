"""Checks of SHARE: sequences that share blocks."""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import PagedFixture, offered, room, small_session, to_be_filled
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_true,
    default_scale,
    may_raise,
    normal_rows,
    raises,
)
from kvref_conformance.testlib.registry import check


def nearly_full_session(subject: Subject) -> tuple[PagedFixture, int]:
    """Returns a cache, and a sequence with all its blocks but one entry, of which the last is partly filled."""
    session = PagedFixture(subject, lambda: to_be_filled(subject, 3, block_size=2))
    need_partly_filled_blocks(session)
    return session, session.create((room(session.cache) - 1) * session.size - 1)


def need_partly_filled_blocks(session: PagedFixture) -> None:
    if session.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")


@check("SHARE-03bc", "paged")
def fork_reads_as_its_parent(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for lengths in ((1,), (size,), (2 * size + 1, 2 * size), (2 * size, size + 1)):
        session = small_session(subject)
        parent = session.create(*lengths)
        used = session.used()
        partly = [length // size for layer in session.layers if (length := session.length(parent, layer)) % size]
        child = session.cache.fork(parent)
        for layer in session.layers:
            assert_pair(session.cache.gather(child, layer), session.cache.gather(parent, layer), f"layer {layer} of the fork")
        session.look()
        most, allocated = len(partly) if session.unit == 1 else len({*partly}) * session.unit, session.used() - used
        assert_true(0 <= allocated <= most, f"blocks that fork allocated, with {lengths} tokens", f"at most {most}", allocated)
        session.count_blocks()


@check("SHARE-03a", "paged")
def fork_returns_an_id_that_was_never_used(subject: Subject) -> None:
    session = small_session(subject)
    used = {parent := session.create(1)}
    for _ in range(4):
        child = session.cache.fork(parent)
        assert_true(child not in used, "the id of a fork", f"an id not in {used}", child)
        used.add(child)
        session.cache.drop(child)
        with raises("SequenceNotFound"):
            session.cache.gather(child, 0)
    session.look()


@check("SHARE-03d", "paged")
def fork_in_a_full_pool_raises_or_copies_the_last_block(subject: Subject) -> None:
    subject.require_size(sequences=2)
    session = PagedFixture(subject, lambda: to_be_filled(subject, 3))
    parent = session.create(room(session.cache) * session.size - 1)
    before, child = session.blocks(), None
    with may_raise("OutOfBlocks"):
        child = session.cache.fork(parent)
    session.look()
    if child is None:
        assert_equal(session.blocks(), before, "blocks after fork raised OutOfBlocks")


def operations_on_sharers(session: PagedFixture, parent: int, child: int) -> list[Callable[[], Any]]:
    """Returns operations on one of two sharers that the other must not observe."""
    length, size, last = session.length(parent, 0), session.size, session.layers[-1]
    return [
        lambda: session.write(child, 0, length, 1),
        lambda: session.write(parent, 0, length, 1),
        lambda: session.write(child, last, 0, size + 1),
        lambda: session.write(parent, last, length - 1, 1),
        lambda: session.append_step([child, parent]),
        lambda: session.cache.truncate(child, size + 1),
        lambda: session.write(child, 0, size + 1, 2),
        lambda: session.cache.truncate(parent, size - 1),
        lambda: session.cache.remove(child, 1, 2),
        lambda: session.cache.truncate(parent, 0),
        lambda: session.write(parent, 0, 0, size + 1),
        lambda: session.cache.drop(child),
    ]


@check("SHARE-04", "paged")
def operations_in_turn_on_one_of_three_sharers_change_no_other(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for more in (0, 1):  # the last block is full, then partly filled
        session = small_session(subject, 18)
        parent = session.create(2 * session.size + more)
        child, _ = session.cache.fork(parent), session.cache.fork(parent)
        for operation in operations_on_sharers(session, parent, child):
            if offered(operation):
                session.look()
        session.count_blocks()


@check("SHARE-04", "paged")
def any_operation_on_one_of_two_sharers_changes_no_other(subject: Subject) -> None:
    for number in range(12):
        session = small_session(subject)
        parent = session.create(2 * session.size + 1)
        operation = operations_on_sharers(session, parent, session.cache.fork(parent))[number]
        if offered(operation):
            session.look()
            session.count_blocks()


@check("SHARE-05b", "paged")
def slot_mapping_block_tables_and_attend_use_the_copy(subject: Subject) -> None:
    for writer in (0, 1):
        session = small_session(subject)
        parent = session.create(2 * session.size + 1)
        family = [parent, session.cache.fork(parent)]
        locate_tokens(session)  # an implementation could remember the places of the tokens
        session.write_in_each_layer(family[writer], 1, 2 * session.size)
        if not locate_tokens(session):
            raise NotOffered("slot_mapping, block_tables or attend")


def locate_tokens(session: PagedFixture) -> bool:
    """Calls the operations that find tokens by the block tables. Returns whether one is provided."""
    provided, size = False, session.subject.size("group_size", 1)
    offered(partial(session.look, "block_table"))
    query = normal_rows(session.subject, 1, session.row[0] * size, session.row[1])
    for sequence in session.model.sequences:
        for layer in session.layers:
            calls: list[tuple[str, tuple[Any, ...]]] = [
                ("slot_mapping", (sequence, layer, 0, session.length(sequence, layer))), ("block_tables", ([sequence], layer)),
                ("attend", (sequence, layer, query, default_scale(session.subject))),
            ]  # fmt: skip
            for name, args in calls:
                provided |= offered(partial(getattr(session.cache, name), *args))
    return provided


@check("SHARE-05a", "paged")
def write_to_a_shared_block_copies_every_filled_slot(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for writer in (0, 1):
        for position in sorted({0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1}):
            session = small_session(subject)
            parent = session.create(2 * size + 1)
            family = [parent, session.cache.fork(parent)]
            session.write(family[writer], session.layers[-1], position, 1)
            session.look()


@check("SHARE-05cd", "paged")
def write_copies_only_shared_blocks_that_it_changes(subject: Subject) -> None:
    session = small_session(subject, 18, sequences=3)
    size, layer = session.size, session.layers[-1]
    parent = session.create(3 * size)
    child, other = session.cache.fork(parent), session.cache.fork(parent)
    for start, count, writer, copied in (
        (size, 1, child, 1), (size + 1, size - 1, child, 0), (size, 1, parent, 1), (size, 1, other, 0), (0, 2 * size, other, 1),
        (0, size + 1, child, 1), (0, 2 * size, parent, 0), (2 * size - 1, 2, child, 1), (2 * size, size + 1, parent, 2),
    ):  # fmt: skip
        used = session.used()
        session.write(writer, layer, start, count)
        allocated = copied * session.unit + (start + count > 3 * size) * (len(session.layers) - session.unit)
        assert_equal(session.used() - used, allocated, f"blocks that a write to [{start}, {start + count}) allocated")
        session.look()


@check("SHARE-05ac", "paged")
def write_to_a_shared_block_changes_no_other_table_entry(subject: Subject) -> None:
    session = small_session(subject)
    parent = session.create(3 * session.size)
    child = session.cache.fork(parent)
    before = session.tables()
    session.write(child, 0, session.size, 1)
    after = session.tables()
    assert_equal(after[parent], before[parent], "tables of the parent after a write to the child")
    copy = after[child][0][1]
    assert_true(copy not in after[parent][0], "the block that the child wrote to", f"a block not in {after[parent][0]}", copy)
    for layer in session.layers:
        copied = layer == 0 or session.unit > 1
        got, want = ([table[0], *table[1 + copied :]] for table in (after[child][layer], before[child][layer]))
        assert_equal(got, want, f"table of layer {layer} of the child, except for the block of the write")


@check("SHARE-05d", "paged")
def append_step_of_all_sharers_copies_for_all_but_one(subject: Subject) -> None:
    for writers in ((1, 2), (0, 1, 2), (2,)):
        session = small_session(subject, 12, sequences=3)
        need_partly_filled_blocks(session)
        parent = session.create(session.size + 1)
        family = [parent, session.cache.fork(parent), session.cache.fork(parent)]
        session.append_step([family[each] for each in writers])
        session.look()
        owners = min(3, len(writers) + 1)
        counts = [(1 + each) * len(session.layers) for each in (owners, 3)]  # 3 if each fork has a copy
        what = f"allocated blocks after a step of sharers {writers} of three"
        assert_true(session.used() in counts, what, " or ".join(map(str, counts)), session.used())
        session.count_blocks()


@check("SHARE-05d", "paged")
def append_step_needs_no_room_for_the_last_sharer(subject: Subject) -> None:
    subject.require_size(sequences=2)
    session, parent = nearly_full_session(subject)
    session.append_step([parent, session.cache.fork(parent)])
    session.look()


@check("SHARE-05d", "paged")
def write_after_the_other_sharer_was_dropped_is_in_place(subject: Subject) -> None:
    session = small_session(subject)
    parent = session.create(2 * session.size + 1)
    session.cache.drop(session.cache.fork(parent))
    before = session.blocks()
    session.write_in_each_layer(parent, session.size - 1, 2)
    assert_equal(session.blocks(), before, "blocks after a write to a sequence whose fork was dropped")
    session.look()


# Checks of SHARE: sharers are created and dropped, and forks are forked.


@check("SHARE-06ab", "paged")
def drop_of_sharers_in_any_order_frees_only_unshared_blocks(subject: Subject) -> None:
    for order in permutations(range(3)):
        session = small_session(subject, 18, sequences=3)
        parent = session.create(2 * session.size + 1)
        child = session.cache.fork(parent)
        family = [parent, child, session.cache.fork(child)]
        session.write(child, 0, 2 * session.size + 1, 1)
        for number in order:
            session.cache.drop(family[number])
            session.look()
            session.count_blocks()
        assert_equal(session.used(), 0, "allocated blocks after drop of all sequences")


@check("SHARE-07", "paged")
def write_without_room_for_its_copies_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for one_short in (False, True):
        session = PagedFixture(subject, partial(to_be_filled, subject, 3, one_short=one_short))
        entries, last = room(session.cache), session.layers[-1]
        parent = session.create(entries * session.size)
        child, free = session.cache.fork(parent), session.cache.config["num_blocks"] - session.used()
        many = free // session.unit + 1  # one block more of a layer than can be copied
        if many > entries:
            raise NotOffered(f"a write that copies {many} blocks at once")
        before = session.blocks()
        for writer, first in ((child, 0), (parent, entries - many)):
            with raises("OutOfBlocks"):
                session.write(writer, last, first * session.size, many * session.size)
            session.look()
            assert_equal(session.blocks(), before, "blocks after a write without room for its copies")
        session.cache.drop(parent)
        session.write(child, last, 0, many * session.size)
        session.look()


@check("SHARE-07", "paged")
def write_with_room_for_new_blocks_but_not_for_a_copy_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=2, tokens=2)
    session, parent = nearly_full_session(subject)
    length = session.length(parent, 0)
    with may_raise("OutOfBlocks"):  # if fork copies the last block
        child = session.cache.fork(parent)
        before = session.blocks()
        with raises("OutOfBlocks"):
            session.write(child, session.layers[-1], length, 2)  # the second token begins a block
        session.look()
        assert_equal(session.blocks(), before, "blocks after a write with room for its new blocks, but not for its copy")


@check("SHARE-07", "paged")
def append_step_without_room_for_its_copies_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=3)
    session, parent = nearly_full_session(subject)
    family = [parent]
    with may_raise("OutOfBlocks"):  # if fork copies the last block
        family += [session.cache.fork(parent), session.cache.fork(parent)]
    if len(family) < 3:
        raise NotOffered("forks that share the last block, in a nearly full pool")
    before = session.blocks()
    with raises("OutOfBlocks"):
        session.append_step(family)  # two copies per layer, with room for one
    session.look()
    assert_equal(session.blocks(), before, "blocks after a step without room for its copies")
    session.append_step(family[1:2])
    session.look()


@check("SHARE-08a", "paged")
def fork_of_a_fork_shares_no_later_writes(subject: Subject) -> None:
    count = min(5, subject.size("sequences", 5))
    session = small_session(subject, 6 * count)
    family = [session.create(session.size + 1)]
    for generation in range(1, count):
        session.write(family[-1], 0, session.size + generation, 1)
        family.append(session.cache.fork(family[-1]))
        session.look()
    for number, sequence in enumerate(family):
        session.write(sequence, 0, session.length(sequence, 0), 2)
        session.write(sequence, 0, number % session.size, 1)
        session.look()
    session.drop_all()


@check("SHARE-08a", "paged")
def fork_of_an_empty_sequence_shares_no_later_writes(subject: Subject) -> None:
    session = small_session(subject)
    parent = session.create(0)
    child = session.cache.fork(parent)
    session.look()
    for sequence in (child, parent):
        session.write(sequence, 0, 0, session.size + 1)
        session.look()
    session.drop_all()


@check("SHARE-08a", "paged")
def fork_of_reserved_blocks_shares_no_later_writes(subject: Subject) -> None:
    session = small_session(subject)
    parent = session.create(1)
    session.cache.ensure_capacity(parent, 3 * session.size)
    child = session.cache.fork(parent)
    for sequence in (parent, child):
        session.write(sequence, 0, 1, 3 * session.size - 1)
        session.look()
    session.cache.drop(child)
    session.look()
    session.drop_all()


@check("SHARE-08b", "paged")
def fork_of_an_unknown_sequence_raises(subject: Subject) -> None:
    session = small_session(subject)
    dropped, live = session.create(1), session.create(2)
    session.cache.drop(dropped)
    for unknown in subject.integers(dropped, max(dropped, live) + 1, -1):
        with raises("SequenceNotFound"):
            session.cache.fork(unknown)
    session.look()


@check("SHARE-09", "paged")
def fork_of_a_fork_reads_right_after_drops_and_reuse_of_blocks(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for more in (0, 1):
        session = small_session(subject, 18)
        parent = session.create(2 * session.size + more)
        child = session.cache.fork(parent)
        session.write(child, 0, session.length(child, 0) - 1, 2)
        session.cache.drop(parent)
        other = session.create(2 * session.size + 1)  # in blocks that the parent had
        grandchild = session.cache.fork(child)
        session.cache.drop(child)
        session.look()
        offered(partial(session.cache.truncate, grandchild, session.size + 1))
        session.cache.drop(other)
        session.create(3 * session.size)
        session.look()
        session.count_blocks()
