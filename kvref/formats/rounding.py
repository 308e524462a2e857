"""Rounding to integers with halves away from zero, in Array API operations.

Formats use two kinds of rounding. Casts between floats round half to even, as the standard's `round` does. Integer codes round
half away from zero, for which the standard has no function: the two differ at every k + 0.5 with an even k.
"""

from array_api_compat import array_namespace

from kvref.array import Array


def round_half_away(x: Array) -> Array:
    """Return the nearest integers, halves away from zero: 0.5 -> 1, -2.5 -> -3.

    x must be finite. The result has its shape and dtype. The function compares the distance to the truncated number with 0.5.
    Adding 0.5 and truncating would be wrong: 0.49999997 + 0.5 is rounded to 1 in float32.
    """
    xp = array_namespace(x)
    truncated = xp.trunc(x)
    away = xp.abs(x - truncated) >= 0.5
    return xp.where(away, truncated + xp.sign(x), truncated)
