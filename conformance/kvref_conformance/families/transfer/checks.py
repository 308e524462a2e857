"""Checks of TRANSFER: the receiver. Transfers begin, arrive, and are committed, aborted or fenced."""

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.transfer.fixture import TransferFixture, concatenated, first
from kvref_conformance.testlib.assertions import assert_equal, assert_true, raises
from kvref_conformance.testlib.registry import check


@check("TRANSFER-01a", "transfer")
def begin_reserves_all_blocks(subject: Subject) -> None:
    run = TransferFixture(subject)
    total = run.cache.num_free_blocks
    assert_equal(total, run.config["num_blocks"], "free blocks of a new cache")
    for length in (1, run.size, run.size + 1, 2 * run.size):
        transfer = run.cache.begin(length)
        run.assert_free(total - run.blocks(length), f"after begin({length}), with blocks of {run.size} tokens")
        run.arrive(transfer, rows := run.rows(length), run.parts(length))
        run.assert_free(total - run.blocks(length), f"after all rows of a transfer of {length} tokens have arrived")
        sequence = run.cache.commit(transfer)
        run.assert_free(total - run.blocks(length), f"after commit of a transfer of {length} tokens")
        run.assert_reads(sequence, rows, "a committed sequence")
        run.cache.drop(sequence)
        run.assert_free(total, f"after drop of a committed sequence of {length} tokens")


@check("TRANSFER-01a", "transfer")
def begin_of_no_tokens_reserves_no_block(subject: Subject) -> None:
    run = TransferFixture(subject)
    aborted = run.aborted(0)
    sequence = run.cache.commit(run.cache.begin(0))
    run.assert_free(run.config["num_blocks"], "after commit and abort of transfers of no tokens")
    run.cache.fence(aborted)
    run.assert_free(run.config["num_blocks"], "after fence of a transfer of no tokens")
    run.assert_reads(sequence, run.rows(0), "a committed sequence of no tokens")


@check("TRANSFER-01b", "transfer")
def begin_returns_an_id_that_it_has_never_returned(subject: Subject) -> None:
    run, seen = TransferFixture(subject), list[int]()
    for end in ("commit", "abort", "", "fence", "commit", ""):
        transfer = run.cache.begin(1)
        assert_true(transfer not in seen, "the id that begin returned", f"none of {seen}", transfer)
        seen.append(transfer)
        if end == "commit":
            run.arrive(transfer, run.rows(1), run.parts(1))
            run.cache.commit(transfer)
        elif end:
            run.cache.abort(transfer)
            if end == "fence":
                run.cache.fence(transfer)


@check("TRANSFER-01c", "transfer")
def begin_without_enough_blocks_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    run.sequence_of(run.rows(run.size + 1))
    length = run.cache.num_free_blocks // run.layers * run.size
    for wrong in (length + 1, length + run.size + 1):
        with run.unchanged(), raises("OutOfBlocks"):
            run.cache.begin(wrong)
    run.cache.begin(length)
    run.assert_free(0, f"after begin({length})")


@check("TRANSFER-01c", "transfer")
def begin_of_an_impossible_length_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    with run.unchanged(), raises("OutOfBlocks"):
        run.cache.begin(10**9)
    for wrong in subject.integers(-1, -run.size):
        with run.unchanged(), raises("PositionOutOfRange"):
            run.cache.begin(wrong)


@check("TRANSFER-02a", "transfer")
def arrive_accepts_parts_in_any_order(subject: Subject) -> None:
    for heads, ranks in ((4, 2), (6, 3), (3, 1), (2, 2)):
        run = TransferFixture(subject, num_kv_heads=heads, head_ranks=ranks)
        length = 2 * run.size + 1
        for cuts, splits in (((1, run.size + 1), (1,)), ((), range(1, run.heads)), ((run.size - 1,), (run.heads - 1,))):
            parts = run.parts(length, cuts=cuts, splits=splits)
            for order in (parts, parts[::-1], [parts[at] for at in subject.rng.permutation(len(parts))]):
                run.arrive(transfer := run.cache.begin(length), rows := run.rows(length), order)
                sequence = run.cache.commit(transfer)
                run.assert_reads(sequence, rows, f"a sequence whose rows arrived in the order {order}")
                run.cache.drop(sequence)


