"""Rotary positions (RoPE): what turns a key to its place, and back when the tokens before it are removed.

Pair i of a head of D numbers turns by position * theta ** (-2 i / D) radians (Su et al. 2021, arXiv:2104.09864, eq. 34). A key at
position p that moves to position p + by is turned by `by` more, for rotations add up.

How far one turn may be from the exact one. Write u = 2**-24, r for the length of a pair (a, b), t for its angle, and c, s for the
cosine and sine that are used: worked out in float64 and rounded once, they are off by d = u / 2 and what the angle is off by. The
new numbers are fl(fl(a c) - fl(b s)) and fl(fl(b c) + fl(a s)):

    d (|a| + |b|)         <= sqrt(2) d r      c and s are not the exact ones
    u (|a c| + |b s|)     <= u r              each product is rounded (Cauchy-Schwarz: c and s are a point of the unit circle)
    u |fl(a c) - fl(b s)| <= u r              the sum is rounded

which is 2.71 u r in all, but for terms in u * u. The angle is by * theta ** e, with e and the power rounded: it is off by at
most |t| (ln theta + 4) 2**-53, less than 0.1 u where |t| <= 2**20 and 1 <= theta <= 10**9. So each number is within BOUND r of
the exact one, BOUND = 3 u, but for 2**-149 where products underflow. Errors of turns add up: one turn after another is within
(1 + sqrt(2)) BOUND r, for the first leaves both numbers of a pair off, and the second turns that along.
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
BOUND = 3 * 2.0**-24  # of a pair's length: how far each of its numbers may be from the exact one after a turn


@dataclass(frozen=True)
class Rotary:
    """theta: the base, 10,000 in the paper. layout: which numbers of a head turn together.

    "halves": number i with number i + D / 2, as Llama's weights have it in transformers (NeoX). "pairs": number 2 i with number
    2 i + 1, as in the paper (GPT-J, and llama.cpp's Llama).

    Raises ConfigError for a head_dim that is odd, a theta that is not positive, a layout that is none.
    """

    head_dim: int
    theta: float = 10_000.0
    layout: str = "halves"

    def __post_init__(self) -> None:
        if whole("head_dim", self.head_dim, 2) % 2:
            raise ConfigError(f"head_dim: expected an even number to turn in pairs, got {self.head_dim}")
        real = isinstance(self.theta, Real) and not isinstance(self.theta, bool)
        if not (real and 0 < self.theta <= LARGEST):
            raise ConfigError(f"theta: expected a positive number, got {self.theta!r:.40}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")

    def turned(self, keys: Array, by: int, backend: Backend = reference) -> Array:
        """Keys, float32 [..., head_dim], each turned by so many positions, back where that is negative.

        Angles are worked out in float64 and their cosines and sines rounded once; products and sums are float32, each rounded. At
        1 <= theta <= 10**9, by no more than 2**20 positions, each number is within BOUND of its pair's length of the exact one.
        """
        xp, half = backend.xp, self.head_dim // 2
        angles = by * float(self.theta) ** (-2.0 * np.arange(half) / self.head_dim)
        cos, sin = (backend.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles)))
        paired = self.layout == "pairs"
        first, second = (keys[..., 0::2], keys[..., 1::2]) if paired else (keys[..., :half], keys[..., half:])
        with np.errstate(over="ignore"):  # what is too large is refused where it is stored
            new = first * cos - second * sin, second * cos + first * sin
        if paired:
            return xp.reshape(xp.stack(new, axis=-1), keys.shape)
        return xp.concat(new, axis=-1)
