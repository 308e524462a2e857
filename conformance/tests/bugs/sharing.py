"""Bugs in shared blocks: references, forks, copy-on-write."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.block_pool import BlockPool
from kvref.block_tables import BlockTables
from kvref.paged import PagedCache
from kvref.token_store import TokenStore


@bug("SHARE-01")
def freeing_forgets_every_reference(patch):
    in_source(patch, "kvref.block_pool.BlockPool.free_many", "self._references[numbers] -= 1", "self._references[numbers] = 0")


@bug("SHARE-01")
def the_last_reference_is_kept(patch):
    in_source(patch, "kvref.block_pool.BlockPool.free_many", "self._references[numbers] == 0", "self._references[numbers] < 0")


@bug("SHARE-01")
def a_shared_block_counts_twice(patch):
    patch.setattr(BlockPool, "num_used", property(lambda self: int(self._references.sum())))


@bug("SHARE-01")
def a_block_handed_out_again_keeps_its_references(patch):
    in_source(patch, "kvref.block_pool.BlockPool.allocate_many", "self._references[taken] = 1", "self._references[taken] += 2")


@bug("SHARE-01")
def a_block_of_no_pool_has_no_references(patch):
    patch.setattr(BlockPool, "references", lambda self, block: int(self._references[block % self.num_blocks]))


@bug("SHARE-02")
def a_free_block_can_be_shared(patch):
    patch.setattr(BlockPool, "share", lambda self, block: self.share_many([block]))


@bug("SHARE-02")
def sharing_what_no_one_holds_goes_unnoticed(patch):
    share = BlockPool.share

    def silent(self, block):
        if 0 <= block < self.num_blocks and self._references[block]:
            share(self, block)

    patch.setattr(BlockPool, "share", silent)


@bug("SHARE-03")
def a_fork_copies_every_block(patch):
    fork = PagedCache.fork

    def deep(self, sequence):
        child = fork(self, sequence)
        for layer in range(self.config.num_layers):
            self._make_writable({}, self._table(child), layer, np.arange(self.length(child, layer)))
        return child

    patch.setattr(PagedCache, "fork", deep)


@bug("SHARE-03")
def a_fork_is_as_long_as_its_first_layer(patch):
    in_source(patch, "kvref.block_tables.BlockTables.fork", "= self.lengths[table]", "= self.lengths[table, 0]")


@bug("SHARE-03")
def a_fork_takes_the_id_of_the_last_that_was_dropped(patch):
    in_source(patch, "kvref.paged.PagedCache.fork", "child = self._next_sequence", "child = len(self._table_of)")


@bug("SHARE-03", "SHARE-09")
def a_fork_leaves_out_what_its_last_block_holds(patch):
    in_source(
        patch,
        "kvref.block_tables.BlockTables.fork",
        "self.lengths[table]",
        "self.lengths[table] // self.block_size * self.block_size",
    )


@bug("SHARE-04", "SHARE-05")
def a_shared_block_is_written_in_place(patch):
    patch.setattr(PagedCache, "_needs_copy", lambda self, blocks: np.zeros(blocks.shape, bool))


@bug("SHARE-04", "SHARE-06")
def a_fork_takes_no_reference(patch):
    in_source(patch, "kvref.paged.PagedCache.fork", "self.pool.share_many(self._tables.held(table))", "None")


@bug("SHARE-04")
def truncating_frees_shared_blocks_for_all(patch):
    truncate = PagedCache.truncate

    def freeing(self, sequence, length):
        held = self._tables.held(self._table(sequence)).copy()
        truncate(self, sequence, length)
        gone = np.setdiff1d(held, self._tables.held(self._table(sequence)))
        still = gone[self.pool._references[gone] > 0]
        self.pool._references[still] = 0
        self.pool._return_blocks(still)

    patch.setattr(PagedCache, "truncate", freeing)


@bug("SHARE-04")
def a_fork_lists_its_parents_table(patch):
    def same(self, sequence):
        child = self.create()
        self._tables.close(self._table_of[child])
        self._table_of[child] = self._table(sequence)
        return child

    patch.setattr(PagedCache, "fork", same)


@bug("SHARE-05")
def keys_are_copied_and_values_are_not(patch):
    in_source(patch, "kvref.token_store.TokenStore.copy", "self.values.copy(sources, targets, block_size)", "pass")


@bug("SHARE-05")
def a_copy_leaves_out_the_last_slot(patch):
    copy = TokenStore.copy

    def short(self, sources, targets, block_size=1):
        slots = [np.array(blocks)[:, None] * block_size + np.arange(max(1, block_size - 1)) for blocks in (sources, targets)]
        copy(self, slots[0].reshape(-1), slots[1].reshape(-1))

    patch.setattr(TokenStore, "copy", short)


@bug("SHARE-05")
def a_copy_is_of_the_zeros_that_it_was_made_of(patch):
    patch.setattr(TokenStore, "copy", lambda self, sources, targets, block_size=1: None)


@bug("SHARE-05")
def the_whole_table_is_copied(patch):
    prepare = PagedCache._make_writable

    def greedy(self, more, tables, layers, positions):
        if np.size(positions) and np.ndim(tables) == 0 and np.ndim(layers) == 0:
            positions = np.arange(self._tables.count(tables) * self.config.block_size)
        prepare(self, more, tables, layers, positions)

    patch.setattr(PagedCache, "_make_writable", greedy)


@bug("SHARE-05")
def who_holds_a_block_alone_copies_it_too(patch):
    patch.setattr(PagedCache, "_needs_copy", lambda self, blocks: np.ones(blocks.shape, bool))
    patch.setattr(PagedCache, "_copies_needed", lambda self, block: self.pool.references(block))


@bug("SHARE-05")
def of_those_who_write_at_once_each_gets_a_copy(patch):
    patch.setattr(PagedCache, "_copies_needed", lambda self, block: self.pool.references(block))


@bug("SHARE-05")
def the_parent_copies_and_the_child_gets_the_copy(patch):
    replace = BlockTables.replace

    def other(self, table, layer, entry, block):
        before = self._blocks[table][layer][entry]
        found = [each for each, blocks in enumerate(self._blocks) if each != table and before in blocks[layer][entry : entry + 1]]
        return replace(self, found[0] if found else table, layer, entry, block)

    patch.setattr(BlockTables, "replace", other)


@bug("SHARE-06")
def a_drop_gives_back_what_others_hold(patch):
    in_source(patch, "kvref.block_pool.BlockPool.free_many", "self._references[numbers] -= 1", "self._references[numbers] = 0")


@bug("SHARE-06")
def a_block_that_was_shared_never_comes_back(patch):
    in_source(patch, "kvref.paged.PagedCache._make_writable", "self.pool.free(source)", "None")


@bug("SHARE-07")
def half_of_the_copies_are_made_before_there_is_no_room(patch):
    prepare = PagedCache._make_writable

    def hasty(self, more, tables, layers, positions):
        places = self._places_to_copy(tables, layers, positions // self.config.block_size)
        if len(places) > self.pool.num_free > 0:
            table, layer, entry = places[0]
            prepare(self, {}, table, layer, np.array([entry * self.config.block_size]))
        prepare(self, more, tables, layers, positions)

    patch.setattr(PagedCache, "_make_writable", hasty)


@bug("SHARE-07")
def without_room_for_a_copy_the_shared_block_is_written_to(patch):
    old = "if needed + len(places) > self.pool.num_free:"
    new = "if needed <= self.pool.num_free < needed + len(places):\n        places = []\n    elif needed > self.pool.num_free:"
    in_source(patch, "kvref.paged.PagedCache._make_writable", old, new)


@bug("SHARE-08")
def a_fork_cannot_be_forked(patch):
    fork = PagedCache.fork

    def once(self, sequence):
        self.forks = getattr(self, "forks", {})
        child = fork(self, self.forks.get(sequence, sequence))
        self.forks[child] = sequence
        return child

    patch.setattr(PagedCache, "fork", once)


@bug("SHARE-08")
def forking_an_unknown_sequence_gives_an_empty_one(patch):
    fork = PagedCache.fork
    patch.setattr(
        PagedCache, "fork", lambda self, sequence: fork(self, sequence) if sequence in self._table_of else self.create()
    )


@bug("SHARE-08")
def what_is_reserved_is_shared_and_written_by_both(patch):
    shared = PagedCache._places_to_copy

    def filled(self, tables, layers, entries):
        return [
            (table, layer, entry)
            for table, layer, entry in shared(self, tables, layers, entries)
            if entry * self.config.block_size < self._tables.lengths[table, layer]
        ]

    patch.setattr(PagedCache, "_places_to_copy", filled)


@bug("SHARE-09")
def a_copy_is_made_by_the_next_write(patch):
    copy, write = TokenStore.copy, TokenStore.write

    def later(self, *what):
        self.pending = [*getattr(self, "pending", []), what]

    def first(self, slots, keys, values):
        pending, self.pending = getattr(self, "pending", []), []
        write(self, slots, keys, values)
        if len(slots) > 2:  # too few to justify a kernel launch
            for what in pending:
                copy(self, *what)
            write(self, slots, keys, values)
        else:
            self.pending = pending

    patch.setattr(TokenStore, "copy", later)
    patch.setattr(TokenStore, "write", first)


@bug("KERN-09")
def blocks_are_copied_one_after_the_other(patch):
    from kvref.backend import ReferenceBackend

    copy = ReferenceBackend.copy

    def in_turn(self, store, sources, targets, block_size=1):
        if len(sources) != len(targets):
            return copy(self, store, sources, targets, block_size)
        for n in range(len(sources)):
            store = copy(self, store, sources[n : n + 1], targets[n : n + 1], block_size)
        return store

    patch.setattr(ReferenceBackend, "copy", in_turn)


@bug("KERN-09")
def a_block_is_copied_up_to_its_last_slot(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.copy", "offsets = np.arange(block_size)",
              "offsets = np.arange(max(1, block_size - 1))")  # fmt: skip


@bug("KERN-09")
def negative_blocks_are_counted_from_the_end(patch):
    in_source(patch, "kvref.backend.blocks_to_copy", "slots_to_gather(numbers, blocks, to_numpy)",
              "host_slots(numbers, blocks, to_numpy) % max(1, blocks)")  # fmt: skip


@bug("KERN-09")
def slots_of_blocks_are_computed_in_the_type_of_the_blocks(patch):
    from kvref.backend import ReferenceBackend

    copy = ReferenceBackend.copy

    def narrow(self, store, sources, targets, block_size=1):
        if getattr(sources, "dtype", None) == np.int8 and 1 < block_size < 128:
            sources = sources * np.int8(block_size) // np.int8(block_size)
        return copy(self, store, sources, targets, block_size)

    patch.setattr(ReferenceBackend, "copy", narrow)


def forgetful_copy(patch, loses):
    """A copy is skipped in a state that few calls lead to."""
    prepare = PagedCache._make_writable

    def losing(self, more, tables, layers, positions):
        places = self._places_to_copy(tables, layers, positions // self.config.block_size)
        lost = loses(self, places, more)
        copy = self._store.copy
        if lost:
            self._store.copy = lambda *what: None
        try:
            prepare(self, more, tables, layers, positions)
        finally:
            if lost:
                self._store.copy = copy

    patch.setattr(PagedCache, "_make_writable", losing)


@hidden("paged", "SHARE-05")
def a_copy_is_forgotten_where_blocks_are_taken_too(patch):
    forgetful_copy(patch, lambda self, places, more: bool(places) and sum(more.values()) > 0)
