"""Checks of POOL: tokens in blocks whose memory comes from a shared buffer pool."""

from collections.abc import Iterator

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.buffers.model import SIZE_CLASSES, class_of
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import clamp_to_limits, new, pair_of_tokens, refused
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, pair_of_content


def shape_of(cache: ObjectProxy) -> tuple[int, int]:
    stats = cache.stats()
    return stats.total_tokens, stats.num_blocks


def buffer_of(cache: ObjectProxy) -> int:
    """Returns the size class of a block's buffers, in bytes."""
    sizes = cache.config
    return class_of(sizes["tokens_per_block"] * sizes["num_kv_heads"] * sizes["head_dim"] * 4)


@check("POOL-01", "pooled")
def a_block_holds_tokens_per_block_and_no_more(subject: Subject) -> None:
    cache = new(subject, "pooled")  # its blocks are smaller than their buffers
    size, most = cache.config["tokens_per_block"], cache.config["max_tokens"]
    for total in range(1, min(2 * size + 1, most) + 1):
        cache.append(*pair_of_tokens(subject, 1))
        assert_equal(shape_of(cache), (total, -(-total // size)), "total_tokens and number of blocks")


@check("POOL-02", "pooled")
def order_is_kept_across_blocks(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache, at = new(subject, "pooled", max_tokens=6 * size + 2), 0
    keys, values = pair_of_tokens(subject, min(5 * size + 3, cache.config["max_tokens"]))
    for count in (size - 1, size + 2, 1, 1, 3 * size):
        cache.append(keys[at : at + count], values[at : at + count])
        at = min(at + count, len(keys))
        assert_pair(cache.read(), (keys[:at], values[:at]), f"the tokens after appends of {at}")
        assert_equal(shape_of(cache), (at, -(-at // size)), "total_tokens and number of blocks")


@check("POOL-03", "pooled")
def whole_oldest_blocks_go(subject: Subject) -> None:
    cases = ((3, 7, (5, 1, 1, 1, 4, 2)), (2, 5, (8,)), (4, 5, (4, 1, 1, 11)), (3, 3, (2, 1, 1, 7)))
    for wanted, most, counts in cases:
        size = subject.size("tokens_per_block", wanted)
        cache, appended = new(subject, "pooled", tokens_per_block=size, max_tokens=most // wanted * size + most % wanted), 0
        maximum = cache.config["max_tokens"]
        scaled = [-(-count * maximum // most) for count in counts]  # unchanged if the limits allow both sizes
        rows = pair_of_tokens(subject, sum(scaled))
        for count in scaled:
            cache.append(rows[0][appended : appended + count], rows[1][appended : appended + count])
            appended += count
            first = next(start for start in range(0, appended + 1, size) if appended - start <= maximum)  # oldest token left
            want = rows[0][first:appended], rows[1][first:appended]
            assert_pair(
                cache.read(), want, f"tokens after appends of {appended}, with tokens_per_block {size} and max_tokens {maximum}"
            )
            assert_equal(shape_of(cache), (appended - first, -(-(appended - first) // size)), "total_tokens and number of blocks")


@check("POOL-04", "pooled")
def a_block_no_buffer_can_hold_leaves_nothing_behind(subject: Subject) -> None:
    pool, heads, most = new(subject, "buffers"), subject.heads, SIZE_CLASSES[-1] // 4
    size = subject.size("tokens_per_block", most // (heads * subject.dim) + 1)
    dim = subject.size("head_dim", max(subject.dim, most // (heads * size) + 1))  # larger if the blocks are smaller
    if heads * size * dim <= most:
        raise NotOffered("a block that is larger than every buffer")
    cache = new(subject, "pooled", pool=pool, head_dim=dim, tokens_per_block=size, max_tokens=size)
    with raises("BufferTooLarge"):
        cache.append(*pair_of_tokens(subject, 2, dim=dim))
    assert_equal(shape_of(cache), (0, 0), "total_tokens and number of blocks after append raised BufferTooLarge")
    assert_equal(len(cache.read()[0]), 0, "number of tokens that read returned after append raised BufferTooLarge")
    stats = pool.stats()
    assert_equal(stats.hits + stats.misses - stats.returns, 0, "buffers in use after append raised BufferTooLarge")


@check("POOL-05", "pooled")
def clear_gives_every_buffer_back(subject: Subject) -> None:
    pool, size = new(subject, "buffers", max_buffers=64), subject.size("tokens_per_block", 3)
    cache, other = (new(subject, "pooled", pool=pool, max_tokens=3 * size) for _ in range(2))
    rows, kept = pair_of_tokens(subject, size + 1), pool.config["max_buffers"]
    cache.append(*pair_of_tokens(subject, 2 * size + 2))
    other.append(*rows)
    buffers = 2 * cache.stats().num_blocks
    cache.clear()
    assert_equal(shape_of(cache), (0, 0), "total_tokens and number of blocks after clear")
    stats = pool.stats()
    assert_equal(
        (stats.returns, dict(stats.free)[buffer_of(cache)]),
        (buffers, min(buffers, kept)),
        "returns and free buffers in the pool's statistics after clear",
    )
    cache.clear()
    assert_equal(pool.stats().returns, buffers, "returns in the pool's statistics after a second clear")
    assert_pair(other.read(), rows, "the tokens of another cache on the same pool")
    more = pair_of_tokens(subject, size + 2)
    cache.append(*more)
    assert_equal(
        pool.stats().hits,
        min(2 * cache.stats().num_blocks, kept),
        "hits in the pool's statistics after released buffers were reused",
    )
    assert_pair(cache.read(), more, "tokens in reused buffers")
    assert_pair(other.read(), rows, "the tokens of another cache on the same pool, after buffers were reused")


@check("POOL-06", "pooled")
def statistics_agree_with_what_is_held(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache = new(subject, "pooled", max_tokens=2 * size + 1)
    assert_equal(shape_of(cache), (0, 0), "total_tokens and number of blocks of a new cache")
    for count in (size - 1, size + 1, size, 2 * size + 2):
        cache.append(*pair_of_tokens(subject, count))
        stats = cache.stats()
        assert_equal(
            stats.total_tokens,
            len(cache.read()[0]),
            "total_tokens in stats, compared with the number of tokens that read returned",
        )
        assert_equal(cache.total_tokens, stats.total_tokens, "total_tokens")
        assert_equal(
            stats.bytes,
            2 * stats.num_blocks * buffer_of(cache),
            f"bytes in stats, with 2 buffers of {buffer_of(cache)} bytes per block",
        )
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        assert_equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics")
        assert_equal(stats.tokens_per_block, size, "tokens_per_block in stats")


@check("POOL-06", "pooled")
def larger_blocks_take_a_larger_class(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 100)
    cache = new(subject, "pooled", tokens_per_block=size, max_tokens=2 * size)
    rows = pair_of_tokens(subject, size + size // 2)
    cache.append(*rows)
    blocks = -(-len(rows[0]) // size)
    assert_equal(cache.stats().bytes, 2 * blocks * buffer_of(cache), f"bytes in stats, with {blocks} blocks of {size} tokens")
    assert_pair(cache.read(), rows, f"{len(rows[0])} tokens in blocks of {size}")
    cache.append(*pair_of_tokens(subject, 0))
    assert_equal(shape_of(cache), (len(rows[0]), blocks), "total_tokens and number of blocks after an append of 0 tokens")


# Checks of LAW-03, LAW-12 and LAW-20 for this family.


@check("LAW-12a", "pooled")
def a_block_must_fit_the_cache(subject: Subject) -> None:
    refused(subject, "pooled", tokens_per_block=clamp_to_limits(subject, "pooled")["max_tokens"] + 1)


@check("LAW-20", "pooled")
def blocks_of_tokens_are_as_large_in_any_type(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 50)
    keys, values = pair_of_tokens(subject, 2 * size + 15)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("pooled", tokens_per_block=size, max_tokens=2 * size + 10)
        yield f"append of {len(keys)} tokens", typed.call(cache, "append", keys, values)
        yield f"statistics after {len(keys)} tokens", dict(cache.stats())
        yield f"the tokens that remain of {len(keys)}", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-03c", "pooled")
def buffers_held_and_given_back_add_up(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache = new(subject, "pooled", max_tokens=2 * size + 1)
    for _ in range(12):
        cache.append(*pair_of_tokens(subject, int(subject.rng.integers(0, size + 2))))
        stats = cache.stats()
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        assert_equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics, compared with 2 per block")


# Checks of LAW-18: blocks that are evicted and allocated again many times.


@check("LAW-18", "pooled")
def the_oldest_blocks_go_hundreds_of_times(subject: Subject) -> None:
    for size, heads, dim in ((16, 1, 64), (32, 2, 80), (64, 1, 128)):
        cache = new(subject, "pooled", num_kv_heads=heads, head_dim=dim, tokens_per_block=size, max_tokens=520)
        config, at, first = cache.config, 0, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        for count in (1, 15, 129, 400, *(7 for _ in range(60)), 257, 1, 33):
            cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
            at += count
            while at - first > config["max_tokens"]:
                first += config["tokens_per_block"]
            written.up_to(0, 0, at)
            assert_equal(
                cache.total_tokens, at - first, f"tokens that remain of {at}, with tokens_per_block {config['tokens_per_block']}"
            )
        belongs(cache.read(), 0, 0, range(first, at), written)
