"""Transfers between two processes: the rows are late, come in another order, or their writer is killed."""

import numpy as np
import pytest

import kvref
from kvref.errors import TransferIncomplete, TransferNotFound
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from transfer_processes import ProcessTransferCache, TransferProcesses

SIZES = {"num_blocks": 2, "num_layers": 1, "num_kv_heads": 2, "head_dim": 3, "block_size": 4}


def judged(made=ProcessTransferCache, **options):
    """The clauses of TRANSFER with a verdict other than passed."""
    judge = CheckRunner(TransferProcesses(made, **options), Effort(examples=20))
    chosen = {
        id.id: [each for each in checks if each.family == "transfer"] for id, checks in select_checks(family="transfer").items()
    }
    verdicts = {id: verdict_of(judge.judge_clause(checks)) for id, checks in chosen.items() if id.startswith("TRANSFER")}
    assert len(verdicts) == 12
    return {id: verdict for id, verdict in verdicts.items() if verdict != "passed"}


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 2, "dies_after": 2}], ids=["at-once", "late", "dies"])
def test_every_clause_passes(options):
    assert judged(**options) == {}


class FenceDoesNotWait(ProcessTransferCache):
    """The peer has registered memory, and its write reaches the next owner of the blocks."""

    def fence(self, transfer):
        kvref.TransferCache.fence(self, transfer)


class CommitDoesNotWait(ProcessTransferCache):
    """A write counts when it is posted."""

    def commit(self, transfer):
        return kvref.TransferCache.commit(self, transfer)


class CommitTrustsADeadPeer(ProcessTransferCache):
    """A peer that has died is taken for one that has written everything."""

    def _lose(self):
        self._unconfirmed = {}


@pytest.mark.parametrize(
    ("made", "options", "clause"),
    [
        (FenceDoesNotWait, {"window": 3}, "TRANSFER-07"),
        (CommitDoesNotWait, {"window": 3}, "TRANSFER-04"),
        (CommitTrustsADeadPeer, {"dies_after": 2}, "TRANSFER-02"),
    ],
)
def test_a_bug_between_the_processes_is_found(made, options, clause):
    assert judged(made, **options).get(clause) == "failed"


def rows(count, value):
    return np.full((2, count, 2, 3), value, np.float32)


def half_sent(**options):
    """A transfer of two blocks, of whose rows half were posted to a peer that was killed before it wrote them."""
    cache = ProcessTransferCache(kvref.TransferConfig(**SIZES), window=8, **options)
    transfer = cache.begin(8, deadline=5)
    cache.arrive(transfer, 0, 0, [0, 2], *rows(4, 7))
    cache.kill_peer()
    return cache, transfer


def test_a_transfer_whose_sender_was_killed_expires_and_its_rows_never_arrive():
    cache, transfer = half_sent(resend=False)
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


@pytest.mark.parametrize("resend", [True, False])
def test_another_sender_can_complete_a_transfer(resend):
    cache, transfer = half_sent(resend=resend)
    if not resend:
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
