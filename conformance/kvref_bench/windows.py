"""Contests of a ring of the last tokens: storing one more token, and a whole step, which attends to all of the window.

The bytes of a step are those of the window's keys and values, read once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import kvref
from kvref_bench import baselines
from kvref_bench.comparison import Comparison, Contender
from kvref_bench.kernels import machine_of

HEADS, DIM = 8, 128
WINDOW, POSITION = 4096, 32_768


def window_contests(backends: list[kvref.Backend], wanted: Callable[[str], bool]) -> Iterator[Comparison]:
    """Yield the contests whose title is wanted, one at a time."""
    makers: dict[str, Callable[[str], Comparison]] = {
        "append a token to a window of 4k at 32k": partial(_append, backends),
        "step of a token in a window of 4k at 32k": partial(_step, backends),
    }
    yield from (make(title) for title, make in makers.items() if wanted(title))


def _append(backends: list[kvref.Backend], title: str) -> Comparison:
    token = np.ones((1, HEADS, DIM), np.float32)
    ours = []
    for backend in backends:
        cache, row = _filled_cache(backend), backend.asarray(token)
        ours.append(Contender(f"kvref windowed {backend.name}", partial(cache.append, row, row), machine_of(backend)))
    theirs = baselines.window_contenders(WINDOW, POSITION, HEADS, DIM, attends=False)
    return Comparison(title, f"{HEADS} x {DIM}", 4 * token.nbytes, [*ours, *theirs])


def _step(backends: list[kvref.Backend], title: str) -> Comparison:
    token = np.random.default_rng(0).standard_normal((1, HEADS, DIM), np.float32)
    ours = []
    for backend in backends:
        cache, row = _filled_cache(backend), backend.asarray(token)
        ours.append(Contender(f"kvref windowed {backend.name}", partial(cache.step, row, row, row), machine_of(backend)))
    theirs = baselines.window_contenders(WINDOW, POSITION, HEADS, DIM, attends=True)
    return Comparison(title, f"{HEADS} x {DIM}", 2 * WINDOW * token.nbytes, [*ours, *theirs])


def _filled_cache(backend: kvref.Backend) -> kvref.WindowedCache:
    cache = kvref.WindowedCache(kvref.WindowedConfig(HEADS, DIM, WINDOW), backend)
    rows: Any = backend.asarray(np.ones((POSITION, HEADS, DIM), np.float32))
    cache.append(rows, rows)
    return cache
