"""Checks of SHARE: sequences that share blocks."""

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import offered, room, to_be_filled, with_room
from kvref_conformance.families.paged.fixture import PagedFixture
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, may_raise, raises, true
from kvref_conformance.testlib.production_sizes import affordable
from kvref_conformance.testlib.registry import check


def known(subject: Subject, entries: int = 12, sequences: int = 2, **sizes: Any) -> PagedFixture:
    subject.need(sequences=sequences)
    return PagedFixture(subject, with_room(subject, entries, **sizes))


@check("SHARE-03bc", "paged")
def a_fork_reads_as_its_parent(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for lengths in ((1,), (size,), (2 * size + 1, 2 * size), (2 * size, size + 1)):
        cache = known(subject)
        parent = cache.create(*lengths)
        cache.look("before fork")
        used = cache.used()
        cache.fork(parent)
        cache.look("after a fork")
        most, taken = cache.partly(parent), cache.used() - used
        true(0 <= taken <= most, f"blocks that fork allocated, with {lengths} tokens", f"at most {most}", taken)
        cache.adds_up("after a fork")


@check("SHARE-03a", "paged")
def a_forks_id_was_never_used(subject: Subject) -> None:
    cache, seen = known(subject), set[int]()
    parent = cache.create(1)
    seen.add(parent)
    for _ in range(4):
        child = cache.fork(parent)
        true(child not in seen, "the id of a fork", f"an id not in {seen}", child)
        seen.add(child)
        cache.drop(child)
        with raises("SequenceNotFound"):
            cache.cache.gather(child, 0)
    cache.look("after drop of its forks")


@check("SHARE-03d", "paged")
def a_fork_needs_room_for_its_last_blocks_at_most(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = PagedFixture(subject, to_be_filled(subject, 3))
    parent = cache.create(room(cache.cache) * cache.size - 1)
    before = cache.seen()
    with may_raise("OutOfBlocks"):
        cache.fork(parent)
    cache.look("after a fork in a full pool")
    if len(cache.tokens) == 1:
        assert_equal(cache.seen(), before, "blocks after fork raised OutOfBlocks")


def acts(cache: PagedFixture, parent: int, child: int) -> dict[str, Callable[[], Any]]:
    """Returns operations on one of two sharers that the other must not observe."""
    length, layers = cache.length(parent, 0), cache.layers
    return {
        "the child wrote a token": lambda: cache.write(child, 0, length, 1),
        "the parent wrote a token": lambda: cache.write(parent, 0, length, 1),
        "the child overwrote its first tokens": lambda: cache.write(child, layers[-1], 0, cache.size + 1),
        "the parent overwrote its last token": lambda: cache.write(parent, layers[-1], length - 1, 1),
        "both appended a step": lambda: cache.step([child, parent]),
        "the child was truncated": lambda: cache.truncate(child, cache.size + 1),
        "the child wrote after the truncation": lambda: cache.write(child, 0, cache.size + 1, 2),
        "the parent was truncated": lambda: cache.truncate(parent, cache.size - 1),
        "the second token of the child was removed": lambda: cache.remove(child, 1, 2),
        "the parent was truncated to 0": lambda: cache.truncate(parent, 0),
        "the parent wrote from position 0": lambda: cache.write(parent, 0, 0, cache.size + 1),
        "the child was dropped": lambda: cache.drop(child),
    }


@check("SHARE-04", "paged")
def what_one_sharer_does_no_other_sees(subject: Subject) -> None:
    subject.need(sequences=3)
    for more in (0, 1):  # the last block is full, then partly filled
        cache = known(subject, 18)
        parent = cache.create(2 * cache.size + more)
        child, _ = cache.fork(parent), cache.fork(parent)
        for when, act in acts(cache, parent, child).items():
            if offered(act):
                cache.look(f"after {when}")
        cache.adds_up("at the end")


@check("SHARE-04", "paged")
def what_one_of_two_does_the_other_does_not_see(subject: Subject) -> None:
    for number in range(len(acts(cache := known(subject), (one := cache.create(1)), one))):
        cache = known(subject)
        parent = cache.create(2 * cache.size + 1)
        child = cache.fork(parent)
        when, act = list(acts(cache, parent, child).items())[number]
        if offered(act):
            cache.look(f"after {when}")
            cache.adds_up(f"after {when}")


@check("SHARE-05b", "paged")
def a_copy_is_where_everything_looks(subject: Subject) -> None:
    """Slots for a kernel, padded tables and attention must use the copy, not the block where the token was before."""
    for writer in (0, 1):
        cache = known(subject)
        sequences = [parent := cache.create(2 * cache.size + 1), cache.fork(parent)]
        ways = cache.ways()
        if not ways:
            raise NotOffered("slot_mapping, block_tables or attend")
        for layer in cache.layers:
            cache.write(sequences[writer], layer, 1, 2 * cache.size)
        for way in ways:
            cache.look_by(way, f"after {('the parent', 'a fork')[writer]} overwrote its tokens")


@check("SHARE-05a", "paged")
def a_copy_holds_every_filled_slot(subject: Subject) -> None:
    for parents in (False, True):
        for position in range(2 * (size := subject.size("block_size", 3)) + 2):
            if position not in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1):
                continue
            cache = known(subject)
            parent = cache.create(2 * size + 1)
            child = cache.fork(parent)
            for layer in cache.layers[-1:]:
                cache.write(parent if parents else child, layer, position, 1)
            cache.look(f"after the {'parent' if parents else 'child'} wrote to position {position}")


@check("SHARE-05cd", "paged")
def only_blocks_written_to_are_copied(subject: Subject) -> None:
    cache = known(subject, 18, sequences=3)
    size, layer = cache.size, cache.layers[-1]
    parent = cache.create(3 * size)
    child, other = cache.fork(parent), cache.fork(parent)
    for start, count, writer, copied in (
        (size, 1, child, 1), (size + 1, size - 1, child, 0), (size, 1, parent, 1), (size, 1, other, 0), (0, 2 * size, other, 1),
        (0, size + 1, child, 1), (0, 2 * size, parent, 0), (2 * size - 1, 2, child, 1), (2 * size, size + 1, parent, 2),
    ):  # fmt: skip
        used = cache.used()
        cache.write(writer, layer, start, count)
        what = f"blocks that a write to [{start}, {start + count}) allocated"
        assert_equal(
            cache.used() - used, copied * cache.unit + (start + count > 3 * size) * (len(cache.layers) - cache.unit), what
        )
        cache.look(f"after a write to [{start}, {start + count})")


@check("SHARE-05ac", "paged")
def the_other_blocks_stay_where_they_are(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(3 * cache.size)
    child = cache.fork(parent)
    before = cache.tables()
    cache.write(child, 0, cache.size, 1)
    after = cache.tables()
    assert_equal(after[parent], before[parent], "tables of the parent after a write to the child")
    own = after[child][0][1]
    true(own not in after[parent][0], "the block that the child wrote to", f"a block not in {after[parent][0]}", own)
    layers = len(cache.layers) if cache.unit > 1 else 1
    kept = [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(after[child])]
    assert_equal(kept, [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(before[child])],
          "tables of the child, except for the block of the write")  # fmt: skip


@check("SHARE-05d", "paged")
def of_those_who_write_at_once_all_but_one_get_a_copy(subject: Subject) -> None:
    for writers in ((1, 2), (0, 1, 2), (2,)):
        cache = known(subject, 12, sequences=3)
        parent = cache.create(cache.size + 1)
        family = [parent, cache.fork(parent), cache.fork(parent)]
        if cache.size == 1:
            raise NotOffered("a partly filled block, where its limits say block_size 1")
        cache.step([family[each] for each in writers])
        cache.look(f"after a step of sharers {writers} of three")
        owners = min(3, len(writers) + 1)
        counts = [(1 + each) * len(cache.layers) for each in (owners, 3)]  # 3 if each fork has a copy
        true(
            cache.used() in counts,
            f"allocated blocks after a step of sharers {writers} of three",
            " or ".join(map(str, counts)),
            cache.used(),
        )
        cache.adds_up(f"after a step of sharers {writers} of three")


@check("SHARE-05d", "paged")
def the_last_of_those_who_write_at_once_needs_no_room(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = PagedFixture(subject, to_be_filled(subject, 3, block_size=2))
    if cache.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")
    parent = cache.create((room(cache.cache) - 1) * cache.size - 1)
    cache.step([parent, cache.fork(parent)])
    cache.look("after both sharers wrote to a block, with room for one copy")


@check("SHARE-05d", "paged")
def who_holds_a_block_alone_writes_in_place(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(2 * cache.size + 1)
    cache.drop(cache.fork(parent))
    before = cache.seen()
    for layer in cache.layers:
        cache.write(parent, layer, cache.size - 1, 2)
    assert_equal(cache.seen(), before, "blocks after a write to a sequence whose fork was dropped")
    cache.look("after drop of its fork")


# Checks of LAW-18: a long prompt with hundreds of forks.


@check("LAW-18", "paged")
def hundreds_go_on_from_one_prompt(subject: Subject) -> None:
    count = subject.size("sequences", 300)
    subject.need(sequences=2)
    cache = PagedFixture(subject, with_room(subject, 400, block_size=16, num_layers=1))
    parent = cache.create(affordable(subject, 65 * cache.size + 5, 2))
    family = [parent, *(cache.fork(parent) for _ in range(min(count, 300) - 1))]
    for sequence in family[::50]:
        cache.write(sequence, 0, cache.length(sequence, 0), 2)
    cache.write(family[-1], 0, cache.size - 1, 2)
    cache.look("after hundreds of forks and writes to some of them")
    cache.adds_up("after hundreds of forks")
    for sequence in family[::2]:
        cache.drop(sequence)
    cache.look("after drop of every second fork")
    for sequence in family[1::2]:
        cache.drop(sequence)
    assert_equal(cache.used(), 0, "allocated blocks after drop of all sequences")


# Checks of SHARE: sharers are created and dropped, and forks are forked.


@check("SHARE-06ab", "paged")
def sharers_go_in_any_order(subject: Subject) -> None:
    for order in permutations(range(3)):
        cache = known(subject, 18, sequences=3)
        parent = cache.create(2 * cache.size + 1)
        family = [parent, child := cache.fork(parent), cache.fork(child)]
        cache.write(child, 0, 2 * cache.size + 1, 1)
        for which in order:
            cache.drop(family[which])
            cache.look(f"after drop of {which} in the order {order}")
            cache.adds_up(f"after drop of {which} in the order {order}")
        assert_equal(cache.used(), 0, f"allocated blocks after drops in the order {order}")


@check("SHARE-07", "paged")
def a_copy_that_does_not_fit_changes_nothing(subject: Subject) -> None:
    for spare in (False, True):
        subject.need(sequences=2)
        cache = PagedFixture(subject, to_be_filled(subject, 3, one_short=spare))
        entries = room(cache.cache)
        parent = cache.create(entries * cache.size)
        child, free = cache.fork(parent), cache.cache.config["num_blocks"] - cache.used()
        many = free // cache.unit + 1  # one block more of a layer than can be copied
        if many > entries:
            raise NotOffered(f"a write that copies {many} blocks at once")
        before = cache.seen()
        for writer, start, stop in ((child, 0, many * cache.size), (parent, (entries - many) * cache.size, entries * cache.size)):
            with raises("OutOfBlocks"):
                cache.write(writer, cache.layers[-1], start, stop - start)
            cache.look("after a write without room for its copies")
            assert_equal(cache.seen(), before, "blocks after a write without room for its copies")
        cache.drop(parent)
        cache.write(child, cache.layers[-1], 0, many * cache.size)
        cache.look("after the other sharer was dropped")


@check("SHARE-07", "paged")
def a_step_that_does_not_fit_copies_for_no_one(subject: Subject) -> None:
    subject.need(sequences=3)
    cache = PagedFixture(subject, to_be_filled(subject, 3, block_size=2))
    if cache.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")
    parent = cache.create((room(cache.cache) - 1) * cache.size - 1)
    family = [parent]
    with may_raise("OutOfBlocks"):  # if fork copies the last block
        family += [cache.fork(parent), cache.fork(parent)]
    if len(family) < 3:
        raise NotOffered("forks that share the last block, in a nearly full pool")
    before = cache.seen()
    with raises("OutOfBlocks"):
        cache.step(family)  # two copies per layer, with room for one
    cache.look("after a step without room for its copies")
    assert_equal(cache.seen(), before, "blocks after a step without room for its copies")
    cache.step(family[1:2])
    cache.look("after a step of one sharer")


@check("SHARE-08a", "paged")
def forks_are_forked(subject: Subject) -> None:
    count = min(5, subject.size("sequences", 5))
    cache = known(subject, 6 * count)
    family = [cache.create(cache.size + 1)]
    for generation in range(1, count):
        cache.write(family[-1], 0, cache.size + generation, 1)
        family.append(cache.fork(family[-1]))
        cache.look(f"after {generation} nested forks")
    for at, sequence in enumerate(family):
        cache.write(sequence, 0, cache.length(sequence, 0), 2)
        cache.write(sequence, 0, at % cache.size, 1)
        cache.look(f"after writes to {at + 1} of {count} sharers")
    for sequence in family:
        cache.drop(sequence)
    assert_equal(cache.used(), 0, "allocated blocks after drop of all sequences")


@check("SHARE-08a", "paged")
def empty_sequences_are_forked(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(0)
    child = cache.fork(parent)
    cache.look("after a fork of an empty sequence")
    for sequence in (child, parent):
        cache.write(sequence, 0, 0, cache.size + 1)
        cache.look("after a write to one of two empty sharers")
    cache.drop(parent)
    cache.drop(child)
    assert_equal(cache.used(), 0, "allocated blocks after drop of both")


@check("SHARE-08a", "paged")
def what_was_reserved_is_written_apart(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(1)
    cache.cache.ensure_capacity(parent, 3 * cache.size)
    child = cache.fork(parent)
    for sequence in (parent, child):
        cache.write(sequence, 0, 1, 3 * cache.size - 1)
        cache.look("after a fork of a sequence with reserved capacity, and a write")
    cache.drop(child)
    cache.look("after drop of the fork")
    cache.drop(parent)
    assert_equal(cache.used(), 0, "allocated blocks after drop of both")


@check("SHARE-08b", "paged")
def an_unknown_sequence_is_not_forked(subject: Subject) -> None:
    cache = known(subject)
    gone, kept = cache.create(1), cache.create(2)
    cache.drop(gone)
    for unknown in subject.integers(gone, max(gone, kept) + 1, -1):
        with raises("SequenceNotFound"):
            cache.cache.fork(unknown)
    cache.look("after a rejected fork of an unknown sequence")


@check("SHARE-09", "paged")
def a_copy_that_is_still_to_come_does_not_show(subject: Subject) -> None:
    subject.need(sequences=3)
    for more in (0, 1):
        cache = known(subject, 18)
        parent = cache.create(2 * cache.size + more)
        child = cache.fork(parent)
        cache.write(child, 0, cache.length(child, 0) - 1, 2)
        cache.drop(parent)
        other = cache.create(2 * cache.size + 1)  # in blocks that the parent had
        again = cache.fork(child)
        cache.drop(child)
        cache.look("after a fork of a fork whose parents were dropped")
        with suppress(NotOffered):
            cache.truncate(again, cache.size + 1)
        cache.drop(other)
        cache.create(3 * cache.size)
        cache.look("after truncate, and after other sequences were dropped and created")
        cache.adds_up("at the end")
