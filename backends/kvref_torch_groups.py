"""Groups with a scale beside their codes in PyTorch (FMT-GROUP, FMT-MX), of [n, group] values at once.

To quantize is two steps, so that torch.compile can make one loop of each: codes, a byte each, and then the bytes they are packed
in, eight codes at a time as an integer of 64 bits. To read back is the same the other way around; not compiled, a table has the
values of all codes of a byte side by side.
"""

from functools import cache

import numpy as np
import torch

from kvref.array import Array
from kvref.formats.grouped import LEAST, Groups
from kvref.formats.microscaling import E8M0_BIAS, E8M0_NAN, NVFP4, Int8Element, Microscaled
from kvref.formats.small_float import SmallFloat
from kvref_torch_formats import BELOW_HALF, NATIVE, Kernels, from_small, small_codes


def quantize_groups(kernels: Kernels, format: Groups, x: Array, codes: Array, scale: Array, zero: Array | None = None) -> Array:
    """Fills codes [n, bytes], and scale and zero [n, 1], of x [n, group]. Returns what is finite unless x is to be refused."""
    whole = _whole(x, codes, format.bits)
    top = torch.full((len(x), 1), float(format.top), device=x.device)
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
    _pack(kernels, whole, codes, format.bits)
    return held * top + low


def dequantize_groups(kernels: Kernels, format: Groups, y: Array, codes: Array, scale: Array, zero: Array | None = None) -> None:
    signed = not format.affine
    if format.bits < 8 and not kernels.fused:
        _look_up(codes, y, _whole_numbers(format.bits, signed, y.device))
        _scaled(y, scale, zero, y)
        return
    whole = _unpacked(kernels, codes, format.bits, y)
    kernels["from_whole"](whole, 2 ** (format.bits - 1) if signed else 0, scale, zero, y)


def quantize_microscaled(kernels: Kernels, format: Microscaled, x: Array, codes: Array, scale: Array) -> Array:
    small, whole = format.small, _whole(x, codes, format.bits)
    limit = torch.full((len(x), 1), small.max, device=x.device)
    kind = "nvfp4" if isinstance(format, NVFP4) else "mx"
    largest = kernels["largest"](x)
    held = kernels["microscales"](largest, limit, kind, scale)
    if isinstance(small, Int8Element):
        kernels["int8_elements"](x, held, limit, kind, whole.view(torch.int8))
    elif small in NATIVE and not kernels.fused:
        kernels["float8_elements"](x, held, limit, kind, NATIVE[small], whole)
    else:
        kernels["small_elements"](x, held, limit, kind, small.name, whole)
    _pack(kernels, whole, codes, format.bits)
    return largest


def dequantize_microscaled(kernels: Kernels, format: Microscaled, y: Array, codes: Array, scale: Array) -> None:
    small, kind = format.small, "nvfp4" if isinstance(format, NVFP4) else "mx"
    if isinstance(small, Int8Element):
        kernels["from_int8"](codes.view(torch.int8), kernels["microscale_values"](scale, kind) * 2.0**-6, y)
    elif kernels.fused:
        from_small(kernels, small, _unpacked(kernels, codes, format.bits, y), y, kernels["microscale_values"](scale, kind))
    else:
        _look_up(codes, y, _elements(small, y.device))
        torch.mul(y, _scales(scale, kind), out=y)


def _whole(x: Array, codes: Array, bits: int) -> Array:
    """Room for codes, a byte each."""
    return codes if bits == 8 else torch.empty(x.shape, dtype=torch.uint8, device=x.device)


# Kernels. What is made of a group's scale is one of its own, between that which finds the extremes and that which writes codes, a
# byte each: in one loop of all it would be done a group at a time, and in float32.


def group_symmetric(x: Array, held: Array, top: Array, whole: Array) -> None:
    quotient = x / held
    away = torch.minimum(quotient.abs() + BELOW_HALF, top)  # the cast truncates
    whole.copy_(torch.copysign(away, quotient))  # to be packed, its lower bits are taken


def group_affine(x: Array, zero: Array, held: Array, top: Array, whole: Array) -> None:
    quotient = (x - zero) / held
    whole.copy_(torch.minimum((quotient + BELOW_HALF).clamp_min(0.0), top).to(torch.uint8))


def from_whole(whole: Array, sign: int, scale: Array, zero: Array | None, out: Array) -> None:
    """sign: the bit that counts as negative, of two's complement."""
    values = whole.to(torch.int32)
    _scaled(((values ^ sign) - sign).to(torch.float32), scale, zero, out)


def _scaled(values: Array, scale: Array, zero: Array | None, out: Array) -> None:
    product = values * scale.to(torch.float32)
    out.copy_(product if zero is None else product + zero.to(torch.float32))  # a second rounding (FMT-GROUP-04)


def microscales(largest: Array, limit: Array, kind: str, scale: Array) -> Array:
    """Writes the codes of scales. Returns what values are divided by, or multiplied with if they are powers of two."""
    code = _scale_codes(largest, limit, kind)
    scale.copy_(code)
    return _scales(code, kind) if kind == "nvfp4" else _power(2 * E8M0_BIAS - code.to(torch.int32))


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


def _scale_codes(largest: Array, limit: Array, kind: str) -> Array:
    if kind == "nvfp4":
        return (largest / limit).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    exponent = (largest.view(torch.int32) >> 23) - ((limit.view(torch.int32) >> 23) - E8M0_BIAS)
    return exponent.clamp(0, E8M0_NAN - 1).to(torch.uint8)


