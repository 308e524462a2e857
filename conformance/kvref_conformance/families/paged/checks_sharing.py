"""Checks of SHARE: sequences that share blocks."""

from collections.abc import Callable
from typing import Any

from kvref_conformance.checking.expect import equal, may_raise, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import offered, room, to_be_filled, with_room
from kvref_conformance.families.paged.known import Known
from kvref_conformance.outcome import NotOffered


def known(subject: Subject, entries: int = 12, sequences: int = 2, **sizes: Any) -> Known:
    subject.need(sequences=sequences)
    return Known(subject, with_room(subject, entries, **sizes))


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
    cache = Known(subject, to_be_filled(subject, 3))
    parent = cache.create(room(cache.cache) * cache.size - 1)
    before = cache.seen()
    with may_raise("OutOfBlocks"):
        cache.fork(parent)
    cache.look("after a fork in a full pool")
    if len(cache.tokens) == 1:
        equal(cache.seen(), before, "blocks after fork raised OutOfBlocks")


def acts(cache: Known, parent: int, child: int) -> dict[str, Callable[[], Any]]:
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
        equal(cache.used() - used, copied * cache.unit + (start + count > 3 * size) * (len(cache.layers) - cache.unit), what)
        cache.look(f"after a write to [{start}, {start + count})")


@check("SHARE-05ac", "paged")
def the_other_blocks_stay_where_they_are(subject: Subject) -> None:
    cache = known(subject)
    parent = cache.create(3 * cache.size)
    child = cache.fork(parent)
    before = cache.tables()
    cache.write(child, 0, cache.size, 1)
    after = cache.tables()
    equal(after[parent], before[parent], "tables of the parent after a write to the child")
    own = after[child][0][1]
    true(own not in after[parent][0], "the block that the child wrote to", f"a block not in {after[parent][0]}", own)
    layers = len(cache.layers) if cache.unit > 1 else 1
    kept = [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(after[child])]
    equal(kept, [[*table[:1], 0, *table[2:]] if layer < layers else table for layer, table in enumerate(before[child])],
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
    cache = Known(subject, to_be_filled(subject, 3, block_size=2))
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
    equal(cache.seen(), before, "blocks after a write to a sequence whose fork was dropped")
    cache.look("after drop of its fork")
