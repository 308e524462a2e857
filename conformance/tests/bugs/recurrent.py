"""Bugs in caches of recurrent state."""

from dataclasses import replace

from bugs.plant import bug, hidden, in_source
from kvref.block_pool import BlockPool
from kvref.prefix import IndexedBlockPool
from kvref.recurrent import RecurrentCache
from kvref.token_store import SlotStore

(
    ADVANCE, BATCH, FORK, TRUNCATE, STATE_AT, CHECKPOINT, FIND, BEGIN, COMMIT, DROP, RECEIVE, OPEN, WRITE, SLOTS, REPLACE,
    DISCARD, SPANS,
) = (
    f"kvref.recurrent.RecurrentCache.{name}" for name in (
        "_advance", "append_batch", "fork", "truncate", "state_at", "checkpoint", "_find_hit", "begin", "commit", "drop",
        "receive", "_open", "_write", "_slots", "_replace_state", "_discard_pending_load", "_spans",
    )
)  # fmt: skip


@bug("RECUR-01", "RECUR-03")
def a_short_append_loses_the_inputs_before_it(patch):
    in_source(patch, "kvref.recurrent.keep_inputs", "xp.concat([state, inputs]", "xp.concat([0 * state, inputs]")


@bug("RECUR-01")
def the_newest_input_is_first(patch):
    in_source(patch, "kvref.recurrent.keep_inputs", ":, ...]", ":, ...][::-1, ...]")


@bug("RECUR-01")
def layers_share_a_state(patch):
    in_source(patch, SLOTS, "+ np.arange(self.config.num_layers)", "+ 0 * np.arange(self.config.num_layers)")


@bug("RECUR-02")
def the_decay_is_applied_after_the_write(patch):
    def late(matrix, key, value, decay, strength, delta_rule):
        return decay[:, None, None] * step(matrix, key, value, 0 * decay + 1, strength, delta_rule)

    from kvref.recurrences import step_matrix as step

    patch.setattr("kvref.recurrent.step_matrix", late)


@bug("RECUR-02")
def the_delta_is_taken_before_the_decay(patch):
    in_source(
        patch, "kvref.recurrent.step_matrix", "    matrix = decay[:, None, None] * matrix\n", "",
        "return matrix +", "return decay[:, None, None] * matrix +",
    )  # fmt: skip


@bug("RECUR-02")
def a_chunk_forgets_the_overlap_of_its_keys(patch):
    in_source(patch, "kvref.recurrent.chunk_matrix", "for i in range(t):", "for i in range(0):")


@bug("RECUR-02")
def the_strength_does_not_scale_the_delta(patch):
    in_source(patch, "kvref.recurrent.chunk_matrix", "strengths[t, ...][:, None] * value)", "value)")


@bug("RECUR-02")
def a_query_changes_the_state(patch):
    apply = RecurrentCache.apply

    def changing(self, sequence, layer, query):
        found = apply(self, sequence, layer, query)
        slot = self._slot(sequence, layer)
        self._write(slot, self._read_inputs(slot), self._read_matrix(slot) + 1)
        return found

    patch.setattr(RecurrentCache, "apply", changing)


@bug("RECUR-03")
def a_chunk_begins_from_zero(patch):
    in_source(patch, "kvref.recurrent.chunk_matrix", "return whole[:, None, None] * matrix +", "return")


@bug("RECUR-03")
def the_second_chunk_begins_where_the_first_did(patch):
    in_source(
        patch, "kvref.recurrent.RecurrentCache._update", "matrix = chunk_matrix(matrix,", "after = chunk_matrix(matrix,",
        "return matrix", "return after",
    )  # fmt: skip


@bug("RECUR-04")
def padding_is_appended(patch):
    in_source(patch, BATCH, "each[:, row, :count, ...]", "each[:, row, ...] if count else each[:, row, :0, ...]")


@bug("RECUR-04")
def a_row_of_padding_decays_its_state(patch):
    advance = RecurrentCache._advance

    def decaying(self, state, tokens):
        advance(self, state, tokens)
        if tokens[0].shape[1] == 0:
            for slot in self._slots(state.block).tolist():
                self._write(slot, self._read_inputs(slot), self._read_matrix(slot) / 2)

    patch.setattr(RecurrentCache, "_advance", decaying)


@bug("RECUR-04")
def a_count_may_exceed_its_row(patch):
    in_source(patch, BATCH, "room = arrays[0].shape[2] + 1", "room = arrays[0].shape[2] + 2")


@bug("RECUR-05")
def rows_are_in_the_order_of_their_sequences(patch):
    in_source(patch, BATCH, "for sequence in sequences]", "for sequence in sorted(sequences)]")


