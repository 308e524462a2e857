"""Bugs in the block pool and the paged cache."""

from bugs.plant import bug, in_source
from kvref.blocks import BlockPool
from kvref.paged import PagedCache


@bug("BLOCK-01")
def a_pool_keeps_one_block_back(patch):
    in_source(patch, "kvref.blocks.BlockPool.__init__", "reversed(range(num_blocks))", "reversed(range(num_blocks - 1))")


@bug("BLOCK-02", "PAGED-13", "LAW-03")
def a_block_is_handed_out_twice(patch):
    in_source(patch, "kvref.blocks.BlockPool.allocate", "self._free.pop()", "self._free[len(self._free) // 2]")


@bug("BLOCK-03")
def an_empty_pool_gives_minus_one(patch):
    in_source(patch, "kvref.blocks.BlockPool.allocate", "if not self._free:", "if not self._free:\n        return -1")


@bug("BLOCK-05")
def a_block_is_freed_twice(patch):
    in_source(
        patch,
        "kvref.blocks.BlockPool.free",
        "if not is_integer(block) or block not in self._used:",
        "if block in self._free:\n        self._free.append(block)\n        return\n    if block not in self._used:",
    )


@bug("BLOCK-06", "PAGED-15")
def utilization_of_none_is_nan(patch):
    patch.setattr(
        BlockPool, "utilization", property(lambda self: self.num_used / self.num_blocks if self.num_blocks else float("nan"))
    )


@bug("PAGED-01")
def ids_are_used_again(patch):
    in_source(patch, "kvref.paged.PagedCache.create", "self._next_sequence\n", "len(self._sequences)\n")


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
        "kvref.paged.PagedCache.ensure_capacity",
        "-(-num_tokens // self.config.block_size)",
        "(num_tokens // self.config.block_size + 1)",
    )


@bug("PAGED-04")
def ensuring_takes_blocks_every_time(patch):
    in_source(patch, "kvref.paged.PagedCache.ensure_capacity", " - held)", ")")


@bug("PAGED-06", "PAGED-14")
def slots_are_decoded_with_another_block_size(patch):
    in_source(
        patch,
        "kvref.blocks.BlockTable.slot",
        "* self._block_size + position % self._block_size",
        "* self._block_size + position % 2",
    )


@bug("PAGED-07")
def only_the_first_layer_is_given_back(patch):
    in_source(patch, "kvref.paged.PagedCache.drop", "range(self.config.num_layers)", "range(1)")


@bug("PAGED-08")
def an_unknown_sequence_has_length_0(patch):
    length = PagedCache.length
    patch.setattr(
        PagedCache, "length", lambda self, sequence, layer: length(self, sequence, layer) if sequence in self._sequences else 0
    )


@bug("PAGED-09")
def length_is_capacity(patch):
    patch.setattr(PagedCache, "length", lambda self, sequence, layer: self._find(sequence).table.capacity(layer))


@bug("PAGED-09")
def overwriting_shortens(patch):
    in_source(patch, "kvref.paged.PagedCache.write", "max(found.lengths[layer], start + count)", "start + count")


@bug("PAGED-10")
def holes_are_allowed(patch):
    in_source(patch, "kvref.paged.PagedCache.write", "found.lengths[layer] + 1", "found.table.capacity(layer) + 99")


@bug("PAGED-11")
def overwriting_spills_into_the_next_slot(patch):
    spill = "start < found.lengths[layer] and self._store.write([found.table.slot(layer, start) + 1], keys[:1], values[:1])"
    old = "self._store.write([found"
    in_source(patch, "kvref.paged.PagedCache.write", old, f"{spill}\n    {old}")


@bug("PAGED-12")
def blocks_are_read_in_order_of_their_number(patch):
    in_source(
        patch,
        "kvref.paged.PagedCache.read",
        "[found.table.slot(layer, position) for position in positions]",
        "sorted(found.table.slot(layer, position) for position in positions)",
    )
