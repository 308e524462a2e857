"""Rows that are rotated before they are quantized, and rotated back when they are read (FMT-ROT).

A channel that lies far from the others takes the scale of its row, and leaves few steps to the rest. A rotation spreads it over
all of them. The one here is the Walsh-Hadamard transform divided by the square root of its length: its own inverse, orthogonal,
without a number to be stored, and n log n additions. The end of a format's name, `_hadamard`, declares it: who reads the codes
has to undo it, and nothing else says that it was done.

Source: Fino and Algazi, Unified Matrix Treatment of the Fast Walsh-Hadamard Transform (1976), for the butterfly; QuaRot
(arXiv:2404.00456) for keys and values; ggml-org/llama.cpp#21038 for blocks of the largest power of two that goes into a head.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array, Shape
from kvref.errors import NonFinite
from kvref.formats import bounds
from kvref.formats.base import Format, Granularity, Quantized, finite_rows

REACH = 2.0**126  # of the sum of a block's largest magnitudes: below it no sum overflows, neither on the way in nor out


def block_of(width: int) -> int:
    """How many neighbours are rotated together: the largest power of two that goes into the width. 1 for none."""
    return max(1, width & -width)


def hadamard(x: Array) -> Array:
    """Rows [..., width] rotated in blocks, float32, in the order of FMT-ROT-01: twice gives them back, but for roundings.

    Value i of a block of n becomes the sum of (-1)^popcount(i & j) x[j] over its values j, over the square root of n.
    """
    xp, block = array_namespace(x), block_of(x.shape[-1])
    if block == 1 or 0 in x.shape:
        return x
    # [block, blocks]: libraries add long rows fastest. Made flat, for a transposed array alone would keep its order in memory.
    turned, span = xp.reshape(xp.reshape(x, (-1, block)).T, (-1,)), 1
    while span < block:  # pairs that are 1, 2, 4, ... apart
        pairs = xp.reshape(turned, (block // (2 * span), 2, span, -1))
        first, second = pairs[:, 0, ...], pairs[:, 1, ...]
        turned = xp.stack([first + second, first - second], axis=1)
        span *= 2
    turned = xp.reshape(xp.reshape(xp.reshape(turned, (block, -1)).T, (-1,)), x.shape)
    return turned * xp.full_like(turned, block**-0.5)  # one rounding, at the end; exact where n is a power of four


@dataclass(frozen=True)
class Rotated:
    """`inner`, of rows that were rotated."""

    inner: Format

    @property
    def name(self) -> str:
        return f"{self.inner.name}_hadamard"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def granularity(self) -> Granularity:
        return self.inner.granularity

    @property
    def group(self) -> int | None:
        return self.inner.group

    @property
    def element(self) -> str:
        return self.inner.element

    @property
    def scale_arrays(self) -> int:
        return self.inner.scale_arrays

    def code_width(self, width: int) -> int:
        return self.inner.code_width(width)

    def code_dtype(self, xp: object) -> str:
        return self.inner.code_dtype(xp)

    def scale_shape(self, width: int) -> Shape:
        return self.inner.scale_shape(width)

    def scale_dtype(self, xp: object) -> str:
        return self.inner.scale_dtype(xp)

    def turned(self, rows: Array) -> Array:
        """What `inner` is given of rows [..., width]. Raises NonFinite, too, where sums might overflow (FMT-ROT-06)."""
        rows = finite_rows(rows)
        xp, most = array_namespace(rows), REACH / block_of(rows.shape[-1])
        if block_of(rows.shape[-1]) > 1 and bool(xp.any(xp.abs(rows) > most)):
            raise NonFinite(f"{self.name} rows: expected magnitudes of at most {most:g}, whose sums are finite, got more")
        return hadamard(rows)

    def quantize(self, rows: Array) -> Quantized:
        return self.inner.quantize(self.turned(rows))

    def dequantize(self, stored: Quantized, width: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # NumPy warns of what no quantizer made
            return hadamard(self.inner.dequantize(stored, width))

    def bound(self, rows: Array, stored: Quantized) -> Array:
        width, turned = rows.shape[-1], hadamard(rows)
        off = self.inner.bound(turned, stored)
        if block_of(width) == 1:
            return off
        return bounds.rotated_bound(rows, self.inner.dequantize(stored, width), off, block_of(width))
