"""Packing and unpacking of codes with fewer than 8 bits in PyTorch, eight at a time, as 64-bit integers.

Without torch.compile, codes are dequantized by a table that contains the numbers of all codes in a byte, or in 12 bits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from kvref.array import Array
from kvref.formats.small_float import SmallFloat


class Kernels(dict[str, Callable[..., Any]]):
    """Kernels by name. fused: whether they are compiled; arithmetic is then faster than looking up in a table."""

    fused = False


def room_for_codes(x: Array, codes: Array, bits: int) -> Array:
    """Return memory for codes of one byte each, in the shape of x: `codes` itself for 8 bits."""
    return codes if bits == 8 else torch.empty(x.shape, dtype=torch.uint8, device=x.device)


def pack_codes(kernels: Kernels, whole: Array, codes: Array, bits: int) -> None:
    """Pack codes [n, group], one per byte, to [n, group * bits / 8], low bits first (FMT-SMALL-01)."""
    if bits == 8:
        return
    packed = kernels["pack"](whole.view(torch.int64), bits)
    if bits == 6:
        codes.view(-1, 3).copy_(packed.view(torch.uint8).view(-1, 4)[:, :3])
    else:
        codes.copy_(packed.view(torch.uint8).view(codes.shape))


def pack(eight: Array, bits: int) -> Array:
    """Pack 8 codes per int64: first pairs, then pairs of pairs. Returns int32 for 4 bits, int16 for 2, int64 for 6."""
    even = 0x0001000100010001 * (2**bits - 1)
    eight = (eight & even) | ((eight >> (8 - bits)) & (even << bits))
    if bits == 4:  # bytes 0, 2, 4 and 6
        eight = (eight | (eight >> 8)) & 0x0000FFFF0000FFFF
        return (eight | (eight >> 16)).to(torch.int32)
    even = 0x0000000100000001 * (2 ** (2 * bits) - 1)
    eight = (eight & even) | ((eight >> (16 - 2 * bits)) & (even << (2 * bits)))
    return eight if bits == 6 else (eight | (eight >> 24)).to(torch.int16)


def unpacked(kernels: Kernels, codes: Array, bits: int, like: Array) -> Array:
    """Return codes, one per byte, in the shape of `like`."""
    if bits == 8:
        return codes
    if bits == 6:
        four = codes.new_zeros((codes.numel() // 3, 4))
        four[:, :3] = codes.reshape(-1, 3)
        return kernels["unpack"](four.view(torch.int32), bits).view(torch.uint8).view(like.shape)
    narrow = torch.int32 if bits == 4 else torch.int16
    codes = aligned(codes, narrow.itemsize)
    return kernels["unpack"](codes.view(narrow), bits).view(torch.uint8).view(like.shape)


def unpack(packed: Array, bits: int) -> Array:
    """Unpack 8 codes of 4 or 2 bits to bytes by moving halves apart, then their halves; or 4 codes of 6 bits one by one."""
    if bits == 6:
        return (packed & 63) | ((packed << 2) & (63 << 8)) | ((packed << 4) & (63 << 16)) | ((packed << 6) & (63 << 24))
    eight = packed.to(torch.int64)  # sign-extended: the upper bits are masked below
    if bits == 4:
        eight = ((eight & 0xFFFF) | (eight << 16)) & 0x0000FFFF0000FFFF
        eight = (eight | (eight << 8)) & 0x00FF00FF00FF00FF
        return (eight | (eight << 4)) & 0x0F0F0F0F0F0F0F0F
    eight = ((eight & 0xFF) | (eight << 24)) & 0x000000FF000000FF
    eight = (eight | (eight << 12)) & 0x000F000F000F000F
    return (eight | (eight << 6)) & 0x0303030303030303


def aligned(array: Array, itemsize: int) -> Array:
    """Return the array, or a copy, aligned for numbers of `itemsize` bytes. Memory from NumPy can have any alignment."""
    fits = array.is_contiguous() and array.data_ptr() % itemsize == 0
    return array if fits else array.clone(memory_format=torch.contiguous_format)


def look_up(codes: Array, y: Array, table: Array) -> None:
    """Write the numbers of packed codes to y, one, two or four per table entry."""
    index = codes.reshape(-1).to(torch.int32)
    if len(table) == 2**12:
        low, middle, high = index[0::3], index[1::3], index[2::3]
        index = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=-1).view(-1)
    if y.is_contiguous() and y.data_ptr() % table.itemsize == 0:
        torch.index_select(table, 0, index, out=y.view(-1).view(table.dtype))
    else:
        y.copy_(torch.index_select(table, 0, index).view(torch.float32).view(y.shape))


@cache
def elements(small: SmallFloat, device: torch.device) -> Array:
    """Return the table of a float type."""
    return _table(torch.from_numpy(small.decode(np.arange(2**small.bits, dtype=np.uint8))).to(device), small.bits)


@cache
def whole_numbers(bits: int, signed: bool, device: torch.device) -> Array:
    """Return the table of integers, unsigned or in two's complement."""
    codes = torch.arange(2**bits, device=device)
    return _table(torch.where((codes >= 2 ** (bits - 1)) & signed, codes - 2**bits, codes).to(torch.float32), bits)


def _table(values: Array, bits: int) -> Array:
    """The numbers of all codes in a byte, or with 6 bits in 12 bits, given the number of each code."""
    count = {8: 1, 6: 2, 4: 2, 2: 4}[bits]
    place = torch.arange(count, device=values.device) * bits
    each = (torch.arange(2 ** (bits * count), device=values.device)[:, None] >> place) & (2**bits - 1)
    return values[each].view(-1).view({1: torch.float32, 2: torch.int64, 4: torch.complex128}[count])


PACKING_KERNELS = (pack, unpack)
