"""Rotary position embedding (RoPE): rotates keys by a number of positions, when tokens before them are removed.

The head_dim = D numbers of a head form D / 2 pairs. At a position, pair i is rotated by position * theta ** (-2 i / D) radians
(Su et al. 2021, arXiv:2104.09864, eq. 34). Rotations add up: a key that moves from position p to p + by is rotated by `by` more.

The error bound of one rotation. Let u = 2**-24, let r be the length of a pair (a, b), t its angle, and c and s the cosine and
sine that are used. They are computed in float64 and rounded once, so that their error is at most d = u / 2 plus the error of the
angle. The new numbers are fl(fl(a c) - fl(b s)) and fl(fl(b c) + fl(a s)), with these errors:

    d (|a| + |b|)         <= sqrt(2) d r      the errors of c and s
    u (|a c| + |b s|)     <= u r              the rounding of the products (Cauchy-Schwarz: (c, s) is on the unit circle)
    u |fl(a c) - fl(b s)| <= u r              the rounding of the sum

The sum is 2.71 u r, up to terms in u * u. The angle is by * theta ** e, where e and the power are rounded: its error is at most
|t| (ln theta + 4) 2**-53, less than 0.1 u if |t| <= 2**20 and 1 <= theta <= 10**9. Each number is therefore within BOUND r of the
exact one, where BOUND = 3 u, plus 2**-149 if products underflow. The errors of successive rotations add up: after two, a number
is within (1 + sqrt(2)) BOUND r, because the first leaves an error in both numbers of a pair, which the second rotates.
"""

import sys
from dataclasses import dataclass
from numbers import Real

import numpy as np

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import ConfigError, whole

LAYOUTS = ("halves", "pairs")
LARGEST = sys.float_info.max
BOUND = 3 * 2.0**-24  # the largest error of a number after one rotation, divided by the length of its pair


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding over the whole head.

    - `head_dim`: an even number.
    - `theta`: the base of the angles, 10,000 in the paper.
    - `layout`: which numbers of a head form a pair. "halves": numbers i and i + head_dim / 2, as for Llama in transformers
      (NeoX). "pairs": numbers 2 i and 2 i + 1, as in the paper, in GPT-J and for Llama in llama.cpp.

    Scaled frequencies (Llama 3.1, YaRN) and embeddings over a part of the head are not supported.

    Raises ConfigError for an odd head_dim, a theta that is not a positive number, or an unknown layout.
    """

    head_dim: int
    theta: float = 10_000.0
    layout: str = "halves"

    def __post_init__(self) -> None:
        if whole("head_dim", self.head_dim, 2) % 2:
            raise ConfigError(f"head_dim: expected an even number, got {self.head_dim}")
        real = isinstance(self.theta, Real) and not isinstance(self.theta, bool)
        if not (real and 0 < self.theta <= LARGEST):
            raise ConfigError(f"theta: expected a positive number, got {self.theta!r:.40}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")

    def turned(self, keys: Array, by: int, backend: Backend = reference) -> Array:
        """Return keys, float32 [..., head_dim], rotated by `by` positions, which can be negative.

        Angles, cosines and sines are computed in float64, cosines and sines are rounded to float32 once, and products and sums
        are float32. If 1 <= theta <= 10**9 and |by| <= 2**20, the error of each number is at most BOUND times the length of its
        pair.
        """
        xp, half = backend.xp, self.head_dim // 2
        angles = by * float(self.theta) ** (-2.0 * np.arange(half) / self.head_dim)
        cos, sin = (backend.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles)))
        paired = self.layout == "pairs"
        first, second = (keys[..., 0::2], keys[..., 1::2]) if paired else (keys[..., :half], keys[..., half:])
        with np.errstate(over="ignore"):  # infinities are rejected when the keys are quantized
            new = first * cos - second * sin, second * cos + first * sin
        if paired:
            return xp.reshape(xp.stack(new, axis=-1), keys.shape)
        return xp.concat(new, axis=-1)
