"""Checks of BLOCK: the block pool."""

from collections.abc import Iterator
from contextlib import suppress

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.blocks.model import Blocks
from kvref_conformance.testlib.assertions import KeptResults, assert_equal, assert_true, raises
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.integer_types import Observation, RaisedError, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    Counter,
    assert_counters_within_bounds,
    call_tolerating_errors,
    unknown_ids,
)
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session


class PoolFixture(Session):
    """A block pool. The model contains the references of each block."""

    model: Blocks

    def __init__(self, subject: Subject, count: int = 0, num_blocks: int = 5) -> None:
        """count: the number of blocks to allocate, all at most."""
        super().__init__(subject, num_blocks=num_blocks)
        self.total: int = self.cache.config["num_blocks"]
        self.allocated = [self.cache.allocate() for _ in range(min(count, self.total))]

    @property
    def free_blocks(self) -> set[int]:
        return set(range(self.total)) - self.model.references_of.keys()

    def look(self, *names: str) -> None:
        super().look(*(names or ("num_free", "num_used")))

    def reject(self, operation: str, *blocks: int) -> None:
        """Makes the call with each of these blocks. Raises ClauseViolation unless each call raises and changes nothing."""
        for block in blocks:
            with raises("BlockNotAllocated"):
                getattr(self.cache, operation)(block)
            self.look()

    @property
    def outside(self) -> list[int]:
        """Ids that are no block of the pool; some equal an allocated block in a narrow integer."""
        far = [each for block in self.allocated[:1] for each in unknown_ids(self.subject, block)]
        return [self.total, self.total + 1000, *(each for each in far if not 0 <= each < self.total)]

    def exhaust(self) -> None:
        """Allocates all blocks that must be free."""
        for _ in self.free_blocks:
            self.cache.allocate()


@check("BLOCK-01", "blocks")
def new_pool_has_only_free_blocks(subject: Subject) -> None:
    for wanted in (0, 1, 5):
        size = subject.size("num_blocks", wanted)
        pool = new_object(subject, "blocks", num_blocks=size)
        assert_equal((pool.num_blocks, pool.num_free, pool.num_used), (size, size, 0), "total, free and used of a new pool")


@check("LAW-17", "blocks")
def allocate_many_results_stay_after_later_calls(subject: Subject) -> None:
    kept, pool = KeptResults(subject), PoolFixture(subject).cache
    for count in (2, 2):
        kept.add(f"allocate_many({count})", pool.as_is("allocate_many", count))
    pool.free(int(kept.kept[0][2][0]))
    pool.allocate()
    kept.assert_unchanged()


@check("BLOCK-02", "blocks")
def allocate_returns_each_block_once(subject: Subject) -> None:
    pool = PoolFixture(subject)
    allocated = [pool.cache.allocate() for _ in range(pool.total)]
    assert_equal(sorted(allocated), list(range(pool.total)), "allocated blocks, sorted")


@check("BLOCK-03", "blocks")
def allocate_from_an_exhausted_pool_raises(subject: Subject) -> None:
    for wanted in (0, 2):
        size = subject.size("num_blocks", wanted)
        pool = PoolFixture(subject, size, num_blocks=size).cache
        with raises("OutOfBlocks"):
            pool.allocate()
        assert_equal((pool.num_free, pool.num_used), (0, size), "free and used after OutOfBlocks")


