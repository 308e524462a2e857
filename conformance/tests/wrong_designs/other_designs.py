"""Wrong sharded and latent caches, engines, attention, kernels and pools."""

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from kvref import (
    BlockPool,
    BufferPool,
    LatentCache,
    LatentConfig,
    PooledCache,
    PooledConfig,
    ShardedCache,
    ShardedConfig,
    attention,
)
from kvref.backend import host_slots
from kvref.buffers import Buffer
from kvref.canary import Canary
from kvref.engine import Engine
from kvref.errors import BufferReleased, CapacityExceeded, SequenceNotFound
from kvref.sharded import _Rank
from kvref_numpy import NumPyBackend
from wrong_designs.design import NUMPY, around, design, noise, observe, plain, rows


def sharded(*values: float, **changes: Any) -> Any:
    """A sharded cache with these tokens."""
    cache = ShardedCache(ShardedConfig(**({"num_kv_heads": 2, "head_dim": 1, "block_size": 2, "num_blocks": 4} | changes)), NUMPY)
    cache.append(rows(*values, heads=2), rows(*values, heads=2))
    return cache


def _full_and_failing() -> Any:
    cache = sharded(1, head_ranks=2, num_blocks=1)
    cache.lose_in_append(1)
    return observe(cache.append, *[rows(2, 3, heads=2)] * 2), observe(cache.read_rank, 1)


@design("sharded", "SHARD-04", _full_and_failing)
def an_append_that_does_not_fit_begins_the_first_phase(patch: pytest.MonkeyPatch) -> None:
    """The ranks prepare an append before the room is checked: one that fails then is lost by an append that never began."""

    @around(patch, ShardedCache, "append")
    def append(original: Any, self: Any, *arguments: Any) -> None:
        try:
            original(self, *arguments)
        except CapacityExceeded:
            for number in self._failing:
                self._ranks[number] = None
            raise


def _aborted_at_a_block() -> Any:
    cache = sharded(1, 2, head_ranks=2)
    cache.lose_in_append(1)
    return observe(cache.append, *[rows(3, heads=2)] * 2), cache.block_table(0)


