"""Bugs in the latent cache."""

import numpy as np

from bugs.plant import bug, hidden, in_source, real
from kvref.backend import ReferenceBackend
from kvref.latent import LatentCache

ATTEND = "kvref.latent.LatentCache.attend"
SEEN = "(np.arange(len(rows)) <= (np.arange(len(query)) + len(rows) - len(query))[:, None]) | (not causal)"


def looked_at(patch, mask):
    """Attend with another mask [num_queries, num_tokens] than the correct one, SEEN."""
    in_source(
        patch, ATTEND, "    latents = attention_as_read(",
        f"""    def looking(query, read, count, row, *, scale, causal, backend):
        rows = self._read(0, count)
        return backend.attend(query, *read(0, count), scale, {mask})

    latents = looking(""",
    )  # fmt: skip


@bug("MLA-01")
def the_rope_part_lies_in_front(patch):
    read = LatentCache.read

    def turned(self):
        rows = read(self)
        return np.concatenate([rows[:, self.config.rank :], rows[:, : self.config.rank]], axis=1)

    patch.setattr(LatentCache, "read", turned)


@bug("MLA-01", "MLA-02")
def the_value_is_the_end_of_the_row(patch):
    in_source(patch, ATTEND, "row[:, :, :rank]", "row[:, :, -rank:]")


@bug("MLA-01", "MLA-02")
def the_rope_part_is_left_out_of_the_score(patch):
    in_source(patch, ATTEND, "query[:, :, nope_dim:]]", "0 * query[:, :, nope_dim:]]")


@bug("MLA-01", "MLA-02")
def all_heads_take_the_values_of_the_first(patch):
    in_source(patch, ATTEND, "xp.matrix_transpose(up_values)", "xp.matrix_transpose(up_values[:1])")


@bug("MLA-02")
def all_heads_take_the_keys_of_the_first(patch):
    in_source(patch, ATTEND, "query[:, :, :nope_dim], up_keys)", "query[:, :, :nope_dim], up_keys[:1])")


@bug("MLA-02")
def square_matrices_of_the_keys_are_turned(patch):
    in_source(
        patch, ATTEND, "_by_head(query[:, :, :nope_dim], up_keys)",
        "_by_head(query[:, :, :nope_dim], xp.matrix_transpose(up_keys) if nope_dim == rank else up_keys)",
    )  # fmt: skip


@bug("MLA-02")
def square_matrices_of_the_values_are_not_turned(patch):
    in_source(
        patch, ATTEND, "xp.matrix_transpose(up_values)",
        "up_values if up_values.shape[1] == rank else xp.matrix_transpose(up_values)",
    )  # fmt: skip


@bug("MLA-02")
def the_weighted_mean_is_added_up_in_half_precision(patch):
    in_source(
        patch, "kvref.latent._by_head", "xp.matmul(xp.permute_dims(rows, (1, 0, 2)), matrices)",
        "(np.permute_dims(rows, (1, 0, 2))[..., None] * matrices[:, None]).astype(np.float16)"
        ".sum(axis=2, dtype=np.float16).astype(np.float32)",
    )  # fmt: skip


@bug("MLA-02")
def causal_queries_are_the_first_tokens(patch):
    looked_at(patch, "(np.arange(len(rows)) <= np.arange(len(query))[:, None]) | (not causal)")


@bug("MLA-02")
def the_last_token_is_not_looked_at(patch):
    looked_at(patch, f"({SEEN}) & (np.arange(len(rows)) != 9)")


@bug("MLA-03")
def every_head_has_a_row_once_it_has_attended(patch):
    attend, num_bytes = LatentCache.attend, LatentCache.num_bytes

    def counting(self, query, *args, **kwargs):
        self.heads = query.shape[1]
        return attend(self, query, *args, **kwargs)

    patch.setattr(LatentCache, "attend", counting)
    patch.setattr(LatentCache, "num_bytes", property(lambda self: num_bytes.fget(self) * getattr(self, "heads", 1)))


@bug("MLA-03")
def keys_and_values_are_counted(patch):
    in_source(patch, "kvref.latent.LatentCache.num_bytes", "self._length *", "2 * self._length *")


@bug("MLA-03")
def memory_is_the_capacity(patch):
    in_source(patch, "kvref.latent.LatentCache.num_bytes", "self._length *", "self.config.max_tokens *")


@bug("MLA-04")
def the_first_scale_is_used_for_all(patch):
    read = LatentCache.read

    def scaled(self):
        rows, store = read(self), self._stores[0]
        if len(self._stores) > 1 and self._length:
            scales = store.stored(range(self._length)).scale.repeat(128, axis=1)
            rows[:, : self.config.rank] *= scales[:, :1] / scales
        return rows

    patch.setattr(LatentCache, "read", scaled)


@bug("MLA-04")
def a_row_has_one_scale(patch):
    quantized = ReferenceBackend.quantize

    def of_a_row(self, rows, format, out=None):
        if format.name != "float8_e4m3fn" or rows.ndim != 3 or rows.shape[-1] != 128:
            return quantized(self, rows, format, out)
        stored = quantized(self, rows.reshape(len(rows), -1), format)
        scale = np.repeat(stored.scale[:, None], rows.shape[1], axis=1)
        return type(stored)(stored.codes.reshape(rows.shape), scale)

    patch.setattr(ReferenceBackend, "quantize", of_a_row)


