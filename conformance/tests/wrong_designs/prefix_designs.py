"""Wrong prefix caches and grouped caches."""

from typing import Any

import numpy as np
import pytest

import kvref.grouped
import kvref.prefix
from kvref import GroupedCache, GroupedConfig, PrefixCache
from kvref.block_pool import BlockPool
from kvref.errors import OutOfBlocks
from kvref.paged import PagedCache
from kvref.prefix import CachedBlock, CommittedTokens, IndexedBlockPool, token_numbers
from wrong_designs.design import NUMPY, around, design, keys, noise, observe, paged, rows, write


def prefix(**changes: Any) -> Any:
    """A prefix cache."""
    return paged(PrefixCache, **changes)


def serve(cache: Any, tokens: list[int], salt: str = "") -> int:
    """Begin, write what is not part of the hit, and commit. Keys are tokens."""
    sequence: int = cache.begin(tokens, salt)
    hit = cache.length(sequence, 0)
    write(cache, sequence, hit, *tokens[hit:])
    cache.commit(sequence, tokens)
    return sequence


def _salted() -> Any:
    cache = prefix()
    serve(cache, [1, 2, 3], "a")
    return cache.match([1, 2, 3], "a"), cache.match([1, 2, 3])


@design("prefix", "PREFIX-03", _salted)
def a_miss_loses_its_salt(patch: pytest.MonkeyPatch) -> None:
    """The salt of a sequence is copied from the blocks of its hit: without a hit, its blocks are committed without a salt."""

    @around(patch, PrefixCache, "begin")
    def begin(original: Any, self: Any, tokens: Any, salt: str = "") -> Any:
        sequence = original(self, tokens, salt)
        if not self.length(sequence, 0):
            self._committed[sequence].salt = ""
        return sequence


def _rewritten() -> Any:
    cache = prefix()
    sequence = serve(cache, [1, 2, 3, 4])
    cache.truncate(sequence, 3)
    write(cache, sequence, 3, 9)
    cache.commit(sequence, [1, 2, 3, 9])
    return cache.match([1, 2, 3, 9, 0])


