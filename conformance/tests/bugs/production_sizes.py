"""Bugs that no small size shows: LAW-18 must notice each, by default or with --real, and no other check may."""

import numpy as np

from bugs.plant import in_source, real
from kvref.backend import ReferenceBackend
from kvref.block_pool import BlockPool
from kvref.block_tables import BlockTables
from kvref.buffers import BufferPool
from kvref.contiguous import ContiguousCache
from kvref.host_store import HostStore
from kvref.paged import PagedCache
from kvref.pooled import PooledCache
from kvref.quantized import QuantizedCache
from kvref.recurrent import RecurrentCache
from kvref.tier_queue import Tier, TierSegment
from kvref.tiered import TieredCache
from kvref_conformance.implementations.backends import Attention


@real("rows")
def a_scale_is_of_the_first_thousand_numbers(patch):
    quantize = ReferenceBackend.quantize

    def hasty(self, rows, format, out=None):
        if rows.shape[-1] > 1000:
            first = np.abs(rows[..., :1000]).max(axis=-1, keepdims=True)
            rows = np.clip(rows, -first, first)
        return quantize(self, rows, format, out)

    patch.setattr(ReferenceBackend, "quantize", hasty)


@real("rows")
def rows_past_the_thousandth_are_read_as_the_one_before(patch):
    dequantize = ReferenceBackend.dequantize

    def torn(self, stored, width, format, out=None):
        values = dequantize(self, stored, width, format, out)
        values[1001:] = values[1000:-1]
        return values

    patch.setattr(ReferenceBackend, "dequantize", torn)


@real("contiguous")
def a_second_growth_copies_a_token_too_few(patch):
    grow = ContiguousCache._grow

    def short(self, needed):
        grow(self, needed)
        self.growths = getattr(self, "growths", 0) + 1
        if self.growths > 1 and self.capacity > 100:
            self._keys[:, :, self.seq_len - 1, :] = 0

    patch.setattr(ContiguousCache, "_grow", short)


@real("contiguous")
def a_fresh_buffer_of_100_tokens_is_never_filled(patch):
    append = ContiguousCache.append

    def short(self, keys, values):
        append(self, keys, values)
        if self.seq_len == self.capacity == keys.shape[2] and self.capacity >= 64:
            self._values[:, :, -1, :] = 0

    patch.setattr(ContiguousCache, "append", short)


@real("contiguous")
def a_length_gone_back_to_is_kept_in_a_byte(patch):
    truncate = ContiguousCache.truncate

    def narrow(self, length):
        truncate(self, length)
        self.seq_len = self.seq_len & 0xFF if self.seq_len > 256 else self.seq_len

    patch.setattr(ContiguousCache, "truncate", narrow)


@real("contiguous")
def past_128_tokens_rows_stay_where_they_were(patch):
    reorder = ContiguousCache.reorder

    def partly(self, rows):
        before = self._keys[:, :, 128:, :].copy()
        reorder(self, rows)
        if len(before) == len(self._keys):
            self._keys[:, :, 128:, :] = before

    patch.setattr(ContiguousCache, "reorder", partly)


@real("contiguous", "paged", "quantized")
def rows_end_at_96_elements(patch):
    cast = ReferenceBackend.quantize

    def short(self, rows, format):
        rows = np.array(rows)
        # small sizes of group formats have rows of this width
        if rows.ndim and 96 < rows.shape[-1] < 256 and format.granularity != "group":
            rows[..., 96:] = 0
        return cast(self, rows, format)

    patch.setattr(ReferenceBackend, "quantize", short)


@real("quantized")
def lengths_are_kept_in_a_byte(patch):
    patch.setattr(QuantizedCache, "length", lambda self, layer=0: int(np.uint8(self._lengths[self._layer(layer)] & 0xFF)))


@real("quantized")
def a_scale_is_looked_up_in_256_slots(patch):
    read = QuantizedCache.read_tokens

    def wrapped(self, layer, positions):
        keys, values = read(self, layer, positions)
        scaled = [keys[n] * 2 if position >= 256 else keys[n] for n, position in enumerate(positions)]
        return np.stack(scaled) if scaled else keys, values

    patch.setattr(QuantizedCache, "read_tokens", wrapped)


