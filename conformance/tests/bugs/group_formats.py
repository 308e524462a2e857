"""Bugs in group formats: which scale a number has, when scales are rounded, how codes are packed."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.formats import Quantized, ggml, group_scales, microscaling, packing


@bug("FMT-SMALL-01")
def codes_lie_high_bits_first(patch):
    def swapped(codes):
        return np.packbits(np.unpackbits(codes, axis=-1)[..., ::-1], axis=-1)[..., ::-1]

    for module in (group_scales, microscaling):
        patch.setattr(module, "pack", lambda codes, bits: swapped(packing.pack(codes, bits)) if bits < 8 else codes)
        patch.setattr(
            module, "unpack", lambda codes, bits, width: packing.unpack(swapped(codes) if bits < 8 else codes, bits, width)
        )


@bug("FMT-GROUP-01", "FMT-GROUP-06")
def a_row_has_one_scale(patch):
    in_source(
        patch, "kvref.formats.group_scales.GroupFormat.quantize", "xp.max(xp.abs(x), axis=-1)",
        "0 * zero + xp.max(xp.abs(x), axis=(-1, -2))[..., None]"
    )  # fmt: skip


@bug("FMT-GROUP-01")
def the_least_scale_of_float16_is_that_of_float32(patch):
    patch.setitem(group_scales.LEAST, "float16", 2.0**-23)


@bug("FMT-GROUP-02", "FMT-GROUP-05")
def codes_are_made_with_what_was_not_rounded_yet(patch):
    in_source(
        patch, "kvref.formats.group_scales.GroupFormat.quantize", "xp.broadcast_to(scale[..., None], x.shape)",
        "xp.maximum(reach / top, 1e-20)[..., None]"
    )  # fmt: skip


@bug("FMT-GROUP-02")
def the_last_code_is_one_too_far(patch):
    in_source(
        patch, "kvref.formats.group_scales.GroupFormat.quantize", "-float(self.top), float", "-float(self.top) - 1, float",
        "round_half_away(quotient)", "round_half_away(quotient - 0.26)",
    )  # fmt: skip


@bug("FMT-GROUP-03")
def a_last_group_is_filled_with_zeros(patch):
    def filled(name, rows, group):
        more = -rows.shape[-1] % group
        wide = np.concatenate([rows, np.zeros((*rows.shape[:-1], more), rows.dtype)], axis=-1)
        return wide.reshape(*rows.shape[:-1], -1, group)

    for module in (group_scales, microscaling, ggml):
        patch.setattr(module, "in_groups", filled)


@bug("FMT-GROUP-04")
def values_are_read_with_the_next_groups_scale(patch):
    numbers = group_scales.GroupFormat._numbers

    def rolled(self, stored, width):
        codes, scale, zero = numbers(self, stored, width)
        return codes, np.roll(scale, 1, axis=-2), zero

    patch.setattr(group_scales.GroupFormat, "_numbers", rolled)


@bug("FMT-GGML-01")
def nibbles_are_neighbours(patch):
    in_source(
        patch, "kvref.formats.ggml.GGML._numbers", "xp.concat([nibbles & 15, nibbles >> 4], axis=-1)",
        "xp.reshape(xp.stack([nibbles & 15, nibbles >> 4], axis=-1), (*nibbles.shape[:-1], 32))",
    )  # fmt: skip


@bug("FMT-GGML-01")
def fifth_bits_are_read_backwards(patch):
    in_source(
        patch, "kvref.formats.ggml.GGML._numbers", "unpack(body[..., :4], 1, GROUP)", "unpack(body[..., :4], 1, GROUP)[..., ::-1]"
    )


@bug("FMT-GGML-02")
def codes_are_made_with_the_scale_in_float16(patch):
    inverse = ggml._inverse
    patch.setattr(ggml, "_inverse", lambda scale: inverse(scale.astype(np.float16).astype(np.float32)))


@bug("FMT-GGML-03", "FMT-GGML-06")
def the_scale_has_no_sign(patch):
    patch.setattr(ggml, "_of_largest_magnitude", lambda x: np.abs(x).max(axis=-1))


@bug("FMT-GGML-04")
def halves_are_cut_off(patch):
    in_source(patch, "kvref.formats.ggml.GGML._coded", "quotient + 0.5", "quotient")


@bug("FMT-GGML-05")
def the_scale_is_not_fitted(patch):
    in_source(patch, "kvref.formats.ggml.IQ4NL._coded", "xp.zeros_like(fitted), fitted)", "xp.zeros_like(fitted), first)")


@bug("FMT-GGML-05")
def the_lower_of_two_as_near_is_taken(patch):
    in_source(patch, "kvref.formats.ggml.IQ4NL._coded", "float(below) >= float(above)", "float(below) > float(above)")


@bug("FMT-GGML-05")
def sums_are_taken_in_halves(patch):
    def halved(x):
        while x.shape[-1] > 1:
            x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
        return x[..., 0]

    patch.setattr(ggml, "_sum_in_order", halved)


@bug("FMT-GGML-06")
def the_far_end_wraps(patch):
    patch.setattr(
        ggml, "_truncated", lambda quotient, bits: (np.trunc(quotient).astype(np.int32) & (2**bits - 1)).astype(np.uint8)
    )


@bug("FMT-GGML-07")
def zeros_are_divided_by_zero(patch):
    bound = ggml.GGML.dequantize

    def divided(self, stored, width):
        values = bound(self, stored, width)
        return np.where(values == 0, values / np.abs(values).max(axis=-1, keepdims=True), values)

    patch.setattr(ggml.GGML, "dequantize", divided)


@bug("FMT-MX-01")
def small_elements_are_flushed(patch):
    decode = microscaling.E2M1.decode

    def flushed(self, codes):
        return np.where(codes & 7 == 1, np.float32(0), decode(codes)) if self.bits == 4 else type(self).decoded(self, codes)

    patch.setattr(microscaling.SmallFloat, "decoded", microscaling.SmallFloat.decode, raising=False)
    patch.setattr(microscaling.SmallFloat, "decode", flushed)


@bug("FMT-MX-01")
def the_scale_of_255_is_a_number(patch):
    patch.setattr(microscaling, "E8M0_NAN", 256)


@bug("FMT-MX-02")
def the_exponent_is_rounded(patch):
    scale_codes = microscaling.MX.scale_codes
    patch.setattr(microscaling.MX, "scale_codes", lambda self, largest: scale_codes(self, largest * np.float32(1.4142135)))


@bug("FMT-MX-03", "FMT-MX-05")
def elements_do_not_saturate(patch):
    in_source(
        patch, "kvref.formats.microscaling.Microscaled.quantize", "xp.minimum(xp.maximum(self.divided(x, scale), -most), most)",
        "np.where(np.abs(self.divided(x, scale)) > most, 0, self.divided(x, scale))",
    )  # fmt: skip


@bug("FMT-MX-03")
def elements_are_cut_off(patch):
    encode = microscaling.SmallFloat.encode
    patch.setattr(microscaling.SmallFloat, "encode", lambda self, x: encode(self, x * np.float32(1 - 2**-5)))


@bug("FMT-MX-04")
def zeros_have_a_scale_of_one(patch):
    scale_codes = microscaling.MX.scale_codes
    patch.setattr(
        microscaling.MX, "scale_codes", lambda self, largest: np.where(largest == 0, np.uint8(127), scale_codes(self, largest))
    )


@bug("FMT-MX-06")
def the_scale_is_rounded_down(patch):
    in_source(patch, "kvref.formats.microscaling.NVFP4.scale_codes", "E4M3FN.encode(", "E4M3FN.encode(0.97 * ")


@bug("FMT-MX-06")
def a_scale_halfway_is_rounded_up(patch):
    in_source(patch, "kvref.formats.microscaling.NVFP4.scale_codes", "E4M3FN.encode(", "E4M3FN.encode((1 + 2.0**-20) * ")


@bug("FMT-MX-06")
def the_least_scale_is_a_subnormal(patch):
    in_source(patch, "kvref.formats.microscaling.NVFP4.scale_codes", "2.0**-6", "2.0**-9")


@bug("FMT-MX-07")
def codes_depend_on_the_range(patch):
    quantize = microscaling.Microscaled.quantize

    def odd(self, rows):
        codes, scale, _ = quantize(self, rows)
        return Quantized(np.where((scale % 2 == 1).any(axis=-1, keepdims=True), codes, codes ^ 1), scale)

    patch.setattr(microscaling.Microscaled, "quantize", odd)


@bug("FMT-LEVEL-05")
def a_least_value_beyond_float16_is_stored(patch):
    in_source(patch, "kvref.formats.ggml.GGML.quantize", "for each in halves:", "for each in halves[:1]:")


@bug("FMT-LEVEL-05")
def only_the_largest_of_the_scales_is_looked_at(patch):
    look = ggml.check_read_back
    patch.setattr(ggml, "check_read_back", lambda name, largest: look(name, np.max(largest, keepdims=True)))


@bug("FMT-GGML-04")
def a_least_value_of_zero_has_no_sign(patch):
    in_source(
        patch, "kvref.formats.ggml.GGML._coded", "keepdims=True), axis=-1)[..., 0]", "keepdims=True), axis=-1)[..., 0] + 0.0"
    )


@bug("FMT-GROUP-01")
def a_zero_keeps_its_sign(patch):
    in_source(patch, "kvref.formats.group_scales.GroupFormat.quantize", "xp.min(x, axis=-1) + 0.0", "-xp.max(-x, axis=-1)")


@bug("FMT-MX-06")
def quotients_are_products_with_a_reciprocal(patch):
    in_source(
        patch, "kvref.formats.microscaling.NVFP4.divided",
        "x / array_namespace(x).broadcast_to(E4M3FN.decode(scale)[..., None], x.shape)",
        "x * (np.float32(1) / E4M3FN.decode(scale))[..., None]",
    )  # fmt: skip