@bug("MLA-04")
def scales_are_read_as_powers_of_two(patch):
    read = LatentCache.read

    def floored(self):
        rows, store = read(self), self._stores[0]
        if len(self._stores) > 1 and self._length:
            scales = store.stored(range(self._length)).scale.repeat(128, axis=1)
            rows[:, : self.config.rank] *= 2 ** np.floor(np.log2(scales)) / scales
        return rows

    patch.setattr(LatentCache, "read", floored)


@bug("MLA-04")
def the_rope_part_is_packed_as_float16(patch):
    in_source(patch, "kvref.latent.LatentCache.__init__", '("bfloat16", 1, config.rope_dim)', '("float16", 1, config.rope_dim)')


@bug("MLA-04")
def records_are_scales_first(patch):
    codes, scales = '("codes", "u1", (rank,)), ', '("scales", "<f4", (rank // TILE,)), '
    in_source(patch, "kvref.latent.record_of", codes + scales, scales + codes)


@bug("MLA-04")
def records_are_big_endian(patch):
    in_source(patch, "kvref.latent.record_of", '"<f4"', '">f4"')


@bug("MLA-04")
def any_rank_can_be_packed(patch):
    in_source(
        patch, "kvref.latent.LatentConfig.__post_init__", "if self.rank % TILE:", "if False:",
    )  # fmt: skip


@bug("MLA-05", "LAW-01")
def tokens_come_as_far_as_they_fit(patch):
    append = LatentCache.append

    def one_by_one(self, latent, rope):
        append(self, latent[:0], rope[:0])
        for at in range(len(latent)):
            append(self, latent[at : at + 1], rope[at : at + 1])

    patch.setattr(LatentCache, "append", one_by_one)


@bug("MLA-05")
def a_full_cache_turns_in_a_ring(patch):
    in_source(
        patch, "kvref.latent.LatentCache.append", "if stop > self.config.max_tokens:", "if False:",
        "range(self._length, stop)", "[slot % self.config.max_tokens for slot in range(self._length, stop)]",
        "self._length = stop", "self._length = min(stop, self.config.max_tokens)",
    )  # fmt: skip


@bug("MLA-05", "LAW-05")
def clear_leaves_a_token(patch):
    patch.setattr(LatentCache, "clear", lambda self: setattr(self, "_length", min(1, self._length)))


@bug("EDIT-02")
def truncating_to_more_makes_it_longer(patch):
    patch.setattr(LatentCache, "truncate", lambda self, length: setattr(self, "_length", abs(length)))


@bug("EDIT-01", "EDIT-03")
def truncating_to_some_leaves_one_more(patch):
    patch.setattr(
        LatentCache, "truncate", lambda self, length: setattr(self, "_length", min(length + (length > 0), self._length))
    )


@hidden("latent", "MLA-02")
def a_query_that_sees_no_token_looks_at_the_first(patch):
    looked_at(patch, f"({SEEN}) | (np.arange(len(rows)) == 0)")


@hidden("latent", "LAW-04")
def a_loud_tile_gives_its_scale_to_the_next(patch):
    read = LatentCache.read

    def leaking(self):
        rows, store = read(self), self._stores[0]
        if len(self._stores) > 1 and self._length and store.token_shape[0] > 1:
            scales = store.stored(range(self._length)).scale
            rows[:, 128:256] *= np.where(scales[:, :1] > 50 * scales[:, 1:2], np.float32(2), np.float32(1))
        return rows

    patch.setattr(LatentCache, "read", leaking)


@real("latent")
def a_tile_of_64_tokens_loses_its_last(patch):
    looked_at(patch, f"({SEEN}) & ((np.arange(len(rows)) % 64 != 63) | (len(rows) < 64))")


@real("latent")
def the_value_ends_at_511(patch):
    in_source(patch, ATTEND, "row[:, :, :rank]", "row[:, :, :rank] * (np.arange(rank) < 511)")


@real("latent")
def lengths_are_kept_in_a_byte(patch):
    append = LatentCache.append

    def narrow(self, latent, rope):
        append(self, latent, rope)
        self._length = self._length & 0xFF if self._length > 256 else self._length

    patch.setattr(LatentCache, "append", narrow)


@real("latent")
def a_fourth_scale_is_the_third(patch):
    read = LatentCache.read

    def short(self):
        rows, store = read(self), self._stores[0]
        if len(self._stores) > 1 and self._length and store.token_shape[0] > 3 and self._length > 16:
            scales = store.stored(range(self._length)).scale
            rows[:, 384:512] *= (scales[:, 2] / scales[:, 3])[:, None]
        return rows

    patch.setattr(LatentCache, "read", short)


@real("latent")
def a_sum_of_512_is_added_up_in_half_precision(patch):
    in_source(
        patch, "kvref.latent._by_head", "xp.matmul(xp.permute_dims(rows, (1, 0, 2)), matrices)",
        "xp.matmul(xp.permute_dims(rows, (1, 0, 2)), matrices) if max(matrices.shape[1:]) < 512 else "
        "xp.matmul(xp.permute_dims(rows, (1, 0, 2)).astype(np.float16), matrices.astype(np.float16)).astype(np.float32)",
    )  # fmt: skip
