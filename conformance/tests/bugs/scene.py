"""A minimal engine with three requests, one of which is going to be wrong."""

from dataclasses import dataclass, field

import numpy as np

from kvref import PrefixCache
from kvref.canary import BOS, FIRST_WORD, Canary
from kvref.engine import Engine
from kvref_canary.diagnosis.case import RequestHistory


def prompt_of(canary, count, seed):
    """Words that are all different if a canary recalls them."""
    rng = np.random.default_rng(seed)
    words = rng.permutation(canary.words)[:count] if canary.recalls else rng.integers(canary.words, size=count)
    return [BOS, *(int(word) + FIRST_WORD for word in words)]


class Coarse(PrefixCache):
    """Keys are rounded to multiples of a step."""

    def __init__(self, config, step):
        super().__init__(config)
        self.step = step

    def write(self, sequence, layer, start, keys, values):
        super().write(sequence, layer, start, np.round(keys / self.step) * np.float32(self.step), values)


@dataclass
class Scene:
    """Request b, which goes wrong; a, which has ended; and c, which continues."""

    canary: Canary
    step: float | None = None  # of the keys
    events: list[tuple[int, str]] = field(default_factory=list)
    more: list[RequestHistory] = field(default_factory=list)

    def __post_init__(self):
        self.engine = Engine(self.canary, 3200)
        self.renew(Coarse(self.cache.config, self.step) if self.step else self.cache)

    def renew(self, cache):
        """Replace the cache with another one."""
        self.engine.cache = self.engine._model.cache = cache
        self.a, self.b, self.c = (self.engine.open() for _ in range(3))
        self.prompts = [prompt_of(self.canary, count, seed) for seed, count in ((1, 130), (2, 99), (3, 130))]
        for session, prompt in ((self.a, self.prompts[0]), (self.c, self.prompts[2])):
            self.engine.extend(session, prompt)
        self.begin(self.prompts[1])

    def begin(self, tokens):
        """Give b only these tokens as its prompt.

        No prefix is found, so that the engine computes all of it in its present state.
        """
        self.engine.truncate(self.b, 0)
        self.cache.pool.clear_index()
        self.told = list(tokens)
        self.engine.extend(self.b, self.told)

    @property
    def cache(self):
        return self.engine.cache

    def sequence(self, session):
        return self.engine._sequence[session]

    def table(self, session):
        """The block ids [entries, layers], readable and writable."""
        return _Entries(self.cache._tables._blocks[self.cache._table_of[self.sequence(session)]])

    def spoil(self, layers, heads, start, stop, change):
        """Apply `change` to keys and values [tokens, num_kv_heads, head_dim] of positions [start, stop) of a layer."""
        for layer in layers:
            keys, values = (np.array(part) for part in self.cache.read(self.sequence(self.b), layer, range(start, stop)))
            for own, other in zip((keys, values), change(layer, keys.copy(), values.copy()), strict=True):
                own[:, heads] = other[:, heads]
            self.cache.write(self.sequence(self.b), layer, start, keys, values)

    def said(self, count):
        """Return the history of request b with its generated tokens, and the histories of the other requests.

        For a canary that recalls, b is extended by every second word of its prompt and generates one token after each.
        """
        before = len(self.engine._tokens[self.b])
        if self.canary.recalls:
            for word in self.prompts[1][20:-1:2]:
                self.engine.extend(self.b, [word])
                self.engine.generate(self.b, 1)
            tokens = self.told + self.engine._tokens[self.b][before:]
            said = range(len(self.told) + 1, len(tokens), 2)
        else:
            self.engine.generate(self.b, count)
            tokens = self.told + self.engine._tokens[self.b][before:]
            said = range(len(self.told), len(tokens))
        others = [
            RequestHistory("request a", self.prompts[0], ended=True),
            RequestHistory("request c", self.prompts[2]),
            *self.more,
        ]
        return RequestHistory("request b", tokens, said, events=tuple(self.events)), others


class _Entries:
    """The lists of block ids of a sequence's layers, indexed as an array [entries, layers]."""

    def __init__(self, layers):
        self._layers = layers

    def __getitem__(self, index):
        return np.array(self._layers).T[index]

    def __setitem__(self, index, blocks):
        entries = np.array(self._layers).T
        entries[index] = blocks
        for layer, changed in zip(self._layers, entries.T.tolist(), strict=True):
            layer[:] = changed
