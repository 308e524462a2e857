"""Checks of LAW-03, LAW-11, LAW-19 and LAW-20 for this family."""

from collections.abc import Iterator
from contextlib import suppress

from kvref_conformance.checking.counts import MANY, NEGATIVE, Counter, tried, within_bounds
from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.integers import REFUSED, Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import NotOffered


@check("LAW-19", "blocks")
def blocks_are_never_more_than_there_are(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total = pool.config["num_blocks"]
    held = [pool.allocate() for _ in range(min(3, total))]
    pool.free(held[0])
    wrong = [(name, block) for name in ("share", "free") for block in (held[0], held[0], -1, total, MANY)]
    wrong += [("allocate_many", count) for count in (*NEGATIVE, total + 1, MANY)]
    for name, number in wrong:
        tried(getattr(pool, name), number)
        within_bounds(_of_pool(pool), f"{name}({number})")
    for _ in range(total + 2):
        tried(pool.allocate)
        within_bounds(_of_pool(pool), "allocating more blocks than are free")


@check("LAW-11", "blocks")
def a_negative_number_of_blocks_is_refused(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, _ = pool.config["num_blocks"], pool.allocate()
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.allocate_many(count)
        equal((pool.num_free, pool.num_used), (total - 1, 1), f"free and used after allocate_many({count})")


@check("LAW-20", "blocks")
def blocks_are_counted_in_any_type(subject: Subject) -> None:
    total = subject.size("num_blocks", 120)

    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("blocks", num_blocks=total)
        held = [pool.allocate() for _ in range(-(-total * 5 // 6))]
        for block in held[-10:]:
            yield "freeing an allocated block", typed.call(pool, "free", block)
        with suppress(NotOffered):
            yield "sharing an allocated block", typed.call(pool, "share", held[0])
            yield "references of the shared block", typed.call(pool, "references", held[0])
        yield "freeing the block again", typed.call(pool, "free", held[-5:][0])
        yield "free, used and utilization", (pool.num_free, pool.num_used, pool.utilization)

    the_same_in_any_type(subject, script)


@check("LAW-20", "blocks")
def several_blocks_are_asked_for_in_any_type(subject: Subject) -> None:
    total = subject.size("num_blocks", 120)

    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("blocks", num_blocks=total)
        for count in (total * 5 // 6, total, total - total * 5 // 6):
            got = typed.call(pool, "allocate_many", count)
            yield f"allocate_many({count})", got if got == REFUSED else len(got)
            yield "free and used", (pool.num_free, pool.num_used)

    the_same_in_any_type(subject, script)


@check("LAW-03a", "blocks")
def free_and_used_blocks_add_up(subject: Subject) -> None:
    pool, held = new(subject, "blocks", num_blocks=7), list[int]()
    total = pool.config["num_blocks"]
    for _ in range(200):
        if held and subject.rng.random() < 0.5:
            pool.free(held.pop(subject.rng.integers(len(held))))
        elif pool.num_free:
            held.append(pool.allocate())
        equal((pool.num_free, pool.num_used), (total - len(held), len(held)), "free and used blocks")
        equal(len(set(held)), len(held), "distinct allocated blocks")


def _of_pool(pool: Handle) -> Iterator[Counter]:
    total = pool.config["num_blocks"]
    yield from ((f"{name} of {total}", getattr(pool, name), total) for name in ("num_free", "num_used"))
    yield "utilization", pool.utilization, 1.0
