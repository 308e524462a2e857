"""Rotary positions (RoPE): what turns a key to its place, and back when the tokens before it are removed.

Pair i of a head of D numbers turns by position * theta ** (-2 i / D) radians (Su et al. 2021, arXiv:2104.09864, eq. 34). A key at
position p that moves to position p + by is turned by `by` more, for rotations add up.
"""

from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import ConfigError, whole

LAYOUTS = ("halves", "pairs")


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
        if isinstance(self.theta, bool) or not (isinstance(self.theta, int | float) and 0 < self.theta < float("inf")):
            raise ConfigError(f"theta: expected a positive number, got {self.theta!r}")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout: expected one of {', '.join(LAYOUTS)}, got {self.layout!r}")

    def turned(self, keys: Array, by: int, backend: Backend = reference) -> Array:
        """Keys, float32 [..., head_dim], each turned by so many positions, back where that is negative.

        Angles are worked out in float64 and their cosines and sines rounded once; products and sums are float32, each rounded.
        """
        xp, half = backend.xp, self.head_dim // 2
        angles = by * float(self.theta) ** (-2.0 * np.arange(half) / self.head_dim)
        cos, sin = (backend.asarray(part.astype(np.float32)) for part in (np.cos(angles), np.sin(angles)))
        paired = self.layout == "pairs"
        first, second = (keys[..., 0::2], keys[..., 1::2]) if paired else (keys[..., :half], keys[..., half:])
        new = first * cos - second * sin, second * cos + first * sin
        if paired:
            return xp.reshape(xp.stack(new, axis=-1), keys.shape)
        return xp.concat(new, axis=-1)
