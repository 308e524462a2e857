"""Bugs in caches on several ranks that show in few states, or at production sizes."""

import numpy as np

from bugs.plant import hidden, in_source, real
from bugs.sharded import APPEND, ATTEND, CACHE, RANK, moved_by, numbered
from kvref.errors import RankLost
from kvref.sharded import ShardedCache, _Rank


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
