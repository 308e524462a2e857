"""Bugs in truncation, removal and reordering."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.contiguous import ContiguousCache
from kvref.paged import PagedCache
from kvref.quantized import QuantizedCache
from kvref.tier_queue import Tier
from kvref.tiered import TieredCache
from kvref.token_store import SlotStore

CONTIGUOUS = "kvref.contiguous.ContiguousCache"
QUANTIZED = "kvref.quantized.QuantizedCache"
TIERED = "kvref.tiered.TieredCache"


@bug("EDIT-01")
def a_token_too_many_goes(patch):
    in_source(patch, f"{CONTIGUOUS}.truncate", '"length")', '"length")\n    self.seq_len -= self.seq_len > 1')


@bug("EDIT-01")
def truncate_replaces_the_buffers_by_copies(patch):
    copies = '"length")\n    self._keys, self._values = self._keys.copy(), self._values.copy()'
    in_source(patch, f"{CONTIGUOUS}.truncate", '"length")', copies)


@bug("EDIT-01")
def going_back_gives_memory_back(patch):
    def truncate(self, length):
        kept = [part[:, :, :length, :].copy() for part in self.read()]
        self.__init__(self.config, self._backend)
        self.append(*kept)

    in_source(patch, f"{CONTIGUOUS}.truncate", '"length")', '"length")\n    self._again(self.seq_len)')
    patch.setattr(ContiguousCache, "_again", truncate, raising=False)


@bug("EDIT-02")
def a_length_past_the_end_is_clamped(patch):
    in_source(patch, f"{CONTIGUOUS}.truncate", "in_range(length,", "in_range(min(length, self.seq_len),")


@hidden("contiguous", "EDIT-02")
@bug("EDIT-02")
def a_negative_length_counts_from_the_end(patch):
    in_source(patch, f"{CONTIGUOUS}.truncate", "in_range(length,", "in_range(length if length >= 0 else self.seq_len + length,")


@bug("EDIT-02")
def a_length_may_be_as_large_as_memory(patch):
    in_source(patch, f"{CONTIGUOUS}.truncate", "self.seq_len + 1,", "max(self.seq_len, self.capacity) + 1,")


@bug("EDIT-03")
def the_next_token_comes_where_it_would_have_come(patch):
    truncate, append = ContiguousCache.truncate, ContiguousCache.append

    def noting(self, length):
        self.end = self.seq_len
        truncate(self, length)

    def late(self, keys, values):
        length = self.seq_len
        append(self, keys, values)
        end = min(getattr(self, "end", 0), self.capacity - keys.shape[2])
        if length < end:
            for buffer, came in zip(self.raw(), (keys, values), strict=True):
                buffer[:, :, end : end + came.shape[2], :] = came
                buffer[:, :, length : length + came.shape[2], :] = 0
        self.end = 0

    patch.setattr(ContiguousCache, "truncate", noting)
    patch.setattr(ContiguousCache, "append", late)


@bug("EDIT-07")
def keys_are_reordered_and_values_are_not(patch):
    reorder = ContiguousCache.reorder

    def half(self, rows):
        before = self._values.copy()
        reorder(self, rows)
        self._values[...] = before if len(before) == len(self._values) else self._values

    patch.setattr(ContiguousCache, "reorder", half)


@hidden("contiguous", "EDIT-07")
@bug("EDIT-07")
def rows_are_read_that_were_overwritten(patch):
    def gather(self, buffer, chosen):
        if len(chosen) != len(buffer):
            return buffer[chosen]
        for row, source in enumerate(chosen):
            buffer[row] = buffer[source]
        return buffer.copy()

    in_source(patch, f"{CONTIGUOUS}.reorder", "self._backend.gather(", "self._in_place(")
    patch.setattr(ContiguousCache, "_in_place", gather, raising=False)


@bug("EDIT-07")
def a_reorder_takes_other_memory(patch):
    in_source(patch, f"{CONTIGUOUS}.reorder", "if config == self.config:", "if False:")


@bug("EDIT-07")
def a_batch_keeps_its_size(patch):
    in_source(patch, f"{CONTIGUOUS}.reorder", "batch_size=len(chosen))", "batch_size=self.config.batch_size)")


@hidden("contiguous", "EDIT-08")
@bug("EDIT-08")
def rows_of_one_origin_are_one(patch):
    def gather(self, buffer, chosen):
        if len(set(chosen)) > 1:
            return buffer[chosen]
        row = buffer[chosen[0]].copy()
        return np.lib.stride_tricks.as_strided(row, (len(chosen), *row.shape), (0, *row.strides))

    in_source(patch, f"{CONTIGUOUS}.reorder", "self._backend.gather(", "self._strided(", "if config == self.config:", "if False:")
    patch.setattr(ContiguousCache, "_strided", gather, raising=False)


@bug("EDIT-09")
def a_negative_row_counts_from_the_end(patch):
    in_source(patch, f"{CONTIGUOUS}.reorder", "in_range(row,", "in_range(row if row >= 0 else self.config.batch_size + row,")


@bug("EDIT-09")
def a_row_past_the_end_is_the_last(patch):
    in_source(patch, f"{CONTIGUOUS}.reorder", "in_range(row,", "in_range(min(row, self.config.batch_size - 1),")


@hidden("quantized", "EDIT-01")
@bug("EDIT-01")
def only_the_first_layer_goes_back(patch):
    in_source(patch, f"{QUANTIZED}.truncate", "[length] * self.config.num_layers", "[length, *self._lengths[1:]]")


@hidden("quantized", "EDIT-02")
@bug("EDIT-02")
def the_longest_layer_says_how_many_may_stay(patch):
    in_source(patch, f"{QUANTIZED}.truncate", "min(self._lengths)", "max(self._lengths)")


@bug("EDIT-03")
def a_token_takes_the_scale_of_the_one_that_went(patch):
    truncate, put = QuantizedCache.truncate, SlotStore.put

    def noting(self, length):
        size = self.config.capacity
        gone = {layer * size + p for layer, count in enumerate(self._lengths) for p in range(max(0, length), count)}
        truncate(self, length)
        for store in (self._store.keys, self._store.values):
            store.kept = getattr(store, "kept", set()) | gone

    def stale(self, slots, new):
        old = [slot for slot in slots if slot in getattr(self, "kept", ())]
        scales = None if self._stored.scale is None else self._stored.scale[old].copy()
        put(self, slots, new)
        if old:
            self._stored.scale[old] = scales

    patch.setattr(QuantizedCache, "truncate", noting)
    patch.setattr(SlotStore, "put", stale)


@bug("EDIT-01")
def the_oldest_tokens_go_and_not_the_newest(patch):
    def remove_newest(self, count):
        Tier.remove_oldest(self, count)
        return count

    patch.setattr(Tier, "remove_newest", remove_newest)


@hidden("tiered", "EDIT-01")
@bug("EDIT-01")
def only_the_tail_goes_back(patch):
    in_source(patch, f"{TIERED}.truncate", "for tier in self._tiers:", "for tier in self._tiers[:1]:")


@bug("EDIT-02")
def a_tiered_length_counts_what_is_held(patch):
    in_source(patch, f"{TIERED}.truncate", "self._next + 1,", "self.total_tokens + 1,")


@bug("EDIT-03")
def what_went_still_takes_room_in_the_tail(patch):
    in_source(
        patch,
        f"{TIERED}.truncate",
        "count, self._next = ",
        "self._tiers[0].room -= min(self._next - length, self._tiers[0].room - 1)\n        count, self._next = ",
    )


@bug("EDIT-03")
def what_went_still_counts_towards_the_most(patch):
    truncate = TieredCache.truncate

    def counting(self, length):
        before = self._next
        truncate(self, length)
        self.ghosts = getattr(self, "ghosts", 0) + before - self._next

    patch.setattr(TieredCache, "truncate", counting)
    in_source(
        patch,
        f"{TIERED}.append",
        "self.total_tokens + count - room",
        "self.total_tokens + count + getattr(self, 'ghosts', 0) - room",
    )


@hidden("tiered", "EDIT-06")
@bug("EDIT-06")
def what_has_moved_on_is_taken_for_what_it_was(patch):
    in_source(patch, f"{TIERED}.truncate", "if length < self._moved_at:", "if length < self._next - self.total_tokens:")


@hidden("tiered", "EDIT-06")
@bug("EDIT-06")
def no_token_goes_once_the_store_has_any(patch):
    in_source(patch, f"{TIERED}.truncate", "if length < self._moved_at:", "if length < self._next and len(self._tiers[2]):")


@bug("EDIT-06")
def a_refused_length_has_cut_the_tail_already(patch):
    in_source(
        patch,
        f"{TIERED}.truncate",
        "if length < self._moved_at:",
        "if length < self._moved_at:\n            self._tiers[0].remove_newest(1)",
    )


@bug("EDIT-04")
def only_the_first_block_past_a_truncation_is_freed(patch):
    in_source(
        patch,
        "kvref.block_sequences.BlockOwner._set_lengths",
        "self._tables.cut(table, entries)",
        "self._tables.cut(table, entries)[:1]",
    )


@bug("EDIT-05")
def a_truncation_frees_blocks_that_others_share(patch):
    in_source(
        patch,
        "kvref.block_sequences.BlockOwner._set_lengths",
        "self.pool.free_many(self._tables.cut(table, entries))",
        "for block in self._tables.cut(table, entries).tolist():\n"
        "        for _ in range(self.pool.references(block)):\n            self.pool.free(block)",
    )


@bug("QUANT-10")
def scales_of_groups_are_written_to_a_slot_once(patch):
    put = SlotStore.put

    def once(self, slots, new):
        if new.scale is not None and new.scale.ndim == 3:  # [n, heads, groups]
            before = self.stored(slots).scale
            new = new._replace(scale=np.where(before != 0, before, new.scale))
        put(self, slots, new)

    patch.setattr(SlotStore, "put", once)


TURNED = "kvref.rope.Rotary.turned"


@bug("EDIT-10")
def pairs_of_a_partial_embedding_are_half_a_head_apart(patch):
    """Modelled on pie-project/pie#602."""
    in_source(
        patch, TURNED, "rotated, rest = keys[..., : 2 * count], keys[..., 2 * count :]",
        "half = keys.shape[-1] // 2\n"
        "    rotated = xp.concat([keys[..., :count], keys[..., half : half + count]], axis=-1)\n"
        "    rest = xp.concat([keys[..., count:half], keys[..., half + count :]], axis=-1)",
    )  # fmt: skip


