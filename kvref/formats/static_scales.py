"""FP8 with a scale that the caller gives, and that is not computed from the data or stored with the codes (FMT-STATIC).

Engines that were calibrated have one scale for all keys of a layer and one for all values: `k_scale` and `v_scale` in vLLM, 1.0
if a checkpoint has none. Numbers outside the range of the scale are clipped.

Source: vllm/v1/attention/ops/triton_reshape_and_cache_flash.py of vLLM 0.33 for x / k_scale, and its QuantFP8 for the clipping.
"""

from dataclasses import dataclass, replace
from numbers import Real

import numpy as np
from array_api_compat import array_namespace

from kvref.array import Array
from kvref.errors import ConfigError
from kvref.formats import bounds
from kvref.formats.base import Granularity, OneScale, Quantized, finite_rows
from kvref.formats.small_float import E4M3FN, E5M2, SmallFloat


@dataclass(frozen=True)
class StaticFloat8(OneScale):
    """value = decode(code) * scale, where code = encode(clip(x / scale)). `small` is the FP8 type, `scale` a positive float32."""

    small: SmallFloat
    scale: float = 1.0
    granularity: Granularity = "given"
    scale_arrays: int = 0

    @property
    def name(self) -> str:
        return f"{self.small.name}_static"

    @property
    def bits(self) -> int:
        return self.small.bits

    @property
    def element(self) -> str:
        return self.small.name

    def with_scale(self, scale: float) -> "StaticFloat8":
        """Return the same format with another scale, rounded to float32.

        Raises ConfigError unless the rounded scale is positive and finite, and its product with the largest FP8 number is finite
        (FMT-STATIC-05).
        """
        wanted = f"scale of {self.name}: expected a finite number above 0"
        if not isinstance(scale, Real) or isinstance(scale, bool):
            raise ConfigError(f"{wanted}, got {scale!r}")
        with np.errstate(over="ignore", under="ignore"):
            held = np.float32(scale)
            largest = held * np.float32(self.small.max)
        if not (held > 0 and np.isfinite(held)):
            raise ConfigError(f"{wanted}, got {scale!r}")
        if not np.isfinite(largest):  # a clipped number would read back as infinity (FMT-LEVEL-05)
            raise ConfigError(f"{wanted} whose product with {self.small.max:g} is finite, got {scale!r}")
        return replace(self, scale=float(held))

    def code_width(self, width: int) -> int:
        return width

    def code_dtype(self, xp: object) -> str:
        return self.small.code_dtype

    def quantize(self, rows: Array) -> Quantized:
        return Quantized(self.small.encode(self.quotient(rows)))

    def quotient(self, rows: Array) -> Array:
        """Return what `quantize` encodes: x / scale, clipped to the range of the FP8 type. Raises as `finite_rows` does."""
        rows = finite_rows(rows)
        xp = array_namespace(rows)
        with np.errstate(over="ignore"):  # a quotient that overflows is clipped too
            quotient = rows / xp.full_like(rows, self.scale)  # an array as the divisor: see kvref.formats.row_scales
        most = xp.full_like(quotient, self.small.max)
        return xp.minimum(xp.maximum(quotient, -most), most)

    def dequantize(self, stored: Quantized, width: int) -> Array:
        values = self.small.decode(stored.codes)
        return values * array_namespace(values).full_like(values, self.scale)

    def bound(self, rows: Array, stored: Quantized) -> Array:
        return bounds.static_float8_bound(rows, self.small.decode(stored.codes), self.scale, self.small)


STATIC = (StaticFloat8(E4M3FN), StaticFloat8(E5M2))
