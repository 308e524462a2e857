"""Bugs against the laws."""

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref import errors
from kvref.backend import ReferenceBackend
from kvref.block_tables import BlockTables
from kvref.formats import row_scales
from kvref.latent import LatentCache
from kvref.paged import PagedCache


@bug("LAW-01", "PAGED-05")
def pages_are_kept_when_the_pool_runs_dry(patch):
    in_source(
        patch,
        "kvref.paged.PagedCache._make_writable",
        "> self.pool.num_free:",
        "> self.pool.num_free:\n        self.pool.allocate_many(self.pool.num_free)",
    )


@bug("LAW-02", "QUANT-06", "FMT-AFF-03")
def values_are_stored_as_keys(patch):
    in_source(patch, "kvref.token_store.TokenStore.quantized", "self.values.quantized(values)", "self.values.quantized(keys)")


@bug("LAW-03", "BLOCK-04", "PAGED-07")
def freed_blocks_are_lost(patch):
    in_source(patch, "kvref.block_pool.BlockPool._return_blocks", "self._num_free += len(blocks)", "pass")


@bug("LAW-04", "QUANT-01")
def the_scale_is_dropped(patch):
    patch.setattr(row_scales.SymmetricRow, "dequantize", lambda self, stored, width: self.decode(stored.codes))


@bug("LAW-05", "LAW-11")
def any_position_a_page_has_can_be_read(patch):
    in_source(patch, "kvref.paged.PagedCache.read", "int(self._tables.lengths[table, layer])", "self._tables.capacity(table)")


@bug("LAW-06", "TIER-01")
def a_long_append_is_quantized_whole(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.append",
        "next(tier for tier in self._tiers if tier.room)",
        "self._tiers[2] if count > self.config.tail_length else self._tiers[0]",
    )


@bug("LAW-07", "LAW-02", "PAGED-12")
def sequences_share_a_table(patch):
    patch.setattr(BlockTables, "open", lambda self: opened(self) * 0)
    opened = BlockTables.open


@bug("LAW-08")
def a_first_write_keeps_the_array_itself(patch):
    patch.setattr(
        ReferenceBackend, "update", lambda self, buffer, new, position: new if position == 0 else whole(buffer, new, position)
    )

    def whole(buffer, new, position):
        out = np.zeros((*buffer.shape[:2], 20, buffer.shape[3]), buffer.dtype)
        out[:, :, :position], out[:, :, position : position + new.shape[2]] = buffer[:, :, :position], new
        return out


@bug("LAW-08")
def loaded_data_is_decoded_when_it_is_read(patch):
    load, read = LatentCache.load, LatentCache.read

    def keep(self, data):
        load(self, data)
        self.data = data, self.length

    def late(self):
        data, length = getattr(self, "data", (None, 0))
        if data is not None and self.length == length:
            load(self, data)
        return read(self)

    patch.setattr(LatentCache, "load", keep)
    patch.setattr(LatentCache, "read", late)


@bug("LAW-09")
def every_quantization_is_a_little_different(patch):
    quantize, calls = row_scales.SymmetricRow.quantize, iter(range(10**9))
    patch.setattr(row_scales.SymmetricRow, "quantize", lambda self, rows: quantize(self, rows * (1 + next(calls) % 7)))


@bug("LAW-10", "TIER-09")
def shapes_are_not_checked(patch):
    patch.setattr(errors.ShapeMismatch, "check", classmethod(lambda cls, name, actual, expected: None))


@bug("LAW-10")
def a_step_of_a_batch_takes_any_shape(patch):
    check = "keys, values = accept_pair(keys, values, shape, self._backend)"
    in_source(patch, "kvref.paged.PagedCache.append_step", check, "")


@bug("LAW-11")
def negative_numbers_are_in_range(patch):
    def lenient(value, stop, error, what):
        if stop is not None and value >= stop:
            raise error(what)
        return value

    for module in (kvref.quantized, kvref.paged, kvref.tiered):
        patch.setattr(module, "in_range", lenient)


@bug("LAW-12")
def sizes_are_not_checked(patch):
    patch.setattr(kvref.paged, "whole_fields", lambda *args, **kwargs: None)


@bug("LAW-12")
def a_single_layer_is_refused(patch):
    minimum = 'whole_fields(self, "num_blocks", minimum=0)'
    in_source(
        patch, "kvref.paged.PagedConfig.__post_init__", minimum, f'{minimum}\n    whole_fields(self, "num_layers", minimum=2)'
    )


@bug("LAW-12")
def a_narrow_head_is_refused(patch):
    patch.setattr(kvref.quantized, "whole_fields", lambda self, *names, minimum=1: whole(self, *names, minimum=max(minimum, 2)))
    whole = kvref.quantized.whole_fields


@bug("LAW-12")
def a_cache_without_a_tail_is_refused(patch):
    patch.setattr(kvref.tiered, "whole_fields", lambda self, *names, minimum=0: whole(self, *names))
    whole = kvref.tiered.whole_fields


@bug("LAW-13")
def empty_appends_raise(patch):
    in_source(patch, "kvref.pooled.PooledCache.append", "going, skipped", "assert keys.shape[0]; going, skipped")


@bug("LAW-14")
def nan_is_stored_as_zero(patch):
    patch.setattr(row_scales, "finite_rows", np.nan_to_num)


@bug("LAW-15")
def strides_are_ignored(patch):
    def in_memory_order(name, values, shape, backend):
        return np.ascontiguousarray(values).reshape(-1)[: values.size].reshape(values.shape) if values.flags.c_contiguous else (
            values.ravel(order="K").reshape(values.shape)
        )  # fmt: skip

    patch.setattr(kvref.validation, "accept", in_memory_order)


@bug("LAW-19", "LAW-11")
def a_negative_number_of_blocks_is_given_back(patch):
    in_source(patch, "kvref.block_pool.BlockPool.allocate_many", 'in_range(count, None, PositionOutOfRange, "count")', "count")


@bug("LAW-19")
def a_sequence_dropped_twice_frees_its_blocks_twice(patch):
    drop = PagedCache.drop

    def forgiving(self, sequence):
        if sequence in self._table_of:
            drop(self, sequence)
        else:
            self.pool._num_free += 8

    patch.setattr(PagedCache, "drop", forgiving)


@bug("LAW-19")
def the_pool_counts_what_is_released_again(patch):
    in_source(
        patch,
        "kvref.buffers.Buffer.release",
        "if memory is not None:",
        "if memory is None:\n            self._pool._returns += 9\n        else:",
    )


@bug("LAW-20")
def integers_are_kept_as_they_came(patch):
    patch.setattr(errors, "integer", lambda value: value if isinstance(value, int | np.integer) else None)


@bug("LAW-20")
def sizes_are_kept_as_they_came(patch):
    patch.setattr(kvref.quantized, "whole_fields", lambda *args, **kwargs: None)


@bug("LAW-20")
def a_start_is_added_to_as_it_came(patch):
    in_source(patch, "kvref.paged.PagedCache.write", "start = self._check_position(", "self._check_position(")


@bug("PAGED-05")
def a_capacity_wraps_around(patch):
    in_range = 'in_range(num_tokens, None, PositionOutOfRange, "num_tokens")'
    in_source(patch, "kvref.paged.PagedCache.ensure_capacity", in_range, "int(np.uint64(num_tokens).astype(np.int64))")
