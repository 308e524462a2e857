"""Bugs in transfers between caches."""

import numpy as np

from bugs.plant import bug, deferred, hidden, in_source
from kvref.block_pool import BlockPool
from kvref.transfer import TransferCache

CACHE = "kvref.transfer.TransferCache"
BEGIN, ARRIVE, COMMIT, ABORT, FENCE, SEND, RELEASE, WRITE, READ = (
    f"{CACHE}.{name}" for name in ("begin", "arrive", "commit", "abort", "fence", "send", "release", "_write", "_read")
)


@bug("TRANSFER-01")
def begin_reserves_no_block_for_the_last_token(patch):
    in_source(patch, BEGIN, "self._missing_entries(table, length)", "self._missing_entries(table, max(0, length - 1))")


@bug("TRANSFER-01")
def begin_reserves_one_block_too_many(patch):
    in_source(patch, BEGIN, "self._missing_entries(table, length)", "self._missing_entries(table, length + 1)")


@bug("TRANSFER-01", "TRANSFER-06")
def begin_returns_the_number_of_open_transfers(patch):
    in_source(
        patch, BEGIN, "transfer, self._next_transfer = self._next_transfer,", "transfer, self._next_transfer = len(self._open),"
    )


@bug("TRANSFER-01")
def begin_of_a_negative_length_is_empty(patch):
    in_source(patch, BEGIN, 'in_range(length, None, PositionOutOfRange, "length")', "max(0, length)")


@bug("TRANSFER-02", "TRANSFER-11")
def the_first_heads_of_a_part_go_to_every_rank(patch):
    in_source(
        patch, WRITE,
        "slice(rank * each + first - heads.start, rank * each + last - heads.start)", "slice(0, last - first)",
    )  # fmt: skip


@bug("TRANSFER-02")
def a_part_clears_the_other_heads_of_its_rank(patch):
    in_source(patch, WRITE, "old[:, last:, :]]", "old[:, last:, :] * 0]")


@bug("TRANSFER-02", "TRANSFER-07")
def a_part_is_written_one_row_too_far(patch):
    write = TransferCache._write

    def too_far(self, slots, heads, keys, values):
        if len(slots) and slots[-1] + 1 < self.config.num_blocks * self.config.block_size:
            write(self, slots[-1:] + 1, heads, keys[-1:], values[-1:])
        write(self, slots, heads, keys, values)

    patch.setattr(TransferCache, "_write", too_far)


@bug("TRANSFER-02")
def a_part_is_limited_by_blocks_only(patch):
    in_source(
        patch, f"{CACHE}._part", "found.arrived.shape[1]\n", "self._tables.capacity(found.table)\n",
    )  # fmt: skip


@bug("TRANSFER-02")
def a_wrong_head_is_ignored(patch):
    in_source(
        patch, f"{CACHE}._part", 'checked_range("heads", heads, self.config.num_kv_heads, HeadOutOfRange)', "range(*heads)",
    )  # fmt: skip


@bug("TRANSFER-03")
def a_second_copy_of_a_row_is_written(patch):
    in_source(patch, ARRIVE, "if arrived.any():", "if False:")


@bug("TRANSFER-03")
def only_a_part_whose_rows_have_all_arrived_is_refused(patch):
    in_source(patch, ARRIVE, "if arrived.any():", "if arrived.size and arrived.all():")


@bug("TRANSFER-03")
def a_refused_part_was_written_already(patch):
    in_source(
        patch, ARRIVE,
        "    if arrived.any():", "    self._write(slots, part, keys, values)\n    if arrived.any():",
    )  # fmt: skip


@bug("TRANSFER-03")
def a_refused_part_counts_as_arrived(patch):
    in_source(
        patch, ARRIVE,
        "        raise", "        arrived[...] = True\n        raise",
    )  # fmt: skip


@bug("TRANSFER-04")
def the_last_layer_completes_a_transfer(patch):
    in_source(patch, COMMIT, "if not arrived.all():", "if not arrived[-1].all():")


@bug("TRANSFER-04")
def one_head_completes_a_transfer(patch):
    in_source(patch, COMMIT, "if not arrived.all():", "if not arrived.any(axis=2).all():")


@bug("TRANSFER-04")
def the_last_row_completes_a_transfer(patch):
    in_source(patch, COMMIT, "if not arrived.all():", "if arrived.size and not arrived[:, -1].all():")


