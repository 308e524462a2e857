"""The traces that the player shows: a story a chapter, told by the reference, and the zoo's shrunk failures.

A story is a conversation with a word to the reader beside some of its calls.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import stories_sharing
import stories_windows
from kvref_conformance.checking.expect import raises
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.trace import file
from kvref_conformance.implementations import load
from kvref_conformance.judging.judge import Judge
from kvref_conformance.judging.zoo import look_at
from kvref_conformance.oracle.witness import Unknown, Witness

BUGS = (
    "blocks-freed-twice", "paged-reads-past-the-length", "quantized-drops-its-scale", "tiered-wraps-one-early",
    "attention-nan-past-the-end", "paged-leaks-a-block",
)  # fmt: skip


def write(folder: Path) -> None:
    """Every story and every bug, as a trace each, into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {name: Told().trace(story) for name, story in STORIES.items()}
    told |= {name: look_at(name).shortest.trace for name in BUGS}
    for name, lines in told.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


class Told:
    """A conversation with the reference; what is said is noted beside the next call."""

    def __init__(self) -> None:
        self._judge = Judge(load("reference"))
        self._subject = self._judge.begin()
        self._notes: dict[int, str] = {}
        self._values = iter(range(1, 10_000))

    def __call__(self, note: str) -> None:
        self._notes[len(self._subject.conversation) + 1] = note

    def new(self, family: str, **sizes: Any) -> Handle:
        return self._subject.new(family, **sizes)

    def tokens(self, *shape: int) -> np.ndarray:
        """Keys or values that can be told apart: 1, 2, 3 and so on."""
        return np.array([next(self._values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    def trace(self, story: Callable[["Told"], None]) -> list[str]:
        story(self)
        said = (story.__doc__ or "").strip()
        header = file.Header("any", said, "model", file.who(self._judge.implementation, "reference"))
        try:
            lines = file.written(header, Witness("exact"), self._subject.conversation)
        except Unknown:  # of numbers that no model says
            lines = file.written(replace(header, judge="check"), Witness("exact"), self._subject.conversation)
        for id, note in self._notes.items():
            request = json.loads(lines[2 * id - 1])
            lines[2 * id - 1] = json.dumps(request | {"note": note})
        return lines


def decoding(tell: Told) -> None:
    """Prefill and decode: every key is computed once"""
    tell("An empty cache for one sequence and one layer.")
    cache = tell.new("contiguous", batch_size=1, num_kv_heads=1, head_dim=2, initial_capacity=8, max_seq_len=8, dtype="float32")
    tell("Prefill: the prompt is four tokens. Their keys and values are computed together, in one pass, and kept.")
    cache.append(tell.tokens(1, 1, 4, 2), tell.tokens(1, 1, 4, 2))
    tell("The last prompt token's query attends over all four, and the first new token comes out.")
    cache.read()
    for word in ("fifth", "sixth", "seventh"):
        tell(f"Decode: one token goes in. One key and one value are computed for it, the {word} of the cache.")
        cache.append(tell.tokens(1, 1, 1, 2), tell.tokens(1, 1, 1, 2))
        tell("Its query attends over everything that is kept. Nothing earlier is computed again.")
        cache.read()


def contiguous(tell: Told) -> None:
    """One buffer that doubles"""
    tell("A buffer with room for two tokens, allowed to grow to eight.")
    cache = tell.new("contiguous", batch_size=1, num_kv_heads=1, head_dim=2, initial_capacity=2, max_seq_len=8, dtype="float32")
    tell("Two tokens fill it. Nothing had to be moved.")
    cache.append(tell.tokens(1, 1, 2, 2), tell.tokens(1, 1, 2, 2))
    tell("The third does not fit: a buffer twice as large is made, and the two tokens are copied into it.")
    cache.append(tell.tokens(1, 1, 1, 2), tell.tokens(1, 1, 1, 2))
    tell("The fourth goes into the room that the doubling left.")
    cache.append(tell.tokens(1, 1, 1, 2), tell.tokens(1, 1, 1, 2))
    tell("Three more: doubled again, and copied again. Six tokens were copied in all, for seven that came.")
    cache.append(tell.tokens(1, 1, 3, 2), tell.tokens(1, 1, 3, 2))
    tell("The eighth token fills the cache to the last slot. That has to work.")
    cache.append(tell.tokens(1, 1, 1, 2), tell.tokens(1, 1, 1, 2))
    tell("A ninth is refused, and nothing has changed: CONTIG-06.")
    with raises("CapacityExceeded"):
        cache.append(tell.tokens(1, 1, 1, 2), tell.tokens(1, 1, 1, 2))
    tell("A new conversation: reset sets the length to 0 and keeps the memory. The old numbers still lie behind the length.")
    cache.reset()
    tell("Reading now gives no tokens: what lies there is nobody's any more (CONTIG-03, LAW-05).")
    cache.read()
    tell("The next sequence writes over them.")
    cache.append(tell.tokens(1, 1, 3, 2), tell.tokens(1, 1, 3, 2))


def paged(tell: Told) -> None:
    """Two sequences, six blocks, and a block handed on"""
    tell("A pool of six blocks of two tokens each, and one layer. All blocks are free.")
    cache = tell.new("paged", num_blocks=6, block_size=2, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
    tell("Sequence A begins. It holds no block yet: blocks come when tokens do.")
    a = cache.create()
    tell("A's prompt is three tokens: that takes two blocks, and the second one is half full.")
    cache.write(a, 0, 0, tell.tokens(3, 1, 2), tell.tokens(3, 1, 2))
    tell("The block table says which blocks hold A's tokens, in order. It is all that attention needs to find them.")
    cache.block_table(a, 0)
    tell("Sequence B begins beside it.")
    b = cache.create()
    tell("B's prompt is two tokens: one block.")
    cache.write(b, 0, 0, tell.tokens(2, 1, 2), tell.tokens(2, 1, 2))
    cache.block_table(b, 0)
    tell("One step of a batch: A and B get a token each, in one call. A's goes into its half-full block, B needs a new one.")
    cache.append([a, b], 0, tell.tokens(2, 1, 2), tell.tokens(2, 1, 2))
    cache.block_table(b, 0)
    tell("Another step. Now A needs a block: its third lies behind B's. Nobody has to lie side by side.")
    cache.append([a, b], 0, tell.tokens(2, 1, 2), tell.tokens(2, 1, 2))
    cache.block_table(a, 0)
    tell("Where A's tokens lie: slot = block × block_size + offset (PAGED-06).")
    cache.slot_mapping(a, 0, 0, 5)
    tell("A is finished and dropped. Its three blocks are free again. Nobody wiped them: A's bits still lie there.")
    cache.drop(a)
    tell("Sequence C begins, and takes what was A's.")
    c = cache.create()
    cache.write(c, 0, 0, tell.tokens(3, 1, 2), tell.tokens(3, 1, 2))
    tell("A's table began with these: this pool hands out what came back last. Any order is right, if no block has two owners.")
    cache.block_table(c, 0)
    tell("C wrote three tokens. The slot after them still holds what A left. Reading it has to raise: PAGED-09, LAW-05.")
    with raises("PositionOutOfRange"):
        cache.read(c, 0, [3])
    tell("C asks for room for nine tokens, three blocks more. Only two are free: it gets none of them (PAGED-05).")
    with raises("OutOfBlocks"):
        cache.ensure_capacity(c, 9)
    tell("What C reads is what C wrote, in order, wherever its blocks are.")
    cache.gather(c, 0)


def quantized(tell: Told) -> None:
    """Rows become codes and a scale"""
    tell("Two layers, room for four tokens, stored as INT8: a byte a number, and one float32 scale for each head's row.")
    cache = tell.new("quantized", num_layers=2, capacity=4, num_kv_heads=1, head_dim=4, format="int8")
    rows = np.array([[[1.0, -0.5, 0.25, 0.01]], [[100.0, -50.0, 25.0, 1.0]]], np.float32)
    tell("A token goes into every layer at once. Look at the numbers: layer 1 has rows a hundred times as large as layer 0.")
    cache.append_step(rows, rows)
    tell("Read back, 1 is exact: it is the largest of its row, code 127. 0.01 became 0.00787: the nearest of 255 steps.")
    cache.read_token(0, 0)
    tell("Layer 1 has a scale of its own, a hundred times as large, and so the same codes: QUANT-06, FMT-INT8-01.")
    cache.read_token(1, 0)
    large = np.array([[[1000.0, 0.0, 0.0, 1.0]], [[1.0, 2.0, 3.0, 4.0]]], np.float32)
    tell("A much larger row comes. A scale that was fixed by the first row would clip it.")
    cache.append_step(large, large)
    tell("With its own scale it is right. Its 1 is lost: beside 1000, a step is 7.9 (FMT-LEVEL-03).")
    cache.read_token(0, 1)
    tell("And the first token still reads as it did. It was quantized once, and nothing touches it again (QUANT-05).")
    cache.read_token(0, 0)
    tell("A batch of tokens, ready for attention.")
    cache.read_tokens(0, [0, 1])


def tiered(tell: Told) -> None:
    """Tail, warm tier, store, gone"""
    tell("At most ten tokens: the newest three exact (tail), the three before in 8 bits (warm tier), the rest in 4 (store).")
    sizes = {"num_kv_heads": 1, "head_dim": 4, "max_tokens": 10, "tail_length": 3, "warm_length": 3, "migration_batch": 2}
    cache = tell.new("tiered", **sizes, tail_dtype="float32", warm_format="q8", store_format="q4")
    rng = np.random.default_rng(6)

    def some(count: int) -> np.ndarray:
        return rng.normal(size=(count, 1, 4)).round(2).astype(np.float32)

    tell("Three tokens fill the tail. They are kept as they came.")
    cache.append(some(3), some(3))
    cache.read()
    tell("One more. The oldest leaves the tail: it is quantized to 8 bits, once, from what the tail held (TIER-02).")
    cache.append(some(1), some(1))
    tell("Read: oldest first. Token 0 is a little off now, the others are exact. Compare the first row with what came before.")
    cache.read()
    tell("Three more: the warm tier is full, and token 0 goes on into the store, in 4 bits.")
    cache.append(some(3), some(3))
    cache.tier_of(0)
    tell("Three more: the cache is full, to the last of its ten tokens.")
    cache.append(some(3), some(3))
    tell("Two more than it can hold: the two oldest are forgotten. The others keep their positions: 2 is still 2 (TIER-07).")
    cache.append(some(2), some(2))
    tell("Asking for what was evicted has to raise.")
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    tell("A new policy: no warm tier. Its tokens move on into the store at once (TIER-10).")
    cache.update_policy(warm_length=0)
    tell("The bytes really stored, tier by tier (TIER-08).")
    cache.stats()


def pooled(tell: Told) -> None:
    """Memory that is handed on"""
    tell("A pool of buffers in five sizes. It keeps at most four free ones of each size.")
    pool = tell.new("buffers", max_buffers=4)
    tell("A cache that takes its memory from the pool: blocks of two tokens, at most four tokens.")
    cache = tell.new("pooled", num_kv_heads=1, head_dim=2, tokens_per_block=2, max_tokens=4, pool=pool)
    tell("Three tokens are two blocks, each with a buffer for keys and one for values: four of 1 KiB, new from the system.")
    cache.append(tell.tokens(3, 1, 2), tell.tokens(3, 1, 2))
    tell("Four misses: nothing was on the free list.")
    pool.stats()
    tell("Two more tokens are one too many. The oldest block goes, whole (POOL-03), and its two buffers go back to the pool.")
    cache.append(tell.tokens(2, 1, 2), tell.tokens(2, 1, 2))
    cache.read()
    tell("Someone else wants 100 bytes, and gets a buffer that was the cache's: a hit, and no call of the system.")
    buffer = pool.acquire(100)
    tell("It starts empty for its next owner: the old keys cannot be read (LAW-05).")
    buffer.values()
    tell("The new owner writes its own values.")
    buffer.extend(tell.tokens(3))
    tell("And gives it back.")
    buffer.release()
    tell("Giving it back twice is harmless, and counted once (BUF-05). Otherwise it would get two owners.")
    buffer.release()
    tell("Whoever still holds on to it is told so.")
    with raises("BufferReleased"):
        buffer.extend(tell.tokens(1))
    tell("The cache lets go of everything. Four buffers are kept, and what the list has no room for is dropped (BUF-04).")
    cache.clear()
    pool.stats()


def canary(tell: Told) -> None:
    """A model that tells on its cache"""
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 64, "period": 12, "window": 0}
    tell("An engine runs a canary with a period of twelve tokens: two layers, that look 4 and 7 tokens back.")
    engine = tell.new("engine", **sizes, recalls=0, cache_tokens=256)
    first = engine.open()
    tell("It is told begin-of-text and twelve words, 4 to 15 by their ids.")
    engine.extend(first, [1, *range(4, 16)])
    tell("And says them again, each found in the cache by two looks back. A wrong one would say which entry was read instead.")
    engine.generate(first, 6)
    tell("A second session, of other words.")
    second = engine.open()
    engine.extend(second, [1, *range(104, 116)])
    tell("Both speak together, and each says its own (ENG-02, ENG-12).")
    engine.step([first, second])
    engine.step([second, first])
    tell("A fork of the second is told a word of its own: what lies behind it in the parent stays as it was (ENG-08).")
    fork = engine.fork(second)
    engine.extend(fork, [200])
    engine.generate(second, 2)
    engine.generate(fork, 2)
    tell("Three words of a draft are told and taken back. They leave nothing (ENG-09).")
    engine.extend(first, [50, 51, 52])
    engine.truncate(first, 21)
    engine.generate(first, 3)
    tell("The second is closed, in the middle of what it had to say. Nobody else notices (ENG-05).")
    engine.close(second)
    engine.generate(fork, 2)


STORIES = {story.__name__: story for story in (
    decoding, contiguous, paged, *stories_sharing.STORIES, quantized, tiered, *stories_windows.STORIES, pooled,
    canary)}  # fmt: skip
