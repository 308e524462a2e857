"""Calls that share blocks: forks, truncation, removal and prefix caching."""

import numpy as np

from kvref_conformance.testlib.assertions import raises
from player_traces.recorder import TraceRecorder

SIZES = {"block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}


def record_sharing(trace: TraceRecorder) -> None:
    """A fork, and when a block is copied"""
    trace.note("A pool of six blocks of two tokens each.")
    cache = trace.new("paged", num_blocks=6, **SIZES)
    a = cache.create()
    trace.note("A's prompt is three tokens: two blocks, the second half full.")
    cache.write(a, 0, 0, trace.tokens(3, 1, 2), trace.tokens(3, 1, 2))
    cache.block_table(a, 0)
    trace.note("B is a fork of A: its table lists the same blocks, which now have two references each. Nothing is copied.")
    b = cache.fork(a)
    trace.note("B reads what A wrote (SHARE-03).")
    cache.gather(b, 0)
    trace.note("B's first own token belongs in a block that A lists too. The cache copies the block, and B writes to the copy.")
    cache.append([b], 0, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    cache.block_table(b, 0)
    trace.note(
        "A appends its next token. Only A lists its last block now, so it writes in place, and nothing is copied (SHARE-05)."
    )
    cache.append([a], 0, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    trace.note("C is a fork of a fork. The first block has three references.")
    c = cache.fork(b)
    trace.note("C overwrites its second token. Only the block of this token is copied; C's other block is shared as before.")
    cache.write(c, 0, 1, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    cache.block_table(c, 0)
    trace.note("B still reads its own second token, and so does A (SHARE-04).")
    cache.read(b, 0, [1])
    trace.note(
        "A is dropped. Its last block is free; its first stays, because B lists it. A parent has no special role (SHARE-06)."
    )
    cache.drop(a)
    trace.note("Sequence D allocates all blocks that are free.")
    d = cache.create()
    cache.ensure_capacity(d, 6)
    cache.block_table(d, 0)
    trace.note(
        "B overwrites its fourth token, in a block that C lists too. No block is free for a copy: nothing changes (SHARE-07)."
    )
    with raises("OutOfBlocks"):
        cache.write(b, 0, 3, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    trace.note("C is dropped. Now only B lists its blocks, so the write needs no copy.")
    cache.drop(c)
    cache.write(b, 0, 3, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    cache.gather(b, 0)


def record_truncation(trace: TraceRecorder) -> None:
    """A truncated draft, and a removal from the middle"""
    keys = np.array([[[np.cos(position), np.sin(position)]] for position in range(9)], np.float32)
    trace.note("Every key is (1, 0), rotated by its position: that is a rotary embedding of two numbers.")
    cache = trace.new("paged", num_blocks=8, **SIZES)
    a = cache.create()
    trace.note("A's prompt is five tokens. Open the numbers: each key is rotated by one more radian.")
    cache.write(a, 0, 0, keys[:5], trace.tokens(5, 1, 2))
    cache.block_table(a, 0)
    trace.note("A small model drafts three tokens. They are written, so that the large model can check them in one pass.")
    cache.write(a, 0, 5, keys[5:8], trace.tokens(3, 1, 2))
    cache.block_table(a, 0)
    trace.note("The first is accepted, two are rejected: truncate to six tokens. The block past the end is freed (EDIT-04).")
    cache.truncate(a, 6)
    trace.note("The rejected tokens cannot be read, although their bits are still in memory (EDIT-01).")
    with raises("PositionOutOfRange"):
        cache.read(a, 0, [6])
    trace.note("B is a fork of A and is truncated to three tokens, in the middle of a block that both list.")
    b = cache.fork(a)
    cache.truncate(b, 3)
    trace.note("B's next token is written to a copy. A's fourth token is unchanged (EDIT-05).")
    cache.write(b, 0, 3, keys[3:4], trace.tokens(1, 1, 2))
    cache.block_table(b, 0)
    cache.gather(a, 0)
    trace.note(
        "A is too long: tokens 1 and 2 are removed. Later tokens move up, and their keys are rotated back by two (EDIT-10)."
    )
    cache.remove(a, 1, 3, frequencies=[1.0])
    cache.block_table(a, 0)
    trace.note("Each key is rotated by its new position: token 1 by one radian, token 2 by two. B is unchanged.")
    cache.gather(a, 0)
    cache.gather(b, 0)


def record_prefixes(trace: TraceRecorder) -> None:
    """Prompts that begin like an earlier one"""
    trace.note("A pool of six blocks of two tokens each, with a prefix index.")
    cache = trace.new("prefix", num_blocks=6, **SIZES)
    trace.note("A begins with the prompt 1 2 3 4 5. Nothing is found: A gets room for five tokens and has length 0.")
    a = cache.begin([1, 2, 3, 4, 5])
    cache.length(a, 0)
    trace.note("The model computes all five tokens.")
    cache.write(a, 0, 0, trace.tokens(5, 1, 2), trace.tokens(5, 1, 2))
    cache.block_table(a, 0)
    trace.note(
        "Commit records which tokens these are. The two full blocks are cached now; the half-full block is not (PREFIX-04)."
    )
    cache.commit(a, [1, 2, 3, 4, 5])
    trace.note("What would another prompt find? Four tokens, in the first two blocks. `match` changes nothing (PREFIX-05).")
    cache.match([1, 2, 3, 4, 8, 9])
    trace.note("The second block alone is not found: its contents depend on the tokens before it (PREFIX-03).")
    cache.match([7, 7, 3, 4, 8, 9])
    trace.note("With another salt, such as the name of an adapter, nothing is found either.")
    cache.match([1, 2, 3, 4, 8, 9], "adapter")
    trace.note("B begins with the tokens in A's blocks, and allocates a block only for the rest.")
    b = cache.begin([1, 2, 3, 4, 8, 9])
    cache.length(b, 0)
    trace.note("Two tokens are computed instead of six.")
    cache.write(b, 0, 4, trace.tokens(2, 1, 2), trace.tokens(2, 1, 2))
    cache.block_table(b, 0)
    cache.commit(b, [1, 2, 3, 4, 8, 9])
    trace.note("A is dropped. B still lists the blocks that they shared.")
    cache.drop(a)
    trace.note("B is dropped. All six blocks are free; three are cached and can be found until they are evicted (PREFIX-06).")
    cache.drop(b)
    cache.num_free_blocks
    trace.note(
        "All of 1 2 3 4 is cached, but the hit is two tokens: the last token has to be computed for its logits (PREFIX-01)."
    )
    cache.match([1, 2, 3, 4])
    trace.note(
        "C allocates four blocks: those that are not cached, then B's last one. First blocks serve more prompts (PREFIX-08)."
    )
    c = cache.begin([20, 21, 22, 23, 24, 25, 26])
    cache.block_table(c, 0)
    trace.note("So B's last block is no longer found (PREFIX-07); the blocks before it are.")
    cache.match([1, 2, 3, 4, 8, 9, 0])
    trace.note("A prompt of three blocks: two are found, but no other block is free, so none is left for the rest (PREFIX-13).")
    with raises("OutOfBlocks"):
        cache.begin([1, 2, 3, 4, 5])
    trace.note("The hit is the same as before: a `begin` that raises changes nothing.")
    cache.match([1, 2, 3, 4, 5])
    trace.note("C is dropped before anything is committed. Its blocks are free and not cached.")
    cache.drop(c)
    trace.note("Now there is room. Four of the five tokens are found.")
    d = cache.begin([1, 2, 3, 4, 5])
    cache.block_table(d, 0)
    trace.note(
        "D overwrites its first token. The block is copied although only D lists it: cached blocks do not change (PREFIX-14)."
    )
    cache.write(d, 0, 0, trace.tokens(1, 1, 2), trace.tokens(1, 1, 2))
    cache.block_table(d, 0)
    trace.note("The cached block is unchanged, and the next prompt finds it.")
    cache.match([1, 2, 3, 4, 5])
