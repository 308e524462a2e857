"""Rounding to whole numbers, in Array API operations.

Two roundings occur in KV caches. Casts between floats round half to even, which is the standard's `round`. Integer codes round
half away from zero, which the standard does not have and `round` is not: they differ at every k + 0.5 with k even.
"""

from array_api_compat import array_namespace

from kvref.array import Array


def round_half_away(x: Array) -> Array:
    """The nearest whole number, halves away from zero: 0.5 -> 1, -2.5 -> -3. Shape and dtype of `x`, which is finite.

    The distance to the truncated value decides. Adding 0.5 first would be wrong: 0.49999997 + 0.5 rounds to 1 in float32.
    """
    xp = array_namespace(x)
    truncated = xp.trunc(x)
    away = xp.abs(x - truncated) >= 0.5
    return xp.where(away, truncated + xp.sign(x), truncated)
