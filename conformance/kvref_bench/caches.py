"""Contests of whole caches: the steps of an engine, compared with plain tensors and transformers' caches.

The bytes of a contest are one read and one write of the tokens of a step. Everything that a cache moves beyond them is its own
overhead.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import kvref
from kvref.array import Array
from kvref_bench import baselines
from kvref_bench.comparison import Comparison, Contender
from kvref_bench.kernels import machine_of

HEADS, DIM = 8, 128
CONTEXTS = (1024, 8192, 32768)
SEQUENCES = 64
ROOM_TOKENS = 4096  # room for tokens after the context, summed over a batch
PREFILL_TOKENS = 4096
MIGRATED_TOKENS = 64
LAYERS = 32
DECODE_STEPS = 512  # more than a contest runs
SHAPE = f"{HEADS} x {DIM}"


def cache_contests(backends: list[kvref.Backend], wanted: Callable[[str], bool]) -> Iterator[Comparison]:
    """Yield the contests whose title is wanted, one at a time."""
    makers: dict[str, Callable[[str], Comparison]] = {
        **{f"append a token at {context // 1024}k": partial(_append, backends, context, 1) for context in CONTEXTS},
        "append a token to a batch of 64 at 1k": partial(_append, backends, 1024, SEQUENCES),
        "prefill of 4k tokens": partial(_prefill, backends),
        "decode step of 64 sequences, 2 layers": partial(_decode, backends),
        "gather 64 sequences of 512 tokens": partial(_gather, backends),
        "migrate 64 tokens": partial(_tiered, backends, 2**16),
        "migrate and evict 64 tokens": partial(_tiered, backends, 1024),
        **{f"bookkeeping of 64 sequences at {context // 1024}k": partial(_bookkeeping, context) for context in CONTEXTS},
    }
    yield from (make(title) for title, make in makers.items() if wanted(title))


def _random(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _entry(cache: str, backend: kvref.Backend, run: Callable[[], object]) -> Contender:
    return Contender(f"kvref {cache}{' ' if cache else ''}{backend.name}", run, machine_of(backend))


def _append(backends: list[kvref.Backend], context: int, batch: int, title: str) -> Comparison:
    token = _random(batch, HEADS, 1, DIM)
    ours = [_entry("", backend, _appending(backend, context, backend.asarray(token))) for backend in backends]
    theirs = [*_slices(context, token), *(baselines.transformers_caches(context, token, ROOM_TOKENS) if batch == 1 else ())]
    return Comparison(title, SHAPE, 4 * token.nbytes, ours + theirs)


def _appending(backend: kvref.Backend, context: int, token: Array) -> Callable[[], object]:
    longest = context + ROOM_TOKENS // token.shape[0]
    cache = kvref.ContiguousCache(kvref.ContiguousConfig(HEADS, DIM, longest, token.shape[0], longest), backend)
    cache.advance(context)

    def step() -> None:
        if cache.seq_len == longest:
            cache.reset()
            cache.advance(context)
        cache.append(token, token)

    return step


def _slices(context: int, token: Any) -> Iterator[Contender]:
    """Yield the baseline: two slice assignments without any check."""

    def assigning(zeros: Callable[[tuple[int, ...]], Any], one: Any) -> Callable[[], object]:
        longest = context + ROOM_TOKENS // token.shape[0]
        shape = (token.shape[0], HEADS, longest, DIM)
        keys, values, end = zeros(shape), zeros(shape), [context]

        def step() -> None:
            position = end[0]
            keys[:, :, position : position + 1] = one
            values[:, :, position : position + 1] = one
            end[0] = position + 1 if position + 1 < longest else context

        return step

    yield Contender("numpy: two slices assigned", assigning(lambda shape: np.zeros(shape, np.float32), token))
    if baselines.are_installed("torch"):
        import torch

        yield Contender("torch: two slices assigned", assigning(torch.zeros, torch.from_numpy(token)))


def _prefill(backends: list[kvref.Backend], title: str) -> Comparison:
    tokens = _random(1, HEADS, PREFILL_TOKENS, DIM)
    rows = np.ascontiguousarray(tokens[0].transpose(1, 0, 2))
    entries = []
    for backend in backends:
        entries.append(_entry("contiguous", backend, _filling(backend, backend.asarray(tokens))))
        entries.append(_entry("paged", backend, _filling_blocks(backend, backend.asarray(rows))))
    return Comparison(title, SHAPE, 4 * tokens.nbytes, entries + list(baselines.transformers_prefill(tokens)))


def _filling(backend: kvref.Backend, tokens: Array) -> Callable[[], object]:
    cache = kvref.ContiguousCache(kvref.ContiguousConfig(HEADS, DIM, PREFILL_TOKENS, 1, PREFILL_TOKENS), backend)

    def fill() -> None:
        cache.reset()
        cache.append(tokens, tokens)

    return fill


def _filling_blocks(backend: kvref.Backend, rows: Array) -> Callable[[], object]:
    cache = kvref.PagedCache(kvref.PagedConfig(PREFILL_TOKENS // 16, 1, HEADS, DIM), backend)
    sequence = cache.create()
    return lambda: cache.write(sequence, 0, 0, rows, rows)


def _paged(
    backend: kvref.Backend, layers: int, heads: int, dim: int, context: int, steps: int
) -> tuple[kvref.PagedCache, list[int]]:
    """SEQUENCES sequences of about `context` tokens; the lengths differ, so that they need new blocks at different steps."""
    blocks = SEQUENCES * layers * ((context + steps) // 16)
    cache = kvref.PagedCache(kvref.PagedConfig(blocks, layers, heads, dim), backend)
    sequences = [cache.create() for _ in range(SEQUENCES)]
    for number, sequence in enumerate(sequences):
        rows = np.zeros((context - number % 16, heads, dim), np.float32)
        for layer in range(layers):
            cache.write(sequence, layer, 0, rows, rows)
    return cache, sequences


def _stepping(backend: kvref.Backend, layers: int, heads: int, dim: int, context: int, steps: int) -> Callable[[], object]:
    cache, sequences = _paged(backend, layers, heads, dim, context, steps)
    tokens = backend.asarray(np.ones((layers, SEQUENCES, heads, dim), np.float32))
    return lambda: cache.append_step(sequences, tokens, tokens)


def _decode(backends: list[kvref.Backend], title: str) -> Comparison:
    layers = 2
    entries = [_entry("paged", backend, _stepping(backend, layers, HEADS, DIM, 512, DECODE_STEPS)) for backend in backends]
    moved = 4 * layers * SEQUENCES * HEADS * DIM * 4
    return Comparison(title, SHAPE, moved, entries)


def _gather(backends: list[kvref.Backend], title: str) -> Comparison:
    context = 512
    entries = []
    for backend in backends:
        cache, sequences = _paged(backend, 1, HEADS, DIM, context, 0)
        entries.append(_entry("paged", backend, partial(cache.gather_batch, sequences, 0)))
    tokens = sum(context - number % 16 for number in range(SEQUENCES))
    slots = np.random.default_rng(0).permutation(SEQUENCES * context)[:tokens]
    store = np.ones((2, SEQUENCES * context, HEADS, DIM), np.float32)
    entries.append(Contender("numpy: store[slots], keys and values", lambda: (store[0][slots], store[1][slots])))
    return Comparison(title, SHAPE, 4 * tokens * HEADS * DIM * 4, entries)


def _tiered(backends: list[kvref.Backend], most: int, title: str) -> Comparison:
    tokens = _random(MIGRATED_TOKENS, HEADS, DIM)
    entries = []
    for backend in backends:
        cache = kvref.TieredCache(kvref.TieredConfig(HEADS, DIM, max_tokens=most, tail_length=256), backend)
        rows = backend.asarray(tokens)
        while cache.stats().total_tokens < min(most, 512):
            cache.append(rows, rows)
        entries.append(_entry("tiered", backend, partial(cache.append, rows, rows)))
    moved = 2 * tokens.size * (4 + 2 + 2) + tokens.size  # float32 read, float16 written and read, 4 bits written; keys and values
    return Comparison(title, SHAPE, moved, entries)


class _NoKernels:
    """A backend whose kernels do nothing: only the bookkeeping is timed."""

    def __init__(self) -> None:
        self._backend = kvref.backend("numpy")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def quantize(self, rows: Array, format: kvref.Format) -> kvref.Quantized:
        return kvref.Quantized(rows)

    def scatter(self, store: Array, slots: Any, new: Array) -> Array:
        return store


def _bookkeeping(context: int, title: str) -> Comparison:
    backend: Any = _NoKernels()
    entry = Contender(f"kvref paged, {LAYERS} layers", _stepping(backend, LAYERS, 1, 1, context, DECODE_STEPS))
    return Comparison(title, "no data", 0, [entry])
