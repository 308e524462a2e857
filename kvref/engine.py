"""A small inference engine: runs a canary over a prefix cache. It is the reference for the family of engines (chapter ENG).

`Model` computes the canary; all keys and values go through the cache. `Engine` manages sessions. A session is a list of tokens.
The cache contains the first of them; the others are computed when the next token is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Sight, attention
from kvref.backend import Backend, reference
from kvref.canary.dimensions import EPSILON, Canary
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
    """The forward pass of a canary: a Llama without MLPs, which are zero in a canary. Decoding is greedy."""

    def __init__(self, canary: Canary, cache: PagedCache, backend: Backend = reference) -> None:
        """cache: must have the layers, kv heads and head_dim of the canary."""
        self.canary, self.cache, self._backend, self._weights = canary, cache, backend, weights(canary)
        angle = np.arange(canary.context)[:, None] * canary.frequencies
        self._cos, self._sin = (part[:, None].astype(np.float32) for part in (np.cos(angle), np.sin(angle)))

    def step(self, sequence: int, tokens: Sequence[int]) -> int:
        """Append tokens to a sequence of the cache, in every layer, and return the token that follows them.

        The tokens are written after those that every layer has. Raises OutOfBlocks, before any layer is written.
        """
        start = self.cache.length(sequence, self.canary.num_layers - 1)  # the layer that is written last
        self.cache.ensure_capacity(sequence, start + len(tokens))  # for all layers, or raises
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
        """RMS norm of the residual stream [tokens, hidden_size]."""
        length = np.sqrt((stream**2).mean(axis=1, keepdims=True) + np.float32(EPSILON))
        return np.asarray(stream / length * self._weights[weight])

    def _heads(self, given: Floats, weight: str) -> Floats:
        """A projection of the normed stream, by head: [tokens, heads, head_dim]."""
        return (given @ self._weights[weight].T).reshape(len(given), -1, self.canary.head_dim)

    def _turned(self, heads: Floats, start: int) -> Floats:
        """Heads with the rotary embedding of the positions from `start` on, layout "halves" (see kvref.rope)."""
        cos, sin = (part[start : start + len(heads)] for part in (self._cos, self._sin))
        half = self.canary.head_dim // 2
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _attended(self, sequence: int, layer: int, query: Floats) -> Floats:
        """Attention over the tokens of a layer, within the layer's window."""
        on, sight = self._backend, Sight(self.canary.windows[layer])
        read = self.cache.gather(sequence, layer)
        return np.asarray(on.to_numpy(attention(on.asarray(query), *read, causal=True, sight=sight, backend=on)))


@dataclass(frozen=True)
class SavedSession:
    """A copy of a session outside the cache. next: the token after its last one, if known. held: keys and values per layer."""

    tokens: list[int]
    next: int | None
    held: list[tuple[Array, Array]]


