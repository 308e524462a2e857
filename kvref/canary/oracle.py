"""The expected output of a canary for any tokens, also with changed cache entries.

It is computed without weights: for each layer and head, from the place with the highest score.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvref.attention import Sight
from kvref.canary.dimensions import LEAK, ROUNDINGS, SHARPNESS, Canary

UNCERTAIN = -2  # a digit that depends on rounding


@dataclass
class Entry:
    """The cache entry of one token, kv head and layer.

    - `at`: the position for which its key was rotated; None for a key of zeros.
    - `key`: the digits in the key, which a layer that recalls compares.
    - `digit`: the digit in the value.
    """

    at: int | None
    key: list[int]
    digit: int


Spoil = Callable[[int, list[list[Entry]]], None]  # called with a layer and its entries, by head and position
Digits = NDArray[np.int64]


@dataclass
class Oracle:
    """The expected output of a canary for one sequence.

    `entries[layer][head][position]` are the cache entries. They can be changed, removed and moved; the oracle then returns what
    an engine with such a cache generates.

    - `roundoff`: the unit roundoff of the engine's arithmetic. The oracle returns None for a token that depends on rounding.
    - `windows`: the windows of the engine's layers, by default those of the canary.
    """

    canary: Canary
    roundoff: float = 2.0**-8
    windows: tuple[int | None, ...] = ()
    entries: list[list[list[Entry]]] = field(init=False)

    def __post_init__(self) -> None:
        heads, layers = range(self.canary.num_kv_heads), range(self.canary.num_layers)
        self.windows = self.windows or self.canary.windows
        self.entries = [[[] for _ in heads] for _ in layers]
        self._apart = math.log(self.canary.context / LEAK) + 2 * ROUNDINGS * self.roundoff * SHARPNESS

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.entries[0][0])

    def upto(self, length: int, windows: tuple[int | None, ...] = ()) -> "Oracle":
        """Return an oracle with the first `length` tokens.

        It shares the Entry objects with this one: replace entries there instead of changing their fields.
        """
        other = Oracle(self.canary, self.roundoff, windows or self.windows)
        other.entries = [[entries[:length] for entries in layer] for layer in self.entries]
        return other

    def extend(self, tokens: Iterable[int], spoil: Spoil | None = None) -> list[int | None]:
        """Append tokens, and return for each the token that follows it, or None if it depends on rounding.

        spoil: called for each layer with the layer and its entries, including those of the new tokens, before they are read.
        """
        canary, start, tokens = self.canary, self.length, list(tokens)
        if not tokens:
            return []
        parts = [np.array([canary.digits(token) for token in tokens])]
        for layer in range(canary.num_layers):
            keys, copied = parts[-1].tolist(), parts[-2 if canary.looks_up(layer) else -1].tolist()
            for head, entries in enumerate(self.entries[layer]):
                entries += [Entry(start + number, key, copied[number][head]) for number, key in enumerate(keys)]
            if spoil:
                spoil(layer, self.entries[layer])
            parts.append(np.stack([self._read(layer, head, parts[0]) for head in range(canary.num_kv_heads)], axis=1))
        return [None if UNCERTAIN in digits else canary.token(digits) for digits in parts[-1].tolist()]

    def generate(self, token: int, count: int) -> list[int | None]:
        """Append `token`, and return the `count` tokens that follow, up to the first None: a token that depends on rounding."""
        said = self.extend([token])
        while len(said) < count and said[-1] is not None:
            said += self.extend([said[-1]])
        return said

    def _read(self, layer: int, head: int, wanted: Digits) -> Digits:
        """The digits that the queries of the last tokens read: of the best place, if places with similar scores have the same."""
        canary, entries, window = self.canary, self.entries[layer][head], self.windows[layer]
        digits = np.array([entry.digit for entry in entries])
        there = np.array([entry.at is not None for entry in entries])
        at = np.array([entry.at or 0 for entry in entries])
        places = np.arange(len(entries))
        first = len(entries) - len(wanted)
        if not canary.looks_up(layer) and there.all() and (at == places).all():
            return self._copied(layer, digits, first)
        queries = places[first:, None]
        worth = SHARPNESS * there * self._nearness(layer, queries - at)
        least = worth
        if canary.looks_up(layer):
            keys = np.array([entry.key for entry in entries])
            alike = _signs(canary, wanted) @ _signs(canary, keys).T
            unknown = canary.bits * (keys == UNCERTAIN).sum(axis=1)  # bits, each of which may be like or unlike
            worth, least = ((worth * each) / (canary.bits * canary.num_kv_heads) for each in (alike + unknown, alike - unknown))
        hidden = ~Sight(window).sees(queries, places)
        best = np.where(hidden, -np.inf, least).max(axis=1, keepdims=True)
        return _agreed(digits, ~hidden & (worth > best - self._apart))

    def _copied(self, layer: int, digits: Digits, first: int) -> Digits:
        """`_read` for a layer that copies by distance, if each key is rotated for its own position: the same for all queries."""
        window = self.windows[layer] or len(digits)
        worth = SHARPNESS * self._nearness(layer, np.arange(min(window, len(digits))))
        best = np.maximum.accumulate(worth)  # by the number of tokens that a query sees
        queries = np.arange(first, len(digits))
        seen = np.minimum(queries, len(worth) - 1)
        near = np.flatnonzero(worth > best - self._apart)
        places = queries[:, None] - near
        hit = (near <= seen[:, None]) & (worth[near] > best[seen][:, None] - self._apart)
        return _agreed(digits[np.maximum(places, 0)], hit)

    def _nearness(self, layer: int, back: NDArray[np.int64]) -> NDArray[np.float64]:
        """`Canary.nearness`, from a table."""
        size = max(self.canary.context, 1 << int(np.abs(back).max(initial=0)).bit_length())
        return _table(self.canary, layer, size)[back + size]


@lru_cache(64)
def _table(canary: Canary, layer: int, size: int) -> NDArray[np.float64]:
    """`Canary.nearness` for the distances from -size to size."""
    return canary.nearness(layer, np.arange(-size, size + 1))


def _signs(canary: Canary, digits: Digits) -> NDArray[np.float64]:
    """The bits of digits [n, num_kv_heads] as +1 and -1, [n, num_kv_heads * bits]; zeros for negative digits."""
    signs = (digits[..., None] >> np.arange(canary.bits) & 1) * 2.0 - 1
    return np.asarray(np.where(digits[..., None] >= 0, signs, 0.0).reshape(len(digits), -1))


def _agreed(digits: Digits, near: NDArray[np.bool_]) -> Digits:
    """Per query, the digit that all places in the mask `near` [queries, places] have, or UNCERTAIN."""
    least = np.where(near, digits, np.iinfo(np.int64).max).min(axis=1)
    most = np.where(near, digits, np.iinfo(np.int64).min).max(axis=1)
    return np.asarray(np.where(least == most, least, UNCERTAIN))


def repeated(prompt: Sequence[int], period: int, count: int) -> list[int]:
    """Return the `count` tokens that a canary without recalls generates after a prompt: it repeats the last period."""
    return [prompt[len(prompt) - period + number % period] for number in range(count)]
