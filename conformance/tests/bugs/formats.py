"""Bugs in formats: rounding, scales, packing."""

import dataclasses

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref.formats import FORMATS, Quantized, casts, packing, row_scales, small_float, token_scales


@bug("FMT-INT8-01", "FMT-LEVEL-01")
def the_scale_is_a_product_with_a_reciprocal(patch):
    in_source(
        patch,
        "kvref.formats.row_scales.SymmetricRow.quantize",
        "largest / limit, xp",
        "largest * np.float32(1 / self.limit), xp",
    )


@bug("FMT-INT8-02", "FMT-LEVEL-01")
def ties_go_to_even(patch):
    patch.setattr(row_scales, "round_half_away", np.round)


@bug("FMT-INT8-02")
def codes_are_truncated(patch):
    patch.setattr(row_scales, "round_half_away", np.trunc)


@bug("FMT-LEVEL-02", "FMT-INT8-09")
def codes_are_rounded_up(patch):
    patch.setattr(row_scales, "round_half_away", np.ceil)


@bug("FMT-INT8-03", "FMT-FP8-08")
def values_are_rounded_to_half(patch):
    dequantize = row_scales.SymmetricRow.dequantize
    patch.setattr(row_scales.SymmetricRow, "dequantize", lambda *args: dequantize(*args).astype(np.float16).astype(np.float32))


@bug("FMT-INT8-04")
def a_zero_row_is_stored_as_the_least_step(patch):
    quantize = row_scales.SymmetricRow.quantize

    def stored(self, rows):
        found = quantize(self, rows)
        return found._replace(codes=np.where((rows == 0).all(axis=-1, keepdims=True), 1, found.codes).astype(found.codes.dtype))

    patch.setattr(row_scales.SymmetricRow, "quantize", stored)


@bug("FMT-INT8-01", "FMT-LEVEL-01")
def a_zero_row_has_no_floor(patch):
    patch.setattr(row_scales, "LEAST_SCALE", 0.0)


@bug("FMT-INT8-05")
def the_scale_comes_from_the_maximum_and_not_its_magnitude(patch):
    in_source(
        patch, "kvref.formats.row_scales.SymmetricRow.quantize", "xp.max(xp.abs(rows), axis=-1)", "xp.abs(xp.max(rows, axis=-1))"
    )


@bug("FMT-INT8-06", "FMT-LEVEL-03")
def the_scale_is_shared_by_all_rows(patch):
    in_source(
        patch,
        "kvref.formats.row_scales.SymmetricRow.quantize",
        "xp.max(xp.abs(rows), axis=-1)",
        "xp.max(xp.abs(rows)) * xp.ones(rows.shape[:-1], dtype=rows.dtype)",
    )


@bug("FMT-LEVEL-03", "FMT-FP8-08")
def the_scale_is_frozen_at_the_first_row(patch):
    quantize, first = row_scales.SymmetricRow.quantize, {}

    def frozen(self, rows):
        scale = first.setdefault(self.name, quantize(self, rows).scale.reshape(-1)[:1])
        codes = self.encode(np.clip(rows / scale, -self.limit, self.limit))
        return Quantized(codes, np.broadcast_to(scale, rows.shape[:-1]).copy())

    patch.setattr(row_scales.SymmetricRow, "quantize", frozen)


@bug("FMT-INT8-07")
def small_rows_use_another_scale(patch):
    quantize = row_scales.SymmetricRow.quantize
    patch.setattr(row_scales.SymmetricRow, "quantize", lambda self, rows: quantize(self, rows + np.float32(1e-3)))


@bug("FMT-INT8-08")
def the_scale_is_widened_for_safety(patch):
    patch.setitem(FORMATS, "int8", dataclasses.replace(row_scales.int8, limit=126.9))


@bug("FMT-LEVEL-04")
def float64_is_taken(patch):
    patch.setattr(kvref.formats.base, "widen", lambda values, name="rows": values.astype(np.float32))
    patch.setattr(kvref.validation, "widen", lambda values, name="rows": values.astype(np.float32))


@bug("FMT-FP8-02")
def rounding_goes_through_half_precision(patch):
    encode = small_float.SmallFloat.encode
    patch.setattr(
        small_float.SmallFloat,
        "encode",
        lambda self, x: encode(self, np.clip(x, -6e4, 6e4).astype(np.float16).astype(np.float32)),
    )


@bug("FMT-FP8-02")
def subnormals_are_flushed(patch):
    encode = small_float.SmallFloat.encode

    def flushed(self, x):
        return encode(self, np.where(np.abs(x) < 2.0 ** (1 - self.bias), np.copysign(np.float32(0), x), x))

    patch.setattr(small_float.SmallFloat, "encode", flushed)


@bug("FMT-FP8-01", "FMT-FP8-05", "FMT-FP8-06")
def one_code_decodes_wrong(patch):
    decode = small_float.SmallFloat.decode

    def wrong(self, codes):
        return np.where(codes >= 0x7F, np.float32(480), decode(self, codes))

    patch.setattr(small_float.SmallFloat, "decode", wrong)


def with_overflow(patch, name, threshold, code):
    encode = small_float.SmallFloat.encode

    def overflowing(self, x):
        codes = encode(self, x)
        return np.where((np.abs(x) > threshold) & (self.name == name), code | (codes & 0x80), codes).astype(codes.dtype)

    patch.setattr(small_float.SmallFloat, "encode", overflowing)


@bug("FMT-FP8-03")
def e4m3fn_overflows_to_nan(patch):
    with_overflow(patch, "float8_e4m3fn", 448, 0x7F)