def _scales(code: Array, kind: str) -> Array:
    if kind == "nvfp4":
        return code.view(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(code == E8M0_NAN, torch.nan, _power(code.to(torch.int32)))


def _power(code: Array) -> Array:
    """2^(code - 127), exactly: 2^-127, too, which is subnormal."""
    return torch.where(code == 0, 1 << 22, code << 23).to(torch.int32).view(torch.float32)


def microscale_values(scale: Array, kind: str) -> Array:
    return _scales(scale, kind)


def _pack(kernels: Kernels, whole: Array, codes: Array, bits: int) -> None:
    """Codes [n, group], a byte each, to [n, group * bits / 8], low bits first (FMT-SMALL-01)."""
    if bits == 8:
        return
    packed = kernels["pack"](whole.view(torch.int64), bits)
    if bits == 6:
        codes.view(-1, 3).copy_(packed.view(torch.uint8).view(-1, 4)[:, :3])
    else:
        codes.copy_(packed.view(torch.uint8).view(codes.shape))


def pack(eight: Array, bits: int) -> Array:
    """Pairs of codes, then pairs of pairs: of each 64 bits 32 (codes of 4 bits), or 16 (of 2); 24 of each 32 (of 6)."""
    even = 0x0001000100010001 * (2**bits - 1)
    eight = (eight & even) | ((eight >> (8 - bits)) & (even << bits))
    if bits == 4:  # bytes 0, 2, 4 and 6
        eight = (eight | (eight >> 8)) & 0x0000FFFF0000FFFF
        return (eight | (eight >> 16)).to(torch.int32)
    even = 0x0000000100000001 * (2 ** (2 * bits) - 1)
    eight = (eight & even) | ((eight >> (16 - 2 * bits)) & (even << (2 * bits)))
    return eight if bits == 6 else (eight | (eight >> 24)).to(torch.int16)


def _unpacked(kernels: Kernels, codes: Array, bits: int, like: Array) -> Array:
    if bits == 8:
        return codes
    if bits == 6:
        four = codes.new_zeros((codes.numel() // 3, 4))
        four[:, :3] = codes.reshape(-1, 3)
        return kernels["unpack"](four.view(torch.int32), bits).view(torch.uint8).view(like.shape)
    narrow = torch.int32 if bits == 4 else torch.int16
    even = codes.contiguous().clone() if codes.storage_offset() % narrow.itemsize else codes.contiguous()
    return kernels["unpack"](even.view(narrow), bits).view(torch.uint8).view(like.shape)


def unpack(packed: Array, bits: int) -> Array:
    """Eight codes of 4 or 2 bits, a byte each: halves are moved apart, then their halves. Or four of 6 bits, each moved."""
    if bits == 6:
        return (packed & 63) | ((packed << 2) & (63 << 8)) | ((packed << 4) & (63 << 16)) | ((packed << 6) & (63 << 24))
    eight = packed.to(torch.int64)  # negative ones with ones in front
    if bits == 4:
        eight = ((eight & 0xFFFF) | (eight << 16)) & 0x0000FFFF0000FFFF
        eight = (eight | (eight << 8)) & 0x00FF00FF00FF00FF
        return (eight | (eight << 4)) & 0x0F0F0F0F0F0F0F0F
    eight = ((eight & 0xFF) | (eight << 24)) & 0x000000FF000000FF
    eight = (eight | (eight << 12)) & 0x000F000F000F000F
    return (eight | (eight << 6)) & 0x0303030303030303


def _look_up(codes: Array, y: Array, table: Array) -> None:
    """The values of packed codes, one, two or four at a time."""
    index = codes.reshape(-1).to(torch.int32)
    if len(table) == 2**12:
        low, middle, high = index[0::3], index[1::3], index[2::3]
        index = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=-1).view(-1)
    target = y.view(-1)
    if target.storage_offset() % (table.itemsize // 4):
        target.copy_(torch.index_select(table, 0, index).view(torch.float32))
    else:
        torch.index_select(table, 0, index, out=target.view(table.dtype))


@cache
def _elements(small: SmallFloat, device: torch.device) -> Array:
    return _table(torch.from_numpy(small.decode(np.arange(2**small.bits, dtype=np.uint8))).to(device), small.bits)


@cache
def _whole_numbers(bits: int, signed: bool, device: torch.device) -> Array:
    codes = torch.arange(2**bits, device=device)
    return _table(torch.where((codes >= 2 ** (bits - 1)) & signed, codes - 2**bits, codes).to(torch.float32), bits)


def _table(values: Array, bits: int) -> Array:
    """The values of the codes that lie in a byte, or in 12 bits, side by side."""
    count = {8: 1, 6: 2, 4: 2, 2: 4}[bits]
    place = torch.arange(count, device=values.device) * bits
    each = (torch.arange(2 ** (bits * count), device=values.device)[:, None] >> place) & (2**bits - 1)
    return values[each].view(-1).view({1: torch.float32, 2: torch.int64, 4: torch.complex128}[count])


GROUP_KERNELS = (
    group_symmetric, group_affine, from_whole, microscales, int8_elements, float8_elements, small_elements,
    microscale_values, pack, unpack,
)  # fmt: skip
