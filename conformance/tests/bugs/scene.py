"""An engine in little with three requests, one of which is to go wrong."""

from dataclasses import dataclass, field

import numpy as np

from kvref import PrefixCache
from kvref.canary import BOS, FIRST_WORD, Canary
from kvref.engine import Engine
from kvref_conformance.engines.told import Told


def prompt_of(canary, count, seed):
    """Words that all differ where a canary recalls them."""
    rng = np.random.default_rng(seed)
    words = rng.permutation(canary.words)[:count] if canary.recalls else rng.integers(canary.words, size=count)
    return [BOS, *(int(word) + FIRST_WORD for word in words)]


class Coarse(PrefixCache):
    """Its keys are multiples of a step."""

    def __init__(self, config, step):
        super().__init__(config)
        self.step = step

    def write(self, sequence, layer, start, keys, values):
        super().write(sequence, layer, start, np.round(keys / self.step) * np.float32(self.step), values)


@dataclass
class Scene:
    """Request b, which goes wrong, between a, that has ended, and c, that goes on."""

    canary: Canary
    step: float | None = None  # of its keys
    events: list[tuple[int, str]] = field(default_factory=list)
    more: list[Told] = field(default_factory=list)

    def __post_init__(self):
        self.engine = Engine(self.canary, 3200)
        self.renew(Coarse(self.cache.config, self.step) if self.step else self.cache)

    def renew(self, cache):
        """Begin with another cache."""
        self.engine.cache = self.engine._model.cache = cache
        self.a, self.b, self.c = (self.engine.open() for _ in range(3))
        self.prompts = [prompt_of(self.canary, count, seed) for seed, count in ((1, 130), (2, 99), (3, 130))]
        for session, prompt in ((self.a, self.prompts[0]), (self.c, self.prompts[2])):
            self.engine.extend(session, prompt)
        self.begin(self.prompts[1])

    def begin(self, tokens):
        """Tell b these tokens alone. None is found, for they are to be computed as the engine now does it."""
        self.engine.truncate(self.b, 0)
        self.cache.pool.forget()
        self.told = list(tokens)
        self.engine.extend(self.b, self.told)

    @property
    def cache(self):
        return self.engine.cache

    def sequence(self, session):
        return self.engine._sequence[session]

    def table(self, session):
        """[entries, layers] of block ids: to be read and written."""
        return self.cache._tables._segment(self.cache._table_of[self.sequence(session)])

    def spoil(self, layers, heads, start, stop, change):
        """change: takes keys and values [tokens, num_kv_heads, head_dim] of positions start .. stop of a layer, to others."""
        for layer in layers:
            keys, values = (np.array(part) for part in self.cache.read(self.sequence(self.b), layer, range(start, stop)))
            for own, other in zip((keys, values), change(layer, keys.copy(), values.copy()), strict=True):
                own[:, heads] = other[:, heads]
            self.cache.write(self.sequence(self.b), layer, start, keys, values)

    def said(self, count):
        """What b was told, and says from its first wrong token on, and what others were told.

        A canary that recalls is asked for every second word of its prompt.
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
        others = [Told("request a", self.prompts[0], ended=True), Told("request c", self.prompts[2]), *self.more]
        return Told("request b", tokens, said, events=tuple(self.events)), others
