"""Rotated formats: rows are multiplied by a Hadamard matrix before they are quantized, and again when they are read (FMT-ROT).

A channel with large magnitudes determines the scale of its row, which leaves few steps for the other channels. The rotation
distributes its magnitude over all of them. It is the Walsh-Hadamard transform divided by the square root of its length:
orthogonal, its own inverse, without parameters, and computed with n log n additions. Stored codes do not show that they are
rotated, so that the name of the format ends with `_hadamard`.

Source: Fino and Algazi, Unified Matrix Treatment of the Fast Walsh-Hadamard Transform (1976), for the butterfly; QuaRot
(arXiv:2404.00456) for keys and values; ggml-org/llama.cpp#21038 for blocks of the largest power of two that divides head_dim.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array, Shape
from kvref.errors import NonFinite
from kvref.formats import bounds
from kvref.formats.base import Format, Granularity, Quantized, finite_rows

REACH = 2.0**126  # block size * largest magnitude is at most this: then no sum overflows, in quantizing or in reading


def block_of(width: int) -> int:
    """Return how many consecutive numbers are rotated together: the largest power of two that divides `width`. 1: no rotation."""
    return max(1, width & -width)


def hadamard(x: Array) -> Array:
    """Return float32 rows [..., width] rotated in blocks, with additions in the order of FMT-ROT-01.

    Number i of a block of n becomes the sum over j of (-1)^popcount(i & j) x[j], divided by the square root of n. Applied twice,
    the function returns the rows, up to rounding.
    """
    xp, block = array_namespace(x), block_of(x.shape[-1])
    if block == 1 or 0 in x.shape:
        return x
    # [block, blocks]: libraries add long rows fastest. Flat, because a transposed array alone would keep its order in memory.
    turned, span = xp.reshape(xp.reshape(x, (-1, block)).T, (-1,)), 1
    while span < block:  # pairs that are 1, 2, 4, ... apart
        pairs = xp.reshape(turned, (block // (2 * span), 2, span, -1))
        first, second = pairs[:, 0, ...], pairs[:, 1, ...]
        turned = xp.stack([first + second, first - second], axis=1)
        span *= 2
    turned = xp.reshape(xp.reshape(xp.reshape(turned, (block, -1)).T, (-1,)), x.shape)
    return turned * xp.full_like(turned, block**-0.5)  # rounds once; exact if n is a power of four


@dataclass(frozen=True)
class HadamardFormat:
    """The format `inner`, applied to rotated rows."""

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
        """Return rows [..., width] rotated, as `inner` quantizes them.

        Raises as `finite_rows` does, NonFinite also for magnitudes whose sums could overflow (FMT-ROT-06).
        """
        rows = finite_rows(rows)
        xp, most = array_namespace(rows), REACH / block_of(rows.shape[-1])
        if block_of(rows.shape[-1]) > 1 and bool(xp.any(xp.abs(rows) > most)):
            raise NonFinite(f"{self.name} rows: expected magnitudes of at most {most:g}, whose sums are finite, got larger ones")
        return hadamard(rows)

    def quantize(self, rows: Array) -> Quantized:
        return self.inner.quantize(self.turned(rows))

    def dequantize(self, stored: Quantized, width: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # NumPy would warn of codes and scales that no quantizer stores
            return hadamard(self.inner.dequantize(stored, width))

    def bound(self, rows: Array, stored: Quantized) -> Array:
        width, turned = rows.shape[-1], hadamard(rows)
        off = self.inner.bound(turned, stored)
        if block_of(width) == 1:
            return off
        return bounds.rotated_bound(rows, self.inner.dequantize(stored, width), off, block_of(width))
