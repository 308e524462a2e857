"""Error bounds of formats: the largest possible difference between a value read back and the number written (FMT-LEVEL-03).

Each bound is derived from the roundings that occur, and the docstring of its function contains the derivation. Half a step (s /
2) alone would be too small: 1 % to 8 % of adversarial inputs exceed it.

Notation: u = 2^-24 is the unit roundoff of float32, so that fl(a) = a (1 + d) with |d| <= u unless it underflows. x is the number
written, s the scale, z the zero, and q or c the number that a code stands for. The functions compute in float64, whose own
relative error is below 2^-52. Arguments broadcast, and the result is float64.
"""

from array_api_compat import array_namespace

from kvref.array import UNIT_ROUNDOFF as U
from kvref.array import Array
from kvref.formats.small_float import SmallFloat


def _float64(*arrays: Array) -> list[Array]:
    return [array_namespace(a).astype(a, array_namespace(a).float64) for a in arrays]


def int8_bound(x: Array, code: Array, scale: Array) -> Array:
    """The bound of FMT-INT8: s/2 + u|x| + u|q|s.

    The quotient fl(x/s) is within u|x/s| of x/s, and the code within 1/2 of the quotient. (|x/s| is at most 127 (1 + u), so that
    clipping moves the code nearer to x/s.) Multiplied by s, this is s/2 + u|x|. The product fl(q s) adds u|q|s.
    """
    x, code, scale = _float64(x, code, scale)
    xp = array_namespace(x)
    return scale / 2 + U * xp.abs(x) + U * xp.abs(code) * scale


def float8_bound(x: Array, decoded: Array, scale: Array, element: SmallFloat) -> Array:
    """The bound of FMT-FP8: max(r|x|, a s)(1 + 2u) + u|x| + u|c|s.

    Here v = 2^-(M+1) for M mantissa bits, r = v/(1 + v), and a is half the least subnormal number. Rounding y = fl(x/s) to the
    nearest code c has an error of at most r|y| in the normal range (half a unit; the relative error is largest halfway between a
    power of two and the next number) and of at most a below it. The error of y is u|x/s|, hence the factor 1 + 2u, and u|x| after
    multiplication by s. The product fl(c s) adds u|c|s.
    """
    x, decoded, scale = _float64(x, decoded, scale)
    xp = array_namespace(x)
    v = 2.0 ** -(element.mantissa_bits + 1)
    absolute = 2.0 ** (1 - element.bias - element.mantissa_bits) / 2
    rounding = xp.maximum(v / (1 + v) * xp.abs(x), absolute * scale)
    return rounding * (1 + 2 * U) + U * xp.abs(x) + U * xp.abs(decoded) * scale


def static_float8_bound(x: Array, decoded: Array, scale: float, element: SmallFloat) -> Array:
    """The bound of FMT-STATIC: max(float8_bound, |x| - MAX s + u MAX s) + 2^-149.

    MAX is the largest number of the FP8 type. If |x| / s is at most MAX, float8_bound applies. Otherwise the code stands for MAX,
    which is |x| - MAX s away, and fl(MAX s) is rounded. A given scale can be so small that the product underflows, by at most
    half of 2^-149.
    """
    (magnitude,) = _float64(array_namespace(x).abs(x))
    xp = array_namespace(magnitude)
    beyond = magnitude - element.max * scale * (1 - U)
    return xp.maximum(float8_bound(x, decoded, xp.full_like(magnitude, scale), element), beyond) + 2.0**-149