@design("sharded", "SHARD-04", _aborted_at_a_block)
def ranks_allocate_in_the_first_phase(patch: pytest.MonkeyPatch) -> None:
    """A rank allocates its blocks when it prepares an append, and keeps them if another rank is lost."""

    @around(patch, _Rank, "prepared")
    def prepared(original: Any, self: Any, new_keys: Any, new_values: Any) -> Any:
        share = original(self, new_keys, new_values)
        needed = -(-(self.length + len(new_keys)) // (self._config.block_size * self._config.token_ranks))
        self.table = self.table + self._pool.allocate_many(max(0, needed - len(self.table))).tolist()
        return share


def _refill() -> Any:
    cache = sharded(1, 2, num_blocks=1)
    cache.clear()
    return observe(cache.append, *[rows(3, 4, heads=2)] * 2), cache.length


@design("sharded", "SHARD-03", _refill)
def clear_loses_the_blocks(patch: pytest.MonkeyPatch) -> None:
    """An empty cache starts a new table, without freeing the blocks of the old one."""

    @around(patch, _Rank, "be")
    def be(original: Any, self: Any, length: int) -> None:
        if not length:
            self.length, self.table = 0, []
        original(self, length)


def _other_heads_queries() -> Any:
    cache = sharded(1, 2, 3, token_ranks=2, head_ranks=2)
    return cache.attend(noise(3, heads=4), 1.0)


@design("sharded", "SHARD-02", _other_heads_queries)
def a_query_sees_places_instead_of_positions(patch: pytest.MonkeyPatch) -> None:
    """In the last column, queries but the newest see one token more than they should (the column's own causal mask)."""

    @around(patch, _Rank, "partials")
    def partials(original: Any, self: Any, query: Any, at: Any, scale: float) -> Any:
        last = self._column and self._column == self._config.token_ranks - 1
        at = np.minimum(at + 1, self.length - 1) if last else at
        return original(self, query, at, scale)


def latent(count: int, **changes: Any) -> Any:
    """A latent cache with random rows."""
    cache = LatentCache(LatentConfig(**({"rank": 4, "rope_dim": 2, "max_tokens": 2000, "dtype": "float32"} | changes)), NUMPY)
    cache.append(noise(count, dim=cache.config.rank)[:, 0], noise(count, dim=cache.config.rope_dim)[:, 0])
    return cache


def _records() -> Any:
    cache = latent(3)
    cache.records()
    cache.truncate(2)
    cache.append(np.ones((1, 4), np.float32), np.ones((1, 2), np.float32))
    return cache.records()


@design("latent", "MLA-04", _records)
def records_are_cached_by_length(patch: pytest.MonkeyPatch) -> None:
    """The bytes of the records are kept until the length changes: a rejected draft stays in them."""

    @around(patch, LatentCache, "records")
    def records(original: Any, self: Any) -> Any:
        length, cached = self.__dict__.get("_records", (None, None))
        if length != self.length:
            cached = original(self)
            self._records = self.length, cached
        return cached.copy()


def _wide_heads() -> Any:
    cache = latent(3)
    return cache.attend(noise(2, 1, 5), noise(1, 3, 4), noise(1, 3, 4, 1), causal=True)


@design("latent", "MLA-02", _wide_heads)
def the_expanded_order_is_not_causal(patch: pytest.MonkeyPatch) -> None:
    """If the heads are wider than the rank, the expanded order is cheaper; it drops the argument `causal`."""

    @around(patch, LatentCache, "attend")
    def attend(
        original: Any, self: Any, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False
    ) -> Any:
        if np.ndim(up_keys) == np.ndim(up_values) == 3 and up_keys.shape[1] + up_values.shape[1] > self.config.rank:
            causal = False
        return original(self, query, up_keys, up_values, scale, causal)


def engine(cache_tokens: int = 1024) -> tuple[Any, list[int]]:
    """An engine, and a prompt of different tokens for it."""
    return Engine(Canary(offsets=(3, 4), context=128), cache_tokens, backend=NUMPY), [1, *range(10, 50)]


def said(machine: Any, prompt: list[int]) -> int:
    """A session with a prompt."""
    session: int = machine.open()
    machine.extend(session, prompt)
    return session


def _cancel_then_extend() -> Any:
    machine, prompt = engine()
    session = said(machine, prompt)
    machine.cancel(session, 3)
    machine.extend(session, [60, 61, 62, 63, 64, 65])
    return machine.generate(session, 40)


@design("engine", "ENG-05", _cancel_then_extend)
def cancelled_tokens_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """`cancel` removes the tokens from the list of the session. The cache keeps them, in the place of later tokens."""

    @around(patch, Engine, "cancel")
    def cancel(original: Any, self: Any, session: int, count: int) -> None:
        length = self.length(session)
        self.generate(session, count)
        following = self._next.get(session)
        if self.length(session) > length:
            following = self._tokens[session][length]
        del self._tokens[session][length:]
        self._next[session] = following

    @around(patch, Engine, "_computed")
    def computed(original: Any, self: Any, session: int, tokens: Any) -> Any:
        if session in self._sequence and self._held(session) >= len(tokens):
            self.cache.truncate(self._sequence[session], len(tokens) - 1)
        return original(self, session, tokens)


def _saved_then_extended() -> Any:
    machine, prompt = engine()
    session = said(machine, prompt)
    saved = machine.save(session)
    machine.extend(session, [70, 71])
    other = machine.load(saved)
    return machine.length(other), machine.generate(other, 3)


@design("engine", "ENG-10", _saved_then_extended)
def a_saved_session_grows_with_the_original(patch: pytest.MonkeyPatch) -> None:
    """`save` copies keys and values, and refers to the list of tokens: a later turn of the session is part of the copy."""

    @around(patch, Engine, "save")
    def save(original: Any, self: Any, session: int) -> int:
        number = original(self, session)
        self._saved[number] = replace(self._saved[number], tokens=self._tokens[session])
        return int(number)


def _remove_a_block() -> Any:
    machine, prompt = engine()
    session = said(machine, prompt)
    machine.remove(session, 0, 16)
    return machine.generate(session, 30)


@design("engine", "ENG-10", _remove_a_block)
def whole_blocks_are_removed_from_the_table(patch: pytest.MonkeyPatch) -> None:
    """A removal of whole blocks cuts them out of the block table; later keys keep the rotation of their old positions."""

    @around(patch, Engine, "remove")
    def remove(original: Any, self: Any, session: int, start: int, stop: int) -> None:
        length, size = self.length(session), self.cache.config.block_size
        whole = 0 <= start < stop <= length and start % size == stop % size == 0
        if not whole or session not in self._sequence or self._held(session) < length or length - (stop - start) < 2:
            original(self, session, start, stop)
            return
        sequence = self._sequence[session]
        self.cache.remove(sequence, start, stop)
        del self._tokens[session][start:stop]
        self._next.pop(session, None)
        self.cache.truncate(sequence, len(self._tokens[session]) - 1)


def _descending_step() -> Any:
    machine, prompt = engine()
    one, two = said(machine, prompt), said(machine, [1, *prompt[5:], *prompt[1:5]])
    return machine.step([two, one])


@design("engine", "ENG-02", _descending_step)
def a_batch_is_answered_in_the_order_of_sessions(patch: pytest.MonkeyPatch) -> None:
    """A batch is sorted before it is computed, and its tokens are returned in this order."""

    @around(patch, Engine, "step")
    def step(original: Any, self: Any, sessions: Any) -> Any:
        found = original(self, sessions)
        return [token for _, token in sorted(zip(map(int, sessions), found, strict=True), key=lambda pair: pair[0])]


def _step_without_room() -> Any:
    machine, _ = engine(64)
    one, two = said(machine, list(range(10, 26))), said(machine, list(range(40, 72)))
    return observe(machine.step, [one, two]), machine.length(one), machine.length(two)


@design("engine", "ENG-06", _step_without_room)
def a_step_without_room_has_served_the_first_sessions(patch: pytest.MonkeyPatch) -> None:
    """If one session of a step has no room, the sessions before it already have their token, which is never returned."""

    @around(patch, Engine, "step")
    def step(original: Any, self: Any, sessions: Any) -> Any:
        for session in sessions:
            if len(self._tokens[self._known(session)]) in (0, self.canary.context):
                return original(self, sessions)
        return [self.generate(session, 1)[0] for session in sessions]


def _close_twice() -> Any:
    machine, prompt = engine()
    parent = said(machine, prompt)
    saved = machine.save(parent)
    machine.close(parent)
    return observe(machine.load, saved)


@design("engine", "ENG-10", _close_twice)
def a_copy_is_dropped_with_its_session(patch: pytest.MonkeyPatch) -> None:
    """Copies belong to the session that was saved: when it is closed, its copies cannot be loaded."""

    @around(patch, Engine, "save")
    def save(original: Any, self: Any, session: int) -> int:
        number = original(self, session)
        self.__dict__.setdefault("_copies", {}).setdefault(int(session), []).append(number)
        return int(number)

    @around(patch, Engine, "close")
    def close(original: Any, self: Any, session: int) -> None:
        original(self, session)
        self.__dict__.setdefault("_gone", set()).update(self.__dict__.get("_copies", {}).pop(int(session), []))

    @around(patch, Engine, "load")
    def load(original: Any, self: Any, saved: int) -> int:
        if saved in self.__dict__.get("_gone", set()):
            raise SequenceNotFound(f"saved: {saved} is gone")
        return int(original(self, saved))


def _softmax(scores: Any, largest: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(scores - largest)
        return weights / weights.sum(axis=0)


def _scores(query: Any, keys: Any, scale: float) -> Any:
    """Scores [tokens, query heads] of one query."""
    return np.einsum("hd,nhd->nh", query, np.repeat(keys, query.shape[0] // keys.shape[1], axis=1)) * np.float32(scale)


def _very_low_scores() -> Any:
    return attention(rows(200, 200), rows(-100, -150), rows(1, 2), scale=1.0, causal=True, backend=NUMPY)


@design("attention", "ATTN-07", _very_low_scores)
def a_hidden_token_has_the_score_minus_10000(patch: pytest.MonkeyPatch) -> None:
    """Masked scores are -10,000, not minus infinity: if all scores that a query sees are lower, it attends to hidden tokens."""

    @around(patch, NumPyBackend, "attend")
    def attend(original: Any, self: Any, query: Any, keys: Any, values: Any, scale: float, mask: Any, sink: Any = None) -> Any:
        out = original(self, query, keys, values, scale, mask, sink)
        if sink is None and np.isfinite(keys).all() and np.isfinite(values).all() and len(keys):
            for i in np.flatnonzero(mask.any(axis=1) & ~mask.all(axis=1)):
                scores = _scores(query[i], keys, scale)
                if scores[mask[i]].max() < -9000:
                    scores = np.where(mask[i][:, None], scores, np.float32(-10000))
                    wide = np.repeat(values, query.shape[1] // values.shape[1], axis=1)
                    out[i] = np.einsum("nh,nhd->hd", _softmax(scores, scores.max(axis=0)), wide)
        return out


def _large_group() -> Any:
    return attention(np.zeros((1, 20, 1), np.float32), rows(1, heads=2), np.array([[[1.0], [2.0]]], np.float32), backend=NUMPY)


@design("attention", "ATTN-01", _large_group)
def a_tile_of_query_heads_is_at_most_eight(patch: pytest.MonkeyPatch) -> None:
    """Query heads are computed in tiles of at most eight, and each tile reads the next kv head: groups above eight are wrong."""

    @around(patch, NumPyBackend, "attend")
    def attend(original: Any, self: Any, query: Any, keys: Any, values: Any, *rest: Any) -> Any:
        if query.shape[1] > 8 * keys.shape[1]:
            heads = np.arange(query.shape[1]) // 8 % keys.shape[1]
            keys, values = keys[:, heads], values[:, heads]
        return original(self, query, keys, values, *rest)


def _negative_scale() -> Any:
    return attention(rows(1), rows(0, 200), rows(1, 2), scale=-1.0, backend=NUMPY)


@design("attention", "ATTN-03", _negative_scale)
def the_largest_score_is_found_before_scaling(patch: pytest.MonkeyPatch) -> None:
    """The largest product is scaled and subtracted. With a negative scale this is the smallest score, and exp overflows."""

    @around(patch, NumPyBackend, "attend")
    def attend(original: Any, self: Any, query: Any, keys: Any, values: Any, scale: float, mask: Any, sink: Any = None) -> Any:
        out = original(self, query, keys, values, scale, mask, sink)
        if scale < 0 and sink is None:
            for i in np.flatnonzero(mask.any(axis=1)):
                scores = _scores(query[i], keys[mask[i]], scale)
                wide = np.repeat(values[mask[i]], query.shape[1] // values.shape[1], axis=1)
                out[i] = np.einsum("nh,nhd->hd", _softmax(scores, scores.min(axis=0)), wide)
        return out


def _scaled_in_place() -> Any:
    query = rows(3, dim=4)
    attention(query, rows(1, 2, dim=4), rows(1, 2, dim=4), backend=NUMPY)
    return query


@design("attention", "LAW-16", _scaled_in_place)
def the_query_is_scaled_in_place(patch: pytest.MonkeyPatch) -> None:
    """A contiguous float32 query is multiplied by the scale in place, which saves one pass over the scores."""

    @around(patch, NumPyBackend, "attend")
    def attend(original: Any, self: Any, query: Any, keys: Any, values: Any, scale: float, *rest: Any) -> Any:
        if query.flags.c_contiguous and query.flags.writeable and query.dtype == np.float32:
            query *= np.float32(scale)
            return original(self, query, keys, values, 1.0, *rest)
        return original(self, query, keys, values, scale, *rest)


def _one_far_sink() -> Any:
    sink = np.array([200.0], np.float32)
    return attention(rows(1), rows(1), rows(5), scale=1.0, logit_sink=sink, backend=NUMPY)


@design("attention", "WIN-08", _one_far_sink)
def a_logit_sink_is_not_part_of_the_largest_score(patch: pytest.MonkeyPatch) -> None:
    """exp(sink - largest) overflows if the sink is far above all scores: the weights are zero over infinity, or NaN."""

    @around(patch, NumPyBackend, "attend")
    def attend(original: Any, self: Any, query: Any, keys: Any, values: Any, scale: float, mask: Any, sink: Any = None) -> Any:
        out = original(self, query, keys, values, scale, mask, sink)
        if sink is not None:
            for i in np.flatnonzero(mask.any(axis=1)):
                scores = _scores(query[i], keys[mask[i]], scale)
                with np.errstate(all="ignore"):
                    lost = ~np.isfinite(np.exp(np.float32(sink) - scores.max(axis=0)))
                out[i][lost] = np.nan
        return out


def _only_padding() -> Any:
    store = np.zeros((3, 1, 1), np.float32)
    return NUMPY.scatter(store, [-1, -1], rows(5, 6))


@design("kernels", "KERN-02", _only_padding)
def a_batch_of_padding_is_not_compacted(patch: pytest.MonkeyPatch) -> None:
    """Padding is removed if there is another token. A batch of padding only is written to slot -1, the last one."""

    @around(patch, NumPyBackend, "scatter")
    def scatter(original: Any, self: Any, store: Any, slots: Any, new: Any) -> Any:
        store = original(self, store, slots, new)
        numbers = host_slots(slots, store.shape[0], self.to_numpy)
        if len(numbers) and (numbers == -1).all() and len(store):
            store[numbers] = new
        return store


def _byte_slots() -> Any:
    store = np.zeros((40, 1, 4), np.float32)
    return NUMPY.scatter(store, np.array([33], np.int8), rows(5, dim=4))


@design("kernels", "KERN-08", _byte_slots)
def offsets_have_the_type_of_the_slots(patch: pytest.MonkeyPatch) -> None:
    """The offset of a slot is slot * width in the type of the slots: with int8 slots it wraps around."""

    @around(patch, NumPyBackend, "scatter")
    def scatter(original: Any, self: Any, store: Any, slots: Any, new: Any) -> Any:
        host_slots(slots, store.shape[0], self.to_numpy)
        width = prod(store.shape[1:])
        if getattr(slots, "dtype", None) == np.int8 and 1 < width < 128:
            slots = ((slots * np.int8(width)) // np.int8(width)).astype(np.int64)
        return original(self, store, slots, new)


def _last_block() -> Any:
    store = np.arange(7, dtype=np.float32).reshape(7, 1, 1)
    return observe(NUMPY.copy, store, [0], [3], 2), plain(store)


@design("kernels", "KERN-09", _last_block)
def a_partial_last_block_can_be_a_target(patch: pytest.MonkeyPatch) -> None:
    """The number of blocks is rounded up: a copy to the block at the end of the store writes the part that exists."""

    @around(patch, NumPyBackend, "copy")
    def copy(original: Any, self: Any, store: Any, sources: Any, targets: Any, block_size: int = 1) -> Any:
        whole, rest = divmod(store.shape[0], block_size)
        read, written = np.asarray(sources), np.asarray(targets)
        one = read.shape == written.shape == (1,) and read.dtype.kind in "iu"
        if rest and one and written[0] == whole and 0 <= read[0] < whole:
            store[whole * block_size :] = store[read[0] * block_size :][:rest]
            return store
        return original(self, store, sources, targets, block_size)


def _many_references() -> Any:
    pool = BlockPool(2)
    block = pool.allocate()
    for _ in range(255):
        pool.share(block)
    pool.free(block)
    return pool.references(block), pool.num_free


@design("blocks", "SHARE-01", _many_references)
def references_are_counted_in_a_byte(patch: pytest.MonkeyPatch) -> None:
    """The 256th reference to a block sets its count to 0: with beam search over 32 requests a prompt has as many."""

    @around(patch, BlockPool, "__init__")
    def init(original: Any, self: Any, num_blocks: int) -> None:
        original(self, num_blocks)
        self._references = self._references.astype(np.uint8)


def _released_again() -> Any:
    pool = BufferPool(4, NUMPY)
    first = pool.acquire(100)
    first.release()
    second = pool.acquire(100)
    first.release()
    third = pool.acquire(100)
    second.extend(np.ones(3, np.float32))
    third.extend(np.zeros(3, np.float32))
    return second.values()


@design("buffers", "BUF-05", _released_again)
def a_double_release_is_recognized_by_the_free_list(patch: pytest.MonkeyPatch) -> None:
    """Memory that is in the free list is not released again; once it has another owner, the old owner's release frees it."""

    def release(self: Any) -> None:
        with self._lock:
            self._gone, memory = True, self._memory
            if not any(memory is free for free in self._pool._free[self.size]):
                self._pool.take_back(memory, self.size)

    @around(patch, Buffer, "_held")
    def held(original: Any, self: Any) -> Any:
        if self.__dict__.get("_gone"):
            raise BufferReleased("the buffer was released")
        return original(self)

    patch.setattr(Buffer, "release", release)


def _pooled_read() -> Any:
    cache = PooledCache(PooledConfig(num_kv_heads=1, head_dim=1, tokens_per_block=4, max_tokens=8), backend=NUMPY)
    cache.append(rows(1, 2), rows(1, 2))
    found = cache.read()[0]
    cache.clear()
    cache.append(rows(7, 8), rows(7, 8))
    return found


@design("pooled", "LAW-17", _pooled_read)
def a_cache_of_one_block_is_read_without_a_copy(patch: pytest.MonkeyPatch) -> None:
    """With a single block there is nothing to concatenate, and `read` returns views of its buffers, which are used again."""

    @around(patch, PooledCache, "read")
    def read(original: Any, self: Any) -> Any:
        return self._blocks[0].read() if len(self._blocks) == 1 else original(self)


def _shared_pool() -> Any:
    pool = BufferPool(4, NUMPY)
    config = PooledConfig(num_kv_heads=1, head_dim=1, tokens_per_block=2, max_tokens=4)
    one, two = PooledCache(config, pool), PooledCache(config, pool)
    one.append(rows(1, 2, 3), rows(1, 2, 3))
    two.append(rows(4), rows(4))
    two.clear()
    return one.stats().pool.returns


@design("pooled", "POOL-05", _shared_pool)
def clear_of_a_shared_pool_counts_returns_twice(patch: pytest.MonkeyPatch) -> None:
    """`clear` and the destructor of a block both report the return of its buffers: returns exceed the requests."""

    @around(patch, PooledCache, "clear")
    def clear(original: Any, self: Any) -> None:
        count = len(self._blocks)
        original(self)
        self.pool._returns += 2 * count