@check("TRANSFER-02b", "transfer")
def arrive_changes_nothing_else(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows, more = run.rows(run.size + 1), run.rows(run.size + 1)
    sequence = run.sequence_of(rows)
    handle = run.cache.export(sequence)
    one, other = run.cache.begin(run.size + 1), run.cache.begin(run.size + 1)
    run.arrive(one, rows, run.parts(run.size + 1))
    run.arrive(other, more, run.parts(run.size + 1, splits=(1,)))
    run.assert_reads(sequence, rows, "a sequence after rows of transfers have arrived")
    run.assert_sends(handle, rows, "an export after rows of transfers have arrived")
    run.assert_reads(run.cache.commit(one), rows, "a transfer, while rows of another arrived")
    run.assert_reads(run.cache.commit(other), more, "a transfer, while another was committed")


@check("TRANSFER-02c", "transfer")
def arrive_outside_the_transfer_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    length, every = max(2, 2 * run.size - 1), [0, run.heads]  # the last block has room for one more, unless it has one slot
    transfer, rows = run.cache.begin(length), run.rows(length)
    two = rows[0][0, :2], rows[1][0, :2]
    for layer in subject.integers(-1, run.layers):
        with run.unchanged(), raises("LayerOutOfRange"):
            run.cache.arrive(transfer, layer, 0, every, *two)
    for start in subject.integers(-1, length - 1, length, length + 1, 10**6):
        with run.unchanged(), raises("PositionOutOfRange"):
            run.cache.arrive(transfer, 0, start, every, *two)
    for span in ([-1, run.heads - 1], [1, run.heads + 1], [run.heads, 2 * run.heads]):
        if span[0] in subject.integers(span[0]):
            wide = [np.resize(each, (2, span[1] - span[0], run.config["head_dim"])) for each in two]
            with run.unchanged(), raises("HeadOutOfRange"):
                run.cache.arrive(transfer, 0, 0, span, *wide)
    for start, span in ((length, every), (0, [1, 1]), (1, [run.heads, run.heads])):  # empty parts
        part = (each[0, :0, span[0] : span[1]] if start else each[0, :1, span[0] : span[1]] for each in rows)
        run.cache.arrive(transfer, 0, start, span, *part)
    run.arrive(transfer, rows, run.parts(length))
    run.assert_reads(run.cache.commit(transfer), rows, "a transfer after parts that are outside of it were refused")


@check("TRANSFER-03", "transfer")
def arrive_of_rows_that_have_arrived_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = 2 * run.size
    rows, other = run.rows(length), run.rows(length)
    transfer, layer = run.cache.begin(length), run.layers - 1
    half = run.heads // 2
    run.arrive(transfer, rows, [(layer, (1, run.size + 1), (0, half or run.heads))])
    again = [(layer, (1, run.size + 1), (0, run.heads)), (layer, (0, 2), (0, 1)), (layer, (run.size, length), (0, run.heads))]
    for part in again:
        with raises("AlreadyArrived"):
            run.arrive(transfer, other, [part])
    with raises("TransferIncomplete"):
        run.cache.commit(transfer)
    missing = {(each, at, head) for each in range(run.layers) for at in range(length) for head in range(run.heads)}
    missing -= {(layer, at, head) for at in range(1, run.size + 1) for head in range(half or run.heads)}
    run.arrive(transfer, rows, [(each, (at, at + 1), (head, head + 1)) for each, at, head in sorted(missing)])
    with raises("AlreadyArrived"):
        run.arrive(transfer, other, [(0, (length - 1, length), (run.heads - 1, run.heads))])
    run.assert_reads(run.cache.commit(transfer), rows, "a transfer to which other rows came a second time")


@check("TRANSFER-04a", "transfer")
def commit_of_an_incomplete_transfer_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = run.size + 1
    places = [(0, 0, 0), (run.layers - 1, length - 1, run.heads - 1), (0, run.size, 0), (run.layers - 1, 0, run.heads - 1)]
    for layer, at, head in places:
        rows, transfer = run.rows(length), run.cache.begin(length)
        whole = run.parts(length, cuts=sorted({at, at + 1}), splits=sorted({head, head + 1}))
        missing = (layer, (at, at + 1), (head, head + 1))
        with raises("TransferIncomplete"):
            run.cache.commit(transfer)
        run.arrive(transfer, rows, [part for part in whole if part != missing])
        with run.unchanged(), raises("TransferIncomplete"):
            run.cache.commit(transfer)
        run.arrive(transfer, rows, [missing])
        sequence = run.cache.commit(transfer)
        run.assert_reads(sequence, rows, f"a sequence whose row of layer {layer}, position {at} and head {head} arrived last")
        run.cache.drop(sequence)


@check("TRANSFER-04b", "transfer")
def commit_returns_a_new_sequence_in_the_reserved_blocks(subject: Subject) -> None:
    run = TransferFixture(subject)
    seen = [run.cache.create(), run.sequence_of(run.rows(1))]
    run.cache.drop(seen[-1])
    for length in (run.size, run.size + 1, 1):
        transfer, rows = run.cache.begin(length), run.rows(length)
        run.arrive(transfer, rows, run.parts(length))
        free = run.cache.num_free_blocks
        sequence = run.cache.commit(transfer)
        run.assert_free(free, f"after commit of a transfer of {length} tokens")
        assert_true(sequence not in seen, "the id that commit returned", f"none of {seen}", sequence)
        seen += [sequence, run.cache.create()]
        assert_true(seen[-1] not in seen[:-1], "the id that create returned", f"none of {seen[:-1]}", seen[-1])
        run.assert_reads(sequence, rows, "a committed sequence")
        run.cache.drop(sequence)


@check("TRANSFER-05a", "transfer")
def num_sequences_counts_committed_transfers_only(subject: Subject) -> None:
    run = TransferFixture(subject)
    run.cache.export(run.sequence_of(run.rows(2)))
    transfer = run.cache.begin(run.size)
    assert_equal(run.cache.num_sequences, 1, "num_sequences with one sequence, one export and one open transfer")
    run.arrive(transfer, run.rows(run.size), run.parts(run.size))
    assert_equal(run.cache.num_sequences, 1, "num_sequences with one sequence and a transfer that has arrived")
    run.aborted(1)
    assert_equal(run.cache.num_sequences, 1, "num_sequences with one sequence and an aborted transfer")
    run.cache.commit(transfer)
    assert_equal(run.cache.num_sequences, 2, "num_sequences after commit")


@check("TRANSFER-05b", "transfer")
def begin_commit_and_abort_change_no_sequence(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows, more = run.rows(run.size + 1), run.rows(run.size)
    sequence = run.sequence_of(rows)
    handle = run.cache.export(sequence)
    transfer, aborted = run.cache.begin(run.size), run.cache.begin(run.size)
    for call in ("arrive", "commit", "abort", ""):
        run.assert_reads(sequence, rows, f"a sequence before {call or 'the end'}")
        run.assert_sends(handle, rows, f"an export before {call or 'the end'}")
        if call == "arrive":
            run.arrive(transfer, more, run.parts(run.size))
        elif call:
            getattr(run.cache, call)(transfer if call == "commit" else aborted)


@check("TRANSFER-06a", "transfer")
def arrive_after_the_end_of_a_transfer_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = run.size + 1
    rows, late = run.rows(length), run.rows(length)
    committed = run.cache.begin(length)
    run.arrive(committed, rows, run.parts(length))
    sequence = run.cache.commit(committed)
    aborted, fenced = run.aborted(length), run.aborted(length)
    run.cache.fence(fenced)
    filling = run.fill()  # gets the blocks of the fenced transfer
    for transfer in (committed, aborted, fenced, *subject.integers(-1, 10**6)):
        for name in ("commit", "abort"):
            with run.unchanged(), raises("TransferNotFound"):
                getattr(run.cache, name)(transfer)
        for part in run.parts(length):
            with raises("TransferNotFound"):
                run.arrive(transfer, late, [part])
        run.look()
    run.assert_reads(sequence, rows, "a committed sequence after late parts")
    run.cache.fence(aborted)
    run.cache.drop(filling)
    run.assert_free(run.config["num_blocks"] - run.blocks(length), "after the other owners were removed")


@check("TRANSFER-06b", "transfer")
def abort_changes_no_other_transfer(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = run.size + 1
    rows, one = run.rows(length), run.cache.begin(length)
    parts = run.parts(length, cuts=(1,))
    run.arrive(one, rows, parts[:-1])
    other = run.cache.begin(length)
    run.arrive(other, run.rows(length), parts[:-1])
    run.cache.abort(other)
    run.arrive(one, rows, parts[-1:])
    run.assert_reads(run.cache.commit(one), rows, "a transfer after the abort of another")


@check("TRANSFER-07a", "transfer")
def fence_frees_the_blocks_of_an_aborted_transfer(subject: Subject) -> None:
    run = TransferFixture(subject)
    total = run.config["num_blocks"]
    for length in (run.size + 1, run.size):
        transfer = run.cache.begin(length)
        run.arrive(transfer, run.rows(length), run.parts(length)[:1])
        run.cache.abort(transfer)
        run.assert_free(total - run.blocks(length), f"after abort of a transfer of {length} tokens")
        run.cache.fence(transfer)
        run.assert_free(total, f"after fence of a transfer of {length} tokens")
        with raises("TransferNotFound"):
            run.cache.fence(transfer)
        run.assert_free(total, "after a second fence")


@check("TRANSFER-07b", "transfer")
def write_late_changes_no_other_owner(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = 2 * run.size
    rows, late = run.rows(length), run.rows(length)
    one = run.cache.begin(length)
    transfer = run.aborted(length)
    exported = run.sequence_of(rows)
    handle = run.cache.export(exported)
    run.cache.drop(exported)
    filling = run.fill()
    run.look()
    run.arrive(one, rows, run.parts(length))
    for layer in range(run.layers):
        run.cache.write_late(transfer, layer, 0, [0, run.heads], late[0][layer], late[1][layer])
    run.look()
    run.assert_sends(handle, rows, "an export after a late write")
    run.assert_reads(run.cache.commit(one), rows, "a transfer after a late write to another")
    run.cache.drop(filling)


@check("TRANSFER-07b", "transfer")
def fence_returns_after_late_writes(subject: Subject) -> None:
    run = TransferFixture(subject)
    length = 2 * run.size
    rows, late = run.rows(length), run.rows(length)
    transfer = run.aborted(length)
    for layer in range(run.layers):
        run.cache.write_late(transfer, layer, 0, [0, run.heads], late[0][layer], late[1][layer])
    run.cache.fence(transfer)
    owners = [run.sequence_of(rows) for _ in range(run.room // length)]  # one has the blocks of the transfer
    handles = [run.cache.export(owner) for owner in owners]
    for _ in range(2):  # a write that is still in flight can take effect between the two
        for owner, handle in zip(owners, handles, strict=True):
            run.assert_reads(owner, rows, "a sequence after the fence of late writes to its blocks")
            run.assert_sends(handle, rows, "an export after the fence of late writes to its blocks")


@check("TRANSFER-07c", "transfer")
def fence_of_a_transfer_that_is_not_aborted_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows = run.rows(run.size)
    opened, committed = run.cache.begin(run.size), run.cache.begin(run.size)
    run.arrive(committed, rows, run.parts(run.size))
    run.arrive(opened, rows, run.parts(run.size)[:1])
    run.cache.commit(committed)
    fenced = run.aborted(run.size)
    run.cache.fence(fenced)
    run.sequence_of(run.rows(run.size))
    for transfer in (opened, committed, fenced, *subject.integers(-1, 10**6)):
        with run.unchanged(), raises("TransferNotFound"):
            run.cache.fence(transfer)
    run.arrive(opened, rows, run.parts(run.size)[1:])
    run.assert_reads(run.cache.commit(opened), rows, "a transfer after its fence was refused")


@check("TRANSFER-07c", "transfer")
def write_late_without_an_abort_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows, late = run.rows(run.size), run.rows(run.size)
    opened, committed = run.cache.begin(run.size), run.cache.begin(run.size)
    for transfer in (opened, committed):
        run.arrive(transfer, rows, run.parts(run.size))
    sequence, fenced = run.cache.commit(committed), run.aborted(run.size)
    run.cache.fence(fenced)
    run.sequence_of(run.rows(run.size))
    for transfer in (opened, committed, fenced, 10**6):
        with run.unchanged(), raises("TransferNotFound"):
            run.cache.write_late(transfer, 0, 0, [0, run.heads], late[0][0], late[1][0])
    run.assert_reads(sequence, rows, "a committed sequence after a late write was refused")
    run.assert_reads(run.cache.commit(opened), rows, "a transfer after a late write was refused")


@check("TRANSFER-08ab", "transfer")
def expire_aborts_transfers_whose_deadline_has_passed(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows, total = run.rows(run.size), run.config["num_blocks"]
    late, never, later, committed, also = (
        run.cache.begin(run.size, **({} if deadline is None else {"deadline": deadline})) for deadline in (5, None, 6, 1, 4)
    )
    for transfer in (late, committed):
        run.arrive(transfer, rows, run.parts(run.size))
    sequence = run.cache.commit(committed)
    for now, want in ((3, []), (5, sorted([late, also])), (5, []), (4, [])):
        assert_equal(sorted(int(each) for each in run.cache.expire(now)), want, f"the transfers that expire({now}) returned")
        run.assert_free(total - run.blocks(*[run.size] * 5), f"after expire({now})")
    for transfer in (late, also):
        with raises("TransferNotFound"):
            run.cache.commit(transfer)
        with raises("TransferNotFound"):
            run.arrive(transfer, rows, run.parts(run.size)[:1])
        run.cache.fence(transfer)
    run.assert_free(total - run.blocks(*[run.size] * 3), "after the fences of two transfers that expired")
    for transfer in (never, later):
        run.arrive(transfer, rows, run.parts(run.size))
        run.assert_reads(run.cache.commit(transfer), rows, "a transfer that did not expire")
    assert_equal(list(run.cache.expire(10**6)), [], "the transfers that expire returned when all were committed")
    run.assert_reads(sequence, rows, "a committed sequence whose deadline has passed")


@check("TRANSFER-08c", "transfer")
def expire_at_a_negative_time_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    run.cache.begin(1, deadline=0)
    for wrong in subject.integers(-1):
        with run.unchanged(), raises("ConfigError"):
            run.cache.expire(wrong)
        with run.unchanged(), raises("ConfigError"):
            run.cache.begin(1, deadline=wrong)
    assert_equal(len(run.cache.expire(0)), 1, "number of transfers with deadline 0 that expire(0) returned")


@check("TRANSFER-12ab", "transfer")
def append_continues_a_committed_sequence(subject: Subject) -> None:
    for over in (1, 0):
        run = TransferFixture(subject)
        total, rows = run.config["num_blocks"], run.rows(run.size + over)
        sequence = run.received(rows)
        for count in (1, run.size, 1):
            rows = concatenated(rows, more := run.rows(count))
            run.cache.append(sequence, *more)
            run.assert_reads(sequence, rows, f"a committed sequence after an append of {count}")
            run.assert_free(total - run.blocks(rows[0].shape[1]), f"after an append of {count} to a committed sequence")
        run.cache.truncate(sequence, run.size)
        run.assert_reads(sequence, first(rows, run.size), "a committed sequence after truncate")
        run.assert_free(total - run.blocks(run.size), "after truncate of a committed sequence")
        handle = run.cache.export(sequence)
        run.cache.drop(sequence)
        run.assert_sends(handle, first(rows, run.size), "an export of a committed sequence")
        run.cache.release(handle)
        run.assert_free(total, "after a committed sequence was sent on and dropped")
