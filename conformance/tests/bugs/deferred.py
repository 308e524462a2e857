"""Bugs that show only if two calls follow each other and nothing is read between them."""

from collections import OrderedDict

import numpy as np

from bugs.engines import put, rows_of
from bugs.plant import bug, deferred
from kvref.engine import Engine
from kvref.paged import PagedCache
from kvref.prefix import CachedBlock, PrefixCache


def forgetting(patch, cache, *reads):
    """Each of these reads finishes what an edit left for later, so that the bug does not show."""
    for name in reads:
        read = getattr(cache, name)

        def reading(self, *args, read=read, **named):
            self.left = None
            return read(self, *args, **named)

        patch.setattr(cache, name, reading)


PAGED_READS = ("gather", "read", "length", "block_table", "block_tables", "gather_batch", "attend", "slot_mapping")


@deferred("paged", "WIN-09")
def a_release_after_a_truncate_to_the_end_of_a_block_loses_a_block(patch):
    truncate, release = PagedCache.truncate, PagedCache.release_before

    def truncating(self, sequence, length):
        truncate(self, sequence, length)
        self.left = sequence if length and length % self.config.block_size == 0 else None

    def releasing(self, sequence, position):
        loses = getattr(self, "left", None) == sequence and self.pool.num_free
        release(self, sequence, position)
        if loses:
            self.pool.allocate()
        self.left = None

    forgetting(patch, PagedCache, *PAGED_READS)
    patch.setattr(PagedCache, "truncate", truncating)
    patch.setattr(PagedCache, "release_before", releasing)


@deferred("paged", "EDIT-10")
@deferred("prefix", "EDIT-10")
@bug("EDIT-10")
def the_second_of_two_rotations_is_lost(patch):
    """Modelled on ggml-org/llama.cpp#3825: a shift that waits for the next read is not added to an earlier one."""
    remove = PagedCache.remove

    def removing(self, sequence, start, stop, frequencies=None, layout="halves"):
        waits = frequencies is not None and getattr(self, "left", None) == sequence
        remove(self, sequence, start, stop, None if waits else frequencies, layout)
        self.left = None if frequencies is None else sequence

    forgetting(patch, PagedCache, *PAGED_READS)
    patch.setattr(PagedCache, "remove", removing)


@bug("PREFIX-14")
def keys_of_a_cached_block_are_rotated_in_place(patch):
    """The block is in one table only, and the removal looks for other tables, but not into the prefix index."""
    remove, needs_copy, copies_needed = PagedCache.remove, PrefixCache._needs_copy, PrefixCache._copies_needed

    def removing(self, sequence, start, stop, frequencies=None, layout="halves"):
        self.rotates = frequencies is not None
        try:
            remove(self, sequence, start, stop, frequencies, layout)
        finally:
            self.rotates = False

    def needing(self, blocks):
        return self.pool.shared(blocks) if getattr(self, "rotates", False) else needs_copy(self, blocks)

    def counting(self, block):
        return self.pool.references(block) - 1 if getattr(self, "rotates", False) else copies_needed(self, block)

    patch.setattr(PagedCache, "remove", removing)
    patch.setattr(PrefixCache, "_needs_copy", needing)
    patch.setattr(PrefixCache, "_copies_needed", counting)


@deferred("prefix", "PREFIX-04")
@bug("PREFIX-04")
def a_commit_adds_the_blocks_that_a_window_freed(patch):
    """Modelled on sgl-project/sglang#31486: the entries of the freed blocks are added with the ids that they had."""
    commit, release = PrefixCache.commit, PrefixCache.release_before

    def releasing(self, sequence, position):
        before = [self.block_table(sequence, layer) for layer in range(self.config.num_layers)]
        release(self, sequence, position)
        after = self.block_table(sequence, 0)
        self.freed = getattr(self, "freed", {}) | {int(sequence): (before, sum(block == -1 for block in after))}

    def committing(self, sequence, tokens):
        commit(self, sequence, tokens)
        before, count = getattr(self, "freed", {}).get(int(sequence), ((), 0))
        for entry, key in enumerate(self._committed[int(sequence)].keys[:count]):
            if not self.pool.find(key):
                cached = CachedBlock(key, np.array([table[entry] for table in before], np.int32))
                self.pool._index[key] = OrderedDict({cached.blocks.tobytes(): cached})

    patch.setattr(PrefixCache, "release_before", releasing)
    patch.setattr(PrefixCache, "commit", committing)


@bug("PREFIX-07")
def a_commit_adds_released_blocks_again(patch):
    a_commit_adds_the_blocks_that_a_window_freed(patch)


@deferred("engine", "ENG-10")
@bug("ENG-05")
def an_aborted_transfer_lands_on_the_next_owner(patch):
    """Modelled on sgl-project/sglang#32564: rows of a loaded session that is closed unused are written to the next session."""
    load, close, extend, length = Engine.load, Engine.close, Engine.extend, Engine.length

    def loading(self, saved):
        session = load(self, saved)
        self.unused, self.rows = session, rows_of(self, session) if self._tokens[session] else []
        return session

    def closing(self, session):
        self.aborted = self.rows if getattr(self, "unused", None) == session else []
        close(self, session)

    def extending(self, session, tokens):
        fresh = not length(self, session)
        extend(self, session, tokens)
        if fresh and getattr(self, "aborted", []):
            put(self, session, self.aborted, 0, min(length(self, session), len(self.aborted[0][0])))
        self.aborted = []

    def using(used):
        def use(self, *args, **named):
            self.unused = None
            return used(self, *args, **named)

        return use

    for name in ("generate", "step", "sample", "cancel", "fork", "save", "length", "truncate", "remove"):
        patch.setattr(Engine, name, using(getattr(Engine, name)))
    patch.setattr(Engine, "load", loading)
    patch.setattr(Engine, "close", closing)
    patch.setattr(Engine, "extend", extending)
