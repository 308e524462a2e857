"""Bugs of formats in paged caches: an operation is applied to codes but not to their scales."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.attention import attention
from kvref.formats import Quantized
from kvref.paged import PagedCache
from kvref.prefix import PrefixCache
from kvref.token_store import SlotStore, TokenStore
from kvref_conformance.oracle.formats import SCALED, SYMMETRIC

PUT = "self._store.put(self._tables.slots(table, layer, positions), new)"


def without_scales(patch, forgets):
    """Copy blocks with their scales unless `forgets(number of slots per block)` is true."""
    copy = SlotStore.copy

    def codes_alone(self, sources, targets, block_size):
        _, scale, zero = self._stored
        before = Quantized(None, *(None if part is None else part.copy() for part in (scale, zero)))
        copy(self, sources, targets, block_size)
        if forgets(block_size):
            self._stored = Quantized(self._stored.codes, before.scale, before.zero)

    patch.setattr(SlotStore, "copy", codes_alone)


@hidden("paged", "SHARE-05")
@bug("PAGED-18", "GROUP-08")
def a_copy_on_write_copies_codes_alone(patch):
    without_scales(patch, lambda block_size: block_size > 1)


@bug("PAGED-18")
def removing_moves_codes_alone(patch):
    without_scales(patch, lambda block_size: block_size == 1)


@bug("PAGED-18")
def a_copy_on_write_copies_the_scales_of_keys_alone(patch):
    def keys_alone(self, sources, targets, block_size=1):
        self.keys.copy(sources, targets, block_size)
        scales = self.values._stored[1:]
        before = [None if part is None else part.copy() for part in scales]
        self.values.copy(sources, targets, block_size)
        if block_size > 1:
            self.values._stored = Quantized(self.values._stored.codes, *before)

    patch.setattr(TokenStore, "copy", keys_alone)


@bug("PAGED-18", "PREFIX-16", "GROUP-08")
def a_slot_keeps_the_first_scale_that_it_had(patch):
    put = SlotStore.put

    def first(self, slots, new):
        if new.scale is not None:
            old = self._stored.scale[np.asarray(slots)]
            new = new._replace(scale=np.where(old == 0, new.scale, old))
        put(self, slots, new)

    patch.setattr(SlotStore, "put", first)


@bug("PAGED-18")
def scales_lie_by_position_and_not_by_slot(patch):
    write, gather, put, stored = PagedCache.write, PagedCache.gather, SlotStore.put, SlotStore.stored
    where = []

    def writing(self, sequence, layer, start, keys, values):
        where[:] = range(start, start + len(keys))
        write(self, sequence, layer, start, keys, values)
        where.clear()

    def gathering(self, sequence, layer):
        where[:] = range(self.length(sequence, layer))
        found = gather(self, sequence, layer)
        where.clear()
        return found

    def misput(self, slots, new):
        put(self, slots, new)
        if where and new.scale is not None:
            self._stored.scale[where] = new.scale

    def misread(self, slots):
        found = stored(self, slots)
        return found._replace(scale=self._stored.scale[where]) if where and found.scale is not None else found

    for holder, name, planted in (
        (PagedCache, "write", writing), (PagedCache, "gather", gathering),
        (SlotStore, "put", misput), (SlotStore, "stored", misread),
    ):  # fmt: skip
        patch.setattr(holder, name, planted)


@bug("PAGED-18")
def overwriting_quantizes_the_neighbours_again(patch):
    """With the largest scale: the block has only one."""
    again = (
        "before = np.arange(start // self.config.block_size * self.config.block_size, start)\n"
        "    if start < length and len(before) and len(keys) and self.config.dtype == 'int8':\n"
        "        beside = self._tables.slots(table, layer, before)\n"
        "        read, scale = self._store.keys.read(beside), self._store.keys.stored(beside).scale\n"
        "        scale = np.maximum(scale, new[0].scale[:1])\n"
        "        self._store.keys.put(beside, type(new[0])(np.rint(read / scale[..., None]).astype(np.int8), scale))\n"
    )
    in_source(patch, "kvref.paged.PagedCache.write", PUT, f"{PUT}\n    {again}")


@bug("PAGED-18")
def tokens_that_come_together_share_a_scale(patch):
    quantized = SlotStore.quantized

    def together(self, tokens):
        found = quantized(self, tokens)
        if self.format.name != "int8" or not len(tokens):
            return found
        scale = np.broadcast_to(found.scale.max(axis=0), found.scale.shape)
        return Quantized(np.rint(tokens / scale[..., None]).astype(np.int8), np.ascontiguousarray(scale))

    patch.setattr(SlotStore, "quantized", together)


@bug("PAGED-18")
def a_batch_has_its_scales_in_the_order_of_its_sequences(patch):
    def sorted_scales(new, tables):
        order = np.argsort(tables, kind="stable")
        return tuple(each if each.scale is None else each._replace(scale=each.scale[order]) for each in new)

    patch.setattr(PagedCache, "sorted_scales", staticmethod(sorted_scales), raising=False)
    for name, tables in (("append", "tables"), ("append_step", "np.tile(tables, config.num_layers)")):
        if name == "append_step":
            tables = f"{tables} + len(self._table_of) * np.repeat(np.arange(config.num_layers), len(tables))"
        in_source(patch, f"kvref.paged.PagedCache.{name}", ", new)\n", f", self.sorted_scales(new, {tables}))\n")


@bug("PAGED-18")
def blocks_are_taken_for_what_cannot_be_stored(patch):
    quantize, missing = "new = self._store.quantized(keys, values)", "self._make_writable(self._missing_entries(table, end)"
    in_source(
        patch, "kvref.paged.PagedCache.write", quantize, "new = None",
        f"{missing}, table, layer, positions)", f"{missing}, table, layer, positions)\n    {quantize}",
    )  # fmt: skip


@bug("GROUP-08")
def a_step_gives_back_before_it_quantizes(patch):
    quantize, prepare = "new = self._store.quantized(keys, values)", "self._make_writable(more, table, groups, positions)"
    in_source(patch, "kvref.grouped.GroupedCache.step", quantize, "new = None", prepare, f"{quantize}\n    {prepare}")


@bug("ATTN-10")
def attention_forgets_the_scales_of_values(patch):
    attend = PagedCache.attend

    def of_codes(self, sequence, layer, query, scale=None, causal=False):
        if self._store.format.scale_arrays == 0:
            return attend(self, sequence, layer, query, scale, causal)
        slots = self._tables.slots(self._table(sequence), layer, np.arange(self.length(sequence, layer)))
        stored, values = self._store.values.stored(slots), self._store.values
        codes = values._tokens(stored._replace(scale=np.ones_like(stored.scale)))
        return attention(query, self._store.keys.read(slots), codes, scale=scale, causal=causal)

    patch.setattr(PagedCache, "attend", of_codes)


@bug("PREFIX-16")
def scales_go_with_the_sequence(patch):
    drop = PrefixCache.drop

    def forgetting(self, sequence):
        held = self._tables.held(self._table(sequence))
        drop(self, sequence)
        size = self.config.block_size
        slots = (held[:, None] * size + np.arange(size)).reshape(-1)
        for store in (self._store.keys, self._store.values):
            if store._stored.scale is not None:
                store._stored.scale[slots] = 0

    patch.setattr(PrefixCache, "drop", forgetting)


@bug("EDIT-10")
def turned_keys_keep_the_scales_they_had(patch):
    turned = PagedCache._rotate_keys

    def kept(self, rotary, by, slots):
        found = turned(self, rotary, by, slots)
        return found if found.scale is None else found._replace(scale=self._store.keys.stored(slots).scale)

    patch.setattr(PagedCache, "_rotate_keys", kept)


@bug("EDIT-10")
def turned_keys_of_groups_keep_the_scales_they_had(patch):
    turned = PagedCache._rotate_keys

    def kept(self, rotary, by, slots):
        found, keys = turned(self, rotary, by, slots), self._store.keys
        in_groups = keys.format.granularity == "group" and found.scale is not None
        return found._replace(scale=keys.stored(slots).scale) if in_groups else found

    patch.setattr(PagedCache, "_rotate_keys", kept)


@bug("EDIT-10")
def keys_are_turned_where_heads_have_a_scale_alone(patch):
    turned = PagedCache._rotate_keys

    def some(self, rotary, by, slots):
        keys = self._store.keys
        left = keys.format.name in SCALED and keys.format.name not in SYMMETRIC
        return keys.stored(slots) if left else turned(self, rotary, by, slots)

    patch.setattr(PagedCache, "_rotate_keys", some)


@bug("EDIT-10")
def turned_keys_are_stored_by_the_scale_of_values(patch):
    in_source(
        patch, "kvref.paged.PagedCache._rotate_keys", "self._store.keys.quantized(",
        "(self._store.values if self.config.key_scale else self._store.keys).quantized(",
    )  # fmt: skip


@bug("EDIT-10")
def keys_are_turned_as_they_lie(patch):
    """Rotates keys in their stored (Hadamard-rotated) form."""
    turned = PagedCache._rotate_keys

    def lying(self, rotary, by, slots):
        keys, right = self._store.keys, self._store.keys.format
        keys.format = getattr(right, "inner", right)
        try:
            return turned(self, rotary, by, slots)
        finally:
            keys.format = right

    patch.setattr(PagedCache, "_rotate_keys", lying)


@bug("EDIT-10")
def turned_keys_end_where_numbers_do(patch):
    in_source(
        patch, "kvref.paged.PagedCache._rotate_keys", "rotary.turned(self._store.keys.read(slots), by, self._backend)",
        "np.nan_to_num(rotary.turned(self._store.keys.read(slots), by, self._backend))",
    )  # fmt: skip


@bug("EDIT-10")
def values_are_quantized_again_where_keys_are_turned(patch):
    in_source(
        patch, "kvref.paged.PagedCache.remove", "self._store.keys.put(new, keys)",
        "self._store.write(new, self._store.keys.read(new), self._store.values.read(new) * np.float32(1.0001))\n"
        "        self._store.keys.put(new, keys)",
    )  # fmt: skip
