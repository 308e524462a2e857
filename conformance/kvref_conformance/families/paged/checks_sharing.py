"""SHARE: sequences that hold blocks together."""

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from typing import Any

from kvref_conformance.checking.expect import equal, may_raise, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import room, to_be_filled, with_room
from kvref_conformance.families.paged.known import Known
from kvref_conformance.outcome import NotOffered


def known(subject: Subject, entries: int = 12, sequences: int = 2, **sizes: Any) -> Known:
    subject.need(sequences=sequences)
    return Known(subject, with_room(subject, entries, **sizes))


@check("SHARE-03", "paged")
def a_fork_reads_as_its_parent(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for lengths in ((1,), (size,), (2 * size + 1, 2 * size), (2 * size, size + 1)):
        cache = known(subject)
        parent = cache.create(*lengths)
        cache.look("before it was forked")
        used = cache.used()
        cache.fork(parent)
        cache.look("after a fork")
        most, taken = cache.partly(parent), cache.used() - used
        true(0 <= taken <= most, f"blocks that a fork of {lengths} tokens took", f"at most {most}", taken)
        cache.adds_up("after a fork")


@check("SHARE-03", "paged")
def a_forks_id_was_never_used(subject: Subject) -> None:
    cache, seen = known(subject), set[int]()
    parent = cache.create(1)
    seen.add(parent)
    for _ in range(4):
        child = cache.fork(parent)
        true(child not in seen, "the id of a fork", f"one not in {seen}", child)
        seen.add(child)
        cache.drop(child)
        with raises("SequenceNotFound"):
            cache.cache.gather(child, 0)
    cache.look("after its forks were dropped")


@check("SHARE-03", "paged")
def a_fork_needs_room_for_its_last_blocks_at_most(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = Known(subject, to_be_filled(subject, 3))
    parent = cache.create(room(cache.cache) * cache.size - 1)
    before = cache.seen()
    with may_raise("OutOfBlocks"):
        cache.fork(parent)
    cache.look("after a fork in a full pool")
    if len(cache.tokens) == 1:
        equal(cache.seen(), before, "blocks after a fork that did not fit")


def acts(cache: Known, parent: int, child: int) -> dict[str, Callable[[], Any]]:
    """What one of two may do, so that the other does not see it."""
    length, layers = cache.length(parent, 0), cache.layers
    return {
        "the child wrote a token": lambda: cache.write(child, 0, length, 1),
        "the parent wrote one": lambda: cache.write(parent, 0, length, 1),
        "the child overwrote its first tokens": lambda: cache.write(child, layers[-1], 0, cache.size + 1),
        "the parent overwrote its last": lambda: cache.write(parent, layers[-1], length - 1, 1),
        "both took a step": lambda: cache.step([child, parent]),
        "the child was cut": lambda: cache.truncate(child, cache.size + 1),
        "the child wrote where it was cut": lambda: cache.write(child, 0, cache.size + 1, 2),
        "the parent was cut": lambda: cache.truncate(parent, cache.size - 1),
        "the child lost its second token": lambda: cache.remove(child, 1, 2),
        "the parent lost all": lambda: cache.truncate(parent, 0),
        "the parent began anew": lambda: cache.write(parent, 0, 0, cache.size + 1),
        "the child was dropped": lambda: cache.drop(child),
    }


@check("SHARE-04", "paged")
def what_one_sharer_does_no_other_sees(subject: Subject) -> None:
    subject.need(sequences=3)
    for more in (0, 1):  # the last block is full, or is not
        cache = known(subject, 18)
        parent = cache.create(2 * cache.size + more)
        child, _ = cache.fork(parent), cache.fork(parent)
        for when, act in acts(cache, parent, child).items():
            with suppress(NotOffered):
                act()
                cache.look(f"after {when}")
        cache.adds_up("after all that")


@check("SHARE-04", "paged")
def what_one_of_two_does_the_other_does_not_see(subject: Subject) -> None:
    for number in range(len(acts(cache := known(subject), (one := cache.create(1)), one))):
        cache = known(subject)
        parent = cache.create(2 * cache.size + 1)
        child = cache.fork(parent)
        when, act = list(acts(cache, parent, child).items())[number]
        with suppress(NotOffered):
            act()
            cache.look(f"after {when}")
            cache.adds_up(f"after {when}")


@check("SHARE-05", "paged")
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


@check("SHARE-05", "paged")
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
        what = f"blocks that a write to {start} .. {start + count} took"
        equal(cache.used() - used, copied * cache.unit + (start + count > 3 * size) * (len(cache.layers) - cache.unit), what)
        cache.look(f"after a write to {start} .. {start + count}")


@check("SHARE-05", "paged")
def the_other_blocks_stay_where_they_are(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(3 * cache.size)
    child = cache.fork(parent)
    before = cache.tables()
    cache.write(child, 0, cache.size, 1)
    after = cache.tables()
    equal(after[parent], before[parent], "the parent's tables after its child wrote")
    own = after[child][0][1]
    true(own not in after[parent][0], "the block that the child wrote to", f"none of {after[parent][0]}", own)
    layers = len(cache.layers) if cache.unit > 1 else 1
    kept = [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(after[child])]
    equal(kept, [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(before[child])],
          "the child's tables but for the block that it wrote to")  # fmt: skip


@check("SHARE-05", "paged")
def of_those_who_write_at_once_all_but_one_get_a_copy(subject: Subject) -> None:
    for writers in ((1, 2), (0, 1, 2), (2,)):
        cache = known(subject, 12, sequences=3)
        parent = cache.create(cache.size + 1)
        family = [parent, cache.fork(parent), cache.fork(parent)]
        if cache.size == 1:
            raise NotOffered("a block that is partly filled, where its limits say block_size 1")
        cache.step([family[each] for each in writers])
        cache.look(f"after {writers} of three sharers wrote a token")
        owners = min(3, len(writers) + 1)
        counts = [(1 + each) * len(cache.layers) for each in (owners, 3)]  # three, where each fork took a copy
        true(cache.used() in counts, f"blocks in use after {writers} of three wrote", " or ".join(map(str, counts)), cache.used())
        cache.adds_up(f"after {writers} of three wrote")


@check("SHARE-05", "paged")
def the_last_of_those_who_write_at_once_needs_no_room(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = Known(subject, to_be_filled(subject, 3, block_size=2))
    if cache.size == 1:
        raise NotOffered("a block that is partly filled, where its limits say block_size 1")
    parent = cache.create((room(cache.cache) - 1) * cache.size - 1)
    cache.step([parent, cache.fork(parent)])
    cache.look("after both sharers of a block wrote to it, where there was room for one copy")


@check("SHARE-05", "paged")
def who_holds_a_block_alone_writes_in_place(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(2 * cache.size + 1)
    cache.drop(cache.fork(parent))
    before = cache.seen()
    for layer in cache.layers:
        cache.write(parent, layer, cache.size - 1, 2)
    equal(cache.seen(), before, "blocks, after a sequence whose fork is gone overwrote its own")
    cache.look("after its fork was dropped")


@check("SHARE-06", "paged")
def sharers_go_in_any_order(subject: Subject) -> None:
    for order in permutations(range(3)):
        cache = known(subject, 18, sequences=3)
        parent = cache.create(2 * cache.size + 1)
        family = [parent, child := cache.fork(parent), cache.fork(child)]
        cache.write(child, 0, 2 * cache.size + 1, 1)
        for which in order:
            cache.drop(family[which])
            cache.look(f"after {which} of {order} went")
            cache.adds_up(f"after {which} of {order} went")
        equal(cache.used(), 0, f"blocks in use after all went, in the order {order}")


@check("SHARE-07", "paged")
def a_copy_that_does_not_fit_changes_nothing(subject: Subject) -> None:
    for spare in (False, True):
        subject.need(sequences=2)
        cache = Known(subject, to_be_filled(subject, 3, one_short=spare))
        entries = room(cache.cache)
        parent = cache.create(entries * cache.size)
        child, free = cache.fork(parent), cache.cache.config["num_blocks"] - cache.used()
        many = free // cache.unit + 1  # blocks of one layer that there is no room to copy
        if many > entries:
            raise NotOffered(f"{many} blocks to be copied at once")
        before = cache.seen()
        for writer, start, stop in ((child, 0, many * cache.size), (parent, (entries - many) * cache.size, entries * cache.size)):
            with raises("OutOfBlocks"):
                cache.write(writer, cache.layers[-1], start, stop - start)
            cache.look("after a copy did not fit")
            equal(cache.seen(), before, "blocks after a copy did not fit")
        cache.drop(parent)
        cache.write(child, cache.layers[-1], 0, many * cache.size)
        cache.look("after the other sharer made room")


@check("SHARE-07", "paged")
def a_step_that_does_not_fit_copies_for_no_one(subject: Subject) -> None:
    subject.need(sequences=3)
    cache = Known(subject, to_be_filled(subject, 3, block_size=2))
    if cache.size == 1:
        raise NotOffered("a block that is partly filled, where its limits say block_size 1")
    parent = cache.create((room(cache.cache) - 1) * cache.size - 1)
    family = [parent]
    with may_raise("OutOfBlocks"):  # where a fork copies the last block
        family += [cache.fork(parent), cache.fork(parent)]
    if len(family) < 3:
        raise NotOffered("three sharers of a last block, in a pool that is nearly full")
    before = cache.seen()
    with raises("OutOfBlocks"):
        cache.step(family)  # two copies a layer, where there is room for one
    cache.look("after a step of which a copy did not fit")
    equal(cache.seen(), before, "blocks after a step of which a copy did not fit")
    cache.step(family[1:2])
    cache.look("after a step of one of them")


@check("SHARE-08", "paged")
def forks_are_forked(subject: Subject) -> None:
    count = min(5, subject.size("sequences", 5))
    cache = known(subject, 6 * count)
    family = [cache.create(cache.size + 1)]
    for generation in range(1, count):
        cache.write(family[-1], 0, cache.size + generation, 1)
        family.append(cache.fork(family[-1]))
        cache.look(f"after {generation} forks of forks")
    for at, sequence in enumerate(family):
        cache.write(sequence, 0, cache.length(sequence, 0), 2)
        cache.write(sequence, 0, at % cache.size, 1)
        cache.look(f"after {at + 1} of {count} were written to")
    for sequence in family:
        cache.drop(sequence)
    equal(cache.used(), 0, "blocks in use after all went")


@check("SHARE-08", "paged")
def empty_sequences_are_forked(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(0)
    child = cache.fork(parent)
    cache.look("after a fork of an empty sequence")
    for sequence in (child, parent):
        cache.write(sequence, 0, 0, cache.size + 1)
        cache.look("after one of two that were empty was written to")
    cache.drop(parent)
    cache.drop(child)
    equal(cache.used(), 0, "blocks in use after both went")


@check("SHARE-08", "paged")
def what_was_reserved_is_written_apart(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(1)
    cache.cache.ensure_capacity(parent, 3 * cache.size)
    child = cache.fork(parent)
    for sequence in (parent, child):
        cache.write(sequence, 0, 1, 3 * cache.size - 1)
        cache.look("after a fork of a sequence with room reserved")
    cache.drop(child)
    cache.look("after the fork was dropped")
    cache.drop(parent)
    equal(cache.used(), 0, "blocks in use after both went")


@check("SHARE-08", "paged")
def an_unknown_sequence_is_not_forked(subject: Subject) -> None:
    cache = known(subject)
    gone, kept = cache.create(1), cache.create(2)
    cache.drop(gone)
    for unknown in subject.integers(gone, max(gone, kept) + 1, -1):
        with raises("SequenceNotFound"):
            cache.cache.fork(unknown)
    cache.look("after an unknown sequence was to be forked")


@check("SHARE-09", "paged")
def a_copy_that_is_still_to_come_does_not_show(subject: Subject) -> None:
    subject.need(sequences=3)
    for more in (0, 1):
        cache = known(subject, 18)
        parent = cache.create(2 * cache.size + more)
        child = cache.fork(parent)
        cache.write(child, 0, cache.length(child, 0) - 1, 2)
        cache.drop(parent)
        other = cache.create(2 * cache.size + 1)  # in what the parent gave back
        again = cache.fork(child)
        cache.drop(child)
        cache.look("after a fork of a fork whose parents are gone")
        with suppress(NotOffered):
            cache.truncate(again, cache.size + 1)
        cache.drop(other)
        cache.create(3 * cache.size)
        cache.look("after it was cut, and others came and went")
        cache.adds_up("after all that")
