"""Bugs of blocks and paged caches that no small size shows:

LAW-18 must notice each, by default or with --real, and no other check.
"""

import numpy as np

from bugs.plant import real
from kvref.backend import ReferenceBackend
from kvref.block_pool import BlockPool
from kvref.block_tables import BlockTables
from kvref.paged import PagedCache


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
