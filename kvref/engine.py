"""An engine in little: a canary run over a paged cache that finds prefixes. What whole engines are judged beside.

`Model` computes, and everything it computes goes through the cache. `Engine` keeps sessions. A session is its tokens; the cache
holds the first of them, and what it lacks is computed when somebody asks what comes next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Sight, attention
from kvref.backend import Backend, reference
from kvref.canary.shape import EPSILON, Canary
from kvref.canary.weights import weights
from kvref.errors import (
    CapacityExceeded,
    OutOfBlocks,
    PositionOutOfRange,
    SequenceNotFound,
    TokenOutOfRange,
    in_range,
    integer,
    whole,
)
from kvref.paged import PagedCache, PagedConfig
from kvref.prefix import PrefixCache

Floats = NDArray[Any]


class Model:
    """A Llama without an MLP, whose MLP of zeros a canary does not need. Greedy: it says the token with the largest logit."""

    def __init__(self, canary: Canary, cache: PagedCache, backend: Backend = reference) -> None:
        self.canary, self.cache, self._backend, self._weights = canary, cache, backend, weights(canary)
        angle = np.arange(canary.context)[:, None] * canary.frequencies
        self._cos, self._sin = (part[:, None].astype(np.float32) for part in (np.cos(angle), np.sin(angle)))

    def step(self, sequence: int, tokens: Sequence[int]) -> int:
        """Write tokens behind those that the sequence has in every layer; what comes next. Raises OutOfBlocks."""
        start = self.cache.length(sequence, self.canary.num_layers - 1)  # the last to be written
        self.cache.ensure_capacity(sequence, start + len(tokens))  # of all layers or none
        stream: Floats = self._weights["model.embed_tokens.weight"][list(tokens)]
        for layer in range(self.canary.num_layers):
            given = self._normed(stream, f"model.layers.{layer}.input_layernorm.weight")
            query, key, value = (self._heads(given, f"model.layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv")
            query, key = self._turned(query, start), self._turned(key, start)
            self.cache.write(sequence, layer, start, self._backend.asarray(key), self._backend.asarray(value))
            read = self._attended(sequence, layer, query).reshape(len(tokens), -1)
            stream = stream + read @ self._weights[f"model.layers.{layer}.self_attn.o_proj.weight"].T
        logits = self._normed(stream[-1:], "model.norm.weight") @ self._weights["lm_head.weight"].T
        return int(logits.argmax())

    def _normed(self, stream: Floats, weight: str) -> Floats:
        length = np.sqrt((stream**2).mean(axis=1, keepdims=True) + np.float32(EPSILON))
        return np.asarray(stream / length * self._weights[weight])

    def _heads(self, given: Floats, weight: str) -> Floats:
        """[tokens, heads, head_dim]"""
        return (given @ self._weights[weight].T).reshape(len(given), -1, self.canary.head_dim)

    def _turned(self, heads: Floats, start: int) -> Floats:
        """Rotary positions: numbers i and i + head_dim / 2 of a head turn by position * theta ** (-2 i / head_dim) (RoPE)."""
        cos, sin = (part[start : start + len(heads)] for part in (self._cos, self._sin))
        half = self.canary.head_dim // 2
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attended(self, sequence: int, layer: int, query: Floats) -> Floats:
        """Where a window is set each query sees its last tokens alone."""
        on, sight = self._backend, Sight(self.canary.windows[layer])
        read = self.cache.gather(sequence, layer)
        return np.asarray(on.to_numpy(attention(on.asarray(query), *read, causal=True, sight=sight, backend=on)))


@dataclass(frozen=True)
class Saved:
    """A session outside of the cache. next: what comes behind its last token. held: keys and values by layer."""

    tokens: list[int]
    next: int | None
    held: list[tuple[Array, Array]]


class Engine:
    """Sessions of a canary, numbered from 0. A session holds at most `context` tokens, all of them together `cache_tokens`."""

    def __init__(self, canary: Canary, cache_tokens: int = 4096, block_size: int = 16, backend: Backend = reference) -> None:
        """A session takes whole blocks of block_size tokens. Raises ConfigError."""
        blocks = -(-whole("cache_tokens", cache_tokens) // whole("block_size", block_size))
        sizes = (blocks * canary.num_layers, canary.num_layers, canary.num_kv_heads, canary.head_dim, block_size)
        self.canary, self.cache = canary, PrefixCache(PagedConfig(*sizes), backend)
        self._model = Model(canary, self.cache, backend)
        self._tokens: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}  # by session, what comes behind its last token, where that is known
        self._sequence: dict[int, int] = {}  # by session, what the cache holds of it, if anything
        self._saved: list[Saved] = []
        self._opened = 0

    def open(self) -> int:
        """A new session of no tokens."""
        session, self._opened = self._opened, self._opened + 1
        self._tokens[session] = []
        return session

    def close(self, session: int) -> None:
        """Forget it. Raises SequenceNotFound, as all that take a session do."""
        self._truncate(self._known(session), 0)
        del self._tokens[session]

    def length(self, session: int) -> int:
        """Tokens told and said."""
        return len(self._tokens[self._known(session)])

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        """Tell it tokens. Raises TokenOutOfRange, CapacityExceeded past the context, OutOfBlocks; then none of them is told."""
        told = self._tokens[self._known(session)]
        given = [in_range(token, self.canary.vocabulary, TokenOutOfRange, "token") for token in tokens]
        if len(told) + len(given) > self.canary.context:
            raise CapacityExceeded(f"context full: {len(given)} tokens needed, {self.canary.context - len(told)} of {self.canary.context} left")
        if given:
            self._next[session] = self._computed(session, told + given)
            told += given

    def generate(self, session: int, count: int) -> list[int]:
        """Say `count` tokens, each the likeliest behind those before it: fewer where the context ends.

        Raises PositionOutOfRange for a session of no tokens, behind which nothing can come, and for a negative count. Where the
        blocks run out it raises OutOfBlocks, and the session is as before.
        """
        told, count = self._speaks(session, count)
        self.cache.ensure_capacity(self._sequence[session], len(told) + count)
        start = len(told)
        for _ in range(count):
            self.extend(session, [self._next[session]])
        return told[start:]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """`n` times what `generate` would say, one behind the other; the session is as before. Raises as `generate` does."""
        times = in_range(n, None, PositionOutOfRange, "n")
        self._speaks(session, count)
        said = list[int]()
        for _ in range(times):
            child = self.fork(session)
            try:
                said += self.generate(child, count)
            finally:
                self.close(child)
        return said

    def cancel(self, session: int, count: int) -> None:
        """Begin to say `count` tokens and be cut off. The session is as before. Raises as `generate` does."""
        self.sample(session, 1, count)

    def step(self, sessions: Sequence[int]) -> list[int]:
        """Say one token in each of several sessions, all different: `generate` of one in each, in all or none.

        Raises CapacityExceeded at the end of a context, and as `generate` does.
        """
        for session in sessions:
            if len(self._tokens[self._known(session)]) == self.canary.context:
                raise CapacityExceeded(f"context full: session {session} has all {self.canary.context} tokens")
        if any(self.length(session) == 0 for session in sessions):
            raise PositionOutOfRange("step: a session has no tokens, add one first")
        said = dict[int, int]()
        try:
            for session in sessions:
                (said[session],) = self.generate(session, 1)
        except OutOfBlocks:
            for session, token in said.items():
                self._truncate(session, self.length(session) - 1)
                self._next[session] = token
            raise
        return list(said.values())

    def fork(self, session: int) -> int:
        """A new session that is as this one is, and goes on by itself: they share what they were told."""
        known, child = self._known(session), self.open()
        self._tokens[child] = list(self._tokens[known])
        if known in self._sequence:
            self._sequence[child] = self.cache.fork(self._sequence[known])
        if known in self._next:
            self._next[child] = self._next[known]
        return child

    def save(self, session: int) -> int:
        """Copy a session out of the cache: the number to load it by, however often, whatever becomes of the session."""
        tokens, sequence = self._tokens[self._known(session)], self._sequence.get(session)
        held = [] if sequence is None else [self.cache.gather(sequence, layer) for layer in range(self.canary.num_layers)]
        self._saved.append(Saved(list(tokens), self._next.get(session), held))
        return len(self._saved) - 1

    def load(self, saved: int) -> int:
        """A new session as one was when it was saved. Raises OutOfBlocks, and SequenceNotFound where nothing was saved so."""
        number = integer(saved)
        if number is None or not 0 <= number < len(self._saved):
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        kept, sequence = self._saved[number], self.cache.create()
        try:
            self.cache.ensure_capacity(sequence, len(kept.tokens))
        except OutOfBlocks:
            self.cache.drop(sequence)
            raise
        for layer, (keys, values) in enumerate(kept.held):
            self.cache.write(sequence, layer, 0, keys, values)
        session = self.open()
        self._tokens[session], self._sequence[session] = list(kept.tokens), sequence
        if kept.next is not None:
            self._next[session] = kept.next
        return session

    def truncate(self, session: int, length: int) -> None:
        """Forget all but the first `length` tokens. Raises PositionOutOfRange for more than there are."""
        told = self._tokens[self._known(session)]
        length = in_range(length, len(told) + 1, PositionOutOfRange, "length")
        if length < len(told):
            self._truncate(session, length)

    def remove(self, session: int, start: int, stop: int) -> None:
        """Forget tokens start .. stop; those behind them are told anew. Raises PositionOutOfRange."""
        told = self._tokens[self._known(session)]
        stop = in_range(stop, len(told) + 1, PositionOutOfRange, "stop")
        start = in_range(start, stop + 1, PositionOutOfRange, "start")
        rest = told[stop:]
        if start < stop:
            self._truncate(session, start)
            told += rest

    def _speaks(self, session: int, count: int) -> tuple[list[int], int]:
        """What a session was told, and how many of `count` tokens it can say. Raises as `generate` does."""
        told = self._tokens[self._known(session)]
        count = min(in_range(count, None, PositionOutOfRange, "count"), self.canary.context - len(told))
        if not told:
            raise PositionOutOfRange(f"session {session} has no tokens, add one first")
        if session not in self._next:
            self._next[session] = self._computed(session, told)
        return told, count

    def _known(self, session: int) -> int:
        number = integer(session)
        if number is None or number not in self._tokens:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return number

    def _computed(self, session: int, tokens: list[int]) -> int:
        """What comes behind these tokens, which begin with those of the session. Raises OutOfBlocks."""
        if session not in self._sequence:
            self._sequence[session] = self.cache.begin(tokens)
        sequence = self._sequence[session]
        held = self._held(session)
        try:
            following = self._model.step(sequence, tokens[held:])
        except BaseException:  # some layers may have been written, and what was found is not told yet
            self.cache.truncate(sequence, min(held, self.length(session)))
            raise
        if len(tokens) // self.cache.config.block_size > held // self.cache.config.block_size:
            self.cache.commit(sequence, tokens)  # a block is full
        return following

    def _held(self, session: int) -> int:
        """How many of a session's tokens the cache holds."""
        return min(self.cache.length(self._sequence[session], layer) for layer in range(self.canary.num_layers))

    def _truncate(self, session: int, length: int) -> None:
        """Leave a session its first tokens. The last of them is computed anew, for what comes behind it is not known."""
        del self._tokens[session][length:]
        self._next.pop(session, None)
        if session in self._sequence and length < 2:
            self.cache.drop(self._sequence.pop(session))
        elif session in self._sequence:
            self.cache.truncate(self._sequence[session], min(length - 1, self._held(session)))
