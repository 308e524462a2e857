"""Packing of codes with fewer than 8 bits into bytes, without gaps (FMT-SMALL-01)."""

from array_api_compat import array_namespace, device

from kvref.array import Array


def pack(codes: Array, bits: int) -> Array:
    """Pack uint8 codes [..., width], each below 2^bits, into uint8 [..., ceil(width * bits / 8)].

    Bit k of code i becomes bit (i * bits + k) % 8 of byte (i * bits + k) // 8: low bits first. Unused bits of the last byte are
    0.
    """
    if bits == 8:
        return codes
    xp = array_namespace(codes)
    each = xp.bitwise_right_shift(codes[..., None], xp.arange(bits, dtype=xp.uint8, device=device(codes))) & 1
    row = xp.reshape(each, (*codes.shape[:-1], codes.shape[-1] * bits))
    if left_over := -row.shape[-1] % 8:
        row = xp.concat([row, xp.zeros((*row.shape[:-1], left_over), dtype=xp.uint8, device=device(codes))], axis=-1)
    eight = xp.reshape(row, (*row.shape[:-1], row.shape[-1] // 8, 8))
    shifted = xp.bitwise_left_shift(eight, xp.arange(8, dtype=xp.uint8, device=device(codes)))
    return xp.sum(shifted, axis=-1, dtype=xp.uint8)


def unpack(packed: Array, bits: int, width: int) -> Array:
    """Return the uint8 codes [..., width] that `pack` packed into uint8 [..., ceil(width * bits / 8)]."""
    if bits == 8:
        return packed
    xp = array_namespace(packed)
    each = xp.bitwise_right_shift(packed[..., None], xp.arange(8, dtype=xp.uint8, device=device(packed))) & 1
    row = xp.reshape(each, (*packed.shape[:-1], packed.shape[-1] * 8))[..., : width * bits]
    codes = xp.reshape(row, (*packed.shape[:-1], width, bits))
    return xp.sum(xp.bitwise_left_shift(codes, xp.arange(bits, dtype=xp.uint8, device=device(packed))), axis=-1, dtype=xp.uint8)
