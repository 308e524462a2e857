"""The formats of ggml in PyTorch (FMT-GGML): functions over [n, 32].

Quantizing computes codes, one per byte, and then the bytes of the blocks.
"""

from itertools import pairwise

import torch

from kvref.array import Array
from kvref.formats.ggml import GGML, GROUP, IQ4_EPSILON, IQ4_VALUES, IQ4NL, LEAST_INVERTIBLE
from kvref_torch.packing import Kernels, aligned
from kvref_torch.rows import rounded

HALF = GROUP // 2


def quantize_ggml(kernels: Kernels, format: GGML, x: Array, codes: Array) -> Array:
    """Quantize x [n, 32] to blocks, codes [n, bytes].

    Returns an array that is finite exactly if x can be stored; otherwise the caller raises NonFinite.
    """
    width, least = GROUP * format.bits // 8, list[Array]()
    halves = codes[:, -HALF:]  # for the lower four bits
    whole = codes[:, -width:] if format.bits == 8 else torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if isinstance(format, IQ4NL):
        empty, *fitted = kernels["blocks_of_a_table"](x, _of_largest_magnitude(kernels, x), whole)
        products, squares = (kernels["in_order"](kernels["transposed"](each))[:, None] for each in fitted)
        scale = torch.where(empty, 0.0, products / torch.where(empty, 1.0, squares))
    elif format.affine:
        low, high = kernels["extremes"](x)
        top = torch.full_like(low, 2.0**format.bits - 1)
        scale, inverse = kernels["scale_and_inverse"](high - low + 0.0, top)  # + 0.0: a range of -0.0 becomes 0.0
        if format.bits == 4:
            kernels["nibbles_above_least"](x, low, inverse, top, halves)
        else:
            kernels["blocks_above_least"](x, low, inverse, top, whole)
        least = [_first_zero(x, low)]
    else:
        reach = kernels["largest"](x) if format.bits == 8 else _of_largest_magnitude(kernels, x)
        divisor = torch.full_like(reach, 127.0 if format.bits == 8 else -(2.0 ** (format.bits - 1)))
        scale, inverse = kernels["scale_and_inverse"](reach, divisor)
        if format.bits == 8:
            kernels["blocks_of_bytes"](x, inverse, whole.view(torch.int8))
        elif format.bits == 4:
            kernels["nibbles_around_zero"](x, inverse, divisor, halves)
        else:
            kernels["blocks_around_zero"](x, inverse, divisor, whole)
    head = (torch.cat([scale, *least], dim=1) if least else scale).to(torch.float16)
    if codes.data_ptr() % 2:
        codes[:, : 2 * head.shape[1]] = head.view(torch.uint8)
    else:  # two bytes at a time
        codes[:, : 2 * head.shape[1]].view(torch.float16).copy_(head)
    if format.bits == 5:
        codes[:, -HALF - 4 : -HALF] = kernels["fifth_bits"](whole.view(torch.int64))
    if format.bits == 5 or isinstance(format, IQ4NL):
        kernels["pack_halves"](whole, halves)
    return head


def dequantize_ggml(kernels: Kernels, format: GGML, y: Array, codes: Array) -> None:
    """Write the numbers of blocks [n, bytes] to y [n, 32]."""
    head = aligned(codes[:, : 4 if format.affine else 2], 2).view(torch.float16).to(torch.float32)
    scale, least = head[:, :1], head[:, 1:] if format.affine else None
    if format.bits == 8:
        kernels["from_int8"](codes[:, -GROUP:].view(torch.int8), scale, y)
    elif isinstance(format, IQ4NL):
        kernels["from_table"](codes[:, -HALF:], torch.tensor(IQ4_VALUES, dtype=torch.float32, device=y.device), scale, y)
    else:
        fifth = codes[:, -HALF - 4 : -HALF] if format.bits == 5 else None
        kernels["from_halves"](codes[:, -HALF:], fifth, 0 if format.affine else 2 ** (format.bits - 1), scale, least, y)


def _of_largest_magnitude(kernels: Kernels, x: Array) -> Array:
    """The number of the largest magnitude in each block, the first if there are several; 0.0 instead of -0.0.

    Finding extremes is several times faster than argmax, which is used only if both extremes have the same magnitude.
    """
    most, even = kernels["larger_and_even"](*kernels["extremes"](x))
    if bool(even.any()):
        even = even.nonzero()[:, 0]
        blocks = x[even]
        most[even] = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    return most


def _first_zero(x: Array, low: Array) -> Array:
    """The least numbers `low`; if one is zero, with the sign of the first zero of its block."""
    zero = (low == 0).nonzero()[:, 0]
    if len(zero):
        blocks = x[zero]
        low[zero] = blocks.gather(-1, blocks.argmin(dim=-1, keepdim=True))
    return low


# Kernels: first those for one number per block, then those for codes, one per byte.


def larger_and_even(low: Array, high: Array) -> tuple[Array, Array]:
    """The extreme of the larger magnitude; and that magnitude if both have it, otherwise 0: faster to write than a bool."""
    return torch.where(-low > high, low, high) + 0.0, torch.where(low + high == 0.0, high, 0.0)