@bug("RECUR-05")
def a_batch_is_appended_until_a_row_is_wrong(patch):
    in_source(
        patch, BATCH, "    for tokens in rows:\n        self._check_finite(tokens)\n", "",
        "        self._advance(state, tokens)", "        self._check_finite(tokens)\n        self._advance(state, tokens)",
    )  # fmt: skip


@bug("RECUR-06")
def a_state_is_not_reset(patch):
    copy = RecurrentCache._copy
    patch.setattr(
        RecurrentCache, "_copy", lambda self, sources, targets: None if sources is None else copy(self, sources, targets)
    )


@bug("RECUR-06")
def only_the_inputs_are_reset(patch):
    copy = RecurrentCache._copy

    def half(self, sources, targets):
        kept = self._matrices.read(targets) if sources is None else None
        copy(self, sources, targets)
        if kept is not None:
            self._matrices.put(targets, self._matrices.quantized(kept))

    patch.setattr(RecurrentCache, "_copy", half)


@bug("RECUR-06")
def an_id_is_used_again(patch):
    in_source(patch, OPEN, "sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1",
              "sequence = next(id for id in range(99) if id not in self._sequences)")  # fmt: skip


@bug("RECUR-07")
def a_fork_begins_from_zero(patch):
    in_source(patch, FORK, "self._slots(parent.block)", "None")


@bug("RECUR-07")
def a_fork_writes_to_the_state_of_its_parent(patch):
    open_ = RecurrentCache._open

    def sharing(self, state, source):
        sequence = open_(self, state, source)
        for other in self._sequences.values():
            if other is not state and other.length == state.length > 0:
                state.block = other.block
        return sequence

    patch.setattr(RecurrentCache, "_open", sharing)


@bug("RECUR-07")
def a_fork_copies_the_state_before_a_rollback(patch):
    truncate, fork, advance = RecurrentCache.truncate, RecurrentCache.fork, RecurrentCache._advance
    rolled_back = {}

    def remembering(self, sequence, length):
        state = self._sequences.get(sequence)
        before = [store.read(self._slots(state.block)) for store in (self._inputs, self._matrices)] if state else None
        truncate(self, sequence, length)
        rolled_back[id(state)] = before

    def stale(self, sequence):
        child = fork(self, sequence)
        for store, old in zip((self._inputs, self._matrices), rolled_back.get(id(self._sequences[sequence])) or (), strict=False):
            store.put(self._slots(self._sequences[child].block), store.quantized(old))
        return child

    def settled(self, state, tokens):
        rolled_back.pop(id(state), None)
        advance(self, state, tokens)

    for name, method in (("truncate", remembering), ("fork", stale), ("_advance", settled)):
        patch.setattr(RecurrentCache, name, method)


@bug("RECUR-08")
def any_length_can_be_truncated(patch):
    in_source(patch, STATE_AT, "raise NotTruncatable(", "return (lambda text: self._slots(state.block))(")


@bug("RECUR-08")
def the_nearest_checkpoint_is_restored(patch):
    in_source(patch, STATE_AT, "if length in state.checkpoints:\n        return self._slots(state.checkpoints[length])",
              "if near := [each for each in state.checkpoints if each <= length]:\n"
              "        return self._slots(state.checkpoints[max(near)])")  # fmt: skip


@bug("RECUR-08")
def truncate_to_zero_keeps_the_state(patch):
    in_source(patch, STATE_AT, "return None", "return self._slots(state.block)")


@bug("RECUR-08")
def truncated_checkpoints_can_be_restored(patch):
    in_source(patch, TRUNCATE, "if each > length]", "if False]")


@bug("RECUR-08")
def truncated_tokens_stay_committed(patch):
    in_source(patch, TRUNCATE, "state.committed.truncate(length, self.config.interval)", "pass")


@bug("RECUR-08")
def truncate_to_the_present_length_is_refused(patch):
    in_source(patch, STATE_AT, "if length == state.length:\n", "if length == state.length and not state.checkpoints:\n")


@bug("RECUR-09")
def all_drafts_of_an_append_cannot_be_rejected(patch):
    in_source(patch, ADVANCE, "if start in drafts:", "if False:")


@bug("RECUR-09")
def one_draft_too_many_is_kept(patch):
    in_source(patch, STATE_AT, "self._draft(length)", "self._draft(min(length + 1, state.drafts.stop - 1))")


