"""Checks of LAW-18: pools of thousands of blocks."""

from kvref_conformance.checking.expect import equal, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import NotOffered


@check("LAW-18", "blocks")
def a_pool_of_thousands_loses_no_block(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=1100)
    total = pool.config["num_blocks"]
    for _ in range(2):
        held = [pool.allocate() for _ in range(total)]
        true(set(held) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(held)))
        equal((pool.num_free, pool.num_used), (0, total), "free and used in an exhausted pool")
        for block in subject.rng.permutation(total).tolist():
            pool.free(block)
        equal((pool.num_free, pool.num_used), (total, 0), "free and used after all blocks were freed")


@check("LAW-18", "blocks")
def a_pool_past_16_bits_hands_out_every_block(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=70_000)
    total, held = pool.config["num_blocks"], list[int]()
    for count in (255, 1, 1, 1000, 64_000, total):
        held += [int(block) for block in pool.allocate_many(min(count, total - len(held)))]
        equal(pool.num_used, len(held), f"used after {len(held)} allocations")
        if "blocks.allocate_many" in subject.through:
            raise NotOffered("allocate_many, without which this many allocations take too long")
    true(set(held) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(held)))
    again = [block for block in (*range(250, 260), *range(65_530, 65_540), total - 1) if block < total]
    for block in again:
        pool.free(block)
    equal(sorted(int(block) for block in pool.allocate_many(len(again))), again, "the only free blocks")


@check("LAW-18", "blocks")
def a_block_is_shared_by_thousands(subject: Subject) -> None:
    pool = new(subject, "blocks", num_blocks=3)
    total, block = pool.config["num_blocks"], pool.allocate()
    for _ in range(1100):
        pool.share(block)
    for _ in range(1100):
        pool.free(block)
    equal((pool.num_free, pool.num_used), (total - 1, 1), "free and used with one of 1101 references left")
    pool.free(block)
    equal(pool.num_used, 0, "used after the last reference was freed")