@bug("EDIT-10")
def numbers_without_a_pair_become_zero(patch):
    in_source(patch, TURNED, "keys[..., 2 * count :]", "0 * keys[..., 2 * count :]")


@bug("EDIT-10")
def frequencies_are_sorted(patch):
    in_source(patch, TURNED, "np.array(self.frequencies)", "np.array(sorted(self.frequencies, reverse=True))")


@bug("EDIT-10")
def a_frequency_of_zero_counts_as_one(patch):
    in_source(patch, TURNED, "np.array(self.frequencies)", "np.array([each or 1.0 for each in self.frequencies])")


@bug("EDIT-10")
def the_last_of_several_frequencies_is_ignored(patch):
    in_source(
        patch,
        TURNED,
        "np.array(self.frequencies)",
        "np.array([*self.frequencies[:-1], 0.0] if count > 2 else self.frequencies)",
    )


def cached_rotations(patch, key):
    """A cache keeps the rotations of its first removal of each kind, which `key(rotary, by)` tells apart."""
    rotate = PagedCache._rotate_keys

    def cached(self, rotary, by, slots):
        kept = self.__dict__.setdefault("_rotations", {})
        return rotate(self, kept.setdefault(key(rotary, by), rotary), by, slots)

    patch.setattr(PagedCache, "_rotate_keys", cached)


@bug("EDIT-10")
def the_first_frequencies_are_used_for_equal_distances(patch):
    cached_rotations(patch, lambda rotary, by: (by, rotary.layout, len(rotary.frequencies)))


@bug("EDIT-10")
def the_first_frequencies_are_used_for_ever(patch):
    cached_rotations(patch, lambda rotary, by: (rotary.layout, len(rotary.frequencies)))


@bug("EDIT-10")
def the_first_layout_is_used_for_ever(patch):
    cached_rotations(patch, lambda rotary, by: rotary.frequencies)


@bug("EDIT-10")
def keys_move_by_at_most_8_positions(patch):
    """A table of cosines and sines has 8 rows."""
    in_source(patch, TURNED, "angles = by *", "angles = max(by, -8) *")


@bug("EDIT-10")
def frequencies_are_float32(patch):
    in_source(patch, TURNED, "np.array(self.frequencies)", "np.array(self.frequencies, np.float32).astype(float)")


@bug("EDIT-10")
def angles_are_float32(patch):
    in_source(patch, TURNED, "by * np.array(self.frequencies)", "np.float32(by) * np.array(self.frequencies, np.float32)")
