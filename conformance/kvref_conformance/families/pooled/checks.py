"""Checks of POOL: tokens in blocks whose memory comes from a shared buffer pool."""

from collections.abc import Iterator

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.buffers.model import SIZE_CLASSES, class_of
from kvref_conformance.families.pooled.model import Pooled
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import assert_config_error, clamp_to_limits, new_object, random_pair
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session


class PooledFixture(Session):
    """A pooled cache. The model contains its tokens, which are random."""

    model: Pooled

    def append(self, count: int) -> None:
        sizes = self.cache.config["num_kv_heads"], self.cache.config["head_dim"]
        self.cache.append(*random_pair(self.subject, count, *sizes))

    def look(self, *names: str) -> None:
        super().look(*(names or ("total_tokens", "stats", "read")))


def assert_sizes(cache: ObjectProxy, tokens: int) -> None:
    """Raises ClauseViolation unless the cache contains that number of tokens, in as few blocks as possible."""
    stats = cache.stats()
    blocks = -(-tokens // cache.config["tokens_per_block"])
    assert_equal((stats.total_tokens, stats.num_blocks), (tokens, blocks), "total_tokens and number of blocks")


def bytes_of_a_block(cache: ObjectProxy) -> int:
    """Returns the bytes of the two buffers of a block."""
    sizes = cache.config
    return 2 * class_of(sizes["tokens_per_block"] * sizes["num_kv_heads"] * sizes["head_dim"] * 4)


@check("POOL-01", "pooled")
def append_opens_a_block_when_the_last_is_full(subject: Subject) -> None:
    cache = new_object(subject, "pooled")  # its blocks are smaller than their buffers
    size, most = cache.config["tokens_per_block"], cache.config["max_tokens"]
    for total in range(1, min(2 * size + 1, most) + 1):
        cache.append(*random_pair(subject, 1))
        assert_sizes(cache, total)


@check("POOL-02", "pooled")
def read_returns_tokens_in_order_across_blocks(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache, stop = new_object(subject, "pooled", max_tokens=6 * size + 2), 0
    keys, values = random_pair(subject, min(5 * size + 3, cache.config["max_tokens"]))
    for count in (size - 1, size + 2, 1, 1, 3 * size):
        cache.append(keys[stop : stop + count], values[stop : stop + count])
        stop = min(stop + count, len(keys))
        assert_pair(cache.read(), (keys[:stop], values[:stop]), f"the tokens after appends of {stop}")
        assert_sizes(cache, stop)


@check("POOL-03", "pooled")
def append_evicts_whole_oldest_blocks(subject: Subject) -> None:
    cases = ((3, 7, (5, 1, 1, 1, 4, 2)), (2, 5, (8,)), (4, 5, (4, 1, 1, 11)), (3, 3, (2, 1, 1, 7)))
    for wanted, most, counts in cases:
        size = subject.size("tokens_per_block", wanted)
        cache, appended = (
            new_object(subject, "pooled", tokens_per_block=size, max_tokens=most // wanted * size + most % wanted),
            0,
        )
        maximum = cache.config["max_tokens"]
        scaled = [-(-count * maximum // most) for count in counts]  # unchanged if the limits allow both sizes
        rows = random_pair(subject, sum(scaled))
        for count in scaled:
            cache.append(rows[0][appended : appended + count], rows[1][appended : appended + count])
            appended += count
            first = next(start for start in range(0, appended + 1, size) if appended - start <= maximum)  # oldest token left
            want, what = (rows[0][first:appended], rows[1][first:appended]), f"tokens [{first}, {appended})"
            assert_pair(cache.read(), want, what)
            assert_sizes(cache, appended - first)


@check("POOL-04", "pooled")
def append_to_a_block_larger_than_every_buffer_changes_nothing(subject: Subject) -> None:
    pool, heads, most = new_object(subject, "buffers"), subject.heads, SIZE_CLASSES[-1] // 4
    size = subject.size("tokens_per_block", most // (heads * subject.dim) + 1)
    dim = subject.size("head_dim", max(subject.dim, most // (heads * size) + 1))  # larger if the blocks are smaller
    if heads * size * dim <= most:
        raise NotOffered("a block that is larger than every buffer")
    cache = new_object(subject, "pooled", pool=pool, head_dim=dim, tokens_per_block=size, max_tokens=size)
    with raises("BufferTooLarge"):
        cache.append(*random_pair(subject, 2, dim=dim))
    assert_sizes(cache, 0)
    assert_equal(len(cache.read()[0]), 0, "number of tokens that read returned after append raised BufferTooLarge")
    stats = pool.stats()
    assert_equal(stats.hits + stats.misses - stats.returns, 0, "buffers in use after append raised BufferTooLarge")


@check("POOL-05", "pooled")
def clear_releases_every_buffer(subject: Subject) -> None:
    pool, size = new_object(subject, "buffers", max_buffers=64), subject.size("tokens_per_block", 3)
    cache, other = (new_object(subject, "pooled", pool=pool, max_tokens=3 * size) for _ in range(2))
    rows, more, most = random_pair(subject, size + 1), random_pair(subject, size + 2), pool.config["max_buffers"]
    cache.append(*random_pair(subject, 2 * size + 2))
    other.append(*rows)
    buffers = 2 * cache.stats().num_blocks
    for _ in range(2):
        cache.clear()
        assert_sizes(cache, 0)
        stats = pool.stats()
        numbers = stats.returns, sum(dict(stats.free).values())
        assert_equal(numbers, (buffers, min(buffers, most)), "returns and free buffers in the pool's statistics after clear")
    cache.append(*more)
    hits = min(2 * cache.stats().num_blocks, most)
    assert_equal(pool.stats().hits, hits, "hits in the pool's statistics after released buffers were reused")
    assert_pair(cache.read(), more, "tokens in reused buffers")
    assert_pair(other.read(), rows, "the tokens of another cache on the same pool")


@check("POOL-06", "pooled")
def stats_agree_with_the_contents(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    fixture = PooledFixture(subject, max_tokens=2 * size + 1)
    fixture.look()
    for count in (size - 1, size + 1, size, 2 * size + 2):
        fixture.append(count)
        stats = fixture.cache.stats()
        assert_equal(fixture.cache.total_tokens, stats.total_tokens, "total_tokens")
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        assert_equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics")
        fixture.look()


@check("POOL-06", "pooled")
def stats_count_the_bytes_of_a_larger_class(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 100)
    fixture = PooledFixture(subject, tokens_per_block=size, max_tokens=2 * size)
    fixture.append(size + size // 2)
    tokens = fixture.cache.stats().total_tokens
    blocks, per_block = -(-tokens // size), bytes_of_a_block(fixture.cache)
    assert_equal(fixture.cache.stats().bytes, blocks * per_block, f"bytes in stats, with {blocks} blocks of {size} tokens")
    fixture.append(0)
    fixture.look()


# Checks of LAW-03, LAW-12 and LAW-20 for this family.


@check("LAW-12a", "pooled")
def new_with_a_block_larger_than_the_cache_raises(subject: Subject) -> None:
    assert_config_error(subject, "pooled", tokens_per_block=clamp_to_limits(subject, "pooled")["max_tokens"] + 1)


@check("LAW-20", "pooled")
def new_accepts_every_integer_type(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 50)
    keys, values = random_pair(subject, 2 * size + 15)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("pooled", tokens_per_block=size, max_tokens=2 * size + 10)
        yield f"append of {len(keys)} tokens", typed.call(cache, "append", keys, values)
        yield f"statistics after {len(keys)} tokens", dict(cache.stats())
        yield f"the tokens that remain of {len(keys)}", typed.call(cache, "read")

    assert_same_for_integer_types(subject, script)


@check("LAW-03c", "pooled")
def stats_of_the_pool_add_up(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache = new_object(subject, "pooled", max_tokens=2 * size + 1)
    for _ in range(12):
        cache.append(*random_pair(subject, int(subject.rng.integers(0, size + 2))))
        stats = cache.stats()
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        assert_equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics, compared with 2 per block")


# Checks of LAW-18: blocks that are evicted and allocated again many times.


@check("LAW-18", "pooled")
def append_evicts_the_oldest_blocks_hundreds_of_times(subject: Subject) -> None:
    for size, heads, dim in ((16, 1, 64), (32, 2, 80), (64, 1, 128)):
        fixture = PooledFixture(subject, num_kv_heads=heads, head_dim=dim, tokens_per_block=size, max_tokens=520)
        for count in (1, 15, 129, 400, *(7 for _ in range(60)), 257, 1, 33):
            fixture.append(count)
            fixture.look("total_tokens")
        fixture.look()
