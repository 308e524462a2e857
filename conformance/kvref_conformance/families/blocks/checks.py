"""Checks of BLOCK: the block pool."""

from collections.abc import Iterator
from contextlib import suppress

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, raises, true
from kvref_conformance.testlib.fixtures import new
from kvref_conformance.testlib.integer_types import REFUSED, Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, Counter, tried, within_bounds
from kvref_conformance.testlib.registry import check


@check("BLOCK-01", "blocks")
def a_new_pool_is_all_free(subject: Subject) -> None:
    for wanted in (0, 1, 5):
        size = subject.size("num_blocks", wanted)
        pool = new(subject, "blocks", num_blocks=size)
        assert_equal(
            (pool.num_blocks, pool.num_free, pool.num_used), (size, size, 0), f"total, free and used of a pool of {size}"
        )


@check("BLOCK-02", "blocks")
def a_block_handed_out_is_no_one_elses(subject: Subject) -> None:
    pool, held = new(subject, "blocks"), set[int]()
    total = pool.config["num_blocks"]
    for _ in range(total):
        block = pool.allocate()
        good = block in range(total) and block not in held
        true(good, "the allocated block", f"a block in [0, {total}) not in {held}", block)
        held.add(block)


@check("BLOCK-03", "blocks")
def an_empty_pool_raises(subject: Subject) -> None:
    for wanted in (0, 2):
        size = subject.size("num_blocks", wanted)
        pool = new(subject, "blocks", num_blocks=size)
        for _ in range(size):
            pool.allocate()
        with raises("OutOfBlocks"):
            pool.allocate()
        assert_equal((pool.num_free, pool.num_used), (0, size), "free and used after OutOfBlocks")


