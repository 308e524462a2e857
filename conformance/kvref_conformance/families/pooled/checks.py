"""Checks of POOL: tokens in blocks whose memory comes from a shared buffer pool."""

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.buffers.model import CLASSES, class_of
from kvref_conformance.outcome import NotOffered


def shape_of(cache: Handle) -> tuple[int, int]:
    stats = cache.stats()
    return stats.total_tokens, stats.num_blocks


def buffer_of(cache: Handle) -> int:
    """Returns the size class of a block's buffers, in bytes."""
    sizes = cache.config
    return class_of(sizes["tokens_per_block"] * sizes["num_kv_heads"] * sizes["head_dim"] * 4)


@check("POOL-01", "pooled")
def a_block_holds_tokens_per_block_and_no_more(subject: Subject) -> None:
    cache = new(subject, "pooled")  # its blocks are smaller than their buffers
    size, most = cache.config["tokens_per_block"], cache.config["max_tokens"]
    for total in range(1, min(2 * size + 1, most) + 1):
        cache.append(*pair_of_tokens(subject, 1))
        equal(shape_of(cache), (total, -(-total // size)), "total_tokens and number of blocks")


@check("POOL-02", "pooled")
def order_is_kept_across_blocks(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache, at = new(subject, "pooled", max_tokens=6 * size + 2), 0
    keys, values = pair_of_tokens(subject, min(5 * size + 3, cache.config["max_tokens"]))
    for count in (size - 1, size + 2, 1, 1, 3 * size):
        cache.append(keys[at : at + count], values[at : at + count])
        at = min(at + count, len(keys))
        pair(cache.read(), (keys[:at], values[:at]), f"the tokens after appends of {at}")
        equal(shape_of(cache), (at, -(-at // size)), "total_tokens and number of blocks")


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
            pair(cache.read(), want, f"tokens after appends of {appended}, with tokens_per_block {size} and max_tokens {maximum}")
            equal(shape_of(cache), (appended - first, -(-(appended - first) // size)), "total_tokens and number of blocks")


@check("POOL-04", "pooled")
def a_block_no_buffer_can_hold_leaves_nothing_behind(subject: Subject) -> None:
    pool, heads, most = new(subject, "buffers"), subject.heads, CLASSES[-1] // 4
    size = subject.size("tokens_per_block", most // (heads * subject.dim) + 1)
    dim = subject.size("head_dim", max(subject.dim, most // (heads * size) + 1))  # larger if the blocks are smaller
    if heads * size * dim <= most:
        raise NotOffered("a block that is larger than every buffer")
    cache = new(subject, "pooled", pool=pool, head_dim=dim, tokens_per_block=size, max_tokens=size)
    with raises("BufferTooLarge"):
        cache.append(*pair_of_tokens(subject, 2, dim=dim))
    equal(shape_of(cache), (0, 0), "total_tokens and number of blocks after append raised BufferTooLarge")
    equal(len(cache.read()[0]), 0, "number of tokens that read returned after append raised BufferTooLarge")
    stats = pool.stats()
    equal(stats.hits + stats.misses - stats.returns, 0, "buffers in use after append raised BufferTooLarge")


@check("POOL-05", "pooled")
def clear_gives_every_buffer_back(subject: Subject) -> None:
    pool, size = new(subject, "buffers", max_buffers=64), subject.size("tokens_per_block", 3)
    cache, other = (new(subject, "pooled", pool=pool, max_tokens=3 * size) for _ in range(2))
    rows, kept = pair_of_tokens(subject, size + 1), pool.config["max_buffers"]
    cache.append(*pair_of_tokens(subject, 2 * size + 2))
    other.append(*rows)
    buffers = 2 * cache.stats().num_blocks
    cache.clear()
    equal(shape_of(cache), (0, 0), "total_tokens and number of blocks after clear")
    stats = pool.stats()
    equal(
        (stats.returns, dict(stats.free)[buffer_of(cache)]),
        (buffers, min(buffers, kept)),
        "returns and free buffers in the pool's statistics after clear",
    )
    cache.clear()
    equal(pool.stats().returns, buffers, "returns in the pool's statistics after a second clear")
    pair(other.read(), rows, "the tokens of another cache on the same pool")
    more = pair_of_tokens(subject, size + 2)
    cache.append(*more)
    equal(
        pool.stats().hits,
        min(2 * cache.stats().num_blocks, kept),
        "hits in the pool's statistics after released buffers were reused",
    )
    pair(cache.read(), more, "tokens in reused buffers")
    pair(other.read(), rows, "the tokens of another cache on the same pool, after buffers were reused")


@check("POOL-06", "pooled")
def statistics_agree_with_what_is_held(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache = new(subject, "pooled", max_tokens=2 * size + 1)
    equal(shape_of(cache), (0, 0), "total_tokens and number of blocks of a new cache")
    for count in (size - 1, size + 1, size, 2 * size + 2):
        cache.append(*pair_of_tokens(subject, count))
        stats = cache.stats()
        equal(
            stats.total_tokens,
            len(cache.read()[0]),
            "total_tokens in stats, compared with the number of tokens that read returned",
        )
        equal(cache.total_tokens, stats.total_tokens, "total_tokens")
        equal(
            stats.bytes,
            2 * stats.num_blocks * buffer_of(cache),
            f"bytes in stats, with 2 buffers of {buffer_of(cache)} bytes per block",
        )
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics")
        equal(stats.tokens_per_block, size, "tokens_per_block in stats")


@check("POOL-06", "pooled")
def larger_blocks_take_a_larger_class(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 100)
    cache = new(subject, "pooled", tokens_per_block=size, max_tokens=2 * size)
    rows = pair_of_tokens(subject, size + size // 2)
    cache.append(*rows)
    blocks = -(-len(rows[0]) // size)
    equal(cache.stats().bytes, 2 * blocks * buffer_of(cache), f"bytes in stats, with {blocks} blocks of {size} tokens")
    pair(cache.read(), rows, f"{len(rows[0])} tokens in blocks of {size}")
    cache.append(*pair_of_tokens(subject, 0))
    equal(shape_of(cache), (len(rows[0]), blocks), "total_tokens and number of blocks after an append of 0 tokens")