@bug("TRANSFER-04")
def an_incomplete_transfer_is_closed_by_commit(patch):
    in_source(
        patch, COMMIT,
        "        raise", "        self._aborted[number] = self._open.pop(number)\n        raise",
    )  # fmt: skip


@bug("TRANSFER-04", "TRANSFER-12")
def a_commit_keeps_the_references_of_the_transfer(patch):
    in_source(
        patch, COMMIT,
        "    table = ", "    self.pool.share_many(self._tables.held(self._open[number].table))\n    table = ",
    )  # fmt: skip


@bug("TRANSFER-04")
def a_commit_returns_the_number_of_the_transfer(patch):
    in_source(patch, COMMIT, "sequence, self._next_sequence = self._next_sequence,", "sequence, self._next_sequence = number,")


@bug("TRANSFER-05")
def an_open_transfer_counts_as_a_sequence(patch):
    patch.setattr(TransferCache, "num_sequences", property(lambda self: len(self._table_of) + len(self._open)))


@bug("TRANSFER-05")
def a_commit_replaces_the_newest_sequence(patch):
    in_source(
        patch, COMMIT,
        "    self._table_of[sequence] = table", "    for each in list(self._table_of)[-1:]:\n"
        "        self._tables.lengths[self._table_of[each]] = 0\n    self._table_of[sequence] = table",
    )  # fmt: skip


@bug("TRANSFER-06")
def a_part_after_the_abort_is_written_to_the_first_blocks(patch):
    """It is written by block number, whatever the owner of the block is."""
    arrive = TransferCache.arrive

    def by_number(self, transfer, layer, start, heads, keys, values):
        if transfer in self._open or not 0 <= transfer < self._next_transfer:
            arrive(self, transfer, layer, start, heads, keys, values)
        else:
            self._write(np.arange(keys.shape[0]), range(*heads), keys, values)

    patch.setattr(TransferCache, "arrive", by_number)


@bug("TRANSFER-06")
def a_part_after_the_commit_is_accepted(patch):
    in_source(patch, COMMIT, "table = self._open.pop(number).table", "table = self._open[number].table")


@bug("TRANSFER-06")
def an_abort_ends_all_transfers_after_it(patch):
    in_source(
        patch, ABORT,
        "self._aborted[number] = self._open.pop(number)",
        "self._aborted |= {each: self._open.pop(each) for each in list(self._open) if each <= number}",
    )  # fmt: skip


@bug("TRANSFER-07")
def an_abort_frees_the_blocks(patch):
    """A late write goes to the blocks of their next owner."""
    in_source(
        patch, ABORT, "self._aborted[number] = self._open.pop(number)",
        "self._aborted[number] = self._open.pop(number)\n"
        "    self.pool.free_many(self._tables.held(self._aborted[number].table))",
    )  # fmt: skip
    in_source(patch, FENCE, "self.pool.free_many(self._tables.close(found.table))", "self._tables.close(found.table)")


@bug("TRANSFER-07")
def a_fence_frees_nothing(patch):
    in_source(patch, FENCE, "self.pool.free_many(self._tables.close(found.table))", "self._tables.close(found.table)")


@bug("TRANSFER-07")
def a_fence_ends_an_open_transfer(patch):
    in_source(
        patch, FENCE, "found = ",
        "if transfer in self._open:\n        self.abort(transfer)\n    found = ",
    )  # fmt: skip


@bug("TRANSFER-07")
def a_second_fence_is_ignored(patch):
    in_source(patch, FENCE, "found = ", "if transfer not in self._aborted:\n        return\n    found = ")


@bug("TRANSFER-07")
def a_late_write_to_a_committed_transfer_is_accepted(patch):
    committed = TransferCache.commit
    write_late = TransferCache.write_late

    def note(self, transfer):
        found = self._open.get(transfer)
        sequence = committed(self, transfer)
        self.__dict__.setdefault("_committed", {})[transfer] = found
        return sequence

    def late(self, transfer, layer, start, heads, keys, values):
        if found := self.__dict__.get("_committed", {}).get(transfer):
            self._write(*self._part(found, layer, start, heads, keys, values))
            return
        write_late(self, transfer, layer, start, heads, keys, values)

    patch.setattr(TransferCache, "commit", note)
    patch.setattr(TransferCache, "write_late", late)


