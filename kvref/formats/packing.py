"""Two four-bit codes in one byte (FMT-AFF-06)."""

from array_api_compat import array_namespace

from kvref.array import Array


def pack4(codes: Array) -> Array:
    """[..., width] codes of 0..15 -> [..., ceil(width / 2)] bytes: the even index in the low nibble, an odd row padded with 0."""
    xp = array_namespace(codes)
    if codes.shape[-1] % 2:
        codes = xp.concat([codes, xp.zeros_like(codes[..., :1])], axis=-1)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack4(packed: Array, width: int) -> Array:
    """[..., ceil(width / 2)] bytes -> [..., width] codes of 0..15."""
    xp = array_namespace(packed)
    pairs = xp.stack([packed & 15, packed >> 4], axis=-1)
    return xp.reshape(pairs, (*packed.shape[:-1], 2 * packed.shape[-1]))[..., :width]
