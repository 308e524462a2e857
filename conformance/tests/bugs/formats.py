"""Bugs in formats: rounding, scales, groups, packing, given scales and rotation."""

import dataclasses
from dataclasses import replace

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref.formats import (
    FORMATS,
    Quantized,
    casts,
    ggml,
    group_scales,
    hadamard,
    microscaling,
    packing,
    row_scales,
    small_float,
    static_scales,
    token_scales,
)
from kvref.quantized import QuantizedCache
from kvref.token_store import SlotStore, TokenStore


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


# Formats with a given scale, and rotated formats.

QUOTIENT = "kvref.formats.static_scales.StaticFloat8.quotient"


@bug("FMT-STATIC-01")
def the_given_scale_is_made_a_reciprocal(patch):
    in_source(patch, QUOTIENT, "rows / xp.full_like(rows, self.scale)", "rows * (np.float32(1) / np.float32(self.scale))")


@bug("FMT-STATIC-01", "FMT-STATIC-07")
def the_given_scale_has_a_floor(patch):
    with_scale = static_scales.StaticFloat8.with_scale
    patch.setattr(
        static_scales.StaticFloat8, "with_scale", lambda self, scale: with_scale(self, max(scale, 0.02) if scale > 0 else scale)
    )


@bug("FMT-STATIC-02", "FMT-STATIC-07")
def what_lies_beyond_is_cast(patch):
    in_source(patch, QUOTIENT, "xp.minimum(xp.maximum(quotient, -most), most)", "quotient")


@bug("FMT-STATIC-02")
def what_lies_beyond_is_not_a_number(patch):
    in_source(
        patch, "kvref.formats.static_scales.StaticFloat8.quantize", "self.small.encode(self.quotient(rows))",
        "np.where(np.abs(rows) > self.small.max * self.scale, np.uint8(0x7f), self.small.encode(self.quotient(rows)))",
    )  # fmt: skip


@bug("FMT-STATIC-03")
def values_are_multiplied_in_half_precision(patch):
    in_source(
        patch, "kvref.formats.static_scales.StaticFloat8.dequantize", "full_like(values, self.scale)",
        "full_like(values, np.float16(self.scale))",
    )  # fmt: skip


@bug("FMT-STATIC-04", "FMT-STATIC-06")
def the_scale_is_that_of_the_first_rows(patch):
    quotient, dequantize = static_scales.StaticFloat8.quotient, static_scales.StaticFloat8.dequantize

    def learned(self, rows=None):
        """Updates the scale, like the layer that learns it before freezing."""
        if rows is not None and rows.size and not hasattr(self, "learned"):
            object.__setattr__(self, "learned", static_scales.replace(self, scale=float(np.abs(rows).max() / self.small.max)))
        return getattr(self, "learned", self)

    patch.setattr(static_scales.StaticFloat8, "quotient", lambda self, rows: quotient(learned(self, rows), rows))
    patch.setattr(static_scales.StaticFloat8, "dequantize", lambda self, stored, width: dequantize(learned(self), stored, width))


@bug("FMT-STATIC-05")
def any_scale_is_taken(patch):
    in_source(patch, "kvref.formats.static_scales.StaticFloat8.with_scale", "if not (held > 0 and np.isfinite(held))", "if False")


@bug("FMT-STATIC-05")
def scales_for_other_formats_are_dropped(patch):
    in_source(
        patch, "kvref.quantized.QuantizedConfig.formats", "self.key_scale, self.value_scale",
        "*((self.key_scale, self.value_scale) if 'static' in self.format else (None, None))",
    )  # fmt: skip


@bug("FMT-STATIC-05", "FMT-STATIC-06")
def without_a_scale_it_is_another(patch):
    for name in ("float8_e4m3fn_static", "float8_e5m2_static"):
        patch.setitem(FORMATS, name, replace(FORMATS[name], scale=2.0))


@bug("FMT-STATIC-06")
def values_have_the_scale_of_keys(patch):
    in_source(
        patch, "kvref.quantized.QuantizedConfig.formats", "self.key_scale, self.value_scale", "self.key_scale, self.key_scale"
    )


@bug("FMT-STATIC-06")
def one_scale_that_is_given_is_both(patch):
    in_source(
        patch, "kvref.quantized.QuantizedConfig.formats", "self.key_scale, self.value_scale",
        "self.key_scale or self.value_scale, self.value_scale or self.key_scale",
    )  # fmt: skip


@bug("FMT-STATIC-08")
def a_given_scale_is_kept_for_each_row(patch):
    counted = SlotStore.token_bytes.fget
    patch.setattr(
        SlotStore, "token_bytes", property(lambda self: counted(self) + 4 * self.token_shape[0] * ("static" in self.format.name))
    )


def both_ways(patch, into, back):
    """Another rotation and its inverse."""
    patch.setattr(hadamard.HadamardFormat, "quantize", lambda self, rows: self.inner.quantize(into(self.turned(rows))))
    patch.setattr(
        hadamard.HadamardFormat,
        "dequantize",
        lambda self, stored, width: hadamard.hadamard(back(self.inner.dequantize(stored, width))),
    )


@bug("FMT-ROT-01", "FMT-ROT-02")
def rows_of_the_matrix_are_in_another_order(patch):
    both_ways(patch, lambda x: np.roll(x, 1, axis=-1), lambda x: np.roll(x, -1, axis=-1))


@bug("FMT-ROT-01")
def blocks_are_sixteen_at_most(patch):
    block_of = hadamard.block_of
    patch.setattr(hadamard, "block_of", lambda width: min(16, block_of(width)))


