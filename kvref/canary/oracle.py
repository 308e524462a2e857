"""What a canary has to say, whatever it was told: computed from which place each layer and head looks at, without weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvref.attention import Sight
from kvref.canary.shape import LEAK, ROUNDINGS, SHARPNESS, Canary

UNCERTAIN = -2  # a digit that hangs on rounding


@dataclass
class Entry:
    """What one kv head of one layer holds of a token. at: the position its key was turned to, None for a key of zeros.

    key: the digits that the key tells of, where a layer looks up. digit: what the value carries.
    """

    at: int | None
    key: list[int]
    digit: int


Spoil = Callable[[int, list[list[Entry]]], None]  # layer, its entries by head and position
Digits = NDArray[np.int64]


@dataclass
class Oracle:
    """One sequence. entries[layer][head][position] may be changed, cut and moved: it says what a cache with those would say.

    roundoff: of what the engine computes with. What this makes uncertain it does not say. windows: what the engine sees in each
    layer, where that is not what the canary says.
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
        return len(self.entries[0][0])

    def upto(self, length: int, windows: tuple[int | None, ...] = ()) -> "Oracle":
        """Another of its first tokens. It shares their entries: put others in their place there rather than change them."""
        other = Oracle(self.canary, self.roundoff, windows or self.windows)
        other.entries = [[entries[:length] for entries in layer] for layer in self.entries]
        return other

    def extend(self, tokens: Iterable[int], spoil: Spoil | None = None) -> list[int | None]:
        """What comes next after each of these tokens, None where it hangs on rounding.

        spoil: is called with a layer and its entries, those of these tokens among them, before any of these tokens reads them.
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
        """The `count` tokens that follow a last one, each of which is told it in turn; what is uncertain ends it."""
        said = self.extend([token])
        while len(said) < count and said[-1] is not None:
            said += self.extend([said[-1]])
        return said

    def _read(self, layer: int, head: int, wanted: Digits) -> Digits:
        """The digits that the queries of the last tokens find: that of the best place, if all near it carry the same."""
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
        """`_read` of a layer that looks back, where each key lies at its own position: all queries look equally far back."""
        window = self.windows[layer] or len(digits)
        worth = SHARPNESS * self._nearness(layer, np.arange(min(window, len(digits))))
        best = np.maximum.accumulate(worth)  # by how far back a query sees
        queries = np.arange(first, len(digits))
        seen = np.minimum(queries, len(worth) - 1)
        near = np.flatnonzero(worth > best - self._apart)
        places = queries[:, None] - near
        hit = (near <= seen[:, None]) & (worth[near] > best[seen][:, None] - self._apart)
        return _agreed(digits[np.maximum(places, 0)], hit)

    def _nearness(self, layer: int, back: NDArray[np.int64]) -> NDArray[np.float64]:
        size = max(self.canary.context, 1 << int(np.abs(back).max(initial=0)).bit_length())
        return _table(self.canary, layer, size)[back + size]


@lru_cache(64)
def _table(canary: Canary, layer: int, size: int) -> NDArray[np.float64]:
    """How near places lie that are -size .. size back."""
    return canary.nearness(layer, np.arange(-size, size + 1))


def _signs(canary: Canary, digits: Digits) -> NDArray[np.float64]:
    """The bits of [n, num_kv_heads] digits as +1 and -1, [n, num_kv_heads * bits]; of what has none zeros."""
    signs = (digits[..., None] >> np.arange(canary.bits) & 1) * 2.0 - 1
    return np.asarray(np.where(digits[..., None] >= 0, signs, 0.0).reshape(len(digits), -1))


def _agreed(digits: Digits, near: NDArray[np.bool_]) -> Digits:
    """By query the digit that all places near have, near [queries, places]."""
    least = np.where(near, digits, np.iinfo(np.int64).max).min(axis=1)
    most = np.where(near, digits, np.iinfo(np.int64).min).max(axis=1)
    return np.asarray(np.where(least == most, least, UNCERTAIN))


def repeated(prompt: Sequence[int], period: int, count: int) -> list[int]:
    """What follows a prompt of a period or more that an offset canary was told: its last period, again and again."""
    return [prompt[len(prompt) - period + number % period] for number in range(count)]
