"""SHARE: sharers come and go, and forks are forked."""

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


@check("SHARE-08a", "paged")
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


@check("SHARE-08a", "paged")
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


@check("SHARE-08a", "paged")
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


@check("SHARE-08b", "paged")
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
