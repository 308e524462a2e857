"""Bugs in caches on several ranks."""

import numpy as np

from bugs.plant import bug, hidden, in_source, real
from kvref.errors import RankLost
from kvref.online_softmax import partial
from kvref.sharded import ShardedCache, ShardedConfig, _Rank

CACHE, RANK, CONFIG = (f"kvref.sharded.{name}" for name in ("ShardedCache", "_Rank", "ShardedConfig"))
POSITIONS, BE, APPEND, ATTEND = f"{RANK}.positions", f"{RANK}.be", f"{CACHE}.append", f"{CACHE}.attend"


@bug("SHARD-01")
def copies_are_dealt_out_in_turn(patch):
    in_source(patch, f"{CONFIG}.heads", "row // self.copies * each", "row % self.num_kv_heads * each")


@bug("SHARD-01")
def rows_of_three_heads_or_more_stand_in_the_wrong_order(patch):
    """Each row reports its share of heads correctly but stores another row's heads."""
    heads = ShardedConfig.heads

    def swapped(self, row):
        return heads(self, self.head_ranks - 1 - row if self.num_kv_heads // self.head_ranks >= 3 else row)

    patch.setattr(ShardedConfig, "heads", swapped)


@bug("SHARD-01")
def a_rank_of_three_heads_or_more_names_those_of_the_next_row(patch):
    """It stores the right heads but reports others."""
    heads = ShardedCache.heads

    def next_row(self, rank):
        shared = self.config.num_kv_heads // self.config.head_ranks >= 3
        return heads(self, (rank + self.config.token_ranks) % self.config.num_ranks if shared else rank)

    patch.setattr(ShardedCache, "heads", next_row)


@bug("SHARD-01")
def the_second_copy_of_a_head_is_written_once(patch):
    keep = _Rank.keep

    def once(self, count, share):
        second = self.length and self._config.copies > 1 and self.number // self._config.token_ranks % 2
        keep(self, count, type(share)(part._replace(codes=part.codes * 0) for part in share) if second else share)

    numbered(patch)
    patch.setattr(_Rank, "keep", once)


def numbered(patch):
    """Give ranks their numbers."""
    init = _Rank.__init__

    def noting(self, config, number, backend):
        init(self, config, number, backend)
        self.number = number

    patch.setattr(_Rank, "__init__", noting)


@bug("SHARD-01")
def any_number_of_rows_will_do(patch):
    post_init = ShardedConfig.__post_init__

    def lenient(self):
        rows = self.head_ranks
        if isinstance(rows, int) and rows > 1 and self.num_kv_heads % rows and rows % self.num_kv_heads:
            object.__setattr__(self, "head_ranks", 1)
        post_init(self)

    patch.setattr(ShardedConfig, "__post_init__", lenient)


@bug("SHARD-02")
def tokens_are_dealt_out_one_by_one(patch):
    in_source(patch, POSITIONS, "every // self._config.block_size %", "every %")


@bug("SHARD-02")
def what_is_left_of_a_block_goes_to_the_next_column(patch):
    """If an append starts inside a block, positions are assigned to columns as if a block started there."""
    prepared = _Rank.prepared

    def shifted(self, keys, values):
        positions, size = type(self).positions, self._config.block_size
        self.positions = lambda start, stop: positions(self, start - start % size, stop - start % size) + start % size
        try:
            return prepared(self, keys, values)
        finally:
            del self.positions

    patch.setattr(_Rank, "prepared", shifted)
    fitting = "tuple(each._replace(codes=each.codes[: len(come)]) for each in share)"
    in_source(patch, f"{RANK}.keep", "self._slots(come), share", f"self._slots(come[: share[0].codes.shape[0]]), {fitting}")


@bug("SHARD-02")
def what_columns_found_is_averaged(patch):
    merge = "merged(found, None, self._backend.xp)"
    in_source(patch, ATTEND, merge, "np.mean([merged([each], None, self._backend.xp) for each in found], axis=0)")


@bug("SHARD-02")
def the_logarithm_is_to_another_base(patch):
    in_source(patch, "kvref.online_softmax._both", "xp.exp(each.largest - _finite(largest, xp))",
              "xp.exp((each.largest - _finite(largest, xp)) / np.float32(np.log(2)))")  # fmt: skip


@bug("SHARD-02")
def the_largest_score_is_taken_for_the_sum(patch):
    """Like a kernel that returns the largest score in place of the log-sum-exp."""
    patch.setattr("kvref.sharded.partial", lambda *given: divided(partial(*given)))


def divided(one):
    return type(one)(one.largest, one.total / one.total, one.values / one.total, one.seen)


@bug("SHARD-02")
def tokens_are_masked_by_where_they_lie(patch):
    in_source(patch, f"{RANK}.partials", "piece <= at[:, None]", "np.arange(start, start + len(piece)) <= at[:, None]")


@bug("SHARD-02")
def queries_see_everything(patch):
    in_source(patch, ATTEND, "np.arange(self.length - count, self.length)", "np.full(count, self.length - 1)")


@bug("SHARD-02")
def copies_answer_for_each_others_query_heads(patch):
    in_source(patch, f"{CONFIG}.query_heads", "copy = self.heads(row), row % self.copies",
              "copy = self.heads(row), self.copies - 1 - row % self.copies")  # fmt: skip


@bug("SHARD-02")
def copies_answer_four_query_heads_of_a_group_at_most(patch):
    attend = ShardedCache.attend

    def up_to_four(self, query, scale):
        out = attend(self, query, scale)
        group = query.shape[1] // self.config.num_kv_heads
        if self.config.copies > 1:
            out[:, np.arange(query.shape[1]) % max(1, group) > 3] = 0
        return out

    patch.setattr(ShardedCache, "attend", up_to_four)


@bug("SHARD-02")
def more_queries_than_tokens_are_answered(patch):
    bounded = 'in_range(count, self.length + 1, PositionOutOfRange, "queries")'
    in_source(patch, ATTEND, bounded, "pass", "num_heads == 0:", "num_heads == 0 or self.length == 0:")


@bug("SHARD-03")
def each_rank_takes_blocks_for_its_own_tokens(patch):
    in_source(patch, BE, "-(-length // (self._config.block_size * self._config.token_ranks))",
              "-(-len(self.positions(0, length)) // self._config.block_size)")  # fmt: skip


@bug("SHARD-03")
def one_rank_gives_blocks_back_in_another_order(patch):
    numbered(patch)
    in_source(patch, BE, "self._pool.free_many(self.table[needed:])",
              "self._pool.free_many(self.table[needed:][:: -1 if self.number else 1])")  # fmt: skip


@bug("SHARD-03")
def a_truncate_keeps_a_block_for_later(patch):
    in_source(patch, BE, "self._pool.free", "needed = max(needed, min(1, len(self.table)))\n    self._pool.free")


@bug("SHARD-03")
def bytes_are_those_of_all_heads(patch):
    in_source(
        patch,
        f"{RANK}.num_bytes",
        "self._store.token_bytes",
        "self._store.token_bytes // len(self.heads) * self._config.num_kv_heads",
    )


@bug("SHARD-03")
def bytes_are_those_of_four_columns_at_most(patch):
    """Like a cache that computes each rank's bytes from the total with too small a number of columns."""
    in_source(patch, f"{RANK}.num_bytes", "len(self.table) *",
              "len(self.table) * self._config.token_ranks // min(4, self._config.token_ranks) *")  # fmt: skip


@bug("SHARD-03")
def blocks_are_taken_anew_for_every_append(patch):
    """A rank's contents are copied to other blocks, in the same way on every rank."""
    moved_by(patch, lambda cache, called: called == "append")


@bug("SHARD-03")
def what_a_truncate_leaves_is_copied_together(patch):
    moved_by(patch, lambda cache, called: called == "truncate" and cache.length > 0)


def moved_by(patch, moves):
    """All blocks get other ids after each call for which `moves` is true."""
    for name in ("append", "truncate"):
        patch.setattr(ShardedCache, name, moving(getattr(ShardedCache, name), name, moves))
    table = ShardedCache.block_table

    def turned(self, rank):
        return [(block + getattr(self, "turns", 0)) % self.config.num_blocks for block in table(self, rank)]

    patch.setattr(ShardedCache, "block_table", turned)


def moving(method, name, moves):
    def called(self, *args):
        method(self, *args)
        self.turns = getattr(self, "turns", 0) + moves(self, name)

    return called


@bug("SHARD-03")
def room_is_counted_on_one_rank(patch):
    in_source(patch, f"{CONFIG}.max_tokens", " * self.token_ranks", "")


@bug("SHARD-04")
def ranks_before_the_one_that_is_lost_have_written(patch):
    half_written(patch, lambda rank, failing, keys: rank < min(failing))


@bug("SHARD-04")
def ranks_behind_the_one_that_is_lost_have_written(patch):
    half_written(patch, lambda rank, failing, keys: rank > max(failing))


def half_written(patch, writes):
    """The remaining ranks for which `writes` is true keep an append in which ranks were lost."""
    append = ShardedCache.append

    def torn(self, keys, values):
        failing = set(self._failing)
        try:
            append(self, keys, values)
        except RankLost:
            for number, rank in enumerate(self._ranks):
                if failing and rank is not None and writes(number, failing, keys) and len(keys):
                    rank.keep(len(keys), rank.prepared(keys, values))
            raise

    patch.setattr(ShardedCache, "append", torn)


@bug("SHARD-04")
def the_first_rank_writes_what_is_not_finite_before_others_are_ready(patch):
    half_written(patch, lambda rank, failing, keys: rank == 0 and not np.isfinite(np.asarray(keys, np.float32)).all())


@bug("SHARD-04")
def the_length_counts_what_was_written_nowhere(patch):
    in_source(patch, APPEND, "self._ranks[number] = None", "self._ranks[number], self.length = None, self.length + count")


@bug("SHARD-04")
def a_read_without_a_rank_gives_what_is_left(patch):
    lose = ShardedCache.lose

    def quietly(self, rank):
        self.last = self.read()
        lose(self, rank)

    patch.setattr(ShardedCache, "lose", quietly)
    read = ShardedCache.read
    patch.setattr(ShardedCache, "read", lambda self: self.last if hasattr(self, "last") else read(self))


@bug("SHARD-04")
def a_negative_rank_counts_from_the_end(patch):
    in_source(patch, f"{CACHE}._number", "in_range(rank,", "in_range(rank % len(self._ranks) if rank < 0 else rank,")


@bug("EDIT-01")
def the_last_column_keeps_its_tokens(patch):
    in_source(patch, f"{CACHE}.truncate", 'for rank in self._every("truncate"):', 'for rank in self._every("truncate")[:-1]:')


# Bugs that show in few states, or at production sizes.


@hidden("sharded", "SHARD-01")
def a_copy_in_the_second_column_misses_what_follows_a_truncate(patch):
    numbered(patch)
    be, keep = _Rank.be, _Rank.keep

    def noting(self, length):
        self.cut = length < self.length
        be(self, length)

    def missing(self, count, share):
        copy = self._config.copies > 1 and self._config.token_ranks > 1 and self.number == self._config.num_ranks - 1
        keep(self, count, type(share)(part._replace(codes=part.codes * 0) for part in share)
             if copy and getattr(self, "cut", False) else share)  # fmt: skip

    patch.setattr(_Rank, "be", noting)
    patch.setattr(_Rank, "keep", missing)


@hidden("sharded", "SHARD-03")
def a_block_is_taken_twice_after_it_was_full(patch):
    """After a rank other than the first was full, its free list is wrong."""
    numbered(patch)
    be = _Rank.be

    def other(self, length):
        if len(self.table) == self._config.num_blocks > 1 and self.number == 1 and length == 0:
            self.table.reverse()
        be(self, length)

    patch.setattr(_Rank, "be", other)


@hidden("sharded", "SHARD-04")
def a_rank_in_which_no_token_would_lie_is_not_missed(patch):
    writing = "any(shares[number][0].codes.shape[0] for number in self._failing)"
    in_source(patch, APPEND, "if count and self._failing:", f"if {writing}:")


@hidden("sharded", "SHARD-04")
def an_append_that_is_lost_takes_its_block(patch):
    append = ShardedCache.append

    def taking(self, keys, values):
        try:
            append(self, keys, values)
        except RankLost:
            for rank in self._ranks:
                turn = self.config.block_size * self.config.token_ranks
                if rank is not None and self.length and self.length % turn == 0 and len(rank.table) < self.config.num_blocks:
                    rank.be(self.length + 1)
                    rank.length = self.length
            raise

    patch.setattr(ShardedCache, "append", taking)


@hidden("sharded", "SHARD-02")
def several_queries_at_the_end_of_a_turn_see_a_token_too_few(patch):
    ends = "np.arange(self.length - count, self.length)"
    whole = "count > 1 and config.token_ranks > 1 and self.length % (config.block_size * config.token_ranks) == 0"
    in_source(patch, ATTEND, ends, f"{ends} - (np.arange(count) == 0) * ({whole})")


@real("sharded")
def a_column_past_the_fourth_is_taken_for_the_first(patch):
    in_source(patch, f"{RANK}.partials", "for start in range(0, len(positions), TOKENS):",
              "for start in range(0, len(positions) if self._column < 4 else 0, TOKENS):")  # fmt: skip


@real("sharded")
def ranks_of_the_seventh_row_and_later_name_the_first_rows_heads(patch):
    in_source(patch, f"{CACHE}.heads", "self._rank(rank)", "self._rank(rank if rank < 6 * self.config.token_ranks else 0)")


@real("sharded")
def bytes_of_eight_columns_and_more_are_those_of_all(patch):
    in_source(patch, f"{RANK}.num_bytes", "len(self.table) *",
              "len(self.table) * (self._config.token_ranks if self._config.token_ranks >= 8 else 1) *")  # fmt: skip


@hidden("sharded", "SHARD-03")
def blocks_move_once_they_are_full(patch):
    """Each time a block is full on all token ranks, in the same way on every rank."""
    moved_by(patch, lambda cache, called: (
        called == "append" and cache.length > 0 and cache.length % (cache.config.block_size * cache.config.token_ranks) == 0
    ))  # fmt: skip


@real("sharded")
def blocks_past_the_fortieth_are_read_as_the_one_before(patch):
    slots = _Rank._slots

    def torn(self, positions):
        found = slots(self, positions)
        late = positions // (self._config.block_size * self._config.token_ranks) > 40
        return np.where(late, slots(self, positions - late * self._config.block_size * self._config.token_ranks), found)

    patch.setattr(_Rank, "_slots", torn)
