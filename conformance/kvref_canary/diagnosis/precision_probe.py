"""A precision probe of a cache: the share of right tokens that a canary generates with it.

An offset canary repeats one period of a prompt. The position from which it reads each token depends only on rounding, not on the
tokens generated before it. After a prompt of one period, each token of the next period is therefore an independent measurement.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvref.canary import BOS, FIRST_WORD, Canary

CompleteFunction = Callable[[Sequence[int], int], Sequence[int]]  # prompt, count -> the tokens that the engine generates


class PrecisionEstimate(NamedTuple):
    right: int
    total: int


def measure_precision(canary: Canary, complete: CompleteFunction, prompts: int = 1, seed: int = 0) -> PrecisionEstimate:
    """Measure one period after each of `prompts` random prompts. The canary must be one without recall."""
    rng = np.random.default_rng(seed)
    right = 0
    for _ in range(prompts):
        told = [BOS, *(FIRST_WORD + int(word) for word in rng.integers(canary.words, size=canary.period))]
        said = complete(told, canary.period)
        right += sum(one == other for one, other in zip(said, told[1:], strict=True))
    return PrecisionEstimate(right, prompts * canary.period)