@bug("TRANSFER-08")
def a_transfer_expires_after_its_deadline(patch):
    in_source(patch, f"{CACHE}.expire", "found.deadline <= now", "found.deadline < now")


@bug("TRANSFER-08")
def a_transfer_without_a_deadline_expires(patch):
    in_source(patch, f"{CACHE}.expire", "found.deadline is not None and found.deadline <= now", "(found.deadline or 0) <= now")


@bug("TRANSFER-08")
def an_expired_transfer_frees_its_blocks(patch):
    in_source(patch, f"{CACHE}.expire", "self.abort(transfer)", "self.abort(transfer)\n        self.fence(transfer)")


@bug("TRANSFER-08")
def an_expired_transfer_can_be_committed(patch):
    in_source(patch, f"{CACHE}.expire", "self.abort(transfer)", "pass")


@bug("TRANSFER-08")
def an_expired_transfer_is_reported_again(patch):
    expire = TransferCache.expire

    def again(self, now):
        self.__dict__.setdefault("_expired", []).extend(expire(self, now))
        return list(self._expired)

    patch.setattr(TransferCache, "expire", again)


@bug("TRANSFER-09")
def an_export_refers_to_the_sequence(patch):
    """What is sent is what the sequence contains when it is sent."""
    in_source(
        patch, f"{CACHE}.export",
        "table = self._tables.fork(self._table(sequence))", "table = self._table(sequence)",
        "    self.pool.share_many(self._tables.held(table))\n", "",
    )  # fmt: skip


@bug("TRANSFER-09")
def an_export_does_not_hold_its_blocks(patch):
    in_source(patch, f"{CACHE}.export", "    self.pool.share_many(self._tables.held(table))\n", "")
    in_source(patch, RELEASE, "self.pool.free_many(self._tables.close(table))", "self._tables.close(table)")


@bug("TRANSFER-09")
def a_block_that_an_export_holds_is_written_in_place(patch):
    patch.setattr(BlockPool, "shared", lambda self, blocks: np.zeros(np.shape(blocks), np.bool_))


@bug("TRANSFER-09")
def a_copy_lacks_the_ranks_after_the_first(patch):
    in_source(patch, f"{CACHE}._copy_blocks", "in self._stores", "in self._stores[:1]")


@bug("TRANSFER-09", "TRANSFER-10")
def handles_are_used_again(patch):
    in_source(
        patch,
        f"{CACHE}.export",
        "handle, self._next_export = self._next_export,",
        "handle, self._next_export = len(self._exports),",
    )


@bug("TRANSFER-10")
def a_release_frees_no_block(patch):
    in_source(patch, RELEASE, "self.pool.free_many(self._tables.close(table))", "self._tables.close(table)")


@bug("TRANSFER-10")
def a_released_handle_still_works(patch):
    in_source(patch, RELEASE, "    del self._exports[int(handle)]\n    self.pool.free_many(self._tables.close(table))",
              "    self.pool.free_many(self._tables.held(table))")  # fmt: skip


@bug("TRANSFER-10")
def a_release_frees_blocks_of_other_owners(patch):
    release = TransferCache.release

    def all_of_them(self, handle):
        held = self._tables.held(self._export(handle))
        release(self, handle)
        for block in held.tolist():
            if self.pool.references(block):
                self.pool.free(block)

    patch.setattr(TransferCache, "release", all_of_them)


@bug("TRANSFER-10")
def a_second_release_releases_another_export_of_the_same_blocks(patch):
    """As if blocks had a number of readers, and a release did not say which of them has finished."""
    release, released = TransferCache.release, "_blocks_of_released"

    def counted(self, handle):
        blocks = vars(self).setdefault(released, {})
        for other, table in self._exports.items():
            if handle in blocks and self._tables.held(table).tolist() == blocks[handle]:
                handle = other
                break
        if handle in self._exports:
            blocks[int(handle)] = self._tables.held(self._exports[handle]).tolist()
        release(self, handle)

    patch.setattr(TransferCache, "release", counted)


@bug("TRANSFER-11")
def send_returns_the_first_heads(patch):
    in_source(patch, SEND, "keys[:, part.start : part.stop, :]", "keys[:, : len(part), :]")


@bug("TRANSFER-11")
def send_returns_the_values_of_the_next_position(patch):
    in_source(
        patch, SEND, "    keys, values = self._read(table, layer, positions)",
        "    keys, values = self._read(table, layer, positions)\n    if len(positions) > 1:\n        "
        "values = self._backend.gather(values, np.roll(np.arange(len(positions)), 1))",
    )  # fmt: skip