def rotated_bound(x: Array, read: Array, off: Array, block: int) -> Array:
    """The bound of FMT-ROT: |off|_1 / sqrt(n) + g (|x|_2 + |read|_2) + sqrt(n) 2^-149 per block of n = 2^k numbers.

    g is (1 + u)^(k + 2) - 1. x: the rows. read: what their rotated numbers F(x) read back as in the inner format. off: the bound
    of the inner format, for the difference between `read` and F(x). block: n.

    Let Q be the rotation, which is orthogonal and its own inverse, and F its computation in float32. The value is F(read), and
    F(read) - x = (F(read) - Q read) + Q (read - F(x)) + Q (F(x) - Q x).

    - The entries of Q are 1 / sqrt(n) in magnitude. No element of Q e exceeds |e|_1 / sqrt(n), which bounds the middle term.
    - Each stage of the butterfly, divided by sqrt(2), is orthogonal, and its sums are rounded once. Its rounding error is at most
      u times the l2 norm of its result. The error of k stages is therefore at most (1 + u)^k - 1 times |x|_2 in the l2 norm. The
      product with fl(1 / sqrt(n)) adds two factors 1 + u: |F(x) - Q x|_2 <= g |x|_2. No element of a vector exceeds its l2
      norm, and Q does not change the norm. This bounds the first and the last term.
    - Sums of float32 numbers do not underflow. The product can, by 2^-150 per element: sqrt(n) 2^-150 in the l2 norm, twice.
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
    """The bound of FMT-AFF: s/2 + (2u + u^2)|x - z| + u q s + u (1 + 2u)|value| + 2^-149.

    fl(fl(x - z)/s) has two roundings, an error of (1 + u)^2 - 1 = 2u + u^2 times |x - z|/s, and the code is within 1/2 of it.
    fl(q s) adds u q s, or 2^-149 if it underflows. The last sum adds u times its result.
    """
    x, code, scale, zero = _float64(x, code, scale, zero)
    xp = array_namespace(x)
    product = code * scale
    value = xp.abs(product + zero)
    return scale / 2 + (2 * U + U * U) * xp.abs(x - zero) + U * product + U * (1 + 2 * U) * value + 2.0**-149


def cast_bound(x: Array, element: SmallFloat) -> Array:
    """The bound of a cast: max(|x| v/(1 + v), half the least subnormal number), v = 2^-(M+1), for |x| within the range."""
    (x,) = _float64(x)
    xp = array_namespace(x)
    v = 2.0 ** -(element.mantissa_bits + 1)
    return xp.maximum(xp.abs(x) * (v / (1 + v)), xp.full_like(x, 2.0 ** -(element.bias + element.mantissa_bits)))


def group_bound(x: Array, code: Array, scale: Array, zero: Array | None, top: int) -> Array:
    """The bound of FMT-GROUP: int8_bound or affine_bound, with max(s/2, |x - z| - top s, z - x) in place of s/2.

    The term z - x applies to affine formats only. top: the largest code. The scale is rounded to its dtype, possibly down, so
    that (x - z) / s exceeds the largest code; clipping then has the error |x - z| - top s. (This exceeds half a step only with
    8-bit codes and bfloat16 scales.) A zero that is rounded up is z - x above the least number of the group.
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
    """The bound of FMT-MX: max(r|x|, a s)(1 + 2u) + u|x|, or |x| - max s if that is larger. r and a as in float8_bound.

    The second term applies to numbers beyond the largest element `max`, which are clipped. If the scale is a power of two, only
    the element is rounded. Dividing by any other scale (NVFP4) adds u|x|.
    """
    x, scale = _float64(x, scale)
    xp = array_namespace(x)
    v = 2.0 ** -(small.mantissa_bits + 1)
    absolute = 2.0 ** (1 - small.bias - small.mantissa_bits) / 2
    rounding = xp.maximum(v / (1 + v) * xp.abs(x), absolute * scale)
    return xp.maximum(rounding * (1 + 2 * U) + U * xp.abs(x), xp.abs(x) - small.max * scale)


def int8_element_bound(x: Array, scale: Array) -> Array:
    """The bound of mxint8: half a step of 2^-6 s, or for numbers beyond the largest element the clipped part."""
    x, scale = _float64(x, scale)
    xp = array_namespace(x)
    return xp.maximum(xp.broadcast_to(scale / 128, x.shape), xp.abs(x) - 127 / 64 * scale)


def ggml_bound(
    x: Array, worth: Array, scale: Array, divisor: int, most: int, widest: float = 1.0, least: float = 2.0**-127
) -> Array:
    """The bound of FMT-GGML without a least value: |d| max(w/2, x/d - most) + 8u(|x| + |d divisor|) + |worth| |d - s|.

    d is the number of the largest magnitude in the block divided by `divisor`, and s the stored float16 scale, which is d rounded
    (in IQ4_NL a fitted scale, rounded). worth: the number that the code stands for. The code is the one nearest to x / d, where
    codes are at most w = `widest` apart, or the last one, which stands for `most`, if x / d is beyond it. The product of x and
    the reciprocal of d has at most four roundings of u each. Using s in place of d changes the value by |worth| |d - s|. If |d|
    is below `least`, ggml does not compute its reciprocal, and |x| is added.
    """
    x, worth, scale = _float64(x, worth, scale)
    xp = array_namespace(x)
    largest = xp.take_along_axis(x, xp.argmax(xp.abs(x), axis=-1, keepdims=True), axis=-1)
    d = (xp.abs(largest) if divisor > 0 else largest) / divisor  # with its sign, except in Q8_0, whose codes have both signs
    held = xp.abs(d) >= least * (1 + 2 * U)  # the float32 d can be rounded up to `least`
    beyond = x / xp.where(held, d, xp.ones_like(d)) - most
    half = xp.abs(d) * xp.maximum(xp.full_like(x, widest / 2), beyond)
    rounding = 8 * U * (xp.abs(x) + xp.abs(d) * abs(divisor)) + xp.abs(worth) * xp.abs(d - scale)
    return half + rounding + xp.where(held, xp.zeros_like(x), xp.abs(x))


def ggml_affine_bound(x: Array, code: Array, scale: Array, least: Array, top: int) -> Array:
    """The bound of FMT-GGML with a least value: d/2 + 8u(|x - min| + d) + q |d - s| + |min - m| + u|value| + 2^-149.

    min and max are the least and the largest number of the block, d = (max - min) / top, and s and m are d and min as stored in
    float16. code: q. least: m. If d is too small to have a reciprocal, x - min is added.
    """
    x, code, scale, least = _float64(x, code, scale, least)
    xp = array_namespace(x)
    low = xp.min(x, axis=-1, keepdims=True)
    d = (xp.max(x, axis=-1, keepdims=True) - low) / top
    rounding = 8 * U * (x - low + d) + code * xp.abs(d - scale) + xp.abs(low - least) + U * xp.abs(code * scale + least)
    return d / 2 + rounding + xp.where(d >= 2.0**-127 * (1 + 2 * U), xp.zeros_like(x), x - low) + 2.0**-149
