"""Formats with one scale per row, static FP8 and single FP8 numbers in PyTorch: functions over rows [n, width]."""

from functools import cache

import numpy as np
import torch

from kvref.array import Array
from kvref.formats.row_scales import LEAST_SCALE, SymmetricRow
from kvref.formats.small_float import BFLOAT16, E2M1, E2M3, E3M2, E4M3FN, E5M2, ELEMENTS, FLOAT16, SmallFloat
from kvref.formats.static_scales import StaticFloat8
from kvref.formats.token_scales import LEAST_SCALE as LEAST_AFFINE_SCALE
from kvref.formats.token_scales import AffineRow
from kvref_torch.packing import Kernels, look_up, pack_codes, room_for_codes, unpacked, whole_numbers

BELOW_HALF = float(np.float32(0.49999997))  # trunc(y + this with y's sign) rounds halves away from zero
PATTERN_BELOW_HALF = int(np.float32(BELOW_HALF).view(np.int32))
NATIVE = {E4M3FN: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
SMALL = {
    element.name: element for element in (E4M3FN, E5M2, E2M1, E2M3, E3M2)
}  # by name: compiled kernels are selected by strings


def quantize_symmetric(kernels: Kernels, format: SymmetricRow, x: Array, codes: Array, scale: Array) -> Array:
    """Quantize x [n, width] to codes [n, width] and scale [n, 1].

    Returns an array that is finite exactly if x can be stored; otherwise the caller raises NonFinite.
    """
    limit = torch.full_like(scale, format.limit)
    if format.name == "int8":
        largest = kernels["int8"](x, limit, codes)
    elif kernels.fused:
        largest = kernels["small_float"](x, limit, codes.view(torch.int8), format.name)
    else:
        largest = kernels["float8"](x, limit, codes, NATIVE[ELEMENTS[format.name]])
    scale.copy_(symmetric_scale(largest, limit))
    return scale * limit


def quantize_affine(kernels: Kernels, format: AffineRow, x: Array, codes: Array, scale: Array, zero: Array) -> Array:
    """Quantize x [n, width] to codes [n, bytes], scale and zero [n, 1]. Returns as `quantize_symmetric` does."""
    steps, whole = torch.full_like(scale, 2.0**format.bits - 1), room_for_codes(x, codes, format.bits)
    least, most = kernels["affine"](x, steps, whole)
    if format.bits == 8 or x.shape[-1] % 8 == 0:
        pack_codes(kernels, whole, codes, format.bits)
    else:
        padded = torch.nn.functional.pad(whole, (0, whole.shape[-1] % 2))
        codes.copy_(padded[:, 0::2] | (padded[:, 1::2] << 4))
    zero.copy_(least)
    scale.copy_(affine_scale(least, most, steps))
    return scale * steps + least


def quantize_static(kernels: Kernels, format: StaticFloat8, x: Array, codes: Array) -> Array:
    """Quantize x [n, width] to codes [n, width] with a given scale. Returns as `quantize_symmetric` does."""
    scale, limit = (torch.full_like(x[:1, :1], each) for each in (format.scale, format.small.max))
    if kernels.fused:
        return kernels["static_small_float"](x, scale, limit, codes.view(torch.int8), format.small.name)
    return kernels["static_float8"](x, scale, limit, codes, NATIVE[format.small])


def dequantize_static(kernels: Kernels, format: StaticFloat8, y: Array, codes: Array) -> None:
    from_small(kernels, format.small, codes, y, torch.full_like(y[:1, :1], format.scale))


def dequantize_symmetric(kernels: Kernels, format: SymmetricRow, y: Array, codes: Array, scale: Array) -> None:
    if format.name == "int8":
        kernels["from_int8"](codes, scale, y)
    else:
        from_small(kernels, ELEMENTS[format.name], codes, y, scale)


def from_small(kernels: Kernels, small: SmallFloat, codes: Array, y: Array, scale: Array | None = None) -> None:
    """Write the numbers of codes, one per byte, times scale to y."""
    slowly_cast = small not in NATIVE or (small.infinity is None and codes.device.type == "cpu")
    if kernels.fused and slowly_cast:
        kernels["small_values"](y.copy_(codes), small.name, scale)
    else:
        kernels["from_float"](codes, NATIVE[small], y, scale)


def dequantize_affine(kernels: Kernels, format: AffineRow, y: Array, codes: Array, scale: Array, zero: Array) -> None:
    if format.bits == 8 or y.shape[-1] % 8:  # or nibbles, if their number per row is not a multiple of 8
        kernels["from_affine"](codes, format.bits, scale, zero, y)
    elif kernels.fused:
        kernels["from_affine"](unpacked(kernels, codes, 4, y), 8, scale, zero, y)
    else:
        look_up(codes, y, whole_numbers(4, False, y.device))
        y.mul_(scale).add_(zero)


# Kernels. Rows are [n, width], and arrays with one number per row [n, 1]. A kernel writes the codes and returns what scales are
# computed from. If it also wrote the scales, torch.compile would make three loops over the data instead of one.


def int8(rows: Array, limit: Array, codes: Array) -> Array:
    largest = rows.abs().amax(dim=-1, keepdim=True)
    quotient = rows / symmetric_scale(largest, limit)
    codes.copy_(rounded(quotient))
    return largest


def float8(rows: Array, limit: Array, codes: Array, dtype: torch.dtype) -> Array:
    largest = rows.abs().amax(dim=-1, keepdim=True)
    quotient = rows / symmetric_scale(largest, limit)
    _cast(quotient, limit, codes, dtype)
    return largest


def small_float(rows: Array, limit: Array, codes: Array, name: str) -> Array:
    """`float8` without PyTorch's cast, which is slower in code compiled for a CPU."""
    largest = rows.abs().amax(dim=-1, keepdim=True)
    codes.copy_(small_codes(rows / symmetric_scale(largest, limit), limit, name))
    return largest


def static_float8(rows: Array, scale: Array, limit: Array, codes: Array, dtype: torch.dtype) -> Array:
    _cast(rows / scale, limit, codes, dtype)
    return largest(rows)


def static_small_float(rows: Array, scale: Array, limit: Array, codes: Array, name: str) -> Array:
    codes.copy_(small_codes(rows / scale, limit, name))
    return largest(rows)


def _cast(quotient: Array, limit: Array, codes: Array, dtype: torch.dtype) -> None:
    within = torch.minimum(torch.maximum(quotient, -limit), limit)  # within the range, casts agree between versions
    codes.copy_(within.to(dtype).view(torch.uint8))


def encode_small(values: Array, limit: Array, codes: Array, name: str) -> None:
    """Write the codes of any numbers. limit: the largest number; for types with infinity, the power of two with its code."""
    no_number = values != values if SMALL[name].infinity is not None else ~values.isfinite()
    codes.copy_(small_codes(values, limit, name, no_number))


def small_codes(quotient: Array, limit: Array, name: str, no_number: Array | None = None) -> Array:
    """Codes of quotients, clipped to `limit`, in two's complement; where `no_number` is true, the code of NaN.

    The code of a power of two is its exponent times 2^mantissa_bits minus a constant, and the codes after it count steps. Codes
    are computed as float32 numbers, exactly, because vectors of these are converted to int8 fastest.
    """
    small = SMALL[name]
    bits, least, sign = small.mantissa_bits, 2.0 ** (1 - small.bias), 2.0 ** (small.bits - 2)
    size = torch.minimum(quotient.abs(), limit)
    power = size.clamp_min(least).view(torch.int32) & (255 << 23)  # the bit pattern of the largest power of two in it
    count = torch.round(size * ((127 << 23) - (power - ((127 + bits) << 23))).view(torch.float32))
    code = power.to(torch.float32) * 2.0 ** (bits - 23) + (count - (128 - small.bias) * 2.0**bits)
    if no_number is not None:
        code = torch.where(no_number, float(small.nan or 0), code)
    return code + (signed((125 + small.bits) << 23, quotient) - sign)


def rounded(quotient: Array) -> Array:
    """Numbers whose truncation is rounding with halves away from zero."""
    return quotient + signed(PATTERN_BELOW_HALF, quotient)


def signed(pattern: int, like: Array) -> Array:
    """The float with the bits `pattern` and the signs of `like`. Compiled, torch.copysign would take as long as all else."""
    return ((like.view(torch.int32) & -(2**31)) | pattern).view(torch.float32)


def symmetric_scale(largest: Array, limit: Array) -> Array:
    return (largest / limit).clamp_min(LEAST_SCALE)


def affine_scale(least: Array, most: Array, steps: Array) -> Array:
    return ((most - least) / steps).clamp_min(LEAST_AFFINE_SCALE)


def affine(rows: Array, steps: Array, whole: Array) -> tuple[Array, Array]:
    least, most = extremes(rows)
    whole.copy_(torch.minimum((rows - least) / affine_scale(least, most, steps) + BELOW_HALF, steps).to(torch.uint8))
    return least, most


def largest(rows: Array) -> Array:
    return rows.abs().amax(dim=-1, keepdim=True)


def extremes(rows: Array) -> tuple[Array, Array]:
    """The least and the largest number of each row. torch.aminmax takes 4 to 10 times as long, compiled as long as this."""
    return rows.amin(dim=-1, keepdim=True), rows.amax(dim=-1, keepdim=True)


def from_int8(codes: Array, scale: Array, out: Array) -> None:
    out.copy_(codes).mul_(scale)


def from_float(codes: Array, dtype: torch.dtype, out: Array, scale: Array | None = None) -> None:
    if dtype == torch.float8_e5m2:  # the upper bytes of float16, whose conversion is several times as fast
        codes, dtype = codes.to(torch.int16).bitwise_left_shift_(8), torch.float16
    out.copy_(codes.view(dtype))
    if scale is not None:
        out.mul_(scale)


def from_float_by_table(codes: Array, dtype: torch.dtype, out: Array, scale: Array | None = None) -> None:
    """`from_float` for a CPU, where the cast from E4M3FN takes four times as long as a table."""
    if dtype != torch.float8_e4m3fn:
        from_float(codes, dtype, out, scale)
        return
    torch.index_select(_values(dtype), 0, codes.to(torch.int32).view(-1), out=out.view(-1))
    if scale is not None:
        out.mul_(scale)


@cache
def _values(dtype: torch.dtype) -> Array:
    """The number of every FP8 code: float32 [256]."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)


def from_affine(codes: Array, bits: int, scale: Array, zero: Array, out: Array) -> None:
    whole = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)[:, : out.shape[-1]] if bits == 4 else codes
    out.copy_(whole).mul_(scale).add_(zero)  # the second rounding (FMT-AFF-04)


def small_values(codes: Array, name: str, scale: Array | None) -> None:
    """Replace codes, given as float32 numbers, by the numbers they stand for, for types without infinity.

    The bits of a normal code, shifted, are the upper bits of a float32 pattern with another bias. A subnormal code is a multiple
    of the least number.
    """
    small, code = SMALL[name], codes.to(torch.int32)
    size = code & (2 ** (small.bits - 1) - 1)
    normal = ((size << (23 - small.mantissa_bits)) + ((127 - small.bias) << 23)).view(torch.float32)
    subnormal = size.to(torch.float32) * 2.0 ** (1 - small.bias - small.mantissa_bits)
    value = torch.where(size < 2**small.mantissa_bits, subnormal, normal)
    if small.nan is not None:
        value = torch.where(size > small.largest, torch.nan, value)
    value = torch.where(code > size, -value, value)
    codes.copy_(value if scale is None else value * scale)


ROW_KERNELS = (
    int8, float8, small_float, static_float8, static_small_float, encode_small, affine, largest, extremes,
    from_int8, from_float, from_affine, small_values,
)  # fmt: skip