@real("quantized")
def going_back_rounds_to_sixteen_past_256_tokens(patch):
    truncate = QuantizedCache.truncate

    def rounded(self, length):
        truncate(self, length if length <= 256 else length // 16 * 16)

    patch.setattr(QuantizedCache, "truncate", rounded)


@real("tiered")
def no_more_than_64_tokens_go_at_once(patch):
    take_back = Tier.remove_newest
    patch.setattr(Tier, "remove_newest", lambda self, count: take_back(self, min(count, 64)))


@real("tiered")
def a_ring_turns_at_128_tokens(patch):
    def slots(self, start, stop):
        return [position % min(self.capacity, 128) for position in range(start, stop)]

    patch.setattr(TierSegment, "slots", slots)


@real("tiered")
def past_1000_tokens_eviction_takes_one_too_many(patch):
    evict = TieredCache._evict

    def greedy(self, count):
        evict(self, count + 1 if count and self._next > 1000 else count)

    patch.setattr(TieredCache, "_evict", greedy)


@real("pooled")
def the_thirtieth_block_is_read_before_the_others(patch):
    read = PooledCache.read

    def turned(self):
        if len(self._blocks) < 30:
            return read(self)
        kept, self._blocks = self._blocks, [self._blocks[1], self._blocks[0], *self._blocks[2:]]
        try:
            return read(self)
        finally:
            self._blocks = kept

    patch.setattr(PooledCache, "read", turned)


@real("recurrent")
def the_state_of_block_256_is_that_of_block_0(patch):
    slots = RecurrentCache._slots
    patch.setattr(RecurrentCache, "_slots", lambda self, block, *index: slots(self, block % 256, *index))


@real("recurrent")
def an_append_writes_its_first_256_tokens_to_the_matrix(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache._update", "range(0, count, CHUNK)", "range(0, min(count, 256), CHUNK)")


@real("recurrent")
def the_hundredth_draft_is_not_rejected(patch):
    truncate = RecurrentCache.truncate

    def tired(self, sequence, length):
        draft = 0 < length < self._sequence(sequence).length
        self.rejected = getattr(self, "rejected", 0) + draft
        if not (draft and self.rejected == 100):
            truncate(self, sequence, length)

    patch.setattr(RecurrentCache, "truncate", tired)


@real("recurrent")
def the_hundredth_checkpoint_of_a_sequence_is_not_found(patch):
    checkpoint = RecurrentCache.checkpoint

    def forgets(self, sequence):
        checkpoint(self, sequence)
        kept = self._sequence(sequence).checkpoints
        if len(kept) == 100:
            self.pool.free(kept.pop(max(kept)))

    patch.setattr(RecurrentCache, "checkpoint", forgets)


@real("recurrent")
def the_hundredth_sequence_starts_from_the_state_before(patch):
    create = RecurrentCache.create

    def keeps(self):
        if self._next_sequence != 100:
            return create(self)
        copy, self._copy = self._copy, lambda sources, targets: None
        try:
            return create(self)
        finally:
            self._copy = copy

    patch.setattr(RecurrentCache, "create", keeps)


@real("buffers")
def the_257th_buffer_in_use_is_the_first(patch):
    acquire = BufferPool.acquire

    def again(self, num_bytes):
        buffer = acquire(self, num_bytes)
        self.in_use = [each for each in getattr(self, "in_use", []) if each._memory is not None] + [buffer]
        if len(self.in_use) > 256 and self.in_use[0].size == buffer.size:
            buffer._memory = self.in_use[0]._memory
        return buffer

    patch.setattr(BufferPool, "acquire", again)


@real("kernels")
def scatter_wraps_at_16_bits(patch):
    scatter = ReferenceBackend.scatter

    def wrapped(self, store, slots, new):
        slots = np.asarray(slots)
        past = slots.dtype.kind in "iu" and slots.ndim == 1 and 2**16 <= slots.max(initial=0) < len(store)
        return scatter(self, store, slots % 2**16 if past else slots, new)

    patch.setattr(ReferenceBackend, "scatter", wrapped)


@real("attention")
def a_tile_of_128_tokens_leaves_out_its_first(patch):
    attended = Attention.attention

    def leaving_out(self, query, keys, values, **options):
        if len(keys) > 128:
            keys, values = (np.concatenate([part[:128], part[127:128], part[129:]]) for part in (keys, values))
        return attended(self, query, keys, values, **options)

    patch.setattr(Attention, "attention", leaving_out)


# Blocks and paged caches.


@real("blocks")
def a_pool_keeps_a_thousand_free_blocks_in_mind(patch):
    free = BlockPool.free

    def forgetful(self, block):
        free(self, block)
        self._num_free = min(self._num_free, 1000) if self.num_blocks > 1000 else self._num_free

    patch.setattr(BlockPool, "free", forgetful)


@real("blocks", "paged")
def blocks_handed_out_are_numbered_in_16_bits(patch):
    allocate = BlockPool.allocate_many
    patch.setattr(BlockPool, "allocate_many", lambda self, count: allocate(self, count).astype(np.uint16).astype(np.int32))


@real("blocks", "paged")
def references_are_counted_in_a_byte(patch):
    init = BlockPool.__init__

    def narrow(self, num_blocks):
        init(self, num_blocks)
        self._references = self._references.astype(np.uint8)

    patch.setattr(BlockPool, "__init__", narrow)


@real("kernels")
def blocks_to_copy_are_numbered_in_16_bits(patch):
    copy = ReferenceBackend.copy

    def wrapped(self, store, sources, targets, block_size=1):
        sources = np.asarray(sources)
        large = sources.dtype.kind in "iu" and 2**16 <= sources.max(initial=0) < len(store) // block_size
        return copy(self, store, sources % 2**16 if large else sources, targets, block_size)

    patch.setattr(ReferenceBackend, "copy", wrapped)


def slots_through(patch, narrow):
    slots = BlockTables.slots
    patch.setattr(BlockTables, "slots", lambda self, *where: narrow(slots(self, *where)))


@real("paged")
def slots_are_kept_in_a_byte_of_blocks(patch):
    def narrow(self, tables, layers, positions):
        blocks = self.at(tables, layers, positions // self.block_size).astype(np.uint8).astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    patch.setattr(BlockTables, "slots", narrow)


@real("paged")
def slots_are_kept_in_16_bits(patch):
    slots_through(patch, lambda slots: slots.astype(np.uint16).astype(np.int64))


@real("paged")
def slots_are_computed_in_float16(patch):
    slots_through(patch, lambda slots: slots.astype(np.float16).astype(np.int64))


@real("paged")
def past_64_entries_a_table_repeats_its_first(patch):
    append = BlockTables.append

    def short(self, table, entries):
        append(self, table, entries)
        for layer in self._blocks[table]:
            layer[64:] = layer[:1] * len(layer[64:])

    patch.setattr(BlockTables, "append", short)


@real("paged")
def a_table_row_ends_at_1024_entries(patch):
    slots = BlockTables.slots

    def wrapped(self, tables, layers, positions):
        return slots(self, tables, layers, positions % (1024 * self.block_size))

    patch.setattr(BlockTables, "slots", wrapped)


@real("paged")
def of_more_than_256_sequences_the_oldest_is_forgotten(patch):
    create = PagedCache.create

    def pruning(self):
        sequence = create(self)
        if len(self._table_of) > 256:
            self._tables.close(self._table_of.pop(next(iter(self._table_of))))
        return sequence

    patch.setattr(PagedCache, "create", pruning)


@real("paged")
def sequences_are_known_by_nine_bits(patch):
    table = PagedCache._table

    def mistaken(self, sequence):
        table(self, sequence)
        return self._table_of[max(each for each in self._table_of if each % 512 == sequence % 512)]

    patch.setattr(PagedCache, "_table", mistaken)


@real("paged")
def the_last_layer_is_as_long_as_the_first_past_256_tokens(patch):
    gather = PagedCache.gather

    def alike(self, sequence, layer):
        table = self._table(sequence)
        longest = int(self._tables.lengths[table].max())
        if longest <= 256 or layer == 0:
            return gather(self, sequence, layer)
        before = self._tables.lengths[table, layer]
        self._tables.lengths[table, layer] = max(before, min(before + 1, self._tables.capacity(table)))
        try:
            return gather(self, sequence, layer)
        finally:
            self._tables.lengths[table, layer] = before

    patch.setattr(PagedCache, "gather", alike)


@real("paged")
def lengths_are_kept_in_16_bits(patch):
    length = PagedCache.length
    patch.setattr(PagedCache, "length", lambda self, sequence, layer: int(np.int16(length(self, sequence, layer) & 0x7FF)))


@real("offload")
def places_of_a_host_store_have_16_bits(patch):
    places = HostStore.places

    def narrow(self, keys):
        return [place & 0xFFFF for place in places(self, keys)]

    patch.setattr(HostStore, "places", narrow)