class Engine:
    """An engine with sessions of a canary (chapter ENG).

    Sessions are numbered from 0, and numbers are not reused. A session has at most `canary.context` tokens. The cache has room
    for `cache_tokens` tokens of all sessions together, where each session is rounded up to whole blocks. Every method with a
    session as its argument raises SequenceNotFound if the session is not open.
    """

    def __init__(self, canary: Canary, cache_tokens: int = 4096, block_size: int = 16, backend: Backend = reference) -> None:
        """Create the cache on the device of `backend`. Raises ConfigError unless the sizes are integers of at least 1."""
        blocks = -(-whole("cache_tokens", cache_tokens) // whole("block_size", block_size))
        sizes = (blocks * canary.num_layers, canary.num_layers, canary.num_kv_heads, canary.head_dim, block_size)
        self.canary, self.cache = canary, PrefixCache(PagedConfig(*sizes), backend)
        self._model = Model(canary, self.cache, backend)
        self._tokens: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}  # by session: the token that follows its last one, if it was computed
        self._sequence: dict[int, int] = {}  # by session: its sequence in the cache, if it has one
        self._saved: list[SavedSession] = []
        self._opened = 0

    def open(self) -> int:
        """Create an empty session, and return its number."""
        session, self._opened = self._opened, self._opened + 1
        self._tokens[session] = []
        return session

    def close(self, session: int) -> None:
        """Remove a session and free its blocks. Raises SequenceNotFound."""
        self._truncate(self._known(session), 0)
        del self._tokens[session]

    def length(self, session: int) -> int:
        """Return the number of tokens of a session, both given and generated."""
        return len(self._tokens[self._known(session)])

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        """Append tokens to a session, all or none.

        Raises TokenOutOfRange, CapacityExceeded if there would be more than `context` tokens (ENG-11), OutOfBlocks or
        SequenceNotFound.
        """
        told = self._tokens[self._known(session)]
        given = [in_range(token, self.canary.vocabulary, TokenOutOfRange, "token") for token in tokens]
        if len(told) + len(given) > self.canary.context:
            raise CapacityExceeded(
                f"context full: {len(given)} tokens needed, {self.canary.context - len(told)} of {self.canary.context} left"
            )
        if given:
            self._next[session] = self._computed(session, told + given)
            told += given

    def generate(self, session: int, count: int) -> list[int]:
        """Generate `count` tokens, append them to the session, and return them; fewer at the end of the context (ENG-11).

        Each is the most likely token after all tokens before it. Raises PositionOutOfRange if the session has no tokens or
        `count` is negative, OutOfBlocks if there are too few free blocks for all of them, or SequenceNotFound. If it raises, the
        session is as before.
        """
        told, count = self._speaks(session, count)
        self.cache.ensure_capacity(self._sequence[session], len(told) + count)
        start = len(told)
        for _ in range(count):
            self.extend(session, [self._next[session]])
        return told[start:]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Return the tokens of `n` calls of `generate`, concatenated. The session does not change. Raises as `generate` does."""
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
        """Generate `count` tokens and discard them, as if interrupted. The session does not change. Raises as `generate` does."""
        self.sample(session, 1, count)

    def step(self, sessions: Sequence[int]) -> list[int]:
        """Generate one token in each of several different sessions, in all or none, and return the tokens.

        Raises CapacityExceeded if a session has `context` tokens, and as `generate` does.
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
        """Create a session with the same tokens, and return its number. It shares the blocks of the other (SHARE-03)."""
        known, child = self._known(session), self.open()
        self._tokens[child] = list(self._tokens[known])
        if known in self._sequence:
            self._sequence[child] = self.cache.fork(self._sequence[known])
        if known in self._next:
            self._next[child] = self._next[known]
        return child

    def save(self, session: int) -> int:
        """Copy a session out of the cache, and return the number of the copy.

        Later changes of the session do not affect the copy. It can be loaded any number of times.
        """
        tokens, sequence = self._tokens[self._known(session)], self._sequence.get(session)
        held = [] if sequence is None else [self.cache.gather(sequence, layer) for layer in range(self.canary.num_layers)]
        self._saved.append(SavedSession(list(tokens), self._next.get(session), held))
        return len(self._saved) - 1

    def load(self, saved: int) -> int:
        """Create a session from a copy, and return the session's number.

        saved: a number that `save` returned. Raises OutOfBlocks, or SequenceNotFound if there is no such copy.
        """
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
        """Remove all tokens but the first `length` from a session (ENG-10).

        Raises PositionOutOfRange unless `length` is in `[0, n + 1)`, where n is the present length, or SequenceNotFound.
        """
        told = self._tokens[self._known(session)]
        length = in_range(length, len(told) + 1, PositionOutOfRange, "length")
        if length < len(told):
            self._truncate(session, length)

    def remove(self, session: int, start: int, stop: int) -> None:
        """Remove the tokens `[start, stop)` from a session. Later tokens stay, and are computed again (ENG-10).

        Raises PositionOutOfRange unless 0 <= start <= stop <= the length of the session, or SequenceNotFound.
        """
        told = self._tokens[self._known(session)]
        stop = in_range(stop, len(told) + 1, PositionOutOfRange, "stop")
        start = in_range(start, stop + 1, PositionOutOfRange, "start")
        rest = told[stop:]
        if start < stop:
            self._truncate(session, start)
            told += rest

    def _speaks(self, session: int, count: int) -> tuple[list[int], int]:
        """The tokens of a session, and how many of `count` tokens fit into its context. Raises as `generate` does."""
        told = self._tokens[self._known(session)]
        count = min(in_range(count, None, PositionOutOfRange, "count"), self.canary.context - len(told))
        if not told:
            raise PositionOutOfRange(f"session {session} has no tokens, add one first")
        if session not in self._next:
            self._next[session] = self._computed(session, told)
        return told, count

    def _known(self, session: int) -> int:
        """`session` as a Python int. Raises SequenceNotFound."""
        number = integer(session)
        if number is None or number not in self._tokens:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return number

    def _computed(self, session: int, tokens: list[int]) -> int:
        """The token that follows `tokens`, which begin with the tokens of the session. Raises OutOfBlocks."""
        if session not in self._sequence:
            self._sequence[session] = self.cache.begin(tokens)
        sequence = self._sequence[session]
        held = self._held(session)
        try:
            following = self._model.step(sequence, tokens[held:])
        except BaseException:  # some layers can be written, and the hit can exceed the session's tokens
            self.cache.truncate(sequence, min(held, self.length(session)))
            raise
        if len(tokens) // self.cache.config.block_size > held // self.cache.config.block_size:
            self.cache.commit(sequence, tokens)  # a block is full
        return following

    def _held(self, session: int) -> int:
        """How many of a session's tokens every layer of the cache has."""
        return min(self.cache.length(self._sequence[session], layer) for layer in range(self.canary.num_layers))

    def _truncate(self, session: int, length: int) -> None:
        """Keep the first `length` tokens of a session. The last is computed again, to get the token after it."""
        del self._tokens[session][length:]
        self._next.pop(session, None)
        if session in self._sequence and length < 2:
            self.cache.drop(self._sequence.pop(session))
        elif session in self._sequence:
            self.cache.truncate(self._sequence[session], min(length - 1, self._held(session)))