@check("BLOCK-04", "blocks")
def a_freed_block_can_be_allocated_again(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    held = [pool.allocate() for _ in range(pool.config["num_blocks"])]
    for block in (held[len(held) // 2], held[0], held[-1]):
        pool.free(block)
        assert_equal(pool.num_free, 1, "free blocks after one was freed")
        assert_equal(pool.allocate(), block, "the only free block")


@check("BLOCK-05a", "blocks")
def a_block_cannot_be_freed_twice(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total = pool.config["num_blocks"]
    first, *held = [pool.allocate() for _ in range(min(3, total))]
    pool.free(first)
    with raises("BlockNotAllocated"):
        pool.free(first)
    assert_equal((pool.num_free, pool.num_used), (total - len(held), len(held)), "free and used after freeing a block twice")
    owners = [*held, *(pool.allocate() for _ in range(total - len(held)))]
    assert_equal(len(set(owners)), total, "distinct blocks allocated after freeing one twice")


@check("BLOCK-05b", "blocks")
def a_block_never_allocated_cannot_be_freed(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, block = pool.config["num_blocks"], pool.allocate()
    for stranger in subject.integers(-1, total, total + 1000, *(set(range(total)) - {block})):
        with raises("BlockNotAllocated"):
            pool.free(stranger)
    assert_equal((pool.num_free, pool.num_used), (total - 1, 1), "free and used after freeing blocks that are not allocated")


@check("BLOCK-06", "blocks")
def utilization_is_used_over_total(subject: Subject) -> None:
    assert_equal(new(subject, "blocks", num_blocks=0).utilization, 0.0, "utilization of a pool of 0 blocks")
    pool = new(subject, "blocks", num_blocks=4)
    total = pool.config["num_blocks"]
    for used in range(total):
        near = abs(pool.utilization - used / total) <= 2.0**-22 * used / total
        true(near, "utilization", f"{used} / {total}", pool.utilization)
        pool.allocate()
    assert_equal(pool.utilization, 1.0, "utilization of an exhausted pool")


@check("BLOCK-07", "blocks")
def several_blocks_are_handed_out_at_once_or_none(subject: Subject) -> None:
    pool, held = new(subject, "blocks"), set[int]()
    total = pool.config["num_blocks"]
    for count in (total // 2, 0, total - total // 2):
        blocks = [int(block) for block in pool.allocate_many(count)]
        assert_equal(len(set(blocks)), count, f"distinct blocks that allocate_many({count}) returned")
        true(set(blocks) <= set(range(total)) - held, "the allocated blocks", f"blocks in [0, {total}) not in {held}", blocks)
        held |= set(blocks)
        assert_equal(
            (pool.num_free, pool.num_used), (total - len(held), len(held)), f"free and used after allocate_many({count})"
        )
    back = sorted({total - 1, 1 % total})
    for block in reversed(back):
        pool.free(block)
    with raises("OutOfBlocks"):
        pool.allocate_many(len(back) + 1)
    assert_equal((pool.num_free, pool.num_used), (len(back), total - len(back)), "free and used after OutOfBlocks")
    assert_equal(sorted(pool.allocate_many(len(back))), back, "the only free blocks")


# Checks of LAW-03, LAW-11, LAW-19 and LAW-20 for this family.


@check("LAW-19", "blocks")
def blocks_are_never_more_than_there_are(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total = pool.config["num_blocks"]
    held = [pool.allocate() for _ in range(min(3, total))]
    pool.free(held[0])
    wrong = [(name, block) for name in ("share", "free") for block in (held[0], held[0], -1, total, LARGEST_JSON_INTEGER)]
    wrong += [("allocate_many", count) for count in (*NEGATIVE, total + 1, LARGEST_JSON_INTEGER)]
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
        assert_equal((pool.num_free, pool.num_used), (total - 1, 1), f"free and used after allocate_many({count})")


@check("LAW-20", "blocks")
def blocks_are_counted_in_any_type(subject: Subject) -> None:
    total = subject.size("num_blocks", 120)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
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

    def script(typed: TypedIntegers) -> Iterator[Seen]:
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
        assert_equal((pool.num_free, pool.num_used), (total - len(held), len(held)), "free and used blocks")
        assert_equal(len(set(held)), len(held), "distinct allocated blocks")


def _of_pool(pool: ObjectProxy) -> Iterator[Counter]:
    total = pool.config["num_blocks"]
    yield from ((f"{name} of {total}", getattr(pool, name), total) for name in ("num_free", "num_used"))
    yield "utilization", pool.utilization, 1.0


# Checks of LAW-18: pools of thousands of blocks.


@check("LAW-18", "blocks")
def a_pool_of_thousands_loses_no_block(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=1100)
    total = pool.config["num_blocks"]
    for _ in range(2):
        held = [pool.allocate() for _ in range(total)]
        true(set(held) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(held)))
        assert_equal((pool.num_free, pool.num_used), (0, total), "free and used in an exhausted pool")
        for block in subject.rng.permutation(total).tolist():
            pool.free(block)
        assert_equal((pool.num_free, pool.num_used), (total, 0), "free and used after all blocks were freed")


@check("LAW-18", "blocks")
def a_pool_past_16_bits_hands_out_every_block(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=70_000)
    total, held = pool.config["num_blocks"], list[int]()
    for count in (255, 1, 1, 1000, 64_000, total):
        held += [int(block) for block in pool.allocate_many(min(count, total - len(held)))]
        assert_equal(pool.num_used, len(held), f"used after {len(held)} allocations")
        if "blocks.allocate_many" in subject.through:
            raise NotOffered("allocate_many, without which this many allocations take too long")
    true(set(held) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(held)))
    again = [block for block in (*range(250, 260), *range(65_530, 65_540), total - 1) if block < total]
    for block in again:
        pool.free(block)
    assert_equal(sorted(int(block) for block in pool.allocate_many(len(again))), again, "the only free blocks")


@check("LAW-18", "blocks")
def a_block_is_shared_by_thousands(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    total, block = pool.config["num_blocks"], pool.allocate()
    for _ in range(1100):
        pool.share(block)
    for _ in range(1100):
        pool.free(block)
    assert_equal((pool.num_free, pool.num_used), (total - 1, 1), "free and used with one of 1101 references left")
    pool.free(block)
    assert_equal(pool.num_used, 0, "used after the last reference was freed")


# Checks of SHARE: blocks with several references.


def counted(pool: ObjectProxy, used: int, when: str) -> None:
    assert_equal((pool.num_free, pool.num_used), (pool.config["num_blocks"] - used, used), f"free and used {when}")


@check("SHARE-01ab", "blocks")
def a_block_is_free_when_the_last_reference_goes(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    total = pool.config["num_blocks"]
    block, *others = [pool.allocate() for _ in range(min(3, total))]
    for _ in range(3):
        pool.share(block)
        counted(pool, 1 + len(others), "after sharing an allocated block")
    for left in (3, 2, 1):
        pool.free(block)
        counted(pool, 1 + len(others), f"with {left} of 4 references left")
    pool.free(block)
    counted(pool, len(others), "after the last reference was freed")
    with raises("BlockNotAllocated"):
        pool.free(block)
    counted(pool, len(others), "after a rejected free without a reference")


@check("SHARE-01ab", "blocks")
def a_shared_block_is_handed_out_to_no_one(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, shared = pool.config["num_blocks"], pool.allocate()
    pool.share(shared)
    pool.free(shared)
    others = [pool.allocate() for _ in range(total - 1)]
    true(
        shared not in others, "blocks allocated while a shared block has a reference left", f"blocks other than {shared}", others
    )
    with raises("OutOfBlocks"):
        pool.allocate()
    pool.free(shared)
    assert_equal(pool.allocate(), shared, "the only free block")


@check("SHARE-01c", "blocks")
def references_are_counted(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, block = pool.config["num_blocks"], pool.allocate()
    wanted = {each: int(each == block) for each in range(total)}
    for more in (1, 1, -1, 1, -1, -1, -1):
        (pool.share if more > 0 else pool.free)(block)
        wanted[block] += more
        assert_equal({each: pool.references(each) for each in range(total)}, wanted, "references of each block")
    again = pool.allocate()
    assert_equal(pool.references(again), 1, "references of a block that was allocated again")
    for stranger in subject.integers(-1, total, total + 1000):
        with raises("BlockNotAllocated"):
            pool.references(stranger)


@check("SHARE-02", "blocks")
def a_block_that_no_one_holds_cannot_be_shared(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, freed = pool.config["num_blocks"], pool.allocate()
    pool.free(freed)
    held = [pool.allocate() for _ in range(min(2, total - 1))]
    for stranger in subject.integers(-1, total, total + 1000, *(set(range(total)) - {*held})):
        with raises("BlockNotAllocated"):
            pool.share(stranger)
        counted(pool, len(held), f"after a rejected share({stranger})")
    owners = [*held, *(pool.allocate() for _ in range(total - len(held)))]
    assert_equal(len(set(owners)), total, "distinct blocks allocated after rejected calls of share")
    for block in owners:
        pool.free(block)
    counted(pool, 0, "after each block was freed once")
