"""Wrong paged caches."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

import kvref.paged
from kvref import PagedCache
from kvref.block_sequences import BlockOwner
from kvref.block_tables import BlockTables
from kvref.errors import integer
from kvref.validation import accept_pair
from wrong_designs.design import around, design, keys, noise, observe, paged, rows, write, written


def _repeat() -> Any:
    cache = paged()
    one, two = cache.create(), cache.create()
    cache.append([one, two, one], 0, rows(1, 2, 3), rows(1, 2, 3))
    return keys(cache, one)


@design("paged", "PAGED-16", _repeat)
def append_counts_only_adjacent_repeats(patch: pytest.MonkeyPatch) -> None:
    """A sequence that occurs twice in a batch gets one token, unless the two places are adjacent."""

    def occurrences(sequences: Any) -> Any:
        named, found = list(sequences), [0] * len(sequences)
        for i in range(1, len(named)):
            found[i] = found[i - 1] + 1 if named[i] == named[i - 1] else 0
        return np.array(found, np.int64)

    patch.setattr(kvref.paged, "_earlier_occurrences", occurrences)


def _two_batches() -> Any:
    cache = paged()
    one, two = written(cache, 1, 2, 3), written(cache, 4)
    offsets = cache.gather_batch([one, two], 0)[2]
    cache.gather_batch([two, one], 0)
    return offsets


@design("paged", "LAW-17", _two_batches)
def gather_batch_returns_one_buffer_of_offsets(patch: pytest.MonkeyPatch) -> None:
    """The offsets of a batch are in a buffer that the next batch of the same size overwrites (like NVIDIA/TensorRT-LLM#15546)."""

    @around(patch, PagedCache, "gather_batch")
    def gather_batch(original: Any, self: Any, sequences: Any, layer: int) -> Any:
        found, values, offsets = original(self, sequences, layer)
        buffer = self.__dict__.setdefault("_offsets", {}).setdefault(len(offsets), offsets)
        buffer[...] = offsets
        return found, values, buffer


def _fork_released() -> Any:
    cache = paged()
    parent = written(cache, 1, 2, 3)
    cache.release_before(parent, 2)
    child = cache.fork(parent)
    return observe(keys, cache, child)


@design("paged", "SHARE-03", _fork_released)
def fork_forgets_what_was_released(patch: pytest.MonkeyPatch) -> None:
    """The child of a sequence with released blocks reads its positions from block -1 on."""

    @around(patch, BlockTables, "fork")
    def fork(original: Any, self: Any, table: int) -> Any:
        new = original(self, table)
        self.released[new] = 0
        return new


def _two_removals() -> Any:
    cache = paged(head_dim=2)
    sequence = written(cache, 1, 2, 3, 4, 5)
    cache.remove(sequence, 0, 1, frequencies=[1.0])
    cache.remove(sequence, 0, 2, frequencies=[1.0])
    return keys(cache, sequence)


@design("paged", "EDIT-10", _two_removals)
def remove_reuses_the_first_rotation(patch: pytest.MonkeyPatch) -> None:
    """Cosines and sines are cached per frequencies and layout, not per distance: a removal of another length is wrong."""

    @around(patch, PagedCache, "_rotate_keys")
    def rotate(original: Any, self: Any, rotary: Any, by: int, slots: Any) -> Any:
        by = self.__dict__.setdefault("_distances", {}).setdefault((rotary.frequencies, rotary.layout), by)
        return original(self, rotary, by, slots)


def _many_copies() -> Any:
    cache = paged(num_blocks=40)
    parent = written(cache, 1)
    every = [parent, *(cache.fork(parent) for _ in range(17))]
    cache.append(every, 0, rows(*range(18)), rows(*range(18)))
    return [keys(cache, sequence) for sequence in every]


@design("paged", "SHARE-05", _many_copies)
def a_call_copies_at_most_sixteen_blocks(patch: pytest.MonkeyPatch) -> None:
    """The kernel that copies shared blocks is launched for 16 copies: further ones of the same call are not made."""

    @around(patch, PagedCache, "_copy_blocks")
    def copy(original: Any, self: Any, sources: Any, targets: Any) -> None:
        original(self, sources[:16], targets[:16])


def _whole_block() -> Any:
    cache = paged()
    parent = written(cache, 1, 2, 3)
    child = cache.fork(parent)
    write(cache, child, 0, 8, 9)
    return keys(cache, parent)


@design("paged", "SHARE-04", _whole_block)
def a_write_of_a_whole_block_is_in_place(patch: pytest.MonkeyPatch) -> None:
    """A shared block that is overwritten completely needs no copy of its tokens, so that the cache forgets to replace it."""

    @around(patch, PagedCache, "_places_to_copy")
    def places(original: Any, self: Any, tables: Any, layers: Any, entries: Any) -> Any:
        found, size = original(self, tables, layers, entries), self.config.block_size
        if size == 1 or np.ndim(tables) or np.ndim(layers):
            return found
        counts = Counter(np.ravel(entries).tolist())
        return [place for place in found if counts[place[2]] < size]


def _long_batch() -> Any:
    cache = paged(num_blocks=80, block_size=16)
    sequence = cache.create()
    new = np.arange(1100, dtype=np.float32).reshape(-1, 1, 1)
    cache.write(sequence, 0, 0, new, new)
    return cache.gather_batch([sequence], 0)[0][1024:, 0, 0]


@design("paged", "LAW-18", _long_batch)
def gather_batch_restarts_after_1024_tokens(patch: pytest.MonkeyPatch) -> None:
    """A kernel has 1,024 threads per sequence, and its second pass does not advance the source."""

    @around(patch, PagedCache, "gather_batch")
    def gather_batch(original: Any, self: Any, sequences: Any, layer: int) -> Any:
        found, values, offsets = original(self, sequences, layer)
        for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            source = start + np.arange(stop - start) % 1024
            found[start:stop], values[start:stop] = found[source], values[source]
        return found, values, offsets


def _parts() -> tuple[Any, int, Any]:
    cache = paged(num_kv_heads=2)
    sequence = written(cache, 1, 2, 3)
    return cache, sequence, [cache.save(sequence, heads=[0, 1]), cache.save(sequence, heads=[1, 2])]


def _drop_pending() -> Any:
    cache, sequence, parts = _parts()
    cache.load(sequence, parts[0])
    cache.drop(sequence)
    return cache.num_free_blocks


@design("paged", "MOVE-05", _drop_pending)
def drop_keeps_the_blocks_of_a_pending_load(patch: pytest.MonkeyPatch) -> None:
    """The blocks of parts that were loaded into a dropped sequence are lost."""
    patch.setattr(PagedCache, "drop", BlockOwner.drop)


def _two_saves() -> Any:
    cache = paged()
    one, two = written(cache, 1, 2, 3), written(cache, 7, 8, 9)
    saved = cache.save(one)
    cache.save(two)
    target = cache.create()
    cache.load(target, saved)
    return keys(cache, target)


@design("paged", "MOVE-04", _two_saves)
def save_returns_one_staging_buffer(patch: pytest.MonkeyPatch) -> None:
    """Saves of the same size are returned in the same memory: the second overwrites the first."""

    @around(patch, PagedCache, "save")
    def save(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        data = np.array(original(self, *arguments, **options))
        buffer = self.__dict__.setdefault("_staging", {}).setdefault(len(data), data)
        buffer[...] = data
        return buffer


def _no_room_for_the_copy() -> Any:
    cache = paged(num_blocks=3)
    parent = written(cache, 1, 2, 3)
    child = cache.fork(parent)
    return [observe(write, cache, child, 3, 7, 8), cache.num_free_blocks, len(cache.block_table(child, 0))]


@design("paged", "SHARE-07", _no_room_for_the_copy)
def write_checks_the_room_for_copies_last(patch: pytest.MonkeyPatch) -> None:
    """New entries are allocated before the copies are counted: an OutOfBlocks for the copies leaves the new entries."""

    @around(patch, PagedCache, "_make_writable")
    def make_writable(original: Any, self: Any, more: Any, tables: Any, layers: Any, positions: Any) -> None:
        needed = self._tables.num_layers * sum(more.values())
        if 0 < needed <= self.pool.num_free:
            self._tables.extend(more, self.pool.allocate_many(needed))
            more = {}
        original(self, more, tables, layers, positions)


def _reject_in_append() -> Any:
    cache = paged(dtype="int8")
    one, two = cache.create(), cache.create()
    new = rows(1, np.inf)
    return [observe(cache.append, [one, two], 0, new, new), cache.num_free_blocks]


@design("paged", "PAGED-18", _reject_in_append)
def append_allocates_before_it_quantizes(patch: pytest.MonkeyPatch) -> None:
    """`append` (not `write`) allocates blocks first: a token that the format rejects leaves them allocated."""

    @around(patch, PagedCache, "append")
    def append(original: Any, self: Any, sequences: Any, layer: int, new_keys: Any, new_values: Any) -> None:
        tables, which = self._tables_of(sequences), self._layer(layer)
        shape = (len(tables), self.config.num_kv_heads, self.config.head_dim)
        accept_pair(new_keys, new_values, shape, self._backend)
        positions = self._tables.lengths[tables, which] + kvref.paged._earlier_occurrences(sequences)
        self._make_writable(self._missing_entries_of_batch(tables, positions + 1), tables, which, positions)
        original(self, sequences, layer, new_keys, new_values)


def _truncate_while_loading() -> Any:
    cache, sequence, parts = _parts()
    cache.load(sequence, parts[0])
    cache.truncate(sequence, 1)
    cache.load(sequence, parts[1])
    return keys(cache, sequence)


@design("paged", "MOVE-05", _truncate_while_loading)
def truncate_discards_a_pending_load(patch: pytest.MonkeyPatch) -> None:
    """Truncating a sequence loses the parts that were loaded for it: the last part does not complete the load."""

    @around(patch, PagedCache, "truncate")
    def truncate(original: Any, self: Any, sequence: int, length: int) -> None:
        original(self, sequence, length)
        self._discard_pending_load(sequence)


def _mapping_after_copy() -> Any:
    cache = paged()
    parent = written(cache, 1)
    child = cache.fork(parent)
    cache.slot_mapping(child, 0, 0, 2)
    write(cache, child, 1, 2)
    return cache.slot_mapping(child, 0, 0, 2)[0] // 2 == cache.block_table(child, 0)[0]


@design("paged", "SHARE-05", _mapping_after_copy)
def slot_mapping_is_cached_until_the_table_grows(patch: pytest.MonkeyPatch) -> None:
    """A cached block table is renewed if its number of entries changed, and not after a copy-on-write."""

    @around(patch, PagedCache, "slot_mapping")
    def slot_mapping(original: Any, self: Any, sequence: int, layer: int, start: int, count: int) -> Any:
        original(self, sequence, layer, start, count)
        size, entries = self.config.block_size, self.block_table(sequence, layer)
        cached = self.__dict__.setdefault("_mappings", {})
        if len(cached.get((int(sequence), int(layer)), ())) != len(entries):
            cached[int(sequence), int(layer)] = entries
        blocks = cached[int(sequence), int(layer)]
        return [blocks[each // size] * size + each % size for each in range(int(start), int(start) + int(count))]


def _write_after_release() -> Any:
    cache = paged()
    sequence = written(cache, 1, 2, 3)
    cache.release_before(sequence, 2)
    cache.truncate(sequence, 0)
    return [observe(write, cache, sequence, 0, 5, 6, 7), observe(keys, cache, sequence)]


@design("paged", "WIN-09", _write_after_release)
def an_emptied_sequence_stays_released(patch: pytest.MonkeyPatch) -> None:
    """`truncate` to 0 keeps the mark before which positions are released, so that the sequence cannot be written again."""

    @around(patch, BlockTables, "cut")
    def cut(original: Any, self: Any, table: int, count: int) -> Any:
        released = self.released[table].copy()
        blocks = original(self, table, count)
        self.released[table] = released
        return blocks

    @around(patch, BlockTables, "close")
    def close(original: Any, self: Any, table: int) -> Any:
        blocks = original(self, table)
        self.released[table] = 0
        return blocks


def _far_id() -> Any:
    cache = paged()
    return observe(cache.length, 2**32 + written(cache, 1), 0)


@design("paged", "PAGED-08", _far_id)
def ids_have_32_bits(patch: pytest.MonkeyPatch) -> None:
    """The id 2^32 + s means the sequence s, which is another request's."""

    @around(patch, PagedCache, "_table")
    def table(original: Any, self: Any, sequence: Any) -> Any:
        number = integer(sequence)
        return original(self, sequence if number is None or number < 0 else number & 0xFFFFFFFF)


def _rotate_int8() -> Any:
    cache = paged(dtype="int8", head_dim=2)
    sequence = cache.create()
    new = np.array([[[0.0, 0.0]], [[3.0, 1.0]]], np.float32)
    cache.write(sequence, 0, 0, new, new)
    cache.remove(sequence, 0, 1, frequencies=[1.0])
    return cache.gather(sequence, 0)[0]


@design("paged", "EDIT-10", _rotate_int8)
def a_rotated_key_keeps_its_old_scale(patch: pytest.MonkeyPatch) -> None:
    """A key that `remove` rotates is quantized again, but only its codes are stored: the scale is that of the old key."""

    @around(patch, PagedCache, "_rotate_keys")
    def rotate(original: Any, self: Any, rotary: Any, by: int, slots: Any) -> Any:
        old = self._store.keys.stored(slots)
        return original(self, rotary, by, slots)._replace(scale=old.scale, zero=old.zero)


def _uneven_removal() -> Any:
    cache = paged(num_layers=2)
    sequence = cache.create()
    cache.write(sequence, 0, 0, rows(1, 2, 3, 4, 5), rows(1, 2, 3, 4, 5))
    cache.write(sequence, 1, 0, rows(6, 7, 8), rows(6, 7, 8))
    cache.remove(sequence, 0, 2)
    return [observe(keys, cache, sequence, layer) for layer in (0, 1)]


@design("paged", "EDIT-10", _uneven_removal)
def remove_cuts_longer_layers_to_the_shortest(patch: pytest.MonkeyPatch) -> None:
    """`remove` sets one length for all layers: a layer that is ahead loses its newest tokens."""

    @around(patch, PagedCache, "_set_lengths")
    def set_lengths(original: Any, self: Any, table: int, lengths: Any) -> None:
        original(self, table, np.full_like(lengths, np.min(lengths)) if np.ndim(lengths) else lengths)


def _tokens_after_the_copy() -> Any:
    cache = paged(num_layers=2)
    parent = written(cache, 1, 2, 3)
    child = cache.fork(parent)
    cache.write(child, 1, 0, rows(9), rows(9))
    return keys(cache, child, 1)


@design("paged", "SHARE-05", _tokens_after_the_copy)
def a_copy_ends_where_the_write_begins(patch: pytest.MonkeyPatch) -> None:
    """A copy contains the slots before the first that is written. If a token is overwritten, those after it are lost."""

    @around(patch, PagedCache, "_make_writable")
    def make_writable(original: Any, self: Any, more: Any, tables: Any, layers: Any, positions: Any) -> None:
        self._written_from = int(np.min(positions)) if np.size(positions) and not np.ndim(tables) else None
        original(self, more, tables, layers, positions)

    @around(patch, PagedCache, "_copy_blocks")
    def copy(original: Any, self: Any, sources: Any, targets: Any) -> None:
        original(self, sources, targets)
        size = self.config.block_size
        if self._written_from is not None and len(targets) == 1:
            lost = np.arange(targets[0] * size + self._written_from % size, (targets[0] + 1) * size)
            blank = noise(len(lost), self.config.num_kv_heads, self.config.head_dim)
            self._store.write(lost, blank, blank)