@check("BLOCK-04", "blocks")
def free_makes_a_block_available_again(subject: Subject) -> None:
    pool = PoolFixture(subject, num_blocks=3)
    allocated = [pool.cache.allocate() for _ in range(pool.total)]
    for block in (allocated[pool.total // 2], allocated[0], allocated[-1]):
        pool.cache.free(block)
        assert_equal(pool.cache.num_free, 1, "free blocks after one was freed")
        assert_equal(pool.cache.allocate(), block, "the only free block")


@check("BLOCK-05a", "blocks")
def free_twice_raises(subject: Subject) -> None:
    pool = PoolFixture(subject, 3)
    pool.cache.free(pool.allocated[0])
    with raises("BlockNotAllocated"):
        pool.cache.free(pool.allocated[0])
    pool.look()
    pool.exhaust()


@check("BLOCK-05b", "blocks")
def free_of_a_block_that_was_not_allocated_raises(subject: Subject) -> None:
    pool = PoolFixture(subject, 1)
    pool.reject("free", *pool.outside, *pool.free_blocks)
    numbers = pool.cache.num_free, pool.cache.num_used
    assert_equal(numbers, (pool.total - 1, 1), "free and used after freeing blocks that are not allocated")


@check("BLOCK-06", "blocks")
def utilization_is_used_over_total(subject: Subject) -> None:
    assert_equal(new_object(subject, "blocks", num_blocks=0).utilization, 0.0, "utilization of a pool of 0 blocks")
    pool = PoolFixture(subject, num_blocks=4)
    for _ in range(pool.total):
        pool.look("utilization")
        pool.cache.allocate()
    assert_equal(pool.cache.utilization, 1.0, "utilization of an exhausted pool")


@check("BLOCK-07", "blocks")
def allocate_many_returns_all_blocks_or_raises(subject: Subject) -> None:
    pool = PoolFixture(subject)
    cache, total = pool.cache, pool.total
    for count in (total // 2, 0, total - total // 2):
        assert_equal(len(cache.allocate_many(count)), count, "number of allocated blocks")
        pool.look()
    blocks = sorted({total - 1, 1 % total})
    for block in reversed(blocks):
        cache.free(block)
    with raises("OutOfBlocks"):
        cache.allocate_many(len(blocks) + 1)
    pool.look()
    assert_equal(sorted(cache.allocate_many(len(blocks))), blocks, "the only free blocks")


# Checks of LAW-03, LAW-11, LAW-19 and LAW-20 for this family.


@check("LAW-19", "blocks")
def counts_stay_within_bounds_after_invalid_calls(subject: Subject) -> None:
    pool = new_object(subject, "blocks")
    total = pool.config["num_blocks"]
    first, *_ = [pool.allocate() for _ in range(min(3, total))]
    pool.free(first)
    wrong = [(name, (block,)) for name in ("share", "free") for block in (first, first, -1, total, LARGEST_JSON_INTEGER)]
    wrong += [("allocate_many", (count,)) for count in (*NEGATIVE, total + 1, LARGEST_JSON_INTEGER)]
    for name, args in (*wrong, *[("allocate", ())] * (total + 2)):
        call_tolerating_errors(getattr(pool, name), *args)
        counters: list[Counter] = [(f"{count} of {total}", getattr(pool, count), total) for count in ("num_free", "num_used")]
        assert_counters_within_bounds([*counters, ("utilization", pool.utilization, 1.0)], f"{name}{args}")


@check("LAW-11", "blocks")
def allocate_many_of_a_negative_number_raises(subject: Subject) -> None:
    pool = PoolFixture(subject, 1)
    for count in NEGATIVE:
        with raises("PositionOutOfRange"):
            pool.cache.allocate_many(count)
        pool.look()


@check("LAW-20", "blocks")
def new_accepts_every_integer_type(subject: Subject) -> None:
    total = subject.size("num_blocks", 120)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        pool = typed.new("blocks", num_blocks=total)
        held = [pool.allocate() for _ in range(-(-total * 5 // 6))]
        for block in held[-10:]:
            yield "freeing an allocated block", typed.call(pool, "free", block)
        with suppress(NotOffered):
            yield "sharing an allocated block", typed.call(pool, "share", held[0])
            yield "references of the shared block", typed.call(pool, "references", held[0])
        yield "freeing the block again", typed.call(pool, "free", held[-5:][0])
        yield "free, used and utilization", (pool.num_free, pool.num_used, pool.utilization)

    assert_same_for_integer_types(subject, script)


@check("LAW-20", "blocks")
def allocate_many_accepts_every_integer_type(subject: Subject) -> None:
    total = subject.size("num_blocks", 120)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        pool = typed.new("blocks", num_blocks=total)
        for count in (total * 5 // 6, total, total - total * 5 // 6):
            got = typed.call(pool, "allocate_many", count)
            yield f"allocate_many({count})", got if isinstance(got, RaisedError) else len(got)
            yield "free and used", (pool.num_free, pool.num_used)

    assert_same_for_integer_types(subject, script)


@check("LAW-03a", "blocks")
def num_free_and_num_used_add_up(subject: Subject) -> None:
    pool = PoolFixture(subject, num_blocks=7)
    for _ in range(200):
        allocated = list(pool.model.references_of)
        if allocated and subject.rng.random() < 0.5:
            pool.cache.free(int(subject.rng.choice(allocated)))
        elif pool.free_blocks:
            pool.cache.allocate()
        pool.look()
        assert_equal(pool.cache.num_free + pool.cache.num_used, pool.total, "free and used blocks")


# Checks of LAW-18: pools of thousands of blocks.


@check("LAW-18", "blocks")
def allocate_and_free_keep_thousands_of_blocks(subject: Subject) -> None:
    pool = new_object(subject, "blocks", num_blocks=1100)
    total = pool.config["num_blocks"]
    for _ in range(2):
        blocks = [pool.allocate() for _ in range(total)]
        assert_true(set(blocks) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(blocks)))
        assert_equal((pool.num_free, pool.num_used), (0, total), "free and used in an exhausted pool")
        for block in subject.rng.permutation(total).tolist():
            pool.free(block)
        assert_equal((pool.num_free, pool.num_used), (total, 0), "free and used after all blocks were freed")


@check("LAW-18", "blocks")
def allocate_many_returns_every_block_past_16_bits(subject: Subject) -> None:
    pool = new_object(subject, "blocks", num_blocks=70_000)
    total, blocks = pool.config["num_blocks"], list[int]()
    for count in (255, 1, 1, 1000, 64_000, total):
        blocks += [int(block) for block in pool.allocate_many(min(count, total - len(blocks)))]
        assert_equal(pool.num_used, len(blocks), f"used after {len(blocks)} allocations")
        if "blocks.allocate_many" in subject.derivations_used:
            raise NotOffered("allocate_many, without which this many allocations take too long")
    assert_true(set(blocks) == set(range(total)), "distinct blocks of an exhausted pool", f"all {total}", len(set(blocks)))
    again = [block for block in (*range(250, 260), *range(65_530, 65_540), total - 1) if block < total]
    for block in again:
        pool.free(block)
    assert_equal(sorted(int(block) for block in pool.allocate_many(len(again))), again, "the only free blocks")


@check("LAW-18", "blocks")
def share_counts_thousands_of_references(subject: Subject) -> None:
    pool = new_object(subject, "blocks", num_blocks=3)
    total, block = pool.config["num_blocks"], pool.allocate()
    for _ in range(1100):
        pool.share(block)
    for _ in range(1100):
        pool.free(block)
    assert_equal((pool.num_free, pool.num_used), (total - 1, 1), "free and used with one of 1101 references left")
    pool.free(block)
    assert_equal(pool.num_used, 0, "used after the last reference was freed")


# Checks of SHARE: blocks with several references.


@check("SHARE-01ab", "blocks")
def free_of_the_last_reference_frees_the_block(subject: Subject) -> None:
    pool = PoolFixture(subject, 3, num_blocks=3)
    block = pool.allocated[0]
    for operation in (pool.cache.share,) * 3 + (pool.cache.free,) * 4:
        assert_equal(pool.cache.num_used, len(pool.allocated), "used while the block has a reference")
        operation(block)
        pool.look()
    pool.reject("free", block)


@check("SHARE-01ab", "blocks")
def allocate_does_not_return_a_shared_block(subject: Subject) -> None:
    pool = PoolFixture(subject, 1)
    shared = pool.allocated[0]
    pool.cache.share(shared)
    pool.cache.free(shared)
    pool.exhaust()
    with raises("OutOfBlocks"):
        pool.cache.allocate()
    pool.cache.free(shared)
    assert_equal(pool.cache.allocate(), shared, "the only free block")


@check("SHARE-01c", "blocks")
def references_counts_shares_and_frees(subject: Subject) -> None:
    pool = PoolFixture(subject, 1)
    block = pool.allocated[0]
    want = {each: int(each == block) for each in range(pool.total)}
    for more in (1, 1, -1, 1, -1, -1, -1):
        (pool.cache.share if more > 0 else pool.cache.free)(block)
        want[block] += more
        assert_equal({each: pool.cache.references(each) for each in want}, want, "references of each block")
    pool.cache.allocate()
    pool.look("references")
    for stranger in pool.outside:
        with raises("BlockNotAllocated"):
            pool.cache.references(stranger)


@check("SHARE-02", "blocks")
def share_of_a_free_block_raises(subject: Subject) -> None:
    pool = PoolFixture(subject, 1)
    pool.cache.free(pool.allocated[0])
    for _ in range(min(2, pool.total - 1)):
        pool.cache.allocate()
    pool.reject("share", *pool.outside, *pool.free_blocks)
    pool.exhaust()
    for block in list(pool.model.references_of):
        pool.cache.free(block)
    assert_equal(pool.cache.num_used, 0, "used after each block was freed once")