@bug("FMT-ROT-01")
def blocks_are_sixty_four_at_most(patch):
    """Like llama.cpp's, for values."""
    block_of = hadamard.block_of
    patch.setattr(hadamard, "block_of", lambda width: min(64, block_of(width)))


def in_blocks_of(block, change):
    """Change rows that are rotated in blocks of these sizes; leave others unchanged."""
    return lambda x: change(x) if hadamard.block_of(x.shape[-1]) == block else x


def last_sign(x):
    return np.concatenate([x[..., :-1], -x[..., -1:]], axis=-1)


@bug("FMT-ROT-01", "FMT-ROT-02")
def a_row_of_the_smallest_matrix_has_another_sign(patch):
    both_ways(patch, in_blocks_of(2, last_sign), in_blocks_of(2, last_sign))


@bug("FMT-ROT-01", "FMT-ROT-02")
def a_row_of_the_matrix_for_heads_of_128_has_another_sign(patch):
    both_ways(patch, in_blocks_of(128, last_sign), in_blocks_of(128, last_sign))


@bug("FMT-ROT-03")
def blocks_of_256_are_rotated_back_with_another_sign(patch):
    both_ways(patch, lambda x: x, in_blocks_of(256, last_sign))


@bug("FMT-ROT-01")
def a_width_that_is_no_power_of_two_is_not_rotated(patch):
    block_of = hadamard.block_of
    patch.setattr(hadamard, "block_of", lambda width: width if block_of(width) == width else 1)


@bug("FMT-ROT-02")
def sums_are_a_product_with_the_matrix(patch):
    def product(x):
        block = hadamard.block_of(x.shape[-1])
        index = np.arange(block)
        signs = (-1.0) ** np.array([[bin(i & j).count("1") for j in index] for i in index])
        matrix = (signs / block**0.5).astype(np.float32)
        return (x.reshape(-1, block) @ matrix).reshape(x.shape)

    patch.setattr(hadamard, "hadamard", product)


@bug("FMT-ROT-02", "FMT-ROT-03")
def each_stage_is_divided(patch):
    in_source(
        patch, "kvref.formats.hadamard.hadamard", "[first + second, first - second]",
        "[(first + second) * np.float32(0.5**0.5), (first - second) * np.float32(0.5**0.5)]",
        "turned * xp.full_like(turned, block**-0.5)", "turned",
    )  # fmt: skip


@bug("FMT-ROT-03", "FMT-ROT-05", "FMT-ROT-07")
def the_rotation_is_not_undone(patch):
    patch.setattr(hadamard.HadamardFormat, "dequantize", lambda self, stored, width: self.inner.dequantize(stored, width))


@bug("FMT-ROT-03", "FMT-ROT-05")
def it_is_undone_with_the_norm_of_a_block_of_64(patch):
    in_source(
        patch, "kvref.formats.hadamard.HadamardFormat.dequantize", "hadamard(self.inner.dequantize(stored, width))",
        "hadamard(self.inner.dequantize(stored, width)) * np.float32((block_of(width) / 64) ** 0.5)",
    )  # fmt: skip


@bug("FMT-ROT-04", "FMT-ROT-07")
def heads_are_rotated_together(patch):
    transform = hadamard.hadamard

    def together(x):
        return transform(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) if x.ndim > 2 else transform(x)

    patch.setattr(hadamard, "hadamard", together)


@bug("FMT-ROT-05")
def a_rotated_row_is_clipped_where_the_row_ends(patch):
    in_source(
        patch, "kvref.formats.hadamard.HadamardFormat.quantize", "self.turned(rows)",
        "np.clip(self.turned(rows), -np.abs(rows).max(axis=-1, keepdims=True), np.abs(rows).max(axis=-1, keepdims=True))",
    )  # fmt: skip


@bug("FMT-ROT-06")
def sums_that_overflow_are_found_in_the_end(patch):
    in_source(patch, "kvref.formats.hadamard.HadamardFormat.turned", "block_of(rows.shape[-1]) > 1 and", "False and")


@bug("FMT-ROT-06")
def what_overflows_is_stored(patch):
    def clipped(self, rows):
        return np.nan_to_num(hadamard.hadamard(rows))

    patch.setattr(hadamard.HadamardFormat, "turned", clipped)


@bug("FMT-ROT-07")
def values_are_not_rotated_back(patch):
    read = TokenStore.read

    def half(self, slots):
        keys, values = read(self, slots)
        return keys, hadamard.hadamard(values) if "hadamard" in self.format.name else values

    patch.setattr(TokenStore, "read", half)


@bug("FMT-ROT-07")
def a_rotated_query_meets_keys_that_are_not(patch):
    attend = QuantizedCache.attend

    def rotating(self, layer, query, scale=None, causal=False):
        query = hadamard.hadamard(query) if "hadamard" in self.config.format else query
        return attend(self, layer, query, scale, causal)

    patch.setattr(QuantizedCache, "attend", rotating)


@bug("FMT-ROT-07")
def codes_of_a_token_that_went_stay(patch):
    put = SlotStore.put

    def half(self, slots, new):
        known = self.__dict__.setdefault("written", set())
        kept = Quantized(*(part if part is None else np.array(part) for part in new))
        if "hadamard" in self.format.name:
            for i, slot in enumerate(slots):
                if slot in known:
                    kept.codes[i] = np.asarray(self._stored.codes)[slot]
            known.update(slots)
        put(self, slots, kept)

    patch.setattr(SlotStore, "put", half)


# Group formats: which scale a number has, when scales are rounded, how codes are packed.


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
