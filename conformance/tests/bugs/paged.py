"""Bugs in the block pool and the paged cache."""

from bugs.plant import bug, in_source
from kvref.block_pool import BlockPool
from kvref.paged import PagedCache


@bug("BLOCK-01")
def a_pool_keeps_one_block_back(patch):
    in_source(patch, "kvref.block_pool.BlockPool.__init__", "np.arange(self.num_blocks,", "np.arange(self.num_blocks - 1,")


@bug("BLOCK-02", "PAGED-13", "LAW-03")
def a_block_is_handed_out_twice(patch):
    old = "self._free[left : self._num_free]"
    in_source(patch, "kvref.block_pool.BlockPool._pop_free_blocks", old, "self._free[left // 2 : left // 2 + count]")


@bug("BLOCK-03")
def an_empty_pool_gives_minus_one(patch):
    in_source(
        patch,
        "kvref.block_pool.BlockPool.allocate_many",
        "if count > self.num_free:",
        "if count > self.num_free:\n        return np.full(count, -1)",
    )


@bug("BLOCK-05")
def a_block_is_freed_twice(patch):
    in_source(
        patch,
        "kvref.block_pool.BlockPool.free",
        "self.free_many",
        "block in self._free[: self._num_free] or self.free_many",
    )


@bug("BLOCK-06", "PAGED-15")
def utilization_of_none_is_nan(patch):
    patch.setattr(
        BlockPool, "utilization", property(lambda self: self.num_used / self.num_blocks if self.num_blocks else float("nan"))
    )


@bug("BLOCK-07")
def fewer_blocks_are_given_than_were_asked_for(patch):
    in_source(
        patch,
        "kvref.block_pool.BlockPool.allocate_many",
        "if count > self.num_free:",
        "count = min(count, self.num_free)\n    if False:",
    )


@bug("PAGED-01")
def ids_are_used_again(patch):
    in_source(patch, "kvref.paged.PagedCache.create", "self._next_sequence\n", "len(self._table_of)\n")


@bug("PAGED-02")
def a_new_sequence_takes_a_block(patch):
    create = PagedCache.create

    def eager(self):
        sequence = create(self)
        self.ensure_capacity(sequence, 1)
        return sequence

    patch.setattr(PagedCache, "create", eager)


@bug("PAGED-03")
def a_full_block_brings_the_next(patch):
    in_source(
        patch,
        "kvref.block_tables.BlockTables.entries_for",
        "-(-num_tokens // self.block_size)",
        "num_tokens // self.block_size + 1",
    )


@bug("PAGED-04")
def ensuring_takes_blocks_every_time(patch):
    in_source(patch, "kvref.paged.PagedCache._missing_entries", " - self._tables.count(table)", "")


@bug("PAGED-06", "PAGED-14")
def slots_are_decoded_with_another_block_size(patch):
    in_source(
        patch,
        "kvref.block_tables.BlockTables.slots",
        "positions % self.block_size",
        "positions % 2",
    )


@bug("PAGED-07")
def only_the_first_layer_is_given_back(patch):
    in_source(patch, "kvref.block_sequences.BlockOwner.drop", "(self._table(sequence)))", "(self._table(sequence))[:1])")


@bug("PAGED-08")
def an_unknown_sequence_has_length_0(patch):
    length = PagedCache.length
    patch.setattr(
        PagedCache, "length", lambda self, sequence, layer: length(self, sequence, layer) if sequence in self._table_of else 0
    )


@bug("PAGED-09")
def length_is_capacity(patch):
    patch.setattr(PagedCache, "length", lambda self, sequence, layer: self._tables.capacity(self._table(sequence)))


@bug("PAGED-09")
def overwriting_shortens(patch):
    in_source(patch, "kvref.paged.PagedCache.write", "max(length, end)", "end")


@bug("PAGED-10")
def holes_are_allowed(patch):
    in_source(
        patch, "kvref.paged.PagedCache.write", "_check_position(table, start, length + 1", "_check_position(table, start, 999"
    )


@bug("PAGED-11")
def overwriting_spills_into_the_next_slot(patch):
    spill = "start < length and self._store.write(self._tables.slots(table, layer, positions[:1]) + 1, keys[:1], values[:1])"
    old = "self._store.put("
    in_source(patch, "kvref.paged.PagedCache.write", old, f"{spill}\n    {old}")


@bug("PAGED-12")
def blocks_are_read_in_order_of_their_number(patch):
    in_source(
        patch,
        "kvref.paged.PagedCache.gather",
        "self._tables.slots(table, layer, positions)",
        "np.sort(self._tables.slots(table, layer, positions))",
    )


@bug("PAGED-16")
def a_batch_goes_by_its_own_order(patch):
    in_source(patch, "kvref.paged.PagedCache.append", "self._tables.slots(tables,", "self._tables.slots(np.sort(tables),")


@bug("PAGED-16")
def the_third_of_a_batch_gets_the_blocks_of_the_second(patch):
    in_source(patch, "kvref.block_tables.BlockTables.extend", "begin += size", "begin = size")


@bug("PAGED-16")
def a_step_takes_every_layers_length_for_the_first(patch):
    in_source(
        patch,
        "kvref.paged.PagedCache.append_step",
        "self._tables.lengths[tables] +",
        "self._tables.lengths[tables][:, :1] * np.ones_like(self._tables.lengths[tables]) +",
    )


@bug("PAGED-16")
def a_sequence_named_twice_is_written_once(patch):
    in_source(patch, "kvref.paged.PagedCache.append", " + _earlier_occurrences(sequences)", "")


@bug("PAGED-17")
def tables_are_filled_up_with_block_0(patch):
    old = "self._tables.padded(tables, layer)"
    in_source(patch, "kvref.paged.PagedCache.block_tables", old, f"np.maximum({old}, 0)")


@bug("PAGED-17")
def offsets_are_lengths(patch):
    in_source(patch, "kvref.paged.PagedCache.gather_batch", "asarray(offsets.", "asarray(lengths.")


@bug("PAGED-17")
def past_its_end_a_table_repeats_its_last_block(patch):
    in_source(patch, "kvref.block_tables.BlockTables.padded", "[NO_BLOCK] *", "(row[-1:] or [NO_BLOCK]) *")
