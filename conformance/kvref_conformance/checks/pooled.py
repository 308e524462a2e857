"""POOL: tokens in blocks whose memory comes from a shared pool."""

import numpy as np

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Handle, Subject


def shape_of(cache: Handle) -> tuple[int, int]:
    stats = cache.stats()
    return stats.total_tokens, stats.num_blocks


@check("POOL-01", "pooled")
def a_block_holds_tokens_per_block_and_no_more(subject: Subject) -> None:
    # 3 tokens take 120 of a buffer's 1024 bytes: room is no reason to go on filling it.
    cache = new(subject, "pooled")
    for total, blocks in ((1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 3)):
        cache.append(*pair_of_tokens(subject, 1))
        equal(shape_of(cache), (total, blocks), "tokens and blocks")


@check("POOL-02", "pooled")
def order_is_kept_across_blocks(subject: Subject) -> None:
    cache, (keys, values), at = new(subject, "pooled"), pair_of_tokens(subject, 18), 0
    for count in (2, 5, 1, 1, 9):
        cache.append(keys[at : at + count], values[at : at + count])
        at += count
        pair(cache.read(), (keys[:at], values[:at]), f"{at} tokens")
        equal(shape_of(cache), (at, -(-at // 3)), "tokens and blocks")


@check("POOL-03", "pooled")
def whole_oldest_blocks_go(subject: Subject) -> None:
    for size, maximum, counts in ((3, 7, (5, 1, 1, 1, 4, 2)), (2, 5, (8,)), (4, 5, (4, 1, 1, 11)), (3, 3, (2, 1, 1, 7))):
        cache, rows, appended = new(subject, "pooled", tokens_per_block=size, max_tokens=maximum), pair_of_tokens(subject, 40), 0
        for count in counts:
            cache.append(rows[0][appended : appended + count], rows[1][appended : appended + count])
            appended += count
            first = next(start for start in range(0, 99, size) if appended - start <= maximum)  # drop until it fits
            want = rows[0][first:appended], rows[1][first:appended]
            pair(cache.read(), want, f"blocks of {size}, at most {maximum} tokens, after {appended}")
            equal(shape_of(cache), (appended - first, -(-(appended - first) // size)), "tokens and blocks")


@check("POOL-04", "pooled")
def a_block_no_buffer_can_hold_leaves_nothing_behind(subject: Subject) -> None:
    pool = new(subject, "buffers")
    cache = new(subject, "pooled", pool=pool, tokens_per_block=7000, max_tokens=9000)  # 280,000 bytes a buffer
    with raises("BufferTooLarge"):
        cache.append(*pair_of_tokens(subject, 2))
    equal(shape_of(cache), (0, 0), "tokens and blocks after an append that found no buffer")
    equal(len(cache.read()[0]), 0, "tokens read")
    stats = pool.stats()
    equal(stats.hits + stats.misses - stats.returns, 0, "buffers in use")


@check("POOL-05", "pooled")
def clear_gives_every_buffer_back(subject: Subject) -> None:
    pool = new(subject, "buffers", max_buffers=64)
    cache, other = (new(subject, "pooled", pool=pool) for _ in range(2))
    rows = pair_of_tokens(subject, 4)
    cache.append(*pair_of_tokens(subject, 8))
    other.append(*rows)
    cache.clear()
    equal(shape_of(cache), (0, 0), "tokens and blocks after clear")
    stats = pool.stats()
    equal((stats.returns, dict(stats.free)[1024]), (6, 6), "buffers given back, and free")
    cache.clear()
    equal(pool.stats().returns, 6, "buffers given back after clearing twice")
    pair(other.read(), rows, "the other cache on the same pool")
    more = pair_of_tokens(subject, 5)
    cache.append(*more)
    equal(pool.stats().hits, 4, "requests served by the buffers given back")
    pair(cache.read(), more, "tokens in buffers given back and taken again")
    pair(other.read(), rows, "the other cache, later")


@check("POOL-06", "pooled")
def statistics_agree_with_what_is_held(subject: Subject) -> None:
    cache = new(subject, "pooled", max_tokens=7)
    equal(shape_of(cache), (0, 0), "tokens and blocks of a new cache")
    for count in (2, 4, 3, 8):
        cache.append(*pair_of_tokens(subject, count))
        stats = cache.stats()
        equal(stats.total_tokens, len(cache.read()[0]), "tokens counted, against tokens read")
        equal(cache.total_tokens, stats.total_tokens, "total_tokens")
        equal(stats.bytes, 2 * stats.num_blocks * 1024, "bytes of 2 buffers of 1024 a block")
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        equal(live, 2 * stats.num_blocks, "the pool's buffers in use")
        equal(stats.tokens_per_block, 3, "tokens a block")


@check("POOL-06", "pooled")
def larger_blocks_take_a_larger_class(subject: Subject) -> None:
    cache = new(subject, "pooled", tokens_per_block=100, max_tokens=200)
    rows = pair_of_tokens(subject, 150)
    cache.append(*rows)
    equal(cache.stats().bytes, 2 * 2 * 4096, f"bytes of 2 blocks of 100 x {HEADS} x {DIM} x 4 bytes")
    pair(cache.read(), rows, "150 tokens in blocks of 100")
    cache.append(np.zeros((0, HEADS, DIM), np.float32), np.zeros((0, HEADS, DIM), np.float32))
    equal(shape_of(cache), (150, 2), "tokens and blocks after appending none")
