"""Rotary position embedding (RoPE): rotates keys by a number of positions, when tokens before them are removed.

An embedding with n frequencies rotates n pairs of the numbers of a head. At a position, pair i is rotated by
position * frequencies[i] radians (Su et al. 2021, arXiv:2104.09864, eq. 34). In the paper n is head_dim / 2, and frequency i is
theta ** (-2 i / head_dim). Models change both: with a partial embedding, the numbers after the first 2 n are not rotated, and
Llama 3.1 and YaRN (arXiv:2309.00071) lower some of the frequencies. Rotations add up: a key that moves from position p to p + by
is rotated by `by` more.

The error bound of one rotation. Let u = 2**-24, let r be the length of a pair (a, b), t its angle, and c and s the cosine and
sine that are used. They are computed in float64 and rounded once, so that their error is at most d = u / 2 plus the error of the
angle. The new numbers are fl(fl(a c) - fl(b s)) and fl(fl(b c) + fl(a s)), with these errors:

    d (|a| + |b|)         <= sqrt(2) d r      the errors of c and s
    u (|a c| + |b s|)     <= u r              the rounding of the products (Cauchy-Schwarz: (c, s) is on the unit circle)
    u |fl(a c) - fl(b s)| <= u r              the rounding of the sum

The sum is 2.71 u r, up to terms in u * u. The angle is by * frequency, rounded once: its error is at most |t| 2**-53, less than
0.1 u if |t| <= 2**25. Each number is therefore within BOUND r of the exact one, where BOUND = 3 u, plus 2**-149 if products
underflow. The errors of successive rotations add up: after two, a number is within (1 + sqrt(2)) BOUND r, because the first
leaves an error in both numbers of a pair, which the second rotates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import ConfigError, whole

LAYOUTS = ("halves", "pairs")
BOUND = 3 * 2.0**-24  # the largest error of a number after one rotation, divided by the length of its pair


def rotary_frequencies(num_rotated: int, theta: float = 10_000.0) -> tuple[float, ...]:
    """Return the frequencies of the paper for the first `num_rotated` numbers of a head, an even number.

    theta: the base. Raises ConfigError for an odd num_rotated or a theta that is not a positive number.
    """
    if whole("num_rotated", num_rotated, 2) % 2:
        raise ConfigError(f"num_rotated: expected an even number, got {num_rotated}")
    if not (_is_finite(theta) and theta > 0):
        raise ConfigError(f"theta: expected a positive number, got {theta!r:.40}")
    return tuple(float(theta) ** (-2 * i / num_rotated) for i in range(num_rotated // 2))


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding.

    - `head_dim`: numbers per head.
    - `frequencies`: radians per position of each pair, 1 to head_dim // 2 finite numbers.
    - `layout`: which of the first 2 n numbers form a pair, for n frequencies. "halves": numbers i and i + n, as for Llama in
      transformers (NeoX). "pairs": numbers 2 i and 2 i + 1, as in the paper, in GPT-J and for Llama in llama.cpp.

    Raises ConfigError for other frequencies or an unknown layout.
    """

    head_dim: int
    frequencies: Sequence[float]
    layout: str = "halves"

    def __post_init__(self) -> None:
        most = whole("head_dim", self.head_dim, 1) // 2
        given = list(self.frequencies) if isinstance(self.frequencies, Sequence | np.ndarray) else []
        if not (1 <= len(given) <= most and all(map(_is_finite, given)) and not isinstance(self.frequencies, str)):
            raise ConfigError(f"frequencies: expected 1 to {most} finite numbers, got {self.frequencies!r:.80}")
        object.__setattr__(self, "frequencies", tuple(map(float, given)))
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")

    def turned(self, keys: Array, by: int, backend: Backend = reference) -> Array:
        """Return keys, float32 [..., head_dim], rotated by `by` positions, which can be negative.

        Angles, cosines and sines are computed in float64, cosines and sines are rounded to float32 once, and products and sums
        are float32. If no angle is larger than 2**25, the error of each number is at most BOUND times the length of its pair.
        """
        xp, count = backend.xp, len(self.frequencies)
        angles = by * np.array(self.frequencies)
        cos, sin = (backend.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles)))
        paired = self.layout == "pairs"
        rotated, rest = keys[..., : 2 * count], keys[..., 2 * count :]
        first, second = (rotated[..., 0::2], rotated[..., 1::2]) if paired else (rotated[..., :count], rotated[..., count:])
        with np.errstate(over="ignore"):  # infinities are rejected when the keys are quantized
            new = first * cos - second * sin, second * cos + first * sin
        return xp.concat([xp.reshape(xp.stack(new, axis=-1), rotated.shape), rest] if paired else [*new, rest], axis=-1)


def _is_finite(number: Any) -> bool:
    """Whether it is a real number, not a bool, and finite as a float."""
    if not isinstance(number, Real) or isinstance(number, bool | np.bool_):
        return False
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond float64
        return False
