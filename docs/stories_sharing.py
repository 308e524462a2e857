"""The stories of sequences that share, go back and are found again: see stories.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvref_conformance.checking.expect import raises

if TYPE_CHECKING:
    from stories import Told

SIZES = {"block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}


def sharing(tell: Told) -> None:
    """A fork, and who copies when"""
    tell("A pool of six blocks of two tokens each.")
    cache = tell.new("paged", num_blocks=6, **SIZES)
    a = cache.create()
    tell("A's prompt is three tokens: two blocks, the second half full.")
    cache.write(a, 0, 0, tell.tokens(3, 1, 2), tell.tokens(3, 1, 2))
    cache.block_table(a, 0)
    tell("B is a fork of A: its table lists the same blocks, which have two references each now. Nothing is copied.")
    b = cache.fork(a)
    tell("B reads what A wrote (SHARE-03).")
    cache.gather(b, 0)
    tell("B's first token of its own belongs into a block that A lists too. The block is copied, and B writes into the copy.")
    cache.append([b], 0, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    cache.block_table(b, 0)
    tell("A says another. Nobody else lists its last block any more: A writes in place, and nothing is copied (SHARE-05).")
    cache.append([a], 0, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    tell("C is a fork of a fork. The first block has three references.")
    c = cache.fork(b)
    tell("C changes its second token. One block is copied, the one that is written to: C's others are shared as before.")
    cache.write(c, 0, 1, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    cache.block_table(c, 0)
    tell("B still reads its own second token, and so does A (SHARE-04).")
    cache.read(b, 0, [1])
    tell("A ends. Its last block is free; the first is B's too, and stays. Nobody counts who was the parent (SHARE-06).")
    cache.drop(a)
    tell("Somebody takes all blocks that are free.")
    d = cache.create()
    cache.ensure_capacity(d, 6)
    cache.block_table(d, 0)
    tell("B is to change its fourth token, in a block that is C's too. None is free for a copy, and nothing changes (SHARE-07).")
    with raises("OutOfBlocks"):
        cache.write(b, 0, 3, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    tell("C ends. Now B is alone with its blocks, and needs no copy.")
    cache.drop(c)
    cache.write(b, 0, 3, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    cache.gather(b, 0)


def going_back(tell: Told) -> None:
    """A draft taken back, and a hole closed"""
    keys = np.array([[[np.cos(position), np.sin(position)]] for position in range(9)], np.float32)
    tell("Every key here is the same, (1, 0), turned by its position: that is what RoPE does with two numbers.")
    cache = tell.new("paged", num_blocks=8, **SIZES)
    a = cache.create()
    tell("A's prompt is five tokens. Open the numbers: each key points one radian further.")
    cache.write(a, 0, 0, keys[:5], tell.tokens(5, 1, 2))
    cache.block_table(a, 0)
    tell("A small model drafts three tokens, and they are written to be checked, in one pass.")
    cache.write(a, 0, 5, keys[5:8], tell.tokens(3, 1, 2))
    cache.block_table(a, 0)
    tell("The first is accepted, two are not: back to six tokens. A block past the end is given back (EDIT-04).")
    cache.truncate(a, 6)
    tell("What was rejected is nobody's, though its bits are still there (EDIT-01).")
    with raises("PositionOutOfRange"):
        cache.read(a, 0, [6])
    tell("B is a fork of A, and goes back to three tokens, into the middle of a block that both list.")
    b = cache.fork(a)
    cache.truncate(b, 3)
    tell("What B says now goes into a copy. A's fourth token is as it was (EDIT-05).")
    cache.write(b, 0, 3, keys[3:4], tell.tokens(1, 1, 2))
    cache.block_table(b, 0)
    cache.gather(a, 0)
    tell("A grows too long, and forgets tokens 1 and 2. The others move up, and their keys are turned back by two (EDIT-10).")
    cache.remove(a, 1, 3, theta=10_000.0)
    cache.block_table(a, 0)
    tell("Each key points where its new position says: token 1 at one radian, token 2 at two. And B has all that it had.")
    cache.gather(a, 0)
    cache.gather(b, 0)


def prefixes(tell: Told) -> None:
    """A prompt that was seen before"""
    tell("A pool of six blocks of two tokens, and a cache that finds what it has seen.")
    cache = tell.new("prefix", num_blocks=6, **SIZES)
    tell("A begins with the prompt 1 2 3 4 5. Nothing is found: it has room for five tokens, and none of them.")
    a = cache.begin([1, 2, 3, 4, 5])
    cache.length(a, 0)
    tell("The model computes all five.")
    cache.write(a, 0, 0, tell.tokens(5, 1, 2), tell.tokens(5, 1, 2))
    cache.block_table(a, 0)
    tell("Commit: these are their tokens. The two full blocks can be found from now on, the half-full one cannot (PREFIX-04).")
    cache.commit(a, [1, 2, 3, 4, 5])
    tell("What would another prompt find? Four tokens: the first two blocks. To ask changes nothing (PREFIX-05).")
    cache.match([1, 2, 3, 4, 8, 9])
    tell("The second block alone is not found: what it holds hangs on what came before it (PREFIX-03).")
    cache.match([7, 7, 3, 4, 8, 9])
    tell("With another salt, such as an adapter's name, nothing is found either.")
    cache.match([1, 2, 3, 4, 8, 9], "adapter")
    tell("B begins with what A's blocks hold, and needs a block for the rest only.")
    b = cache.begin([1, 2, 3, 4, 8, 9])
    cache.length(b, 0)
    tell("Two tokens are computed in place of six.")
    cache.write(b, 0, 4, tell.tokens(2, 1, 2), tell.tokens(2, 1, 2))
    cache.block_table(b, 0)
    cache.commit(b, [1, 2, 3, 4, 8, 9])
    tell("A ends. B holds the blocks that they shared.")
    cache.drop(a)
    tell("B ends. All six blocks are free, and three of them wait: they are found until somebody takes them (PREFIX-06).")
    cache.drop(b)
    cache.num_free_blocks
    tell("The whole prompt 1 2 3 4 is there. Found are two: the last token has to be computed, for its logits (PREFIX-01).")
    cache.match([1, 2, 3, 4])
    tell("C takes four blocks: the plain ones, then one that waits. It is B's last: a beginning serves more prompts (PREFIX-08).")
    c = cache.begin([20, 21, 22, 23, 24, 25, 26])
    cache.block_table(c, 0)
    tell("So B's own block is not found any more (PREFIX-07), and what came before it is.")
    cache.match([1, 2, 3, 4, 8, 9, 0])
    tell("A prompt of three blocks: two are found, and these are all that is free. None is left for the rest (PREFIX-13).")
    with raises("OutOfBlocks"):
        cache.begin([1, 2, 3, 4, 5])
    tell("And as found before: who is refused takes nothing with him.")
    cache.match([1, 2, 3, 4, 5])
    tell("C is cut off before anything was committed. Its blocks go back.")
    cache.drop(c)
    tell("Now there is room. Four of the five tokens are there.")
    d = cache.begin([1, 2, 3, 4, 5])
    cache.block_table(d, 0)
    tell("D changes its first token. The block is copied, though D alone holds it: what can be found stays as it is (PREFIX-14).")
    cache.write(d, 0, 0, tell.tokens(1, 1, 2), tell.tokens(1, 1, 2))
    cache.block_table(d, 0)
    tell("The block waits as it was, for whoever asks next.")
    cache.match([1, 2, 3, 4, 5])


STORIES = (sharing, going_back, prefixes)