@bug("TRANSFER-11")
def send_reads_past_the_export(patch):
    in_source(patch, SEND, "int(self._tables.lengths[table, 0])", "self._tables.capacity(table)")


@bug("TRANSFER-11")
def three_ranks_are_concatenated_in_the_wrong_order(patch):
    in_source(
        patch, READ, "for store in self._stores)", "for store in (self._stores[::-1] if len(self._stores) > 2 else self._stores))"
    )


@bug("TRANSFER-11")
def ranks_that_do_not_divide_the_heads_are_accepted(patch):
    patch.setattr("kvref.transfer.TransferConfig.__post_init__", lambda self: None)


@bug("TRANSFER-12")
def a_committed_sequence_continues_at_the_next_block(patch):
    in_source(
        patch, COMMIT,
        "self._tables.lengths[table] = arrived.shape[1]",
        "self._tables.lengths[table] = self._tables.capacity(table) if arrived.shape[1] > 3 else arrived.shape[1]",
    )  # fmt: skip


@bug("TRANSFER-12")
def a_committed_sequence_cannot_be_truncated(patch):
    """Its tables keep their entries."""
    in_source(patch, COMMIT, "self._table_of[sequence] = table", "self._table_of[sequence] = table\n    self._whole = {table}")
    in_source(
        patch, "kvref.block_sequences.BlockOwner._set_lengths",
        "self.pool.free_many(", "if table not in getattr(self, '_whole', ()):\n        self.pool.free_many(",
    )  # fmt: skip


# For the state machine to find.


@hidden("transfer", "TRANSFER-08")
def only_one_of_three_transfers_expires(patch):
    in_source(patch, f"{CACHE}.expire", "return expired", "return expired if len(expired) < 3 else expired[:1]")


@hidden("transfer", "TRANSFER-07")
def the_fence_of_the_newer_of_two_frees_the_blocks_of_the_older(patch):
    in_source(
        patch, FENCE,
        "self._known(transfer, self._aborted)", "min(self._aborted) if len(self._aborted) == 2 else int(transfer)",
        "found = ", "self._known(transfer, self._aborted)\n    found = ",
    )  # fmt: skip


@hidden("transfer", "TRANSFER-09")
def a_copy_is_not_made_if_two_exports_hold_the_block(patch):
    patch.setattr(BlockPool, "shared", lambda self, blocks: self._references[blocks] == 2)


@hidden("transfer", "TRANSFER-02")
def a_part_that_begins_inside_a_block_and_a_rank_loses_its_last_head(patch):
    write = TransferCache._write

    def losing(self, slots, heads, keys, values):
        each = self.config.num_kv_heads // self.config.head_ranks
        if len(slots) > 1 and slots[0] % self.config.block_size and heads.start % each:
            heads, keys, values = range(heads.start, heads.stop - 1), keys[:, :-1], values[:, :-1]
        write(self, slots, heads, keys, values)

    patch.setattr(TransferCache, "_write", losing)


@hidden("transfer", "TRANSFER-10")
def the_third_export_of_a_sequence_releases_the_second(patch):
    release = TransferCache.release

    def third(self, handle):
        release(self, handle)
        if len(self._exports) == 2 and handle > max(self._exports):
            table = self._exports[max(self._exports)]
            self.pool.free_many(self._tables.cut(table, 0))

    patch.setattr(TransferCache, "release", third)


@deferred("transfer", "TRANSFER-09")
def an_append_directly_after_an_export_is_written_in_place(patch):
    shared, export, append = BlockPool.shared, TransferCache.export, TransferCache.append

    def now(self, sequence):
        handle = export(self, sequence)
        self.pool.fresh = True
        return handle

    def then(self, sequence, keys, values):
        append(self, sequence, keys, values)
        self.pool.fresh = False

    def read(self, table, layer, positions):
        self.pool.fresh = False
        return reading(self, table, layer, positions)

    reading = TransferCache._read
    patch.setattr(TransferCache, "export", now)
    patch.setattr(TransferCache, "append", then)
    patch.setattr(TransferCache, "_read", read)
    patch.setattr(
        BlockPool, "shared",
        lambda self, blocks: np.zeros(np.shape(blocks), np.bool_) if getattr(self, "fresh", False) else shared(self, blocks),
    )  # fmt: skip
