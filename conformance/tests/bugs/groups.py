"""Bugs in grouped caches, whose layers differ."""

import numpy as np

from bugs.plant import bug, hidden, in_source, real
from kvref.block_pool import BlockPool
from kvref.block_sequences import BlockOwner
from kvref.block_tables import BlockTables
from kvref.grouped import GroupedCache
from kvref.prefix import IndexedBlockPool, PrefixIndexed

STEP, ATTEND, FIND, BEGIN, COMMIT, SLOTS = (f"kvref.grouped.GroupedCache.{name}" for name in (
    "step", "attend", "_find_hit", "begin", "commit", "_slots",
))  # fmt: skip


def unseen(patch, words):
    in_source(patch, STEP, "self._unseen_entries(length)", f"self._unseen_entries({words})")


@bug("GROUP-01", "GROUP-02")
def what_a_window_gave_back_it_lists_and_gives_back_again(patch):
    in_source(patch, STEP, "self._tables.release(table, unseen)", "self._tables.before(table, unseen)")


@bug("GROUP-01")
def two_groups_take_one_block(patch):
    step = GroupedCache.step

    def sharing(self, sequence, keys, values):
        step(self, sequence, keys, values)
        table = self._table(sequence)
        for entry in range(self._tables.count(table) if self.config.num_groups > 1 else 0):
            block = int(self._tables.at(table, 1, np.array([entry]))[0])
            if self._tables.at(table, 0, np.array([entry]))[0] >= 0:
                self._tables.replace(table, 0, entry, block)

    patch.setattr(GroupedCache, "step", sharing)


@bug("GROUP-02")
def windows_give_nothing_back(patch):
    unseen(patch, "0")


@bug("GROUP-02", "GROUP-04")
def windows_give_back_a_token_early(patch):
    unseen(patch, "length + 1")


@bug("GROUP-02")
def windows_give_back_a_token_late(patch):
    unseen(patch, "max(0, length - 1)")


@bug("GROUP-02", "GROUP-04", "GROUP-07")
def windows_give_back_when_a_step_ends(patch):
    unseen(patch, "length + count")


@bug("GROUP-03")
def what_is_gone_is_given_back_before_anyone_looks(patch):
    in_source(patch, STEP, " > free:", " > free and False:")


@bug("GROUP-03")
def the_first_group_alone_is_asked_for_room(patch):
    in_source(patch, STEP, "config.num_groups * more[table]", "more[table]")


@bug("GROUP-03")
def what_is_given_back_is_no_room(patch):
    in_source(patch, STEP, "== 1 for block in", "== 0 for block in")


@bug("GROUP-04")
def a_window_is_a_token_wider(patch):
    in_source(patch, ATTEND, "sight=sight", "sight=Sight(sight.window and sight.window + 1)")


@bug("GROUP-04")
def every_layer_sees_all_that_is_held(patch):
    in_source(patch, ATTEND, "sight=sight", "sight=Sight()")


@bug("GROUP-04")
def what_is_no_longer_held_is_read(patch):
    patch.setattr(GroupedCache, "_check_not_released", lambda self, *where: None)


@bug("GROUP-04")
def layers_of_a_group_lie_in_one_place(patch):
    in_source(patch, SLOTS, "layers // groups", "layers // groups * 0")


@bug("GROUP-05")
def the_last_group_alone_says_what_is_found(patch):
    in_source(patch, FIND, ".all():\n", ".any():\n")


@bug("GROUP-05")
def windows_are_asked_for_every_block(patch):
    in_source(patch, FIND, "if (runs >= len(keys) - self._unseen_entries(len(keys) * self.config.block_size)).all()",
              "if (runs >= len(keys)).all()")  # fmt: skip


@bug("GROUP-05")
def a_window_is_a_token_narrower_where_it_is_found(patch):
    in_source(patch, FIND, "self._unseen_entries(len(keys) * self.config.block_size)",
              "self._unseen_entries(len(keys) * self.config.block_size + 1)")  # fmt: skip


@bug("GROUP-05")
def what_one_group_committed_another_finds(patch):
    patch.setattr("kvref.grouped._group_key", lambda key, group: key)


@bug("GROUP-05")
def a_sequence_holds_all_that_was_found_of_it(patch):
    in_source(
        patch,
        FIND,
        "np.arange(hit)[:, None] < self._unseen_entries(hit * self.config.block_size)",
        "np.zeros(blocks.shape, bool)",
    )


@bug("GROUP-05")
def windows_commit_nothing(patch):
    in_source(patch, COMMIT, "range(self.config.num_groups)", "[self.config.num_groups - 1]")


@bug("GROUP-06")
def what_windows_find_is_held_by_no_one(patch):
    in_source(patch, BEGIN, "self.pool.share_many(entries[entries != NO_BLOCK])", "self.pool.share_many(entries[:, -1])")


@bug("GROUP-06")
def what_can_be_found_is_not_free(patch):
    patch.setattr(IndexedBlockPool, "num_free", BlockPool.num_free)


@bug("GROUP-06")
def the_first_positions_are_taken_first(patch):
    cut = BlockTables.cut
    patch.setattr(BlockTables, "cut", lambda self, table, count: cut(self, table, count)[::-1])


@bug("GROUP-07")
def any_length_is_left(patch):
    patch.setattr(GroupedCache, "truncate", PrefixIndexed.truncate)


@bug("GROUP-07")
def nothing_goes_once_a_window_passed(patch):
    truncate = GroupedCache.truncate

    def refusing(self, sequence, length):
        passed = self._tables.released[self._table(sequence)].any() and length < self.length(sequence)
        truncate(self, sequence, -1 if passed else length)

    patch.setattr(GroupedCache, "truncate", refusing)


@bug("GROUP-07")
def what_is_cut_off_stays_in_the_windows(patch):
    def cut(self, table, lengths):
        self._tables.lengths[table] = lengths

    patch.setattr(BlockOwner, "_set_lengths", cut)


@bug("PREFIX-14")
def a_step_goes_to_a_block_that_can_be_found(patch):
    patch.setattr(GroupedCache, "_needs_copy", BlockOwner._needs_copy)
    patch.setattr(GroupedCache, "_copies_needed", BlockOwner._copies_needed)


@hidden("grouped", "PREFIX-02")
def what_is_cut_off_stays_committed(patch):
    truncate = GroupedCache.truncate

    def remembering(self, sequence, length):
        told = self._committed.get(sequence)
        before = (told.tokens, list(told.keys)) if told else None
        truncate(self, sequence, length)
        if before:
            told.tokens, told.keys = before

    patch.setattr(GroupedCache, "truncate", remembering)


@hidden("grouped", "GROUP-03")
def a_fork_forgets_what_its_parent_gave_back(patch):
    fork = BlockTables.fork

    def forgetful(self, table):
        child = fork(self, table)
        self.released[child] = 0
        return child

    patch.setattr(BlockTables, "fork", forgetful)


@real("grouped")
def a_window_has_five_hundred_tokens_at_most(patch):
    in_source(patch, ATTEND, "sight=sight", "sight=Sight(sight.window and min(sight.window, 500))")


@real("grouped")
def blocks_of_a_group_are_numbered_in_ten_bits(patch):
    in_source(patch, SLOTS, ".astype(np.int64)", ".astype(np.int64) % 1024")


@real("grouped")
def what_a_window_gives_back_is_counted_in_a_byte(patch):
    seen = GroupedCache._unseen_entries
    patch.setattr(GroupedCache, "_unseen_entries", lambda self, length: np.minimum(seen(self, length), 127))
