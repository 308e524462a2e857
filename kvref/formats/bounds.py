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


def static_float8_bound(x: Array, decoded: Array, scale: float, element: SmallFloat) -> Array:
    """max(float8_bound, |x| - MAX s + u MAX s) + 2^-149, with MAX the largest number of the element.

    As float8_bound while |x| / s is at most MAX. Beyond that the code is MAX, |x| - MAX s away, and fl(MAX s) is rounded. A scale
    that is given may be so small that the product underflows: half of 2^-149.
    """
    (magnitude,) = _float64(array_namespace(x).abs(x))
    xp = array_namespace(magnitude)
    beyond = magnitude - element.max * scale * (1 - U)
    return xp.maximum(float8_bound(x, decoded, xp.full_like(magnitude, scale), element), beyond) + 2.0**-149


def rotated_bound(x: Array, read: Array, off: Array, block: int) -> Array:
    """|off|_1 / sqrt(n) + g (|x|_2 + |read|_2) + sqrt(n) 2^-149 of each block of n = 2^k, g = (1 + u)^(k + 2) - 1.

    x is the row, `read` what its rotated numbers y were read as, `off` how far each of those may lie from y. With Q the rotation,
    orthogonal and its own inverse, and F what float32 makes of it, the value is F(read), and
    F(read) - x = (F(read) - Q read) + Q (read - F(x)) + Q (F(x) - Q x).

    - Entries of Q are 1 / sqrt(n) in magnitude, so that no element of Q e is more than |e|_1 / sqrt(n): the middle term.
    - A stage of the butterfly, over sqrt(2), is orthogonal, and its sums are rounded once: what it adds is at most u times the
      l2 norm of what it gives. So k stages give (1 + u)^k - 1 of |x|_2 in that norm, and the product with fl(1 / sqrt(n)) two
      factors of 1 + u more: |F(x) - Q x|_2 <= g |x|_2. No element of a vector is more than its l2 norm, and Q leaves that alone.
    - Sums of float32 do not underflow; the product may, by 2^-150 each element: sqrt(n) 2^-150 in the l2 norm, twice.
    """
    x, read, off = _float64(x, read, off)
    xp = array_namespace(x)
    x, read, off = (xp.reshape(each, (*each.shape[:-1], each.shape[-1] // block, block)) for each in (x, read, off))
    stages, root = block.bit_length() - 1, block**0.5
    norms = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True)) + xp.sqrt(xp.sum(read * read, axis=-1, keepdims=True))
    g = (1 + U) ** (stages + 2) - 1
    bound = xp.sum(off, axis=-1, keepdims=True) / root + g * norms + root * 2.0**-149
    return xp.reshape(xp.broadcast_to(bound, x.shape), (*x.shape[:-2], -1))


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


def group_bound(x: Array, code: Array, scale: Array, zero: Array | None, top: int) -> Array:
    """As int8_bound or affine_bound, with max(s/2, |x - z| - top s, and z - x where there is a zero) in the place of s/2.

    The scale is rounded once more, and may be too small for the largest code, by less than half a code everywhere but in 8 bits
    and bfloat16: then |x - z| - top s is cut off. A zero that is rounded up lies z - x above the least value.
    """
    x, code, scale = _float64(x, code, scale)
    xp = array_namespace(x)
    if zero is None:
        half = xp.maximum(xp.broadcast_to(scale / 2, x.shape), xp.abs(x) - top * scale)
        return half + U * xp.abs(x) + U * xp.abs(code) * scale
    (zero,) = _float64(zero)
    offset, product = x - zero, code * scale
    half = xp.maximum(xp.maximum(xp.broadcast_to(scale / 2, x.shape), offset - top * scale), -offset)
    rounding = (2 * U + U * U) * xp.abs(offset) + U * product + U * (1 + 2 * U) * xp.abs(product + zero)
    return half + rounding + 2.0**-149


def small_element_bound(x: Array, scale: Array, small: SmallFloat) -> Array:
    """max(r|x|, a s)(1 + 2u) + u|x| up to the largest element, and |x| - max s beyond it; r and a as in float8_bound.

    Where the scale is a power of two nothing but the element is rounded; a scale with digits divides, u|x|.
    """
    x, scale = _float64(x, scale)
    xp = array_namespace(x)
    v = 2.0 ** -(small.mantissa_bits + 1)
    absolute = 2.0 ** (1 - small.bias - small.mantissa_bits) / 2
    rounding = xp.maximum(v / (1 + v) * xp.abs(x), absolute * scale)
    return xp.maximum(rounding * (1 + 2 * U) + U * xp.abs(x), xp.abs(x) - small.max * scale)


def int8_element_bound(x: Array, scale: Array) -> Array:
    """Half a step of 2^-6, and beyond the largest element what is cut off."""
    x, scale = _float64(x, scale)
    xp = array_namespace(x)
    return xp.maximum(xp.broadcast_to(scale / 128, x.shape), xp.abs(x) - 127 / 64 * scale)


def ggml_bound(
    x: Array, worth: Array, scale: Array, divisor: int, most: int, widest: float = 1.0, least: float = 2.0**-127
) -> Array:
    """|d| max(w/2, x/d - most) + 8u(|x| + |d| |divisor|) + |worth| |d - s|; and |x| where |d| is below `least`, and not inverted.

    d is the block's largest value over `divisor`, s the float16 that is stored of it (of what was fitted, in IQ4_NL). The code is
    the nearest to x / d, with codes w apart at most, or the last one, worth `most`, where x / d lies beyond it. Of x times the
    reciprocal of d four roundings are left, u each; s in the place of d moves the value by |worth| |d - s|.
    """
    x, worth, scale = _float64(x, worth, scale)
    xp = array_namespace(x)
    largest = xp.take_along_axis(x, xp.argmax(xp.abs(x), axis=-1, keepdims=True), axis=-1)
    d = (xp.abs(largest) if divisor > 0 else largest) / divisor  # of its sign but in Q8_0, whose codes have both
    held = xp.abs(d) >= least * (1 + 2 * U)  # d in float32 may be rounded up to it
    beyond = x / xp.where(held, d, xp.ones_like(d)) - most
    half = xp.abs(d) * xp.maximum(xp.full_like(x, widest / 2), beyond)
    rounding = 8 * U * (xp.abs(x) + xp.abs(d) * abs(divisor)) + xp.abs(worth) * xp.abs(d - scale)
    return half + rounding + xp.where(held, xp.zeros_like(x), xp.abs(x))


def ggml_affine_bound(x: Array, code: Array, scale: Array, least: Array, top: int) -> Array:
    """d/2 + 8u(|x - min| + d) + q |d - s| + |min - m| + u|value|, d = (max - min) / top; x - min where d cannot be inverted."""
    x, code, scale, least = _float64(x, code, scale, least)
    xp = array_namespace(x)
    low = xp.min(x, axis=-1, keepdims=True)
    d = (xp.max(x, axis=-1, keepdims=True) - low) / top
    rounding = 8 * U * (x - low + d) + code * xp.abs(d - scale) + xp.abs(low - least) + U * xp.abs(code * scale + least)
    return d / 2 + rounding + xp.where(d >= 2.0**-127 * (1 + 2 * U), xp.zeros_like(x), x - low) + 2.0**-149
