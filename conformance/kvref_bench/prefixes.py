"""Contests of sharing between sequences: forks, prefix lookups, and beginning a sequence with and without a hit.

Hardly any data moves: the contests time tables, references and keys, and simple alternatives that a user would write.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

import kvref
from kvref_bench import baselines, prefix_managers
from kvref_bench.comparison import Comparison, Contender
from kvref_bench.kernels import machine_of

HEADS, DIM, BLOCK_SIZE = 8, 128, 16
TOKENS = 32_768
ROWS = np.ones((TOKENS, 1, 1), np.float32)
POOL = 100_000  # blocks
NUM_PROMPTS = 51  # prompts that were written: more than the pool can store
PART_TOKENS = 64  # tokens from one branch to the next
FORKED_TOKENS = 8192  # tokens, of one layer: 64 MB of keys and values


def prefix_contests(backends: list[kvref.Backend], wanted: Callable[[str], bool]) -> Iterator[Comparison]:
    """Yield the contests whose title is wanted, one at a time."""
    makers: dict[str, Callable[[str], Comparison]] = {
        "fork 8k tokens and diverge": partial(_fork, backends),
        "match 32k tokens in 100,000 blocks": _match,
        "match 32k tokens past 511 branches": _match_branches,
        "begin 32k tokens, hit and cold": _begin,
        "take 2,000 blocks that can be found": _evict,
    }
    yield from (make(title) for title, make in makers.items() if wanted(title))


def _fork(backends: list[kvref.Backend], title: str) -> Comparison:
    """Fork, append one token to the last block (which is copied), and drop. The bytes are those of that block."""
    entries = []
    for backend in backends:
        cache = kvref.PagedCache(kvref.PagedConfig(FORKED_TOKENS // BLOCK_SIZE + 2, 1, HEADS, DIM, BLOCK_SIZE), backend)
        sequence = cache.create()
        rows = backend.asarray(np.ones((FORKED_TOKENS - 1, HEADS, DIM), np.float32))
        cache.write(sequence, 0, 0, rows, rows)
        run = partial(_diverge, cache, sequence, rows[:1, ...])
        entries.append(Contender(f"kvref paged {backend.name}", run, machine_of(backend)))
    whole = np.ones((2, FORKED_TOKENS, HEADS, DIM), np.float32)
    entries.append(Contender("numpy: a copy of the sequence", whole.copy))
    entries += [
        *baselines.transformers_fork(FORKED_TOKENS, HEADS, DIM),
        *prefix_managers.fork_contenders(FORKED_TOKENS, HEADS, DIM),
    ]
    return Comparison(title, f"{HEADS} x {DIM}", 2 * 2 * BLOCK_SIZE * HEADS * DIM * 4, entries)


def _diverge(cache: kvref.PagedCache, sequence: int, token: Any) -> None:
    child = cache.fork(sequence)
    cache.append([child], 0, token, token)
    cache.drop(child)


def _prompts(count: int) -> list[list[int]]:
    """Return `count` prompts of TOKENS tokens with a common prefix."""
    starts = range(10**6, (count + 1) * 10**6, 10**6)
    return [[*range(1000), *range(start, start + TOKENS - 1000)] for start in starts]


def _cache_with_prompts(prompts: list[list[int]]) -> kvref.PrefixCache:
    """Return a cache into which these prompts were written."""
    cache = kvref.PrefixCache(kvref.PagedConfig(POOL, 1, 1, 1, BLOCK_SIZE), kvref.backend("numpy"))
    for prompt in prompts:
        _serve(cache, prompt)
    return cache


def _serve(cache: kvref.PrefixCache, tokens: list[int]) -> None:
    sequence = cache.begin(tokens)
    held = cache.length(sequence, 0)
    cache.write(sequence, 0, held, ROWS[held : len(tokens)], ROWS[held : len(tokens)])
    cache.commit(sequence, tokens)
    cache.drop(sequence)


def _match(title: str) -> Comparison:
    prompts = _prompts(NUM_PROMPTS)
    return _matching(title, prompts[NUM_PROMPTS // 2], prompts)


def _match_branches(title: str) -> Comparison:
    """A prompt from which others branch at many places, like turns of a conversation: a prefix tree has a node at each."""
    asked = list(range(10**6, 10**6 + TOKENS))
    parted = [asked[:at] + list(range(10**8 + at, 10**8 + at + BLOCK_SIZE)) for at in range(PART_TOKENS, TOKENS, PART_TOKENS)]
    return _matching(title, asked, [asked, *parted])


def _matching(title: str, asked: list[int], prompts: list[list[int]]) -> Comparison:
    """The prompt is a list of numbers; engines are also timed with the prompt as they prepare it before a lookup."""
    cache, others = _cache_with_prompts(prompts), prefix_managers.prefix_managers(prompts, POOL, BLOCK_SIZE, TOKENS)
    known = set[int]()
    for prompt in prompts:
        known.update(_chained_keys(prompt))

    def in_python() -> int:
        return next((number for number, key in enumerate(_chained_keys(asked)) if key not in known), TOKENS // BLOCK_SIZE)

    entries = [
        Contender("kvref prefix", partial(cache.match, asked)),
        Contender("python: a chain of hash() of tuples", in_python),
    ]
    for engine in others:
        entries.append(Contender(engine.name, partial(_find_prepared, engine, asked)))
        entries.append(Contender(f"{engine.name}, prepared", partial(engine.find, engine.prepare(asked))))
    return Comparison(title, "no data", 0, entries)


def _find_prepared(engine: prefix_managers.PrefixManager, tokens: list[int]) -> int:
    return engine.find(engine.prepare(tokens))


def _chained_keys(tokens: list[int]) -> Iterator[int]:
    """Yield chained keys from Python's hash, for trusted input only: two keys may collide."""
    key = 0
    for start in range(0, len(tokens), BLOCK_SIZE):
        key = hash((key, tuple(tokens[start : start + BLOCK_SIZE])))
        yield key


