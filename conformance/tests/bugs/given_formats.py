"""Bugs in formats with a given scale, and in rotated formats."""

from dataclasses import replace

import numpy as np

from bugs.plant import bug, in_source
from kvref.formats import FORMATS, Quantized, hadamard, static_scales
from kvref.quantized import QuantizedCache
from kvref.token_store import SlotStore, TokenStore

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
