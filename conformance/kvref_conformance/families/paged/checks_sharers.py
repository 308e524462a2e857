"""Checks of SHARE: sharers are created and dropped, and forks are forked."""

from contextlib import suppress
from itertools import permutations

from kvref_conformance.checking.expect import equal, may_raise, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks_sharing import known
from kvref_conformance.families.paged.counting import room, to_be_filled
from kvref_conformance.families.paged.known import Known
from kvref_conformance.outcome import NotOffered


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
        equal(cache.used(), 0, f"allocated blocks after drops in the order {order}")


@check("SHARE-07", "paged")
def a_copy_that_does_not_fit_changes_nothing(subject: Subject) -> None:
    for spare in (False, True):
        subject.need(sequences=2)
        cache = Known(subject, to_be_filled(subject, 3, one_short=spare))
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
            equal(cache.seen(), before, "blocks after a write without room for its copies")
        cache.drop(parent)
        cache.write(child, cache.layers[-1], 0, many * cache.size)
        cache.look("after the other sharer was dropped")


@check("SHARE-07", "paged")
def a_step_that_does_not_fit_copies_for_no_one(subject: Subject) -> None:
    subject.need(sequences=3)
    cache = Known(subject, to_be_filled(subject, 3, block_size=2))
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
    equal(cache.seen(), before, "blocks after a step without room for its copies")
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
    equal(cache.used(), 0, "allocated blocks after drop of all sequences")


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
    equal(cache.used(), 0, "allocated blocks after drop of both")


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
    equal(cache.used(), 0, "allocated blocks after drop of both")


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
