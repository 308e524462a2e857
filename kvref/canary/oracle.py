"""What a canary has to say, whatever it was told: computed from which place each layer and head looks at, without weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass
class Oracle:
    """One sequence. entries[layer][head][position] may be changed, cut and moved: it says what a cache with those would say.

    roundoff: of what the engine computes with. What this makes uncertain it does not say.
    """

    canary: Canary
    roundoff: float = 2.0**-8
    entries: list[list[list[Entry]]] = field(init=False)

    def __post_init__(self) -> None:
        heads, layers = range(self.canary.num_kv_heads), range(self.canary.num_layers)
        self.entries = [[[] for _ in heads] for _ in layers]
        self._apart = math.log(self.canary.context / LEAK) + 2 * ROUNDINGS * self.roundoff * SHARPNESS

    @property
    def length(self) -> int:
        return len(self.entries[0][0])

    def extend(self, tokens: Iterable[int]) -> list[int | None]:
        """What comes next after each of these tokens, None where it hangs on rounding."""
        return [self._step(token) for token in tokens]

    def generate(self, token: int, count: int) -> list[int | None]:
        """The `count` tokens that follow a last one, each of which is told it in turn; what is uncertain ends it."""
        said: list[int | None] = [self._step(token)]
        while len(said) < count and said[-1] is not None:
            said.append(self._step(said[-1]))
        return said

    def _step(self, token: int) -> int | None:
        canary, position = self.canary, self.length
        parts = [canary.digits(token)]
        for layer in range(canary.num_layers):
            copied = parts[-2] if canary.looks_up(layer) else parts[-1]
            for head, entries in enumerate(self.entries[layer]):
                entries.append(Entry(position, parts[-1], copied[head]))
            parts.append([self._read(layer, head, position, parts[0]) for head in range(canary.num_kv_heads)])
        return None if UNCERTAIN in parts[-1] else canary.token(parts[-1])

    def _read(self, layer: int, head: int, position: int, wanted: list[int]) -> int:
        """The digit that a query finds: that of the best place, if all that come near it carry the same."""
        canary, window = self.canary, self.canary.windows[layer]
        entries = self.entries[layer][head]
        seen = entries if window is None else entries[-window:]
        there = np.array([entry.at is not None for entry in seen])
        back = np.array([position - (entry.at or 0) for entry in seen])
        worth = SHARPNESS * there * canary.nearness(layer, back)
        if canary.looks_up(layer):
            keys = np.array([canary.signs(entry.key) for entry in seen])
            worth = worth * (keys * canary.signs(wanted)).mean(axis=(1, 2))
        near = {seen[place].digit for place in np.flatnonzero(worth > worth.max() - self._apart)}
        near |= {UNCERTAIN for entry in seen if canary.looks_up(layer) and UNCERTAIN in entry.key}
        return near.pop() if len(near) == 1 else UNCERTAIN


def repeated(prompt: Sequence[int], period: int, count: int) -> list[int]:
    """What follows a prompt of a period or more that an offset canary was told: its last period, again and again."""
    return [prompt[len(prompt) - period + number % period] for number in range(count)]