@bug("FMT-FP8-04")
def e5m2_overflows_above_57344(patch):
    with_overflow(patch, "float8_e5m2", 57344, 0x7C)


@bug("FMT-FP8-07", "FMT-FP8-02")
def a_carry_is_lost(patch):
    encode = small_float.SmallFloat.encode
    patch.setattr(
        small_float.SmallFloat, "encode", lambda self, x: encode(self, x) - (np.abs(encode(self, x)) % 8 == 0).astype(np.uint8)
    )


@bug("FMT-FP8-08")
def fp8_rows_are_not_clipped(patch):
    old, new = "xp.minimum(xp.maximum(quotient, -limit), limit)", "quotient"
    in_source(patch, "kvref.formats.row_scales.SymmetricRow.quantize", old, new)
    encode = row_scales.float8_e5m2.encode

    def infinite(x):
        return np.where(x > 57344, 0x7C, encode(x)).astype(np.uint8)

    patch.setitem(FORMATS, "float8_e5m2", dataclasses.replace(row_scales.float8_e5m2, encode=infinite))


@bug("FMT-FP8-09")
def fp8_scales_are_rounded_to_bfloat16(patch):
    quantize = row_scales.SymmetricRow.quantize

    def rounded(self, rows):
        stored = quantize(self, rows)
        return stored._replace(scale=(stored.scale.view(np.uint32) & 0xFFFF0000).view(np.float32))

    patch.setattr(row_scales.SymmetricRow, "quantize", rounded)


@bug("FMT-AFF-01", "FMT-AFF-07")
def affine_steps_are_counted_with_the_end(patch):
    in_source(
        patch,
        "kvref.formats.token_scales.AffineRow.quantize",
        "xp.full_like(spread, 2**self.bits - 1)",
        "xp.full_like(spread, 2**self.bits)",
    )


@bug("FMT-AFF-02")
def affine_codes_round_to_even(patch):
    patch.setattr(token_scales, "round_half_away", np.round)


@bug("FMT-AFF-04")
def the_last_two_roundings_are_fused(patch):
    def fused(self, stored, width):
        product = self._codes(stored, width).astype(np.float64) * stored.scale[..., None]
        return (product + stored.zero[..., None]).astype(np.float32)

    patch.setattr(token_scales.AffineRow, "dequantize", fused)


@bug("FMT-FP8-10", "FMT-FP8-08")
def fp8_rows_are_scaled_to_440(patch):
    patch.setitem(FORMATS, "float8_e4m3fn", dataclasses.replace(row_scales.float8_e4m3fn, limit=440.0))


@bug("FMT-AFF-05")
def zeros_are_kept_in_half_precision(patch):
    quantize = token_scales.AffineRow.quantize

    def narrow(self, rows):
        stored = quantize(self, rows)
        return stored._replace(zero=stored.zero.astype(np.float16).astype(np.float32))

    patch.setattr(token_scales.AffineRow, "quantize", narrow)


@bug("FMT-AFF-01")
def a_constant_row_divides_by_zero(patch):
    patch.setattr(token_scales, "LEAST_SCALE", 0.0)


@bug("FMT-AFF-06")
def nibbles_are_swapped(patch):
    pack, unpack = packing.pack, packing.unpack

    def swap(codes, bits):
        return (codes >> 4) | (codes << 4) if bits == 4 else codes

    patch.setattr(token_scales, "pack", lambda codes, bits: swap(pack(codes, bits), bits))
    patch.setattr(token_scales, "unpack", lambda codes, bits, width: unpack(swap(codes, bits), bits, width))


@bug("FMT-AFF-08")
def rows_are_padded_with_zeros(patch):
    quantize = token_scales.AffineRow.quantize

    def padded(self, rows):
        stored = quantize(self, np.concatenate([rows, np.zeros_like(rows[..., :1])], axis=-1))
        return stored._replace(codes=stored.codes[..., : self.code_width(rows.shape[-1])])

    patch.setattr(token_scales.AffineRow, "quantize", padded)


@bug("FMT-CAST-01", "CONTIG-12")
def bfloat16_is_truncated(patch):
    def truncated(self, x):
        return (x.view(np.uint32) >> 16).astype(np.uint16)

    patch.setattr(small_float.SmallFloat, "encode", truncated)


@bug("CONTIG-12")
def a_narrow_cache_keeps_float32(patch):
    patch.setattr(casts.Cast, "quantize", lambda self, rows: Quantized(rows))
    patch.setattr(casts.Cast, "code_dtype", lambda self, xp: "float32")
    patch.setattr(casts.Cast, "dequantize", lambda self, stored, width: stored.codes)


@bug("FMT-AFF-01", "FMT-LEVEL-05")
def an_infinite_range_is_divided(patch):
    patch.setattr(token_scales, "check_read_back", lambda name, largest: None)


@bug("FMT-LEVEL-05")
def the_largest_float_reads_back_infinite(patch):
    patch.setattr(row_scales, "check_read_back", lambda name, largest: None)


@bug("FMT-LEVEL-05")
def only_the_range_is_looked_at(patch):
    in_source(patch, "kvref.formats.token_scales.AffineRow.quantize", "scale * steps + zero)", "spread)")


@bug("FMT-INT8-03", "FMT-FP8-08", "QUANT-01")
def values_are_not_rounded(patch):
    def unrounded(self, stored, width):
        return self.decode(stored.codes).astype(np.float64) * stored.scale[..., None]

    patch.setattr(row_scales.SymmetricRow, "dequantize", unrounded)
