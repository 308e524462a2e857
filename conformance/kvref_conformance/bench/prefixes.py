"""Contests of what sequences share: forks, prefixes that are found, beginning on a hit and cold.

Hardly any data moves: what is timed are tables, references and keys. Beside them stands what a user would write instead.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import kvref
from kvref_conformance.bench import rivals
from kvref_conformance.bench.contest import Contest, Entry
from kvref_conformance.bench.kernels import place_of

HEADS, DIM, BLOCK_SIZE = 8, 128, 16
TOKENS = 32_768
SEEN = 1_500_000  # tokens that the pool of 100,000 blocks has seen
FORKED = 8192  # tokens, of one layer: 64 MB of keys and values
POOL = 100_000  # blocks


def contests(backends: list[kvref.Backend], wanted: Callable[[str], bool]) -> Iterator[Contest]:
    """Those whose title is wanted, one at a time."""
    makers: dict[str, Callable[[str], Contest]] = {
        "fork 8k tokens and diverge": partial(_fork, backends),
        "match 32k tokens in 100,000 blocks": _match,
        "begin 32k tokens, hit and cold": _begin,
        "take 2,000 blocks that can be found": _evict,
    }
    yield from (make(title) for title, make in makers.items() if wanted(title))


def _fork(backends: list[kvref.Backend], title: str) -> Contest:
    """A fork, one token of its own in its last block, which is copied, and its end. The bytes are those of that block."""
    entries = []
    for backend in backends:
        cache = kvref.PagedCache(kvref.PagedConfig(FORKED // BLOCK_SIZE + 2, 1, HEADS, DIM, BLOCK_SIZE), backend)
        sequence = cache.create()
        rows = backend.asarray(np.ones((FORKED - 1, HEADS, DIM), np.float32))
        cache.write(sequence, 0, 0, rows, rows)
        run = partial(_diverge, cache, sequence, rows[:1, ...])
        entries.append(Entry(f"kvref paged {backend.name}", run, place_of(backend)))
    whole = np.ones((2, FORKED, HEADS, DIM), np.float32)
    entries.append(Entry("numpy: a copy of the sequence", whole.copy))
    moved = 2 * 2 * BLOCK_SIZE * HEADS * DIM * 4
    return Contest(title, f"{HEADS} x {DIM}", moved, entries + list(rivals.transformers_fork(FORKED, HEADS, DIM)))


def _diverge(cache: kvref.PagedCache, sequence: int, token: Any) -> None:
    child = cache.fork(sequence)
    cache.append([child], 0, token, token)
    cache.drop(child)


def _seen(tokens: int) -> tuple[kvref.PrefixCache, list[list[int]]]:
    """A cache that has seen so many tokens, prompts of TOKENS that begin alike, and those prompts."""
    cache = kvref.PrefixCache(kvref.PagedConfig(POOL, 1, 1, 1, BLOCK_SIZE), kvref.backend("numpy"))
    rows, prompts = np.ones((TOKENS, 1, 1), np.float32), []
    for number in range(tokens // TOKENS):
        prompts.append([*range(1000), *range(10**6 * (number + 1), 10**6 * (number + 1) + TOKENS - 1000)])
        sequence = cache.begin(prompts[-1])
        held = cache.length(sequence, 0)
        cache.write(sequence, 0, held, rows[held:], rows[held:])
        cache.commit(sequence, prompts[-1])
        cache.drop(sequence)
    return cache, prompts


def _match(title: str) -> Contest:
    cache, prompts = _seen(SEEN)
    asked = prompts[len(prompts) // 2]
    known = set[int]()
    for prompt in prompts:
        known.update(_chained(prompt))

    def in_python() -> int:
        return next((number for number, key in enumerate(_chained(asked)) if key not in known), TOKENS // BLOCK_SIZE)

    entries = [Entry("kvref prefix", partial(cache.match, asked)), Entry("python: a chain of hash() of tuples", in_python)]
    return Contest(title, "no data", 0, entries)


def _chained(tokens: list[int]) -> Iterator[int]:
    """Keys as they are made where nobody means harm: Python's own hash, of which two may be alike."""
    key = 0
    for start in range(0, len(tokens), BLOCK_SIZE):
        key = hash((key, tuple(tokens[start : start + BLOCK_SIZE])))
        yield key


def _begin(title: str) -> Contest:
    cache, prompts = _seen(SEEN)
    cold = range(10**9, 10**9 + TOKENS)

    def begun(tokens: list[int]) -> None:
        cache.drop(cache.begin(tokens))

    entries = [Entry("kvref prefix, a hit", partial(begun, prompts[0])), Entry("kvref prefix, cold", partial(begun, list(cold)))]
    return Contest(title, "no data", 0, entries)


def _evict(title: str) -> Contest:
    """Blocks that wait to be found again, put in order and taken in order."""
    cache, _ = _seen(SEEN)
    fresh = iter(range(10**12, 10**15, TOKENS))
    rows = np.ones((TOKENS, 1, 1), np.float32)

    def turned_over() -> None:
        start = next(fresh)
        tokens = list(range(start, start + TOKENS))
        sequence = cache.begin(tokens)
        cache.write(sequence, 0, 0, rows, rows)
        cache.commit(sequence, tokens)
        cache.drop(sequence)

    return Contest(title, "no data", 0, [Entry("kvref prefix: begin, write, commit, drop", turned_over)])
