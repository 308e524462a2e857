"""Bugs in the family `compressed`."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.compressed import CompressedCache, CompressedConfig

(APPEND, COMPRESS, STEP, WINDOW, ROWS, STATE, TRUNCATE, OPEN, FORK, DROP, OFFLOAD, RESTORE, DISCARD, ACCEPTED, VISIBLE) = (
    f"kvref.compressed.CompressedCache.{name}"
    for name in (
        "_append", "_compress", "step", "read_window", "read_rows", "read_state", "truncate", "_open", "fork", "drop",
        "offload", "restore", "discard", "_accepted", "_visible",
    )
)  # fmt: skip


@bug("COMPR-01")
def the_row_of_an_incomplete_group_is_returned(patch):
    in_source(patch, ROWS, "self._num_rows(state)", "-(-state.length // self.config.ratio)")


@bug("COMPR-01")
def rows_are_returned_newest_first(patch):
    in_source(patch, ROWS, "np.arange(self._num_rows(state))", "np.arange(self._num_rows(state))[::-1]")


@bug("COMPR-01")
def the_state_contains_a_complete_group(patch):
    in_source(patch, STATE, "state.length // self.config.ratio * self.config.ratio",
              "max(0, state.length - 1) // self.config.ratio * self.config.ratio")  # fmt: skip


@bug("COMPR-01")
def the_state_returns_contributions_for_gates(patch):
    in_source(patch, STATE, "self._read(state, 2, at)", "self._read(state, 1, at)")


@bug("COMPR-01")
def the_window_contains_one_token_too_many(patch):
    in_source(patch, WINDOW, "self.config.window + 1", "self.config.window")


@bug("COMPR-01")
def the_window_is_returned_as_the_ring_is_stored(patch):
    read = CompressedCache.read_window

    def as_stored(self, sequence):
        found, length, size = read(self, sequence), self.length(sequence), self.config.window + self.config.rollback
        at = np.arange(length - len(found), length) % size
        return found[np.argsort(at, kind="stable")]

    patch.setattr(CompressedCache, "read_window", as_stored)


@bug("COMPR-01")
def further_gates_are_ignored(patch):
    accepted = CompressedCache._accepted

    def cut(self, state, latents, contributions, gates):
        return accepted(self, state, latents, contributions, gates[: len(latents)] if np.ndim(gates) == 2 else gates)

    patch.setattr(CompressedCache, "_accepted", cut)


@bug("COMPR-01")
def contributions_of_the_wrong_shape_are_noticed_after_latents_are_stored(patch):
    append = CompressedCache.append

    def early(self, sequence, latents, contributions, gates):
        state = self._known(sequence)
        if (
            np.shape(latents) != np.shape(contributions)
            and np.ndim(latents) == 2
            and np.shape(latents)[1] == self.config.head_dim
        ):
            self._append(state, *self._accepted(state, latents, latents, latents))
        append(self, sequence, latents, contributions, gates)

    patch.setattr(CompressedCache, "append", early)


@bug("COMPR-02")
def a_row_is_the_mean_of_its_group(patch):
    in_source(patch, COMPRESS, "attend(query, gates[:, :, None],", "attend(query, 0 * gates[:, :, None],")


@bug("COMPR-02")
def gates_of_the_first_number_weigh_all_numbers(patch):
    in_source(patch, COMPRESS, "attend(query, gates[:, :, None],", "attend(query, gates[:, :1, None] + 0 * gates[:, :, None],")


@bug("COMPR-02")
def gates_are_scaled_as_scores(patch):
    in_source(patch, COMPRESS, "contributions[:, :, None], 1.0,", "contributions[:, :, None], self.config.head_dim**-0.5,")


@bug("COMPR-02")
def weights_are_not_divided_by_their_sum(patch):
    in_source(patch, COMPRESS, "1.0, mask)[:, :, 0]", "1.0, mask)[:, :, 0] * xp.sum(xp.exp(gates), axis=0)")


@bug("COMPR-02")
def a_row_is_rotated_for_its_last_token(patch):
    in_source(patch, COMPRESS, "position, self._backend", "position + self.config.ratio - 1, self._backend")


@bug("COMPR-02")
def a_row_is_rotated_for_its_number(patch):
    in_source(patch, COMPRESS, "position, self._backend", "position // self.config.ratio, self._backend")


@bug("COMPR-02")
def rows_are_not_rotated(patch):
    in_source(patch, COMPRESS, "if self._rotary is None:", "if True:")


@bug("COMPR-02")
def the_first_numbers_are_rotated(patch):
    in_source(patch, COMPRESS, "[row[:, : dim - rope], self._rotary.turned(row[:, dim - rope :], position, self._backend)]",
              "[self._rotary.turned(row[:, :rope], position, self._backend), row[:, rope:]]")  # fmt: skip


@bug("COMPR-02")
def rows_are_rotated_with_the_base_of_other_layers(patch):
    patch.setattr("kvref.compressed.THETA", 10_000.0)


@bug("COMPR-02")
def angles_are_computed_in_float32(patch):
    in_source(patch, "kvref.rope.Rotary.turned", "by * np.array(self.frequencies)",
              "np.float32(by) * np.array(self.frequencies, np.float32)")  # fmt: skip


@bug("COMPR-02")
def rows_are_rotated_in_halves(patch):
    create = CompressedCache.__init__

    def halves(self, *args, **named):
        create(self, *args, **named)
        if self._rotary is not None:
            object.__setattr__(self._rotary, "layout", "halves")

    patch.setattr(CompressedCache, "__init__", halves)


@bug("COMPR-02")
def a_group_begins_at_the_start_of_a_chunk(patch):
    in_source(
        patch,
        APPEND,
        "at = slice(",
        "at = slice(start - first, (group + 1) * ratio - first) if group == first // ratio else slice(",
    )


@bug("COMPR-02")
def only_the_first_group_of_a_chunk_is_compressed(patch):
    in_source(patch, APPEND, "end // ratio)", "min(end // ratio, first // ratio + 1))")


@bug("COMPR-02")
def all_rows_of_a_chunk_are_rotated_for_the_first(patch):
    in_source(patch, APPEND, "group * ratio)", "first)")


@bug("COMPR-02")
def the_row_of_an_older_owner_remains(patch):
    in_source(patch, APPEND, "self._put(state, 3, np.array([group]), row)",
              "slots = self._slots(state, 3, np.array([group]))\n"
              "        self._put(state, 3, np.array([group]), row + 1e-3 * self._stores[3].read(slots)[:, 0, :])")  # fmt: skip


@bug("COMPR-03")
def a_query_sees_one_token_too_few(patch):
    in_source(patch, VISIBLE, "positions > at - self.config.window", "positions > at - self.config.window + 1")


@bug("COMPR-03")
def a_query_sees_later_tokens(patch):
    in_source(patch, VISIBLE, "(positions <= at) &", "")


@bug("COMPR-03")
def a_query_sees_the_row_of_its_own_group(patch):
    in_source(patch, VISIBLE, "(groups + 1) * self.config.ratio - 1 <= at", "groups * self.config.ratio <= at")


@bug("COMPR-03")
def a_query_sees_all_rows(patch):
    in_source(patch, VISIBLE, "(groups + 1) * self.config.ratio - 1 <= at", "groups + 0 * at >= 0")


@bug("COMPR-03")
def the_last_query_of_a_group_does_not_see_its_row(patch):
    in_source(patch, VISIBLE, "(groups + 1) * self.config.ratio - 1 <= at", "(groups + 1) * self.config.ratio <= at")


@bug("COMPR-03")
def rows_of_tokens_in_the_window_are_not_seen(patch):
    in_source(patch, VISIBLE, "(groups + 1) * self.config.ratio - 1 <= at",
              "(groups + 1) * self.config.ratio - 1 <= at - self.config.window")  # fmt: skip


@bug("COMPR-03")
def the_window_begins_with_the_chunk(patch):
    in_source(patch, STEP, "first = max(0, start - config.window + 1)", "first = start")


@bug("COMPR-03")
def the_window_is_read_after_new_tokens_overwrote_it(patch):
    in_source(patch, STEP, "self._append(state, latents, contributions, gates)",
              "self._append(state, latents, contributions, gates)\n"
              "    before = self._stores[0].read(self._slots(state, 0, np.arange(first, start)))")  # fmt: skip


@bug("COMPR-03")
def rows_and_the_window_have_softmaxes_of_their_own(patch):
    attend = "self._backend.attend(query, entries, entries, _scale(scale, config.head_dim), self._backend.asarray({}))"
    in_source(patch, STEP, "return " + attend.format("mask"),
              "rows_only = np.arange(mask.shape[1]) >= start + count - first\n"
              f"    parts = [{attend.format('m')} for m in (mask & ~rows_only, mask & rows_only)]\n"
              "    has_rows = (mask & rows_only).any(1)[:, None, None]\n"
              "    return np.where(has_rows, (parts[0] + parts[1]) / 2, parts[0])")  # fmt: skip


@bug("COMPR-03")
def without_a_scale_it_is_1_over_head_dim(patch):
    step = CompressedCache.step

    def scaled(self, sequence, query, latents, contributions, gates, scale=None):
        return step(self, sequence, query, latents, contributions, gates, 1 / self.config.head_dim if scale is None else scale)

    patch.setattr(CompressedCache, "step", scaled)


@bug("COMPR-03")
def step_does_not_store_gates(patch):
    in_source(patch, STEP, "self._append(state, latents, contributions, gates)",
              "self._append(state, latents, contributions, 0 * gates)")  # fmt: skip


@bug("COMPR-03")
def step_appends_before_it_refuses_the_query(patch):
    step = CompressedCache.step

    def early(self, sequence, query, latents, *arrays, **named):
        if np.ndim(latents) == 2 and len(query) != len(latents):
            self.append(sequence, latents, *arrays[:2])
        return step(self, sequence, query, latents, *arrays, **named)

    patch.setattr(CompressedCache, "step", early)


@bug("COMPR-03")
def further_queries_are_ignored(patch):
    in_source(patch, STEP, "accept_query(query,", "accept_query(query[:count],")


@bug("COMPR-04")
def a_window_can_hide_tokens(patch):
    in_source(patch, "kvref.compressed.CompressedConfig.__post_init__", "self.window < self.ratio - 1", "False")


@bug("COMPR-04")
def an_odd_number_is_rotated(patch):
    check = CompressedConfig.__post_init__

    def rounded(self):
        object.__setattr__(self, "rope_dim", self.rope_dim // 2 * 2)
        check(self)

    patch.setattr(CompressedConfig, "__post_init__", rounded)


@bug("COMPR-04")
def more_numbers_than_a_row_has_are_rotated(patch):
    check = CompressedConfig.__post_init__

    def capped(self):
        if self.rope_dim % 2 == 0:
            object.__setattr__(self, "rope_dim", min(self.rope_dim, self.head_dim // 2 * 2))
        check(self)

    patch.setattr(CompressedConfig, "__post_init__", capped)


@bug("COMPR-05")
def truncate_of_the_last_token_raises(patch):
    in_source(patch, TRUNCATE, "if first < min(stored, length):", "if length < state.length:")


@bug("COMPR-05")
def truncate_to_0_raises(patch):
    in_source(
        patch,
        TRUNCATE,
        "if length == 0:",
        "if length == 0 and state.length > 6:\n        raise NotTruncatable('0')\n    if length == 0:",
    )


@bug("COMPR-05")
def rollback_is_one_less(patch):
    in_source(patch, TRUNCATE, "state.end - self._sizes[index]", "state.end - self._sizes[index] + 2")


@bug("COMPR-05")
def tokens_that_are_gone_are_as_they_were_overwritten(patch):
    in_source(patch, TRUNCATE, "if first < min(stored, length):", "if False:")


@bug("COMPR-05")
def a_refused_truncate_removes_tokens(patch):
    in_source(
        patch, TRUNCATE, "            raise NotTruncatable", "            state.length = length\n            raise NotTruncatable"
    )


@bug("COMPR-05")
def truncate_does_not_restore_the_state(patch):
    in_source(patch, TRUNCATE, "state.length = length",
              "if length // config.ratio < state.length // config.ratio:\n"
              "        at = np.arange(length // config.ratio * config.ratio, length)\n"
              "        self._put(state, 1, at, 0 * self._read(state, 1, at))\n"
              "    state.length = length")  # fmt: skip


@bug("COMPR-05")
def the_row_of_a_group_that_became_incomplete_is_not_computed_again(patch):
    in_source(patch, APPEND, "for group in range(first // ratio, end // ratio):",
              "for group in range(max(first // ratio, state.end // ratio), end // ratio):")  # fmt: skip


@bug("COMPR-05")
def truncate_beyond_the_end_is_ignored(patch):
    in_source(patch, TRUNCATE, "in_range(length,", "in_range(min(length, state.length),")


@bug("COMPR-05")
def truncate_forgets_which_tokens_were_overwritten(patch):
    in_source(patch, TRUNCATE, "state.length = length", "state.length = state.end = length")


@bug("COMPR-05")
def truncate_to_0_keeps_which_tokens_were_overwritten(patch):
    in_source(patch, TRUNCATE, "state.length = state.end = 0", "state.length = 0")


@bug("COMPR-05")
def a_fork_forgets_which_tokens_were_overwritten(patch):
    in_source(patch, FORK, "self._open(parent.length, parent.end)", "self._open(parent.length, parent.length)")


@bug("COMPR-05")
def a_restored_sequence_forgets_which_tokens_were_overwritten(patch):
    in_source(patch, RESTORE, "self._open(length, end)", "self._open(length, length)")


@bug("COMPR-05")
def a_fork_has_readable_tokens_only(patch):
    in_source(patch, FORK, "return child",
              "length, config = parent.length, self.config\n"
              "    group = length // config.ratio * config.ratio\n"
              "    for i, first in enumerate((max(0, length - config.window + 1), group, group)):\n"
              "        at = np.arange(max(0, parent.end - self._sizes[i]), first)\n"
              "        self._put(self._known(child), i, at, np.zeros((len(at), config.head_dim), np.float32))\n"
              "    return child")  # fmt: skip


@bug("COMPR-06")
def a_new_sequence_has_the_length_of_the_former_one(patch):
    drop, create = CompressedCache.drop, CompressedCache.create

    def noting(self, sequence):
        self.former = self._known(sequence).length if self.config.num_blocks == 1 else 0
        drop(self, sequence)

    def create_with_the_former(self):
        sequence = create(self)
        self._sequences[sequence].length = self._sequences[sequence].end = getattr(self, "former", 0)
        return sequence

    patch.setattr(CompressedCache, "drop", noting)
    patch.setattr(CompressedCache, "create", create_with_the_former)


@bug("COMPR-06")
def a_fork_has_no_compressor_state(patch):
    in_source(patch, FORK, "[store.read(self._block(parent, i)) for i, store in self._numbered()]",
              "[store.read(self._block(parent, i)) * (i != 1) for i, store in self._numbered()]")  # fmt: skip


@bug("COMPR-06")
def a_fork_has_no_rows(patch):
    in_source(patch, FORK, "[store.read(self._block(parent, i)) for i, store in self._numbered()]",
              "[store.read(self._block(parent, i)) * (i != 3) for i, store in self._numbered()]")  # fmt: skip


@bug("COMPR-06")
def a_fork_has_the_block_of_its_parent(patch):
    in_source(patch, FORK, "return child", "self._sequences[child].block = parent.block\n    return child")


@bug("COMPR-06")
def a_dropped_sequence_can_be_read(patch):
    in_source(patch, DROP, "del self._sequences[int(sequence)]", "pass")


@bug("COMPR-06")
def drop_frees_the_block_of_another(patch):
    in_source(patch, DROP, "del self._sequences[int(sequence)]",
              "del self._sequences[int(sequence)]\n"
              "    for other in self._sequences.values():\n        other.length = other.end = 0")  # fmt: skip


@bug("COMPR-06")
def the_smallest_unused_id_is_returned(patch):
    in_source(patch, OPEN, "self._next_sequence, self._next_sequence + 1",
              "min(set(range(len(self._sequences) + 1)) - set(self._sequences)), 0")  # fmt: skip


@bug("COMPR-07")
def the_smallest_unused_handle_is_returned(patch):
    in_source(patch, OFFLOAD, "self._next_handle, self._next_handle + 1",
              "min(set(range(len(self._copies) + 1)) - set(self._copies)), 0")  # fmt: skip


@bug("COMPR-07")
def a_restored_sequence_has_no_window(patch):
    in_source(patch, RESTORE, "[self._backend.asarray(part) for part in parts]",
              "[self._backend.asarray(part * (i != 0)) for i, part in enumerate(parts)]")  # fmt: skip


@bug("COMPR-07")
def a_restored_sequence_has_no_gates(patch):
    in_source(patch, RESTORE, "[self._backend.asarray(part) for part in parts]",
              "[self._backend.asarray(part * (i != 2)) for i, part in enumerate(parts)]")  # fmt: skip


@bug("COMPR-07")
def a_restored_sequence_begins_a_new_group(patch):
    in_source(patch, RESTORE, "self._open(length, end)",
              "self._open(length - length % self.config.ratio, end - end % self.config.ratio)")  # fmt: skip


@bug("COMPR-07")
def a_copy_changes_with_its_sequence(patch):
    in_source(patch, RESTORE, "length, end, parts = self._copies[self._known_copy(handle)]",
              "length, end, parts = self._copies[self._known_copy(handle)]\n"
              "    if self.sources[handle] in self._sequences:\n"
              "        source = self._sequences[self.sources[handle]]\n"
              "        parts = [s.read(self._block(source, i)) for i, s in self._numbered()]")  # fmt: skip
    in_source(patch, OFFLOAD, "return handle",
              "self.sources = getattr(self, 'sources', {}) | {handle: int(sequence)}\n    return handle")  # fmt: skip


@bug("COMPR-07")
def offload_removes_the_sequence(patch):
    in_source(patch, OFFLOAD, "return handle", "self.drop(sequence)\n    return handle")


@bug("COMPR-07")
def a_copy_can_be_restored_once(patch):
    restore = CompressedCache.restore

    def once(self, handle):
        found = restore(self, handle)
        self.discard(handle)
        return found

    patch.setattr(CompressedCache, "restore", once)


@bug("COMPR-07")
def discard_leaves_the_copy(patch):
    in_source(patch, DISCARD, "del self._copies[self._known_copy(handle)]", "self._known_copy(handle)")


@bug("COMPR-08")
def a_copy_takes_a_block(patch):
    patch.setattr(CompressedCache, "num_free_blocks", property(lambda self: max(0, self._pool.num_free - len(self._copies))))


@bug("COMPR-08")
def drop_loses_a_block(patch):
    in_source(patch, DROP, "self._pool.free(self._known(sequence).block)", "self._known(sequence)")


@bug("COMPR-08")
def the_last_block_is_not_used(patch):
    in_source(patch, OPEN, "self._pool.num_free == 0", "self._pool.num_free <= 1")


@bug("COMPR-08")
def a_row_without_room_leaves_the_window_changed(patch):
    in_source(patch, ACCEPTED, "        needed = state.length + shape[0]",
              "        needed = state.length + shape[0]\n"
              "        room = self.config.max_tokens - state.length\n"
              "        self._append(state, latents[:room, :], contributions[:room, :], gates[:room, :])")  # fmt: skip


@bug("COMPR-08")
def a_sequence_can_have_one_token_too_few(patch):
    in_source(patch, ACCEPTED, "> self.config.max_tokens:", ">= self.config.max_tokens:")


@bug("COMPR-08")
def tokens_beyond_the_room_are_dropped(patch):
    append = CompressedCache.append

    def cut(self, sequence, *arrays):
        if sequence in self._sequences and len({np.shape(each) for each in arrays}) == 1 and np.ndim(arrays[0]) == 2:
            arrays = [each[: self.config.max_tokens - self.length(sequence)] for each in arrays]
        append(self, sequence, *arrays)

    patch.setattr(CompressedCache, "append", cut)


@hidden("compressed", "COMPR-02")
def after_a_restore_the_first_gate_of_the_group_is_lost(patch):
    restore = CompressedCache.restore

    def losing(self, handle):
        sequence = restore(self, handle)
        state = self._known(sequence)
        self.restored = state if state.length % self.config.ratio > 1 else None
        return sequence

    compress = CompressedCache._compress

    def without_the_first(self, contributions, gates, position):
        if (
            state := getattr(self, "restored", None)
        ) is not None and state.length // self.config.ratio * self.config.ratio == position:
            gates = np.concatenate([0 * gates[:1], gates[1:]])
        return compress(self, contributions, gates, position)

    patch.setattr(CompressedCache, "restore", losing)
    patch.setattr(CompressedCache, "_compress", without_the_first)