def scale_and_inverse(reach: Array, divisor: Array) -> tuple[Array, Array]:
    scale = reach / divisor
    has_one = scale.abs() >= LEAST_INVERTIBLE  # otherwise the inverse is 0 (FMT-GGML-07)
    return scale, torch.where(has_one, torch.ones_like(scale) / torch.where(has_one, scale, 1.0), 0.0)


def blocks_of_bytes(x: Array, inverse: Array, whole: Array) -> None:
    quotient = x * inverse
    whole.copy_(rounded(quotient))


def blocks_around_zero(x: Array, inverse: Array, divisor: Array, whole: Array) -> None:
    whole.copy_(_around_zero(x, inverse, divisor).to(torch.uint8))


def nibbles_around_zero(x: Array, inverse: Array, divisor: Array, out: Array) -> None:
    out.copy_(_halves(_around_zero(x, inverse, divisor)))


def blocks_above_least(x: Array, least: Array, inverse: Array, top: Array, whole: Array) -> None:
    whole.copy_(_above_least(x, least, inverse, top).to(torch.uint8))


def nibbles_above_least(x: Array, least: Array, inverse: Array, top: Array, out: Array) -> None:
    out.copy_(_halves(_above_least(x, least, inverse, top)))


def _around_zero(x: Array, inverse: Array, divisor: Array) -> Array:
    """Codes before the conversion that truncates them."""
    return torch.minimum(x * inverse + (0.5 - divisor), -2 * divisor - 1)


def _above_least(x: Array, least: Array, inverse: Array, top: Array) -> Array:
    return torch.minimum((x - least) * inverse + 0.5, top)


def _halves(codes: Array) -> Array:
    """Two codes per byte, combined as float32 numbers, which are converted to bytes fastest."""
    whole = torch.trunc(codes)
    return (whole[:, :HALF] + 16.0 * whole[:, HALF:]).to(torch.uint8)


def blocks_of_a_table(x: Array, largest: Array, whole: Array) -> tuple[Array, Array, Array]:
    """Write the codes of IQ4_NL. Returns what its scale is fitted with: which blocks are zeros, x^2 t x, and x^2 t^2."""
    empty = largest.abs() < IQ4_EPSILON
    first = torch.where(empty, 1.0, largest) / torch.full_like(largest, IQ4_VALUES[0])
    quotient = x * (torch.ones_like(first) / first)
    both = torch.zeros_like(x)  # per number: 256 * code + (table[code] - table[0])
    for below, above in pairwise(IQ4_VALUES):  # of two equally near numbers the upper
        both = torch.where(quotient >= (below + above) / 2, both + (256.0 + (above - below)), both)
    code = torch.trunc(both * 2.0**-8)
    whole.copy_(code.to(torch.uint8))
    worth = both - 256.0 * code + IQ4_VALUES[0]
    weighted = x * x * worth
    return empty, weighted * x, weighted * worth


def transposed(values: Array) -> Array:
    return values.t().contiguous()


def in_order(values: Array) -> Array:
    """The sum of values [32, n] over the first axis, added in order: in float32 the order affects the result."""
    total = values[0]
    for i in range(1, GROUP):
        total = total + values[i]
    return total


def fifth_bits(eight: Array) -> Array:
    """The fifth bits of eight codes in a byte, by a product that moves bit 8 i to bit 56 + i."""
    return ((((eight >> 4) & 0x0101010101010101) * 0x0102040810204080 >> 56) & 255).to(torch.uint8)


def pack_halves(whole: Array, out: Array) -> None:
    out.copy_((whole[:, :HALF] & 15) | ((whole[:, HALF:] & 15) << 4))


def from_table(nibbles: Array, table: Array, scale: Array, out: Array) -> None:
    out[:, :HALF] = table[(nibbles & 15).to(torch.int32)] * scale
    out[:, HALF:] = table[(nibbles >> 4).to(torch.int32)] * scale


def from_halves(nibbles: Array, fifth: Array | None, zero: int, scale: Array, least: Array | None, out: Array) -> None:
    if fifth is not None:
        four = fifth.to(torch.int32)
        bits = four[:, :1] | (four[:, 1:2] << 8) | (four[:, 2:3] << 16) | (four[:, 3:] << 24)
        place = torch.arange(GROUP, dtype=torch.int32, device=out.device)
    for side, half in enumerate((nibbles & 15, nibbles >> 4)):
        code = half.to(torch.int32)
        if fifth is not None:
            code = code | (((bits >> place[side * HALF : (side + 1) * HALF]) & 1) << 4)
        product = (code - zero).to(torch.float32) * scale
        out[:, side * HALF : (side + 1) * HALF] = product if least is None else product + least  # rounded twice


GGML_KERNELS = (
    larger_and_even, scale_and_inverse, blocks_of_bytes, blocks_around_zero, nibbles_around_zero, blocks_above_least,
    nibbles_above_least, blocks_of_a_table, transposed, in_order, fifth_bits, pack_halves, from_table, from_halves,
)  # fmt: skip