def _begin(title: str) -> Comparison:
    """Begin and drop a sequence with room for a prompt: for a cached prompt, and for one that is never cached."""
    prompts = _prompts(NUM_PROMPTS)
    cache, others = _cache_with_prompts(prompts), prefix_managers.prefix_managers(prompts, POOL, BLOCK_SIZE, TOKENS)
    asked = {"a hit": prompts[NUM_PROMPTS // 2], "cold": list(range(10**9, 10**9 + TOKENS))}

    def begun(tokens: list[int]) -> None:
        cache.drop(cache.begin(tokens))

    entries = [Contender(f"kvref prefix, {how}", partial(begun, tokens)) for how, tokens in asked.items()]
    for engine in others:
        entries += [Contender(f"{engine.name}, {how}", partial(engine.serve, each, keep=False)) for how, each in asked.items()]
    return Comparison(title, "no data", 0, entries)


def _evict(title: str) -> Comparison:
    """Evict cached-free blocks in order. A prompt that returns has already been evicted."""
    prompts = _prompts(NUM_PROMPTS)
    cache, others = _cache_with_prompts(prompts), prefix_managers.prefix_managers(prompts, POOL, BLOCK_SIZE, TOKENS)
    fresh = [list(range(start, start + TOKENS)) for start in range(10**12, 10**12 + 64 * TOKENS, TOKENS)]

    def served(how: Callable[[list[int]], object], prompts: Iterator[list[int]]) -> None:
        how(next(prompts))

    entries = [Contender("kvref prefix: and written", partial(served, partial(_serve, cache), cycle(fresh)))]
    entries += [Contender(each.name, partial(served, partial(each.serve, keep=True), cycle(fresh))) for each in others]
    return Comparison(title, "no data", 0, entries)
