"""Checks of SHARE: blocks with several references."""

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject


def counted(pool: Handle, used: int, when: str) -> None:
    equal((pool.num_free, pool.num_used), (pool.config["num_blocks"] - used, used), f"free and used {when}")


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
    equal(pool.allocate(), shared, "the only free block")


@check("SHARE-01c", "blocks")
def references_are_counted(subject: Subject) -> None:
    pool = new(subject, "blocks")
    total, block = pool.config["num_blocks"], pool.allocate()
    wanted = {each: int(each == block) for each in range(total)}
    for more in (1, 1, -1, 1, -1, -1, -1):
        (pool.share if more > 0 else pool.free)(block)
        wanted[block] += more
        equal({each: pool.references(each) for each in range(total)}, wanted, "references of each block")
    again = pool.allocate()
    equal(pool.references(again), 1, "references of a block that was allocated again")
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
    equal(len(set(owners)), total, "distinct blocks allocated after rejected calls of share")
    for block in owners:
        pool.free(block)
    counted(pool, 0, "after each block was freed once")
