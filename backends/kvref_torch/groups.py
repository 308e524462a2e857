"""Formats of groups in PyTorch (FMT-GROUP, FMT-MX): functions over [n, group].

Quantizing has two steps, of which torch.compile can make one loop each: the codes, one per byte, and their packing. Dequantizing
has the same steps in reverse order.
"""

from functools import cache

import torch

from kvref.array import Array
from kvref.formats.group_scales import LEAST, GroupFormat
from kvref.formats.microscaling import E8M0_BIAS, E8M0_NAN, NVFP4, Int8Element, Microscaled
from kvref.formats.small_float import E4M3FN
from kvref_torch.packing import Kernels, elements, look_up, pack_codes, room_for_codes, unpacked, whole_numbers
from kvref_torch.rows import BELOW_HALF, NATIVE, from_small, small_codes


def quantize_groups(
    kernels: Kernels, format: GroupFormat, x: Array, codes: Array, scale: Array, zero: Array | None = None
) -> Array:
    """Quantize x [n, group] to codes [n, bytes], scale and zero [n, 1].

    Returns an array that is finite exactly if x can be stored; otherwise the caller raises NonFinite.
    """
    whole = room_for_codes(x, codes, format.bits)
    top = torch.full((len(x), 1), float(format.top), dtype=torch.float32, device=x.device)
    if zero is None:
        reach, low = kernels["largest"](x), torch.zeros_like(top)
    else:
        low, high = kernels["extremes"](x)
        low = zero.copy_(low + 0.0).to(torch.float32)
        reach = high - low
    held = scale.copy_((reach / top).clamp_min(LEAST[format.scale.name])).to(torch.float32)
    if zero is None:
        kernels["group_symmetric"](x, held, top, whole.view(torch.int8))
    else:
        kernels["group_affine"](x, low, held, top, whole)
    pack_codes(kernels, whole, codes, format.bits)
    return held * top + low


def dequantize_groups(
    kernels: Kernels, format: GroupFormat, y: Array, codes: Array, scale: Array, zero: Array | None = None
) -> None:
    """Write the numbers of codes [n, bytes] to y [n, group]."""
    signed = not format.affine
    if format.bits < 8 and not kernels.fused:
        look_up(codes, y, whole_numbers(format.bits, signed, y.device))
        _scale(y, scale, zero)
        return
    whole = unpacked(kernels, codes, format.bits, y)
    kernels["from_whole"](whole, 2 ** (format.bits - 1) if signed else 0, scale, zero, y)


def quantize_microscaled(kernels: Kernels, format: Microscaled, x: Array, codes: Array, scale: Array) -> Array:
    """Quantize x [n, group] to codes [n, bytes] and scale codes [n, 1]. Returns as `quantize_groups` does."""
    small, whole = format.small, room_for_codes(x, codes, format.bits)
    limit = torch.full((len(x), 1), small.max, dtype=torch.float32, device=x.device)
    kind = "nvfp4" if isinstance(format, NVFP4) else "mx"
    largest = kernels["largest"](x)
    held = kernels["microscales"](largest, limit, kind, scale)
    if isinstance(small, Int8Element):
        kernels["int8_elements"](x, held, limit, kind, whole.view(torch.int8))
    elif small in NATIVE and not kernels.fused:
        kernels["float8_elements"](x, held, limit, kind, NATIVE[small], whole)
    else:
        kernels["small_elements"](x, held, limit, kind, small.name, whole.view(torch.int8))
    pack_codes(kernels, whole, codes, format.bits)
    return largest


def dequantize_microscaled(kernels: Kernels, format: Microscaled, y: Array, codes: Array, scale: Array) -> None:
    """Write the numbers of codes [n, bytes] to y [n, group]."""
    small = format.small
    factor = torch.empty_like(scale, dtype=torch.float32)
    look_up(scale, factor, elements(E4M3FN, y.device) if isinstance(format, NVFP4) else _powers(y.device))
    if isinstance(small, Int8Element):
        kernels["from_int8"](codes.view(torch.int8), factor * 2.0**-6, y)
    elif kernels.fused:
        from_small(kernels, small, unpacked(kernels, codes, format.bits, y), y, factor)
    else:
        look_up(codes, y, elements(small, y.device))
        y.mul_(factor)