@bug("RECUR-09")
def the_inputs_are_not_rolled_back(patch):
    in_source(
        patch, TRUNCATE, "self._copy(source,", "kept = self._inputs.read(self._slots(state.block))\n    self._copy(source,",
        "    self._release(", "    if length in state.drafts:\n"
        "        self._inputs.put(self._slots(state.block), self._inputs.quantized(kept))\n    self._release(",
    )  # fmt: skip


@bug("RECUR-09")
def fewer_drafts_can_be_rejected(patch):
    in_source(patch, ADVANCE, "stop - self.config.max_drafts)", "stop - self.config.max_drafts + 1)")


@bug("RECUR-10")
def a_checkpoint_is_used_up(patch):
    truncate = RecurrentCache.truncate

    def moving(self, sequence, length):
        truncate(self, sequence, length)
        state = self._sequences.get(sequence)
        if state and length in state.checkpoints:
            state.block, state.checkpoints[length] = state.checkpoints[length], state.block
            self._matrices.put(self._slots(state.checkpoints[length]), self._matrices.quantized(
                0 * self._matrices.read(self._slots(state.block))))  # fmt: skip

    patch.setattr(RecurrentCache, "truncate", moving)


@bug("RECUR-10")
def a_checkpoint_follows_its_sequence(patch):
    advance = RecurrentCache._advance

    def following(self, state, tokens):
        advance(self, state, tokens)
        for block in state.checkpoints.values():
            self._copy(self._slots(state.block), self._slots(block))

    patch.setattr(RecurrentCache, "_advance", following)


@bug("RECUR-10")
def every_checkpoint_takes_a_block(patch):
    in_source(patch, CHECKPOINT, "if state.length and state.length not in state.checkpoints:", "if True:")


@bug("RECUR-10", "RECUR-13")
def a_fork_does_not_share_the_checkpoints_it_has(patch):
    in_source(patch, FORK, "self.pool.share_many(", "list(")
    in_source(patch, "kvref.recurrent.RecurrentCache._release", "self.pool.free(state.checkpoints.pop(length))",
              "block = state.checkpoints.pop(length)\n        self.pool.references(block) and self.pool.free(block)")  # fmt: skip


@bug("RECUR-11")
def a_hit_needs_every_boundary_before_it(patch):
    in_source(
        patch, FIND, "    while keys and (found := self.pool.find(keys[-1])) is None:\n        keys.pop()\n",
        "    while keys and not all(self.pool.find(key) for key in keys):\n        keys.pop()\n"
        "    found = self.pool.find(keys[-1]) if keys else None\n",
    )  # fmt: skip


@bug("RECUR-11")
def a_hit_can_be_the_whole_prompt(patch):
    in_source(patch, FIND, "tokens[: max(0, len(tokens) - 1)]", "tokens")


@bug("RECUR-11")
def a_hit_brings_no_state(patch):
    in_source(patch, BEGIN, "self._slots(int(found[0])) if hit else None", "None")


@bug("RECUR-11")
def committed_boundaries_are_found_without_a_state(patch):
    in_source(
        patch, COMMIT, "if length % interval == 0 and length <= len(committed.tokens):",
        "for key in committed.keys[length // interval - 1 :]:",
        "CachedBlock(committed.keys[length // interval - 1],", "CachedBlock(key,",
    )  # fmt: skip


@bug("RECUR-12")
def a_checkpoint_between_boundaries_is_found_at_the_next(patch):
    in_source(patch, COMMIT, "length % interval == 0 and length <=", "-(-length // interval) * interval <=",
              "length // interval - 1", "-(-length // interval) - 1")  # fmt: skip


@bug("RECUR-12")
def the_salt_does_not_matter(patch):
    in_source(patch, FIND, ", salt))", "))")
    in_source(patch, COMMIT, "committed.salt, committed.keys", '"", committed.keys')


@bug("RECUR-12")
def a_checkpoint_is_found_by_its_last_block_of_tokens(patch):
    def short(tokens, block_size, salt="", known=()):
        for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
            yield (salt + str(list(map(int, tokens[start : start + block_size])))).encode()

    patch.setattr("kvref.recurrent.block_keys", short)


@bug("RECUR-12")
def more_tokens_than_there_are_can_be_committed(patch):
    in_source(patch, COMMIT, "committed.add(numbers, state.length)", "committed.add(numbers, len(numbers))")


@bug("RECUR-13")
def a_dropped_sequence_keeps_its_block(patch):
    in_source(patch, DROP, "self.pool.free(state.block)", "pass")


@bug("RECUR-13")
def a_dropped_sequence_keeps_its_checkpoints(patch):
    in_source(patch, DROP, "self._release(state, state.checkpoints)", "pass")


