"""Checks of BLOCK: the block pool."""

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject


@check("BLOCK-01", "blocks")
def a_new_pool_is_all_free(subject: Subject) -> None:
    for wanted in (0, 1, 5):
        size = subject.size("num_blocks", wanted)
        pool = new(subject, "blocks", num_blocks=size)
        equal((pool.num_blocks, pool.num_free, pool.num_used), (size, size, 0), f"total, free and used of a pool of {size}")


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
        equal((pool.num_free, pool.num_used), (0, size), "free and used after OutOfBlocks")


@check("BLOCK-04", "blocks")
def a_freed_block_can_be_allocated_again(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    held = [pool.allocate() for _ in range(pool.config["num_blocks"])]
    for block in (held[len(held) // 2], held[0], held[-1]):
        pool.free(block)
        equal(pool.num_free, 1, "free blocks after one was freed")
        equal(pool.allocate(), block, "the only free block")


@check("BLOCK-05a", "blocks")
def a_block_cannot_be_freed_twice(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total = pool.config["num_blocks"]
    first, *held = [pool.allocate() for _ in range(min(3, total))]
    pool.free(first)
    with raises("BlockNotAllocated"):
        pool.free(first)
    equal((pool.num_free, pool.num_used), (total - len(held), len(held)), "free and used after freeing a block twice")
    owners = [*held, *(pool.allocate() for _ in range(total - len(held)))]
    equal(len(set(owners)), total, "distinct blocks allocated after freeing one twice")


@check("BLOCK-05b", "blocks")
def a_block_never_allocated_cannot_be_freed(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, block = pool.config["num_blocks"], pool.allocate()
    for stranger in subject.integers(-1, total, total + 1000, *(set(range(total)) - {block})):
        with raises("BlockNotAllocated"):
            pool.free(stranger)
    equal((pool.num_free, pool.num_used), (total - 1, 1), "free and used after freeing blocks that are not allocated")


@check("BLOCK-06", "blocks")
def utilization_is_used_over_total(subject: Subject) -> None:
    equal(new(subject, "blocks", num_blocks=0).utilization, 0.0, "utilization of a pool of 0 blocks")
    pool = new(subject, "blocks", num_blocks=4)
    total = pool.config["num_blocks"]
    for used in range(total):
        near = abs(pool.utilization - used / total) <= 2.0**-22 * used / total
        true(near, "utilization", f"{used} / {total}", pool.utilization)
        pool.allocate()
    equal(pool.utilization, 1.0, "utilization of an exhausted pool")


@check("BLOCK-07", "blocks")
def several_blocks_are_handed_out_at_once_or_none(subject: Subject) -> None:
    pool, held = new(subject, "blocks"), set[int]()
    total = pool.config["num_blocks"]
    for count in (total // 2, 0, total - total // 2):
        blocks = [int(block) for block in pool.allocate_many(count)]
        equal(len(set(blocks)), count, f"distinct blocks that allocate_many({count}) returned")
        true(set(blocks) <= set(range(total)) - held, "the allocated blocks", f"blocks in [0, {total}) not in {held}", blocks)
        held |= set(blocks)
        equal((pool.num_free, pool.num_used), (total - len(held), len(held)), f"free and used after allocate_many({count})")
    back = sorted({total - 1, 1 % total})
    for block in reversed(back):
        pool.free(block)
    with raises("OutOfBlocks"):
        pool.allocate_many(len(back) + 1)
    equal((pool.num_free, pool.num_used), (len(back), total - len(back)), "free and used after OutOfBlocks")
    equal(sorted(pool.allocate_many(len(back))), back, "the only free blocks")
