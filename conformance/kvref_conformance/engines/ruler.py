"""How much precision a cache leaves to attention: the share of right tokens that a canary says in it.

An offset canary says one period of a prompt again. Which place each token is read from hangs on rounding alone, not on what was
said before it: behind a prompt of a period, every token of the next is a measurement of its own.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvref.canary import BOS, FIRST_WORD, Canary

Complete = Callable[[Sequence[int], int], Sequence[int]]  # a prompt and a count, to the tokens that an engine says behind it


class Measured(NamedTuple):
    right: int
    of: int


def measured(canary: Canary, complete: Complete, prompts: int = 1, seed: int = 0) -> Measured:
    """Of one period behind each of some prompts of words at random. Of a canary without recall."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(prompts):
        told = [BOS, *(FIRST_WORD + int(word) for word in rng.integers(canary.words, size=canary.period))]
        said = complete(told, canary.period)
        right += sum(one == other for one, other in zip(said, told[1:], strict=True))
    return Measured(right, prompts * canary.period)