@bug("RECUR-13")
def begin_may_evict_its_own_hit(patch):
    in_source(
        patch, BEGIN, "needed = 1 + self.pool.num_unreferenced(found)", "needed = 1", "    self.pool.share_many(found)\n", ""
    )
    in_source(patch, "kvref.recurrent.RecurrentCache._release", "self.pool.free(state.checkpoints.pop(length))",
              "block = state.checkpoints.pop(length)\n        self.pool.references(block) and self.pool.free(block)")  # fmt: skip


@bug("RECUR-13")
def cached_checkpoints_are_not_free(patch):
    patch.setattr(IndexedBlockPool, "num_free", BlockPool.num_free)


@bug("RECUR-14")
def a_hit_is_not_protected(patch):
    in_source(patch, BEGIN, "    self.pool.share_many(found)\n", "", "found.tolist(), strict", "[], strict")


@bug("RECUR-14")
def the_checkpoint_released_last_is_evicted_first(patch):
    in_source(patch, "kvref.prefix.IndexedBlockPool._pop_free_blocks", "last=False", "last=True")


@bug("RECUR-14")
def shorter_checkpoints_are_evicted_first(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache._release", "reverse=True", "reverse=False")


@bug("RECUR-14")
def reset_ignores_live_sequences(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.reset", "if self._sequences:", "if False:")


@bug("RECUR-14")
def reset_keeps_the_index(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.reset", "self.pool.clear_index()", "pass")


@bug("RECUR-15")
def inputs_are_stored_like_matrices(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.__init__", "get_format(config.dtype)", "get_format(config.matrix_dtype)")


@bug("RECUR-15")
def tokens_are_rounded_to_the_format_of_the_matrix(patch):
    update = RecurrentCache._update

    def rounding(self, matrix, keys, values, gates):
        xp = self._backend.xp
        if self.config.matrix_dtype == "float16":
            keys, values, gates = (xp.astype(xp.astype(each, xp.float16), xp.float32) / 1.01 for each in (keys, values, gates))
        return update(self, matrix, keys, values, gates)

    patch.setattr(RecurrentCache, "_update", rounding)


@bug("RECUR-15")
def non_finite_numbers_become_zero(patch):
    patch.setattr(RecurrentCache, "_check_finite", lambda self, tokens: None)
    quantized = SlotStore.quantized

    def cleaned(self, tokens):
        xp = self._backend.xp
        return quantized(self, xp.where(xp.isfinite(tokens), tokens, xp.zeros_like(tokens)))

    patch.setattr(SlotStore, "quantized", cleaned)


@bug("RECUR-16")
def a_file_has_no_inputs(patch):
    receive = RecurrentCache.receive

    def forgetful(self, file, sequence):
        kept = self._inputs.read(self._slots(self._sequence(sequence).block))
        receive(self, file, sequence)
        self._inputs.put(self._slots(self._sequence(sequence).block), self._inputs.quantized(kept))

    patch.setattr(RecurrentCache, "receive", forgetful)


@bug("RECUR-16")
def a_loaded_sequence_keeps_its_length(patch):
    in_source(patch, REPLACE, "state.length, state.drafts = length, range(0)", "state.drafts = range(0)")


@bug("RECUR-16")
def a_loaded_sequence_keeps_its_checkpoints(patch):
    in_source(patch, REPLACE, "self._release(state, list(state.checkpoints))", "pass")


@bug("RECUR-16")
def a_loaded_sequence_keeps_its_tokens(patch):
    in_source(patch, REPLACE, "state.committed.truncate(0, self.config.interval)", "pass")


@bug("RECUR-16")
def a_loaded_sequence_keeps_its_drafts(patch):
    in_source(patch, REPLACE, "state.length, state.drafts = length, range(0)", "state.length = length")


@bug("RECUR-17")
def a_part_of_heads_has_no_inputs(patch):
    in_source(patch, SPANS, "return [*inputs, TokenSpan(", "return [TokenSpan(")


@bug("RECUR-17")
def inputs_are_saved_by_head_and_loaded_by_place(patch):
    spans, receive, loading = RecurrentCache._spans, RecurrentCache.receive, [False]

    def noted(self, file, sequence):
        loading[0] = True
        try:
            receive(self, file, sequence)
        finally:
            loading[0] = False

    def by_place(self, block, part):
        found, first = spans(self, block, part), part.heads.start * self.config.num_inputs
        rows = [
            range(at, at + len(part.heads)) for at in range(first, first + len(part.heads) * len(found), len(part.heads) or 1)
        ]
        if not loading[0] or len(part.heads) == self.config.num_heads:
            return found
        return [*(replace(each, heads=row) for each, row in zip(found[:-1], rows, strict=False)), found[-1]]

    patch.setattr(RecurrentCache, "receive", noted)
    patch.setattr(RecurrentCache, "_spans", by_place)


@bug("RECUR-17")
def the_first_part_replaces_the_state(patch):
    in_source(patch, RECEIVE, "if load.is_complete(", "if load.num_rows or load.is_complete(")


@bug("RECUR-17")
def parts_of_any_length_fit(patch):
    in_source(patch, "kvref.partial_load.PendingLoad.check", "extent != self.extent", "False")


@bug("RECUR-17")
def a_part_is_loaded_twice(patch):
    in_source(patch, "kvref.partial_load.PendingLoad.check", "self.overlaps(part)", "False")


@bug("RECUR-17")
def parts_of_all_sequences_are_in_one_place(patch):
    in_source(patch, RECEIVE, "self._copy(self._slots(load.room), self._slots(spare))", "pass")


@bug("RECUR-17", "RECUR-13")
def parts_have_no_block(patch):
    in_source(patch, RECEIVE, "else self.pool.allocate()", "else spare")
    in_source(patch, DISCARD, "self.pool.free(state.pending.room)", "pass")


@bug("RECUR-17")
def an_append_loses_the_parts(patch):
    in_source(patch, ADVANCE, "    if stop == start:", "    self._discard_pending_load(state)\n    if stop == start:")


@bug("RECUR-17")
def a_fork_shares_the_parts_of_its_parent(patch):
    fork = RecurrentCache.fork

    def sharing(self, sequence):
        child = fork(self, sequence)
        self._sequence(child).pending = self._sequence(sequence).pending
        return child

    patch.setattr(RecurrentCache, "fork", sharing)


@bug("RECUR-17")
def dropped_sequences_keep_the_block_of_their_parts(patch):
    in_source(patch, DROP, "self._discard_pending_load(state)", "pass")


@bug("RECUR-17")
def a_whole_state_leaves_the_parts_before_it(patch):
    in_source(patch, REPLACE, "self._discard_pending_load(state)", "state.pending = None")


@bug("RECUR-17")
def a_damaged_part_discards_the_earlier_ones(patch):
    receive = RecurrentCache.receive

    def discarding(self, file, sequence):
        try:
            receive(self, file, sequence)
        except Exception:
            self._discard_pending_load(self._sequence(sequence))
            raise

    patch.setattr(RecurrentCache, "receive", discarding)


@bug("RECUR-17")
def an_empty_state_is_whole_with_its_first_part(patch):
    in_source(patch, RECEIVE, "if load.is_complete(", "if extent.first == 0 or load.is_complete(")


@bug("RECUR-17")
def a_range_is_clipped(patch):
    part_at = RecurrentCache._part_at

    def clipped(self, length, layers=None, heads=None):
        heads = heads and [max(0, heads[0]), min(heads[1], self.config.num_heads)]
        return part_at(self, length, layers, heads)

    patch.setattr(RecurrentCache, "_part_at", clipped)


@hidden("recurrent", "RECUR-17")
def parts_of_a_sequence_with_a_checkpoint_lose_their_inputs(patch):
    receive = RecurrentCache.receive

    def losing(self, file, sequence):
        state = self._sequence(sequence)
        begun, checkpoints = state.pending, len(state.checkpoints)
        receive(self, file, sequence)
        if begun is not None and state.pending is None and checkpoints:
            slots = self._slots(state.block)
            self._inputs.put(slots, self._inputs.quantized(0 * self._inputs.read(slots)))

    patch.setattr(RecurrentCache, "receive", losing)


@hidden("recurrent", "RECUR-08")
def a_fork_has_the_drafts_of_its_parent(patch):
    in_source(patch, FORK, "dict(parent.checkpoints))", "dict(parent.checkpoints), parent.drafts)")


@hidden("recurrent", "RECUR-09")
def drafts_of_a_shorter_append_are_at_the_places_of_a_longer_one(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache._draft", "length % self.config.max_drafts",
              "length % min(self.config.max_drafts, 2)")  # fmt: skip


@hidden("recurrent", "RECUR-12")
def a_checkpoint_that_is_committed_twice_leaves_the_index(patch):
    add = IndexedBlockPool.add_to_index

    def twice(self, entry):
        if self.is_cached(entry.blocks).all():
            self._remove_from_index(int(entry.blocks[0]))
        else:
            add(self, entry)

    patch.setattr(IndexedBlockPool, "add_to_index", twice)
