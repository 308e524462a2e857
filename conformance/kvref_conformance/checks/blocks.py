"""BLOCK: the pool of blocks."""

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.drivers.in_process import Subject


@check("BLOCK-01", "blocks")
def a_new_pool_is_all_free(subject: Subject) -> None:
    for size in (0, 1, 5):
        pool = new(subject, "blocks", num_blocks=size)
        equal((pool.num_blocks, pool.num_free, pool.num_used), (size, size, 0), f"total, free and used of a pool of {size}")


@check("BLOCK-02", "blocks")
def a_block_handed_out_is_no_one_elses(subject: Subject) -> None:
    pool, held = new(subject, "blocks"), set[int]()
    for _ in range(5):
        block = pool.allocate()
        true(block in range(5) and block not in held, "the block allocated", f"one in range(5) not in {held}", block)
        held.add(block)


@check("BLOCK-03", "blocks")
def an_empty_pool_raises(subject: Subject) -> None:
    for size in (0, 2):
        pool = new(subject, "blocks", num_blocks=size)
        for _ in range(size):
            pool.allocate()
        with raises("OutOfBlocks"):
            pool.allocate()
        equal((pool.num_free, pool.num_used), (0, size), "free and used after OutOfBlocks")


@check("BLOCK-04", "blocks")
def a_freed_block_can_be_allocated_again(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    held = [pool.allocate() for _ in range(3)]
    for block in (held[1], held[0], held[2]):
        pool.free(block)
        equal(pool.num_free, 1, "free blocks after one was freed")
        equal(pool.allocate(), block, "the only free block")


@check("BLOCK-05", "blocks")
def a_block_cannot_be_freed_twice(subject: Subject) -> None:
    pool = new(subject, "blocks")
    held = [pool.allocate() for _ in range(3)]
    pool.free(held[0])
    with raises("BlockNotAllocated"):
        pool.free(held[0])
    equal((pool.num_free, pool.num_used), (3, 2), "free and used after freeing a block twice")
    owners = [held[1], held[2], *(pool.allocate() for _ in range(3))]
    equal(len(set(owners)), 5, "distinct blocks held after freeing one twice")


@check("BLOCK-05", "blocks")
def a_block_never_allocated_cannot_be_freed(subject: Subject) -> None:
    pool = new(subject, "blocks")
    block = pool.allocate()
    for stranger in (-1, 5, 1000, *(set(range(5)) - {block})):
        with raises("BlockNotAllocated"):
            pool.free(stranger)
    equal((pool.num_free, pool.num_used), (4, 1), "free and used after freeing strangers")


@check("BLOCK-06", "blocks")
def utilization_is_used_over_total(subject: Subject) -> None:
    equal(new(subject, "blocks", num_blocks=0).utilization, 0.0, "utilization of a pool of none")
    pool = new(subject, "blocks", num_blocks=4)
    for used in range(4):
        equal(pool.utilization, used / 4, f"utilization with {used} of 4 in use")
        pool.allocate()
    equal(pool.utilization, 1.0, "utilization of a pool in full use")


@check("BLOCK-07", "blocks")
def several_blocks_are_handed_out_at_once_or_none(subject: Subject) -> None:
    pool, held = new(subject, "blocks"), set[int]()
    for count in (2, 0, 3):
        blocks = [int(block) for block in pool.allocate_many(count)]
        equal(len(set(blocks)), count, f"different blocks that allocate_many({count}) gave")
        true(set(blocks) <= set(range(5)) - held, "the blocks allocated", f"some of range(5) not in {held}", blocks)
        held |= set(blocks)
        equal((pool.num_free, pool.num_used), (5 - len(held), len(held)), f"free and used after allocate_many({count})")
    pool.free(4)
    pool.free(1)
    with raises("OutOfBlocks"):
        pool.allocate_many(3)
    equal((pool.num_free, pool.num_used), (2, 3), "free and used after OutOfBlocks")
    equal(sorted(pool.allocate_many(2)), [1, 4], "the only free blocks")
