"""Bugs of formats in caches: codes without their scales, rows quantized twice or not at all, steps that one operation omits."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.attention import attention
from kvref.formats import Quantized
from kvref.formats.hadamard import HadamardFormat, hadamard
from kvref.formats.static_scales import StaticFloat8
from kvref.grouped import GroupedCache
from kvref.latent import LatentCache
from kvref.paged import PagedCache
from kvref.prefix import PrefixCache
from kvref.quantized import QuantizedCache
from kvref.tiered import TieredCache
from kvref.token_store import SlotStore, TokenStore
from kvref.windowed import WindowedCache
from kvref_conformance.oracle.formats import SCALED_FORMATS, SYMMETRIC_FORMATS

STEP = "kvref.windowed.WindowedCache.step"
SETTLE, ADOPT = "kvref.tiered.TieredCache._migrate", "kvref.tiered.TieredCache._set_policy"
WRITE = "kvref.windowed.WindowedCache._write"


def only_codes_are_put(patch, cache, operation, when):
    """In an operation of the cache, put only codes into slots and keep the old scales, whenever `when(cache)` is true."""
    put, work = SlotStore.put, getattr(cache, operation)
    going: list[object] = []

    def working(self, *args, **kwargs):
        going.append(self)
        try:
            return work(self, *args, **kwargs)
        finally:
            going.pop()

    def codes_only(self, slots, new):
        before = [None if scale is None else scale.copy() for scale in self._stored[1:]]
        put(self, slots, new)
        if going and when(going[-1]):
            self._stored = Quantized(self._stored.codes, *before)

    patch.setattr(cache, operation, working)
    patch.setattr(SlotStore, "put", codes_only)


@bug("WIN-10")
def a_ring_that_turned_over_keeps_its_scales(patch):
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.length > cache.config.window)


@bug("WIN-10")
def the_scale_of_a_draft_stays(patch):
    truncate = WindowedCache.truncate

    def remembering(self, length):
        self.went = self.length > length > 0
        truncate(self, length)

    patch.setattr(WindowedCache, "truncate", remembering)
    patch.setattr(WindowedCache, "went", False, raising=False)
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.went)


@bug("WIN-10")
def sinks_are_read_with_the_scales_of_the_ring(patch):
    in_source(
        patch, "kvref.windowed.WindowedCache.read", "return self._store.read(self._slots(wanted))",
        """sinks = self.config.sinks
    own, turned = self._slots(wanted), self._slots(wanted + sinks * (wanted < sinks))
    return tuple(
        store.dequantized(type(codes)(codes.codes, *scales[1:]))
        for store in (self._store.keys, self._store.values)
        for codes, scales in [(store.stored(own), store.stored(turned))]
    )""",
    )  # fmt: skip


@bug("WIN-10")
def a_step_attends_over_what_was_given(patch):
    in_source(patch, STEP, "self._store.dequantized(stored)", "(keys, values)")


@bug("WIN-10")
def a_step_quantizes_what_it_has_read_back(patch):
    in_source(patch, STEP, "self._write(stored,", "self._write(self._store.quantized(*coming),")


@bug("WIN-10")
def a_step_that_is_refused_counts_its_tokens(patch):
    in_source(
        patch, STEP, "stored = self._store.quantized(keys, values)",
        "self.length += keys.shape[0]\n    stored = self._store.quantized(keys, values)\n    self.length -= keys.shape[0]",
    )  # fmt: skip


@bug("WIN-10")
def keys_have_the_scales_of_values(patch):
    in_source(
        patch, WRITE, "self._store.put(slots, stored)",
        "self._store.put(slots, (type(stored[0])(stored[0].codes, *stored[1][1:]), stored[1]))",
    )  # fmt: skip


@bug("TIER-17")
def codes_move_on_without_their_scales(patch):
    only_codes_are_put(patch, TieredCache, "_migrate", lambda cache: cache.total_tokens > 6)


@bug("TIER-17")
def the_scales_of_what_was_evicted_stay(patch):
    only_codes_are_put(patch, TieredCache, "append", lambda cache: cache._next > cache.config.max_tokens)


@bug("TIER-17")
def the_scales_of_what_went_stay(patch):
    only_codes_are_put(patch, TieredCache, "append", lambda cache: cache._next < getattr(cache, "longest", 0))
    truncate = TieredCache.truncate

    def remembering(self, length):
        self.longest = self._next
        truncate(self, length)

    patch.setattr(TieredCache, "truncate", remembering)


@bug("TIER-17")
def tokens_that_move_on_are_quantized_twice(patch):
    in_source(
        patch, SETTLE, "target.write(keys, values)",
        "store = target.segments[-1].store\n            target.write(*store.dequantized(store.quantized(keys, values)))",
    )  # fmt: skip


@bug("TIER-17")
def the_store_is_read_with_the_scales_of_values(patch):
    """Only for the first part of a batch that spans two runs; otherwise every check would notice it."""
    in_source(
        patch, "kvref.tier_queue.Tier.read", "yield segment.store.read(segment.slots(first, last))",
        """slots = segment.slots(first, last)
            keys, values = segment.store.keys.stored(slots), segment.store.values.stored(slots)
            keys = type(keys)(keys.codes, *values[1:]) if len(self.segments) > 1 else keys
            yield segment.store.dequantized((keys, values))""",
    )  # fmt: skip


@bug("TIER-17")
def a_new_format_is_for_what_is_stored_too(patch):
    update = TieredCache.update_policy

    def again(self, **changes):
        store = self._tiers[-1]
        held = list(store.read(0, len(store)))
        update(self, **changes)
        if "store_format" in changes and held:
            store.remove_oldest(sum(len(keys) for keys, _ in held))
            for keys, values in held:
                store.write(keys, values)

    patch.setattr(TieredCache, "update_policy", again)


@bug("TIER-17")
def every_scale_is_counted_as_four_bytes(patch):
    in_source(
        patch,
        "kvref.token_store.SlotStore.token_bytes",
        "ITEM_BYTES[dtype] * prod(shape)",
        "max(ITEM_BYTES[dtype], 4 * (shape != self._parts[0][0])) * prod(shape)",
    )


@bug("TIER-18")
def what_a_store_cannot_hold_is_found_at_migration(patch):
    patch.setattr("kvref.tiered.check_migration", lambda keys, values, stores: None)


@bug("TIER-18")
def the_first_tier_alone_is_looked_at(patch):
    check_migration = TieredCache.append.__globals__["check_migration"]
    patch.setattr("kvref.tiered.check_migration", lambda keys, values, stores: check_migration(keys, values, stores[:1]))


@bug("TIER-18")
def a_new_policy_is_not_held_against_what_is_there(patch):
    in_source(patch, ADOPT, "check_migration(keys, values, later)", "pass")


@bug("TIER-18")
def a_policy_that_is_refused_has_changed(patch):
    in_source(patch, ADOPT, "newest = [", "self.config = config\n    newest = [")


@bug("TIER-18")
def whatever_float16_does_not_reach_is_refused(patch):
    """Which scales have the smaller range is ignored."""
    in_source(patch, "kvref.tiered.TieredCache._check_storable", "< MAGNITUDES_BELOW:", "< 65504.0:")


@bug("MLA-06")
def the_scales_of_rows_that_went_stay(patch):
    only_codes_are_put(patch, LatentCache, "append", lambda cache: cache._length < getattr(cache, "longest", 0))
    truncate = LatentCache.truncate

    def remembering(self, length):
        self.longest = self._length
        truncate(self, length)

    patch.setattr(LatentCache, "truncate", remembering)


@bug("MLA-06")
def the_rope_part_has_a_scale_of_its_own(patch):
    in_source(
        patch, "kvref.latent.LatentCache.__init__", "parts = [(config.dtype, 1, config.rank + config.rope_dim)]",
        "parts = [(config.dtype, 1, config.rank), (config.dtype, 1, config.rope_dim)]",
    )  # fmt: skip


@bug("MLA-06")
def groups_lie_across_the_edge(patch):
    in_source(patch, "kvref.latent.LatentConfig.__post_init__", "(self.rank, self.rope_dim)", "(self.rank + self.rope_dim,)")


@bug("MLA-06")
def scales_lie_before_codes_in_a_record(patch):
    in_source(
        patch, "kvref.latent.LatentCache.records", "record = record_of(self.config)",
        "record = record_of(self.config)\n    fields = [(name, record[name]) for name in record.names]\n"
        "    parts, record = parts[::-1], np.dtype(fields[::-1])",
    )  # fmt: skip


@bug("MLA-06")
def scales_of_16_bits_are_widened_in_a_record(patch):
    patch.setitem(LatentCache.records.__globals__["BYTES"], "float16", "<f4")
    patch.setitem(LatentCache.records.__globals__["BYTES"], "uint16", "<f4")


@bug("MLA-06")
def rows_are_counted_without_their_scales(patch):
    in_source(patch, "kvref.latent.LatentCache.num_bytes", "store.token_bytes", "store._parts[0][0][-1]")


# Paged caches: an operation is applied to codes but not to their scales.

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
        left = keys.format.name in SCALED_FORMATS and keys.format.name not in SYMMETRIC_FORMATS
        return keys.stored(slots) if left else turned(self, rotary, by, slots)

    patch.setattr(PagedCache, "_rotate_keys", some)


@bug("EDIT-10")
def turned_keys_are_stored_by_the_scale_of_values(patch):
    in_source(
        patch, "kvref.paged.PagedCache._rotate_keys", "rotated = keys.quantized(",
        "rotated = (self._store.values if self.config.key_scale else keys).quantized(",
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
        patch, "kvref.paged.PagedCache._rotate_keys", "rotary.turned(keys.read(slots), by, self._backend)",
        "np.nan_to_num(rotary.turned(keys.read(slots), by, self._backend))",
    )  # fmt: skip


@bug("EDIT-10")
def rotated_keys_overflow_to_infinity(patch):
    """Formats with scales raise NonFinite when they quantize, and float16 and bfloat16 do not."""
    in_source(patch, "kvref.paged.PagedCache._rotate_keys", "if self._backend.xp.any(overflows):", "if False:")


@bug("EDIT-10")
def values_are_quantized_again_where_keys_are_turned(patch):
    in_source(
        patch, "kvref.paged.PagedCache.remove", "self._store.keys.put(new, keys)",
        "self._store.write(new, self._store.keys.read(new), self._store.values.read(new) * np.float32(1.0001))\n"
        "        self._store.keys.put(new, keys)",
    )  # fmt: skip


# A given scale or rotated rows: one operation omits a step.

MADE = "kvref.paged.PagedCache.__init__"


def during(patch, cache, operation, method, instead):
    """During an operation of the cache, replace a method of its store: instead(self, right, *args)."""
    right, work, going = getattr(SlotStore, method), getattr(cache, operation), []

    def working(self, *args, **kwargs):
        going.append(self)
        try:
            return work(self, *args, **kwargs)
        finally:
            going.pop()

    patch.setattr(cache, operation, working)
    patch.setattr(SlotStore, method, lambda self, *args: instead(self, right, *args) if going else right(self, *args))


def as_it_lies(store, right, stored):
    """Return rows in rotated form, without the inverse rotation."""
    values = right(store, stored)
    return hadamard(values) if isinstance(store.format, HadamardFormat) else values


@bug("PAGED-18")
def positions_of_pages_are_read_as_they_lie(patch):
    during(patch, PagedCache, "read", "dequantized", as_it_lies)


@bug("ATTN-10")
def pages_are_attended_to_as_they_lie(patch):
    during(patch, PagedCache, "attend", "dequantized", as_it_lies)


@bug("WIN-10")
def a_step_sees_what_is_rotated_still(patch):
    during(patch, WindowedCache, "step", "dequantized", as_it_lies)


@bug("GROUP-08")
def groups_are_attended_to_as_they_lie(patch):
    during(patch, GroupedCache, "attend", "dequantized", as_it_lies)


@bug("TIER-17")
@hidden("tiered", "TIER-17")
def tokens_move_on_as_they_lie(patch):
    during(patch, TieredCache, "_migrate", "dequantized", as_it_lies)


@bug("MLA-06")
def latent_and_rope_part_are_rotated_each_by_itself(patch):
    quantized, dequantized = SlotStore.quantized, SlotStore.dequantized
    latent = []  # stores of latent caches: the row's store, and the start of its rope part
    made = LatentCache.__init__

    def making(self, config, *args, **kwargs):
        made(self, config, *args, **kwargs)
        latent.append((self._stores[0], config.rank))

    def of_halves(store):
        """Rotate both parts separately in these stores."""
        rank = next((rank for each, rank in latent if each is store), None)
        if rank is None or not isinstance(store.format, HadamardFormat):
            return None
        return lambda rows: np.concatenate([hadamard(rows[..., :rank]), hadamard(rows[..., rank:])], axis=-1)

    def writing(self, rows):  # first undoes the rotation of the whole row
        return quantized(self, hadamard(turn(rows)) if (turn := of_halves(self)) else rows)

    def reading(self, stored):
        values = dequantized(self, stored)
        return turn(hadamard(values)) if (turn := of_halves(self)) else values

    patch.setattr(LatentCache, "__init__", making)
    patch.setattr(SlotStore, "quantized", writing)
    patch.setattr(SlotStore, "dequantized", reading)


@bug("FMT-STATIC-06")
def the_scales_of_pages_are_taken_for_each_other(patch):
    in_source(patch, MADE, "of_keys, of_values = config.formats", "of_values, of_keys = config.formats")


@bug("FMT-STATIC-06")
def the_scale_of_keys_is_for_values_too(patch):
    in_source(patch, MADE, "of_keys, of_values = config.formats", "of_keys = of_values = config.formats[0]")


def by_the_scale_of_keys(patch, cache, operation):
    """An operation of the cache reads values with the scale of keys, if scales are given."""
    work = getattr(cache, operation)

    def working(self, *args, **kwargs):
        values = self._store.values
        right = values.format
        if isinstance(right, StaticFloat8):
            values.format = self._store.keys.format
        try:
            return work(self, *args, **kwargs)
        finally:
            values.format = right

    patch.setattr(cache, operation, working)


@bug("ATTN-10")
def values_are_attended_to_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, QuantizedCache, "attend")


@bug("ATTN-10")
def values_of_pages_are_attended_to_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, PagedCache, "attend")


@bug("PAGED-17")
def values_of_a_batch_are_gathered_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, PagedCache, "gather_batch")


@bug("PAGED-17")
def a_batch_of_pages_is_gathered_as_it_lies(patch):
    during(patch, PagedCache, "gather_batch", "dequantized", as_it_lies)


@bug("PAGED-18")
def a_batch_is_quantized_by_one_scale(patch):
    batch = TokenStore.quantized

    def by_the_keys(self, keys, values):
        return (self.keys.quantized(keys), self.keys.quantized(values)) if batched else batch(self, keys, values)

    batched: list[object] = []
    for operation in ("append", "append_step"):
        work = getattr(PagedCache, operation)

        def working(self, *args, work=work):
            batched.append(self)
            try:
                return work(self, *args)
            finally:
                batched.pop()

        patch.setattr(PagedCache, operation, working)
    patch.setattr(TokenStore, "quantized", by_the_keys)


@bug("FMT-STATIC-06")
def pages_learn_their_scale_from_what_comes_first(patch):
    write = PagedCache.write

    def learning(self, sequence, layer, start, keys, values):
        if isinstance(self._store.format, StaticFloat8) and not hasattr(self, "learned"):
            self.learned = True
            for store, rows in ((self._store.keys, keys), (self._store.values, values)):
                if np.size(rows):
                    store.format = store.format.with_scale(float(np.abs(np.asarray(rows)).max() / store.format.small.max) or 1.0)
        write(self, sequence, layer, start, keys, values)

    patch.setattr(PagedCache, "write", learning)


@bug("PREFIX-16")
def what_was_found_is_read_as_it_lies(patch):
    begin = PrefixCache.begin

    def remembering(self, tokens, *args):
        sequence = begin(self, tokens, *args)
        self.found = getattr(self, "found", set()) | ({sequence} if self.length(sequence, 0) else set())
        return sequence

    gather = PrefixCache.gather

    def gathered(self, sequence, layer):
        keys, values = gather(self, sequence, layer)
        rotated = isinstance(self._store.format, HadamardFormat) and sequence in getattr(self, "found", ())
        return (hadamard(keys), hadamard(values)) if rotated else (keys, values)

    patch.setattr(PrefixCache, "begin", remembering)
    patch.setattr(PrefixCache, "gather", gathered)