# Kernels. Scales are computed between the kernel that finds the extremes and the kernel that writes codes, one per byte. In a
# single loop, they would be computed group by group, and not be rounded to their dtype.


def group_symmetric(x: Array, held: Array, top: Array, whole: Array) -> None:
    quotient = x / held
    away = torch.minimum(quotient.abs() + BELOW_HALF, top)  # the conversion truncates
    whole.copy_(torch.where(quotient < 0.0, -away, away))  # two's complement: packing uses the lower bits


def group_affine(x: Array, zero: Array, held: Array, top: Array, whole: Array) -> None:
    quotient = (x - zero) / held
    whole.copy_(torch.minimum((quotient + BELOW_HALF).clamp_min(0.0), top).to(torch.uint8))


def from_whole(whole: Array, sign: int, scale: Array, zero: Array | None, out: Array) -> None:
    """Convert codes to numbers. sign: the sign bit of two's complement, or 0 for unsigned codes."""
    out.copy_(((whole ^ sign) - sign).view(torch.int8) if sign else whole)
    _scale(out, scale, zero)


def _scale(y: Array, scale: Array, zero: Array | None) -> None:
    y.mul_(scale.to(torch.float32))
    if zero is not None:
        y.add_(zero.to(torch.float32))  # the second rounding (FMT-GROUP-04)


def microscales(largest: Array, limit: Array, kind: str, scale: Array) -> Array:
    """Write the codes of scales, and return the divisors, or for powers of two the factors, of x."""
    if kind == "nvfp4":  # normal numbers of E4M3FN: a float32 pattern rounded to even without its last 20 bits
        pattern = (largest / limit).clamp(2.0 ** (1 - E4M3FN.bias), E4M3FN.max).view(torch.int32)
        pattern = (pattern + (((pattern >> 20) & 1) + (1 << 19) - 1)) & -(1 << 20)
        scale.copy_((pattern >> 20) - ((E8M0_BIAS - E4M3FN.bias) << 3))
        return pattern.view(torch.float32)
    exponent = (largest.view(torch.int32) >> 23) - ((limit.view(torch.int32) >> 23) - E8M0_BIAS)
    code = exponent.clamp(0, E8M0_NAN - 1)
    scale.copy_(code)
    return _power(2 * E8M0_BIAS - code)


def int8_elements(x: Array, held: Array, limit: Array, kind: str, whole: Array) -> None:
    whole.copy_(torch.round(_clamped(x, held, limit, kind) * 64.0))


def float8_elements(x: Array, held: Array, limit: Array, kind: str, dtype: torch.dtype, whole: Array) -> None:
    whole.copy_(_clamped(x, held, limit, kind).to(dtype).view(torch.uint8))


def small_elements(x: Array, held: Array, limit: Array, kind: str, name: str, whole: Array) -> None:
    whole.copy_(small_codes(_quotient(x, held, kind), limit, name))


def _clamped(x: Array, held: Array, limit: Array, kind: str) -> Array:
    return torch.minimum(torch.maximum(_quotient(x, held, kind), -limit), limit)


def _quotient(x: Array, held: Array, kind: str) -> Array:
    return x / held if kind == "nvfp4" else x * held


def _power(code: Array) -> Array:
    """2^(code - 127), exactly, also 2^-127, which is subnormal."""
    return torch.where(code == 0, 1 << 22, code << 23).to(torch.int32).view(torch.float32)


@cache
def _powers(device: torch.device) -> Array:
    """The numbers of the codes of E8M0: float32 [256]."""
    code = torch.arange(256, dtype=torch.int32, device=device)
    return torch.where(code == E8M0_NAN, torch.nan, _power(code))


GROUP_KERNELS = (
    group_symmetric, group_affine, from_whole, microscales, int8_elements, float8_elements, small_elements,
)  # fmt: skip
