"""How far a value read back may lie from the value written, at worst: derived, not tuned.

Notation: u = 2^-24 is float32's unit roundoff, so fl(a) = a (1 + d) with |d| <= u where nothing underflows; x is the value
written, s the scale, q or c the code's value, z the zero point. Bounds are computed in float64, whose own rounding is below
2^-52 of them. Naive half steps (s / 2) are violated by 1 % to 8 % of adversarial inputs: the rounding terms are not decoration.
"""

from array_api_compat import array_namespace

from kvref.array import UNIT_ROUNDOFF as U
from kvref.array import Array
from kvref.formats.small_float import SmallFloat


def _float64(*arrays: Array) -> list[Array]:
    return [array_namespace(a).astype(a, array_namespace(a).float64) for a in arrays]


def int8_bound(x: Array, code: Array, scale: Array) -> Array:
    """s/2 + u|x| + u|q|s.

    The quotient fl(x/s) lies within u|x/s| of x/s and the code within 1/2 of the quotient (the clamp only moves it nearer to
    x/s, which is at most 127 (1 + u)); times s that is s/2 + u|x|. The product fl(q s) adds u|q|s.
    """
    x, code, scale = _float64(x, code, scale)
    xp = array_namespace(x)
    return scale / 2 + U * xp.abs(x) + U * xp.abs(code) * scale


def float8_bound(x: Array, decoded: Array, scale: Array, element: SmallFloat) -> Array:
    """max(r|x|, a s)(1 + 2u) + u|x| + u|c|s, with r = v/(1 + v), v = 2^-(M+1), and a half the least subnormal.

    Rounding y = fl(x/s) to the nearest code c errs by at most r|y| in the normal range (half a unit, taken at the binade's
    midpoint) and by a below it; y itself by u|x/s|, hence the factor and u|x| once multiplied by s; fl(c s) adds u|c|s.
    """
    x, decoded, scale = _float64(x, decoded, scale)
    xp = array_namespace(x)
    v = 2.0 ** -(element.mantissa_bits + 1)
    absolute = 2.0 ** (1 - element.bias - element.mantissa_bits) / 2
    rounding = xp.maximum(v / (1 + v) * xp.abs(x), absolute * scale)
    return rounding * (1 + 2 * U) + U * xp.abs(x) + U * xp.abs(decoded) * scale


def affine_bound(x: Array, code: Array, scale: Array, zero: Array) -> Array:
    """s/2 + (2u + u^2)|x - z| + u q s + u (1 + 2u)|value| + 2^-149.

    fl(fl(x - z)/s) carries two roundings, (1 + u)^2 - 1 = 2u + u^2 of |x - z|/s; the code is within 1/2 of it; fl(q s) adds
    u q s (2^-149 where it underflows) and the last sum u of its result.
    """
    x, code, scale, zero = _float64(x, code, scale, zero)
    xp = array_namespace(x)
    product = code * scale
    value = xp.abs(product + zero)
    return scale / 2 + (2 * U + U * U) * xp.abs(x - zero) + U * product + U * (1 + 2 * U) * value + 2.0**-149


def cast_bound(x: Array, element: SmallFloat) -> Array:
    """max(|x| v/(1 + v), half the least subnormal), v = 2^-(M+1), for |x| within the format's range."""
    (x,) = _float64(x)
    xp = array_namespace(x)
    v = 2.0 ** -(element.mantissa_bits + 1)
    return xp.maximum(xp.abs(x) * (v / (1 + v)), xp.full_like(x, 2.0 ** -(element.bias + element.mantissa_bits)))
