"""Transfers between two processes: the rows are late, come in another order, or their writer is killed."""

import numpy as np
import pytest
from transfer_processes import ProcessTransferCache, TransferProcesses

import kvref
from kvref.errors import TransferIncomplete, TransferNotFound
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import Effort

SIZES = {"num_blocks": 2, "num_layers": 1, "num_kv_heads": 2, "head_dim": 3, "block_size": 4}


def judged(made=ProcessTransferCache, of="TRANSFER", machine=True, **options):
    """The violations per clause, unshrunk. of: a prefix of ids. machine: whether the state machine judges too."""
    judge, found = CheckRunner(TransferProcesses(made, **options), Effort(examples=5)), {}
    for clause, checks in select_checks(family="transfer").items():
        own = [check for check in checks if check.family == "transfer" and (check.run or machine)]
        outcomes = [judge.judge_check(check) for check in own] if clause.id.startswith(of) else []
        if failures := [str(each.violation) for each in outcomes if isinstance(each, Failure)]:
            found[clause.id] = failures
        else:
            assert all(each.verdict in ("passed", "not run") for each in outcomes)
    return found


@pytest.mark.parametrize("options", [{"window": 3}, {"window": 2, "dies_after": 2}], ids=["late", "dies"])
def test_every_clause_passes(options):
    assert judged(**options) == {}


class CommitDoesNotWait(ProcessTransferCache):
    """A row has arrived when its write is posted: the sequence contains what the blocks contained before."""

    def commit(self, transfer):
        return kvref.TransferCache.commit(self, transfer)


class CommitTrustsADeadWriter(ProcessTransferCache):
    """A writer that has died is taken for one that has written everything: a partial transfer becomes a sequence."""

    def _lose(self):
        self._unconfirmed = {}


class AbortFreesBlocks(ProcessTransferCache):
    """The blocks of an aborted transfer have a next owner while its writes are in flight."""

    def abort(self, transfer):
        super().abort(transfer)
        self.pool.free_many(self._tables.held(self._aborted[int(transfer)].table))

    def fence(self, transfer):
        number = self._known(transfer, self._aborted)
        self._confirm()
        self._tables.close(self._aborted.pop(number).table)


class FenceDoesNotWait(ProcessTransferCache):
    """The blocks are free while writes are in flight, and these reach the next owner."""

    def fence(self, transfer):
        kvref.TransferCache.fence(self, transfer)


class RowsCountWhenConfirmed(ProcessTransferCache):
    """A row that was posted, but not confirmed, is accepted again. The newest write is executed first, and the oldest stays."""

    def arrive(self, transfer, layer, start, heads, keys, values):
        if transfer in self._open:
            self._open[transfer].arrived[...] = False
        super().arrive(transfer, layer, start, heads, keys, values)

    def commit(self, transfer):
        if transfer in self._open:
            self._open[transfer].arrived[...] = True
        return super().commit(transfer)


class ExpireForgetsWrites(ProcessTransferCache):
    """`expire` frees the blocks of a transfer at once, as if a sender that is late had stopped to write."""

    def expire(self, now):
        expired = super().expire(now)
        for transfer in expired:
            kvref.TransferCache.fence(self, transfer)
        return expired


class WriterMixesUpRanks(ProcessTransferCache):
    """The writer has mapped the memory of the ranks in another order."""

    def _start(self):
        self._memory.parts = self._memory.parts[2:] + self._memory.parts[:2]
        super()._start()


@pytest.mark.parametrize(
    ("made", "options", "clause"),
    [
        (CommitDoesNotWait, {"window": 3}, "TRANSFER-04"),
        (CommitTrustsADeadWriter, {"dies_after": 2}, "TRANSFER-04"),
        (RowsCountWhenConfirmed, {"window": 3}, "TRANSFER-03"),
        (AbortFreesBlocks, {"window": 3}, "TRANSFER-07"),
        (FenceDoesNotWait, {"window": 3}, "TRANSFER-07"),
        (ExpireForgetsWrites, {"window": 3}, "TRANSFER-08"),
        (WriterMixesUpRanks, {}, "TRANSFER-11"),
    ],
)
def test_a_bug_between_the_processes_is_found(made, options, clause):
    assert clause in judged(made, clause, machine=False, **options)


def rows(count, value):
    return np.full((2, count, 2, 3), value, np.float32)


def half_sent(**options):
    """A transfer of two blocks, of whose rows half were posted to a writer that was killed before it wrote them."""
    cache = ProcessTransferCache(kvref.TransferConfig(**SIZES), window=8, **options)
    transfer = cache.begin(8, deadline=5)
    cache.arrive(transfer, 0, 0, [0, 2], *rows(4, 7))
    cache.kill_writer()
    return cache, transfer


def test_a_transfer_whose_sender_was_killed_expires_and_its_rows_never_arrive():
    cache, transfer = half_sent(resends=False)
    with pytest.raises(TransferIncomplete):
        cache.commit(transfer)
    assert cache.num_sequences == 0
    assert cache.expire(5) == [transfer]
    assert cache.num_free_blocks == 0
    cache.fence(transfer)
    assert cache.num_free_blocks == 2
    owner = cache.create()
    cache.append(owner, *rows(8, 1)[:, None])
    later = cache.begin(0)
    cache.commit(later)
    np.testing.assert_array_equal(cache.gather(owner, 0), rows(8, 1))
    with pytest.raises(TransferNotFound):
        cache.arrive(transfer, 0, 4, [0, 2], *rows(4, 7))


@pytest.mark.parametrize("resends", [True, False])
def test_another_sender_can_complete_a_transfer(resends):
    cache, transfer = half_sent(resends=resends)
    if not resends:
        with pytest.raises(TransferIncomplete):
            cache.commit(transfer)
        cache.arrive(transfer, 0, 0, [0, 2], *rows(4, 7))
    cache.arrive(transfer, 0, 4, [0, 2], *rows(4, 8))
    sequence = cache.commit(transfer)
    np.testing.assert_array_equal(cache.gather(sequence, 0), np.concatenate([rows(4, 7), rows(4, 8)], axis=1))


def test_a_late_write_reaches_the_blocks_while_they_have_no_owner():
    """Between abort and fence, the memory changes, and no sequence does."""
    cache = ProcessTransferCache(kvref.TransferConfig(**SIZES), window=8)
    transfer, owner = cache.begin(4), cache.create()
    cache.append(owner, *rows(4, 1)[:, None])
    cache.arrive(transfer, 0, 0, [0, 2], *rows(4, 7))
    cache.abort(transfer)
    before = [np.array(store.read(range(8))) for store in cache._stores]
    cache.fence(transfer)
    after = [np.array(store.read(range(8))) for store in cache._stores]
    assert (after[0] == 7).sum() == 2 * 4 * 2 * 3 and not (before[0] == 7).any()
    np.testing.assert_array_equal(cache.gather(owner, 0), rows(4, 1))
