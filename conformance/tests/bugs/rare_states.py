"""Bugs that show in one state only: a state machine has to find them, whatever the hand-written checks find."""

import numpy as np

from bugs.plant import hidden
from kvref.block_pool import BlockPool
from kvref.buffers import Buffer
from kvref.contiguous import ContiguousCache
from kvref.paged import PagedCache
from kvref.pooled import PooledCache
from kvref.quantized import QuantizedCache
from kvref.tiered import TieredCache


def dropping(patch, gives_back):
    """`drop` frees only some of each layer's blocks, selected from its blocks, tokens and block size."""

    def drop(self, sequence):
        number, size = self._table(sequence), self.config.block_size
        tables = [self._tables.blocks(number, layer) for layer in range(self.config.num_layers)]
        tokens = self._tables.lengths[number].tolist()
        self._tables.close(number)
        for table, count in zip(tables, tokens, strict=True):
            for block in gives_back(table, count, max(tokens), size):
                self.pool.free(block)
        del self._table_of[sequence]

    patch.setattr(PagedCache, "drop", drop)


@hidden("paged", "PAGED-07")
def a_partly_filled_block_is_not_given_back(patch):
    dropping(
        patch, lambda table, tokens, most, size: [b for i, b in enumerate(table) if i != tokens // size or tokens % size == 0]
    )


@hidden("paged", "PAGED-07")
def blocks_are_given_back_by_each_layers_tokens(patch):
    dropping(patch, lambda table, tokens, most, size: table[: -(-tokens // size)] if tokens else table)


@hidden("paged", "PAGED-07")
def what_was_reserved_is_not_given_back(patch):
    dropping(patch, lambda table, tokens, most, size: table[: -(-most // size)] if most else table)


def overwriting(patch, spoiled):
    """Overwriting loses the tokens that `spoiled` selects from start, end, the earlier length and the block size."""
    write = PagedCache.write

    def lossy(self, sequence, layer, start, keys, values):
        valid = sequence in self._table_of and layer in range(self.config.num_layers)
        before = self._tables.lengths[self._table_of[sequence], layer] if valid else 0
        there = self.read(sequence, layer, range(before)) if 0 <= start < before else None
        write(self, sequence, layer, start, keys, values)
        end = start + keys.shape[0]
        if there is not None and start < end <= before:
            for position in spoiled(start, end, before, self.config.block_size):
                write(self, sequence, layer, position, there[0][position : position + 1], there[1][position : position + 1])

    patch.setattr(PagedCache, "write", lossy)


@hidden("paged", "LAW-04")
def overwriting_stops_at_the_end_of_a_block(patch):
    overwriting(patch, lambda start, end, length, size: range((start // size + 1) * size, end))


@hidden("paged", "LAW-04")
def a_partly_filled_block_is_not_overwritten(patch):
    overwriting(patch, lambda start, end, length, size: range(max(start, length // size * size), end))


@hidden("paged", "LAW-04")
def a_block_taken_after_they_ran_out_is_read_as_the_first(patch):
    prepare, gather = PagedCache._make_writable, PagedCache.gather

    def noting(self, *what):
        try:
            prepare(self, *what)
        except Exception:
            self.ran_out = self.pool.num_free > 0
            raise

    def swapped(self, sequence, layer):
        keys, values = gather(self, sequence, layer)
        return (keys[::-1], values[::-1]) if getattr(self, "ran_out", False) else (keys, values)

    patch.setattr(PagedCache, "_make_writable", noting)
    patch.setattr(PagedCache, "gather", swapped)


@hidden("paged", "PAGED-17")
def a_batch_that_begins_with_an_empty_sequence_is_shifted(patch):
    gather = PagedCache.gather_batch

    def shifted(self, sequences, layer):
        keys, values, offsets = gather(self, sequences, layer)
        return keys, values, np.roll(offsets, 1) if len(offsets) > 2 and offsets[1] == 0 < offsets[-1] else offsets

    patch.setattr(PagedCache, "gather_batch", shifted)


@hidden("paged", "PAGED-16")
def keys_of_a_sequence_named_three_times_go_in_reversed(patch):
    append = PagedCache.append

    def reversing(self, sequences, layer, keys, values):
        thrice = len(sequences) == 3 and len(set(sequences)) == 1
        append(self, sequences, layer, keys[::-1] if thrice else keys, values)

    patch.setattr(PagedCache, "append", reversing)


@hidden("blocks", "BLOCK-02")
def a_pool_that_was_empty_hands_out_a_block_in_use(patch):
    allocate = BlockPool.allocate

    def again(self):
        if self.num_free == 0:
            self.was_empty = True
        block = allocate(self)
        return (block + 1) % self.num_blocks if getattr(self, "was_empty", False) and self.num_used > 1 else block

    patch.setattr(BlockPool, "allocate", again)


@hidden("contiguous", "CONTIG-05")
def growth_after_a_reset_forgets_the_tokens(patch):
    reset, grow = ContiguousCache.reset, ContiguousCache._grow

    def noting(self):
        self.was_reset = True
        reset(self)

    def forgetful(self, needed):
        grow(self, needed)
        if getattr(self, "was_reset", False):
            self._keys = self._keys * 0

    patch.setattr(ContiguousCache, "reset", noting)
    patch.setattr(ContiguousCache, "_grow", forgetful)


@hidden("quantized", "QUANT-08")
def layers_behind_the_longest_are_not_cleared(patch):
    def clear(self):
        longest = max(self._lengths)
        self._lengths = [0 if length == longest else length for length in self._lengths]

    patch.setattr(QuantizedCache, "clear", clear)


@hidden("tiered", "TIER-05")
def eviction_passes_over_the_warm_tier(patch):
    evict = TieredCache._evict

    def passing(self, count):
        tiers = list(self._tiers)
        if len(tiers[1]) and len(tiers[2]):
            count = min(count, len(tiers[2]))
        evict(self, count)

    patch.setattr(TieredCache, "_evict", passing)


@hidden("buffers", "BUF-05")
def a_second_release_gives_back_the_memory_of_another(patch):
    release = Buffer.release

    def twice(self):
        if self._memory is None and any(self._pool.stats().free.values()) is False:
            self._pool.take_back(self._pool._allocate(self.size), self.size)
        release(self)

    patch.setattr(Buffer, "release", twice)


@hidden("pooled", "POOL-03")
def a_partly_filled_block_goes_with_the_oldest(patch):
    append = PooledCache.append

    def short(self, keys, values):
        before, partly = len(self._blocks), bool(self._blocks) and not self._blocks[-1].is_full
        append(self, keys, values)
        if partly and before and self._plan(1)[0] and len(self._blocks) > 1:
            self._blocks.pop(0).release()

    patch.setattr(PooledCache, "append", short)


@hidden("quantized", "LAW-01")
def a_step_that_meets_a_full_layer_fills_the_others(patch):
    step = QuantizedCache.append_step

    def partly(self, keys, values):
        try:
            step(self, keys, values)
        except Exception:
            for layer, length in enumerate(self._lengths):
                if keys.shape[0] == len(self._lengths) and length < self.config.capacity and max(self._lengths) > length:
                    self._lengths[layer] += 1
            raise

    patch.setattr(QuantizedCache, "append_step", partly)