@design("prefix", "PREFIX-02", _rewritten)
def truncate_keeps_the_key_of_the_cut_block(patch: pytest.MonkeyPatch) -> None:
    """A truncation inside a block keeps the key of this block: what is written there next is committed under the old key."""

    def truncate(self: CommittedTokens, length: int, block_size: int) -> None:
        self.tokens = self.tokens[:length]
        del self.keys[-(-length // block_size) :]

    patch.setattr(CommittedTokens, "truncate", truncate)


def _matched() -> Any:
    cache = prefix(num_blocks=6)
    for first in (10, 20):
        cache.drop(serve(cache, [first, 2, 3, 4, 5]))
    cache.match([10, 2, 3, 4, 5])
    cache.create()
    cache.ensure_capacity(2, 6)
    return cache.match([10, 2, 3, 4, 5]), cache.match([20, 2, 3, 4, 5])


@design("prefix", "PREFIX-05", _matched)
def match_of_several_blocks_is_a_use(patch: pytest.MonkeyPatch) -> None:
    """A `match` of two blocks or more moves them to the end of the order of eviction."""

    @around(patch, PrefixCache, "match")
    def match(original: Any, self: Any, tokens: Any, *label: Any, **named: Any) -> Any:
        hit = original(self, tokens, *label, **named)
        found = self._find_hit(CommittedTokens("".join(label[:1]), token_numbers(tokens)))
        for block in [each for entry in reversed(found) for each in entry.blocks.tolist()] if len(found) > 1 else []:
            if block in self.pool._evictable:
                self.pool._evictable.move_to_end(block)
        return hit


def _failed_begin() -> Any:
    cache = prefix(num_blocks=4)
    for first in (10, 20):
        cache.drop(serve(cache, [first, 2]))
    result = observe(cache.begin, [10, 2, *range(30)])
    sequence = cache.create()
    cache.ensure_capacity(sequence, 6)
    return result, cache.match([10, 2, 0]), cache.match([20, 2, 0])


@design("prefix", "PREFIX-13", _failed_begin)
def a_begin_without_room_is_a_use(patch: pytest.MonkeyPatch) -> None:
    """A `begin` that raises OutOfBlocks has shared and freed the blocks of its hit, which are evicted later than before."""

    @around(patch, PrefixCache, "begin")
    def begin(original: Any, self: Any, tokens: Any, *label: Any, **named: Any) -> Any:
        try:
            return original(self, tokens, *label, **named)
        except OutOfBlocks:
            found = self._find_hit(CommittedTokens("".join(label[:1]), token_numbers(tokens)))
            blocks = np.array([entry.blocks for entry in found], np.int32).reshape(-1)
            self.pool.share_many(blocks)
            self.pool.free_many(blocks[::-1])
            raise


def _two_copies() -> Any:
    cache = prefix(num_blocks=3)
    one, two = cache.begin([1, 2]), cache.begin([1, 2])
    for sequence in (one, two):
        write(cache, sequence, 0, 1, 2)
        cache.commit(sequence, [1, 2])
    cache.drop(one)
    sequence = cache.create()
    cache.ensure_capacity(sequence, 4)
    return cache.match([1, 2, 3])


@design("prefix", "PREFIX-10", _two_copies)
def evicting_a_block_forgets_its_copies(patch: pytest.MonkeyPatch) -> None:
    """The index has one entry per key: if one of two equal blocks is evicted, the other is not found any more."""

    @around(patch, IndexedBlockPool, "_remove_from_index")
    def remove(original: Any, self: Any, block: int) -> None:
        lost = [entry.key for entry in self._entries_of_block.get(block, [])]
        original(self, block)
        for key in lost:
            for copy in self._index.pop(key, []):
                for other in set(copy.blocks.tolist()):
                    self._entries_of_block[other].remove(copy)
                    if not self._entries_of_block[other]:
                        del self._entries_of_block[other]
                        if other in self._evictable:
                            del self._evictable[other]
                            BlockPool._return_blocks(self, np.array([other], np.int32))


def _far_tokens() -> Any:
    cache = prefix()
    serve(cache, [1, 2, 3])
    return cache.match([2**32 + 1, 2, 3])


@design("prefix", "PREFIX-03", _far_tokens)
def tokens_are_hashed_as_32_bits(patch: pytest.MonkeyPatch) -> None:
    """Ids of placeholders for images are larger than 2^32; two of them can be hashed as the same token."""

    @around(patch, kvref.prefix, "block_keys")
    def block_keys(original: Any, tokens: Any, *rest: Any, **options: Any) -> Any:
        return original(np.asarray(tokens, np.int64) & 0xFFFFFFFF, *rest, **options)


def _commit_after_release() -> Any:
    cache = prefix()
    sequence = cache.begin([1, 2, 3, 4, 5])
    write(cache, sequence, 0, 1, 2, 3, 4, 5)
    cache.release_before(sequence, 2)
    cache.commit(sequence, [1, 2, 3, 4, 5])
    other = cache.begin([1, 2, 9])
    return cache.length(other, 0), observe(keys, cache, other)


@design("prefix", "PREFIX-03", _commit_after_release)
def commit_pairs_the_remaining_blocks_with_the_first_keys(patch: pytest.MonkeyPatch) -> None:
    """After `release_before` the remaining blocks are committed under the keys of the first ones."""

    def commit(self: Any, sequence: int, tokens: Any) -> None:
        table, numbers = self._table(sequence), token_numbers(tokens)
        committed = self._committed[int(sequence)]
        committed.add(numbers, int(self._tables.lengths[table].min()))
        new, first = list(self._keys(committed)), len(committed.keys)
        entries = np.arange(first, first + len(new))[:, None]
        blocks = self._tables.at(table, np.arange(self.config.num_layers), entries)
        gone = max(0, int(self._tables.released[table].max()) - first)
        for key, held in zip(new, blocks[gone:], strict=False):
            self.pool.add_to_index(CachedBlock(key, held))
        committed.keys += new

    patch.setattr(PrefixCache, "commit", commit)


def _remove_cached() -> Any:
    cache = prefix()
    sequence = serve(cache, [1, 2, 3, 4, 5])
    cache.remove(sequence, 0, 1)
    return keys(cache, cache.begin([1, 2, 3, 4, 0]))


@design("prefix", "PREFIX-14", _remove_cached)
def remove_moves_tokens_inside_cached_blocks(patch: pytest.MonkeyPatch) -> None:
    """`remove` copies blocks that another table lists, and not blocks that are cached only."""

    @around(patch, PrefixCache, "remove")
    def remove(original: Any, self: Any, *arguments: Any, **options: Any) -> None:
        self._removing = True
        try:
            original(self, *arguments, **options)
        finally:
            self._removing = False

    @around(patch, PrefixCache, "_needs_copy")
    def needs_copy(original: Any, self: Any, blocks: Any) -> Any:
        return self.pool.shared(blocks) if self.__dict__.get("_removing") else original(self, blocks)


def _forks_commit() -> Any:
    cache = prefix()
    parent = serve(cache, [1, 2])
    child = cache.fork(parent)
    write(cache, parent, 2, 3, 4)
    write(cache, child, 2, 5, 6)
    cache.commit(parent, [1, 2, 3, 4])
    cache.commit(child, [1, 2, 5, 6])
    return cache.match([1, 2, 5, 6, 0])


@design("prefix", "PREFIX-02", _forks_commit)
def a_fork_shares_the_list_of_committed_keys(patch: pytest.MonkeyPatch) -> None:
    """Parent and child append the keys of their blocks to one list: what one commits seems to be committed by the other."""

    @around(patch, PrefixCache, "fork")
    def fork(original: Any, self: Any, sequence: int) -> Any:
        child = original(self, sequence)
        self._committed[child].keys = self._committed[int(sequence)].keys
        return child


def _load_over() -> Any:
    cache = prefix()
    sequence = serve(cache, [1, 2, 3])
    other = cache.create()
    write(cache, other, 0, 7, 8, 9)
    cache.load(sequence, cache.save(other))
    return observe(cache.commit, sequence, [7, 8, 9])


@design("prefix", "MOVE-01", _load_over)
def load_keeps_the_committed_tokens(patch: pytest.MonkeyPatch) -> None:
    """A sequence into which a file was loaded still has the committed tokens of its former contents."""

    @around(patch, PrefixCache, "receive")
    def receive(original: Any, self: Any, file: Any, sequence: int) -> None:
        before = self._committed.get(int(sequence))
        kept = before and CommittedTokens(before.salt, before.tokens, list(before.keys))
        original(self, file, sequence)
        if kept:
            self._committed[int(sequence)] = kept


def _truncated_order() -> Any:
    cache = prefix(num_blocks=4)
    sequence = serve(cache, [1, 2, 3, 4])
    cache.truncate(sequence, 0)
    other = cache.create()
    cache.ensure_capacity(other, 6)
    return cache.match([1, 2, 3, 4, 5])


@design("prefix", "PREFIX-08", _truncated_order)
def truncate_releases_the_first_blocks_first(patch: pytest.MonkeyPatch) -> None:
    """`drop` releases the last block first and `truncate` the first one, so that a prefix loses its beginning."""

    @around(patch, PrefixCache, "_set_lengths")
    def set_lengths(original: Any, self: Any, table: int, lengths: Any) -> None:
        self._tables.lengths[table] = lengths
        entries = self._tables.entries_for(int(self._tables.lengths[table].max()))
        self.pool.free_many(self._tables.cut(table, entries)[::-1])


def _append_cached() -> Any:
    cache = prefix()
    sequence = serve(cache, [1, 2, 3, 4])
    cache.truncate(sequence, 3)
    cache.append([sequence], 0, rows(9), rows(9))
    return keys(cache, cache.begin([1, 2, 3, 4, 5]))


@design("prefix", "PREFIX-14", _append_cached)
def append_writes_into_cached_blocks(patch: pytest.MonkeyPatch) -> None:
    """`append` assumes that the last block is never cached, which is wrong after a truncation inside a cached block."""
    for name in ("append", "append_step"):

        @around(patch, PrefixCache, name)
        def append(original: Any, self: Any, *arguments: Any) -> None:
            self._appending = True
            try:
                original(self, *arguments)
            finally:
                self._appending = False

    @around(patch, PrefixCache, "_needs_copy")
    def needs_copy(original: Any, self: Any, blocks: Any) -> Any:
        return self.pool.shared(blocks) if self.__dict__.get("_appending") else original(self, blocks)


def _overwrite_by_fork() -> Any:
    cache = prefix()
    sequence = serve(cache, [1, 2, 3, 4])
    child = cache.fork(sequence)
    write(cache, child, 1, 8)
    return observe(cache.commit, sequence, [1, 8]), observe(cache.commit, child, [1, 8])


@design("prefix", "PREFIX-02", _overwrite_by_fork)
def an_overwrite_forgets_the_tokens_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    """A fork refers to the committed tokens of its parent: overwriting a token of the child forgets those of the parent."""

    @around(patch, PrefixCache, "fork")
    def fork(original: Any, self: Any, sequence: int) -> Any:
        child = original(self, sequence)
        self._committed[child] = self._committed[int(sequence)]
        return child


def grouped(**changes: Any) -> Any:
    """A grouped cache: two layers, one of them with a window."""
    sizes = {"num_blocks": 12, "num_layers": 2, "num_groups": 2, "window": 3, "num_kv_heads": 1, "head_dim": 1, "block_size": 2}
    return GroupedCache(GroupedConfig(**(sizes | changes)), NUMPY)


def step(cache: Any, sequence: int, *values: float) -> None:
    """Append tokens. The keys of layer l are the values plus 100 l."""
    new = np.stack([rows(*values) + 100 * layer for layer in range(cache.config.num_layers)])
    cache.step(sequence, new, new)


def _hit_at_the_edge() -> Any:
    cache = grouped()
    sequence = cache.begin(list(range(7)))
    step(cache, sequence, 0, 1, 2, 3, 4)
    step(cache, sequence, 5)
    cache.commit(sequence, list(range(6)))
    return cache.match([0, 1, 2, 3, 9]), cache.match([0, 1, 2, 3, 4, 5, 9])


@design("grouped", "GROUP-05", _hit_at_the_edge)
def a_hit_needs_one_token_before_the_window(patch: pytest.MonkeyPatch) -> None:
    """A window group must also have the token before the window: a hit is shorter if this token begins another block."""
    finding = []

    @around(patch, GroupedCache, "_unseen_entries")
    def unseen(original: Any, self: Any, length: int) -> Any:
        return original(self, length - 1 if finding else length)

    for name in ("begin", "match"):

        @around(patch, GroupedCache, name)
        def find(original: Any, self: Any, *arguments: Any, **options: Any) -> Any:
            finding.append(True)
            try:
                return original(self, *arguments, **options)
            finally:
                finding.pop()


def _without_room() -> Any:
    cache = grouped(num_blocks=5)
    sequence = cache.create()
    step(cache, sequence, 1, 2, 3, 4)
    cache.fork(sequence)
    result = observe(step, cache, sequence, 5, 6)
    return result, cache.block_table(sequence, 0), cache.num_free_blocks


def _count_references_as(patch: pytest.MonkeyPatch, count: int) -> None:
    """Make `step` count every block of the tokens that it does not see any more as one with `count` references."""

    @around(patch, GroupedCache, "_copies_needed")
    def copies_needed(original: Any, self: Any, block: int) -> Any:
        return int(self.pool._references[block]) - (not self.pool.is_cached([block])[0])

    @around(patch, GroupedCache, "step")
    def one_step(original: Any, self: Any, *arguments: Any) -> None:
        self.pool.references = lambda block: count
        try:
            original(self, *arguments)
        finally:
            del self.pool.references


@design("grouped", "GROUP-03", _without_room)
def step_counts_on_blocks_that_a_fork_shares(patch: pytest.MonkeyPatch) -> None:
    """Blocks that leave the window count as available although a fork has them: the step fails after it has released them."""
    _count_references_as(patch, 1)


def _room_from_the_window() -> Any:
    cache = grouped(num_blocks=5, window=1)
    sequence = cache.create()
    step(cache, sequence, 1, 2, 3, 4)
    return observe(step, cache, sequence, 5)


@design("grouped", "GROUP-03", _room_from_the_window)
def step_does_not_count_on_the_blocks_it_frees(patch: pytest.MonkeyPatch) -> None:
    """The admission check ignores the blocks that leave the window: a step that has room raises OutOfBlocks."""
    _count_references_as(patch, 0)


def _truncate_at_the_edge() -> Any:
    cache = grouped()
    sequence = cache.create()
    step(cache, sequence, 1, 2, 3, 4)
    step(cache, sequence, 5, 6)
    return [observe(cache.truncate, sequence, length) for length in (5, 4, 3)]


@design("grouped", "GROUP-07", _truncate_at_the_edge)
def truncate_checks_the_window_of_the_next_position(patch: pytest.MonkeyPatch) -> None:
    """`truncate` looks for the first position that a query after the next one sees: at the edge of a block, it is released."""
    cutting = []

    @around(patch, GroupedCache, "_unseen_entries")
    def unseen(original: Any, self: Any, length: int) -> Any:
        return original(self, length + 1 if cutting else length)

    @around(patch, GroupedCache, "truncate")
    def truncate(original: Any, self: Any, *arguments: Any) -> None:
        cutting.append(True)
        try:
            original(self, *arguments)
        finally:
            cutting.pop()


def _three_groups() -> Any:
    cache = grouped(num_layers=3, num_groups=3, window=8)
    sequence = cache.begin([1, 2, 3])
    step(cache, sequence, 1, 2, 3)
    cache.commit(sequence, [1, 2, 3])
    other = cache.begin([1, 2, 3])
    return [cache.read(other, layer, [0, 1])[0] for layer in range(3)]


@design("grouped", "GROUP-05", _three_groups)
def the_index_distinguishes_two_groups(patch: pytest.MonkeyPatch) -> None:
    """The key of a cached block contains one bit for its group: with three groups, the first and the third are confused."""
    patch.setattr(kvref.grouped, "_group_key", lambda key, group: key + (group & 1).to_bytes(4, "little"))


def _four_layers() -> Any:
    cache = grouped(num_layers=4)
    sequence = cache.create()
    step(cache, sequence, 1, 2)
    return [cache.read(sequence, layer, [0])[0] for layer in range(4)]


@design("grouped", "LAW-02", _four_layers)
def a_layer_is_found_in_its_block_by_remainder(patch: pytest.MonkeyPatch) -> None:
    """Layer l is at place l % (layers per group) of a block. With four layers in two groups, two layers have one place."""

    def slots(self: Any, table: int, layers: Any, positions: Any) -> Any:
        groups, size = self.config.num_groups, self.config.block_size
        blocks = self._tables.at(table, layers % groups, positions // size).astype(np.int64)
        return (blocks * self._layers + layers % self._layers) * size + positions % size

    patch.setattr(GroupedCache, "_slots", slots)


def _fork_then_step() -> Any:
    cache = grouped(window=8, dtype="uint8_g32_float16", head_dim=32)
    sequence, new = cache.create(), np.stack([noise(1, dim=32, seed=seed) for seed in (1, 2)])
    cache.step(sequence, new, new)
    child = cache.fork(sequence)
    cache.step(child, new, new)
    return cache.read(child, 1, [0])


@design("grouped", "GROUP-08", _fork_then_step)
def a_copied_block_has_no_zeros(patch: pytest.MonkeyPatch) -> None:
    """A copy of a shared block contains codes and scales, and not the zeros of affine formats."""

    @around(patch, GroupedCache, "_copy_blocks")
    def copy(original: Any, self: Any, sources: Any, targets: Any) -> None:
        size = self._layers * self.config.block_size
        for store in (self._store.keys, self._store.values):
            zero = None if store._stored.zero is None else store._stored.zero.copy()
            store.copy(sources, targets, size)
            if zero is not None:
                store._stored = store._stored._replace(zero=zero)


def _load_prefix() -> Any:
    cache = prefix(num_blocks=4)
    saved = cache.save(serve(cache, [1, 2]))
    damaged = np.array(saved)
    damaged[-1] ^= 1
    cache.drop(0)
    cache.ensure_capacity(cache.create(), 6)
    return observe(cache.load, 1, damaged), cache.match([1, 2, 3])


@design("prefix", "MOVE-03", _load_prefix)
def a_damaged_file_evicts_blocks(patch: pytest.MonkeyPatch) -> None:
    """`load` allocates its blocks before it verifies the checksum: a damaged file evicts cached blocks."""

    @around(patch, PrefixCache, "receive")
    def receive(original: Any, self: Any, file: Any, sequence: int) -> None:
        table = self._table(sequence)
        PagedCache.receive(self, file, sequence)
        if self._table(sequence) != table:
            self._committed[int(sequence)].truncate(0, self.config.block_size)
