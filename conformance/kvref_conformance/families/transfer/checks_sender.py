"""Checks of TRANSFER: the sender, both ends together, and laws in the form that applies to this family only."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.transfer.fixture import TransferFixture, concatenated, first
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import KeptResults, assert_equal, assert_pair, assert_true, raises
from kvref_conformance.testlib.fixtures import assert_config_error, clamp_to_limits, random_tokens, supported_formats, supports
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check


@check("TRANSFER-09a", "transfer")
def export_changes_nothing(subject: Subject) -> None:
    run, seen = TransferFixture(subject), list[int]()
    for count in (run.size + 1, run.size, 0):
        rows = run.rows(count)
        sequence = run.sequence_of(rows)
        free, sequences = run.cache.num_free_blocks, run.cache.num_sequences
        for again in (True, False):
            handle = run.cache.export(sequence)
            assert_true(handle not in seen, "the handle that export returned", f"none of {seen}", handle)
            seen.append(handle)
            run.assert_free(free, "after export")
            assert_equal(run.cache.num_sequences, sequences, "num_sequences after export")
            run.assert_reads(sequence, rows, "an exported sequence")
            if again:
                run.cache.release(handle)


@check("TRANSFER-09b", "transfer")
def send_returns_the_rows_at_the_call_of_export(subject: Subject) -> None:
    for count in (5, 3, 1):
        for change in ("append", "truncate", "drop"):
            run = TransferFixture(subject)
            count = min(count, run.room // 2)
            rows = run.rows(count)
            sequence = run.sequence_of(rows)
            handle = run.cache.export(sequence)
            if change == "append":
                run.cache.append(sequence, *run.rows(run.size + 1))
            elif change == "truncate":
                run.cache.truncate(sequence, count // 2)
                run.cache.append(sequence, *run.rows(count))
            else:
                run.cache.drop(sequence)
            run.assert_sends(handle, rows, f"an export of {count} tokens after {change}")
            run.fill()
            run.assert_sends(handle, rows, f"an export of {count} tokens after {change}, when no block is free")


@check("TRANSFER-09b", "transfer")
def send_returns_the_rows_after_transfers_have_used_every_free_block(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows = run.rows(run.size + 1)
    sequence = run.sequence_of(rows)
    handle = run.cache.export(sequence)
    run.cache.drop(sequence)
    length = run.cache.num_free_blocks // run.layers * run.size
    transfer = run.cache.begin(length)
    run.arrive(transfer, run.rows(length), run.parts(length))
    run.assert_sends(handle, rows, "an export while a transfer has every free block")


@check("TRANSFER-09c", "transfer")
def append_copies_a_block_that_an_export_holds(subject: Subject) -> None:
    run = TransferFixture(subject)
    total, rows, more = run.config["num_blocks"], run.rows(run.size + 1), run.rows(1)
    if run.size == 1:
        return  # every block is full, so that append copies none
    sequence = run.sequence_of(rows)
    handle = run.cache.export(sequence)
    run.cache.append(sequence, *more)
    run.assert_free(total - run.blocks(run.size, 1, 1), "after an append to a block that an export holds")
    run.assert_reads(sequence, concatenated(rows, more), "an exported sequence after an append")
    run.assert_sends(handle, rows, "its export")
    run.cache.append(sequence, *run.rows(0))
    run.assert_free(total - run.blocks(run.size, 1, 1), "after an append of no tokens")
    run.cache.release(handle)
    run.assert_free(total - run.blocks(run.size + 2), "after the release")


@check("TRANSFER-09c", "transfer")
def append_without_a_block_for_the_copy_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    if run.size == 1:
        return  # every block is full, so that append copies none
    rows = run.rows(run.size + 1)
    sequence = run.sequence_of(rows)
    handle = run.cache.export(sequence)
    run.fill()
    with run.unchanged(), raises("OutOfBlocks"):
        run.cache.append(sequence, *run.rows(1))
    run.assert_sends(handle, rows, "an export after an append that raised")
    run.cache.release(handle)
    run.cache.append(sequence, *(more := run.rows(1)))  # needs no copy any more
    run.assert_reads(sequence, concatenated(rows, more), "a sequence after the release of its export")


@check("TRANSFER-10a", "transfer")
def release_frees_blocks_without_another_owner(subject: Subject) -> None:
    run = TransferFixture(subject)
    total, rows = run.config["num_blocks"], run.rows(2 * run.size + 1)
    sequence = run.sequence_of(rows)
    one = run.cache.export(sequence)
    run.cache.truncate(sequence, run.size)
    other = run.cache.export(sequence)
    run.assert_free(total - run.blocks(2 * run.size + 1), "with an export of a sequence that was truncated")
    run.cache.release(one)
    run.assert_free(total - run.blocks(run.size), "after release of an export whose first block has other owners")
    run.cache.drop(sequence)
    run.assert_free(total - run.blocks(run.size), "after drop of an exported sequence")
    run.assert_sends(other, first(rows, run.size), "an export after the release of another")
    run.cache.release(other)
    run.assert_free(total, "after release of the last owner")


@check("TRANSFER-10b", "transfer")
def send_of_a_released_handle_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    handle, kept = (run.cache.export(run.sequence_of(run.rows(2))) for _ in range(2))
    run.cache.release(handle)
    for wrong in (handle, kept + 10**6, *subject.integers(-1)):
        with run.unchanged(), raises("ExportNotFound"):
            run.cache.send(wrong, 0, [0, 1], [0, run.heads])
        with run.unchanged(), raises("ExportNotFound"):
            run.cache.release(wrong)
    again = run.cache.export(run.sequence_of(run.rows(1)))
    assert_true(again not in (handle, kept), "the handle that export returned", f"neither {handle} nor {kept}", again)


@check("TRANSFER-10c", "transfer")
def release_changes_no_other_owner(subject: Subject) -> None:
    run = TransferFixture(subject)
    rows = run.rows(run.size + 1)
    sequence = run.sequence_of(rows)
    one, other = run.cache.export(sequence), run.cache.export(sequence)
    transfer = run.cache.begin(run.size)
    run.arrive(transfer, more := run.rows(run.size), run.parts(run.size))
    run.cache.release(one)
    with run.unchanged(), raises("ExportNotFound"):  # a count of readers would release the other
        run.cache.release(one)
    run.fill()
    run.assert_reads(sequence, rows, "a sequence after release of one of its exports")
    run.assert_sends(other, rows, "an export after release of another")
    run.assert_reads(run.cache.commit(transfer), more, "a transfer after release of an export")


@check("TRANSFER-11a", "transfer")
def send_returns_positions_and_heads_in_order(subject: Subject) -> None:
    for heads, ranks in ((6, 3), (4, 2), (3, 1)):
        run = TransferFixture(subject, num_kv_heads=heads, head_ranks=ranks)
        rows = run.rows(2 * run.size + 1)
        handle = run.cache.export(run.sequence_of(rows))
        for start, stop in ((0, 1), (run.size - 1, run.size + 1), (1, 2 * run.size + 1), (run.size, run.size)):
            for low, high in ((0, 1), (run.heads - 1, run.heads), (1, run.heads), (0, max(1, run.heads - 1))):
                for layer in range(run.layers):
                    want = [part[layer, start:stop, low:high] for part in rows]
                    what = f"positions [{start}, {stop}) and heads [{low}, {high}) of layer {layer}"
                    assert_pair(run.cache.send(handle, layer, [start, stop], [low, high]), (want[0], want[1]), what)


@check("TRANSFER-11b", "transfer")
def send_outside_the_export_raises(subject: Subject) -> None:
    run = TransferFixture(subject)
    length, every = run.size + 1, [0, run.heads]
    sequence = run.sequence_of(run.rows(length))
    handle = run.cache.export(sequence)
    run.cache.append(sequence, *run.rows(1))  # a position that is not part of the export
    for layer in subject.integers(-1, run.layers):
        with raises("LayerOutOfRange"):
            run.cache.send(handle, layer, [0, 1], every)
    for span in ([0, length + 1], [-1, 1], [2, 1], [length + 1, length + 1]):
        if span == subject.integers(*span):
            with raises("PositionOutOfRange"):
                run.cache.send(handle, 0, span, every)
    for span in ([0, run.heads + 1], [-1, 1], [1, 0]):
        if span == subject.integers(*span):
            with raises("HeadOutOfRange"):
                run.cache.send(handle, 0, [0, 1], span)
    for tokens, heads in (([length, length], every), ([0, 1], [run.heads, run.heads])):
        got = run.cache.send(handle, 0, tokens, heads)
        shape = tokens[1] - tokens[0], heads[1] - heads[0], run.config["head_dim"]
        assert_equal([np.shape(part) for part in got], [shape] * 2, "shapes of an empty part")
    run.look()


@check("TRANSFER-11c", "transfer")
def commit_of_a_sent_export_reads_as_the_exported_sequence(subject: Subject) -> None:
    ends = (((1, 3), (2, 2)), ((3, 1), (1, 4)), ((2, 4), (4, 1)), ((4, 2), (2, 4)), ((16, 3), (1, 2)))
    for (size, other_size), (ranks, other_ranks) in ends:
        sender = TransferFixture(subject, block_size=size, head_ranks=ranks, num_kv_heads=4, num_blocks=32)
        receiver = TransferFixture(subject, block_size=other_size, head_ranks=other_ranks, num_kv_heads=4, num_blocks=40)
        length = 7
        for run in (sender, receiver):
            run.need_room(2 * length)
        receiver.sequence_of(receiver.rows(2))  # so that block numbers differ
        rows = sender.rows(length)
        handle = sender.cache.export(sender.sequence_of(rows))
        transfer = receiver.cache.begin(length)
        for layer, tokens, heads in receiver.parts(length, cuts=(2, 5), splits=(1, 2) if receiver.heads > 2 else ()):
            got = sender.cache.send(handle, layer, list(tokens), list(heads))
            receiver.cache.arrive(transfer, layer, tokens[0], list(heads), *got)
        what = f"a sequence sent from blocks of {sender.size} to blocks of {receiver.size}"
        receiver.assert_reads(receiver.cache.commit(transfer), rows, what)


@check("TRANSFER-11c", "transfer")
def arrive_rounds_rows_to_the_dtype_of_the_receiver(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", "float16", "bfloat16", "float32"):
        run = TransferFixture(subject, dtype=dtype)
        numbers = [subject.rng.normal(size=each.shape).astype(np.float32) for each in run.rows(run.size + 1)]
        if subject.dtype != "float32":
            numbers = [round_to(each, subject.dtype) for each in numbers]
        rows = numbers[0], numbers[1]
        want = round_to(rows[0], dtype), round_to(rows[1], dtype)
        run.assert_reads(run.received(rows, splits=(1,) if run.heads > 1 else ()), want, f"a sequence received in {dtype}")
        run.assert_reads(run.sequence_of(rows), want, f"a sequence appended in {dtype}")


@check("TRANSFER-11d", "transfer")
def head_ranks_do_not_change_what_is_read(subject: Subject) -> None:
    for heads, ranks in ((6, 1), (6, 2), (6, 3), (6, 6)):
        run = TransferFixture(subject, num_kv_heads=heads, head_ranks=ranks)
        rows = run.rows(run.size + 2)
        run.assert_reads(run.sequence_of(rows), rows, f"a sequence on {ranks} ranks")
        run.assert_free(run.config["num_blocks"] - run.blocks(run.size + 2), f"with a sequence on {ranks} ranks")
        run.assert_reads(run.received(rows), rows, f"a sequence that was received on {ranks} ranks")


@check("TRANSFER-11d", "transfer")
def new_with_ranks_that_do_not_divide_the_heads_raises(subject: Subject) -> None:
    for heads, ranks in ((4, 3), (2, 4), (6, 4)):
        if supports(subject, "head_ranks", ranks) and supports(subject, "num_kv_heads", heads):
            assert_config_error(subject, "transfer", num_kv_heads=heads, head_ranks=ranks)


# Laws in the form that applies to this family only.


@check("LAW-17", "transfer")
def results_of_send_stay_after_later_calls(subject: Subject) -> None:
    run, kept = TransferFixture(subject), KeptResults(subject)
    sequence = run.sequence_of(run.rows(run.size))
    handle = run.cache.export(sequence)
    for heads in ([0, run.heads], [0, 1]):
        kept.add(f"send of the heads {heads}", run.cache.as_is("send", handle, 0, [0, run.size], heads))
    run.cache.drop(sequence)
    run.cache.release(handle)
    run.fill()
    kept.assert_unchanged()


@check("LAW-20", "transfer")
def transfer_operations_accept_every_integer_type(subject: Subject) -> None:
    config = clamp_to_limits(subject, "transfer", block_size=50, num_blocks=12, num_kv_heads=2, head_ranks=1)
    layers, heads = config["num_layers"], config["num_kv_heads"]
    length = min(120, config["num_blocks"] // layers * config["block_size"] // 2)
    keys, values = (random_tokens(subject, length * layers, heads) for _ in range(2))
    step = [each.reshape(layers, length, heads, -1) for each in (keys, values)]

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("transfer", block_size=50, num_blocks=12, num_kv_heads=2, head_ranks=1)
        transfer = typed.call(cache, "begin", length, deadline=100)
        for layer in range(layers):
            typed.call(cache, "arrive", transfer, layer, 0, [0, heads], step[0][layer][:100], step[1][layer][:100])
            typed.call(cache, "arrive", transfer, layer, 100, [0, heads], step[0][layer][100:], step[1][layer][100:])
        yield f"expire(99) of deadline 100, then {length} tokens", typed.call(cache, "expire", 99)
        sequence = typed.call(cache, "commit", transfer)
        handle = typed.call(cache, "export", sequence)
        for layer in range(layers):
            yield f"layer {layer} of the sequence", typed.call(cache, "gather", sequence, layer)
            yield f"layer {layer} of the export", typed.call(cache, "send", handle, layer, [100, length], [0, heads])
        typed.call(cache, "truncate", sequence, 90)
        yield "length after truncate(90)", typed.call(cache, "length", sequence)
        aborted = typed.call(cache, "begin", 60)
        yield "abort", typed.call(cache, "abort", aborted)
        yield "second abort", typed.call(cache, "abort", aborted)
        yield "fence", typed.call(cache, "fence", aborted)
        yield "second release", [typed.call(cache, "release", handle) for _ in range(2)]
        yield "drop", typed.call(cache, "drop", sequence)
        yield "free blocks at the end", cache.num_free_blocks

    assert_same_for_integer_types(subject, script)


@check("LAW-18", "transfer")
def transfers_of_long_sequences_between_different_block_sizes(subject: Subject) -> None:
    length = affordable_tokens(subject, 1100, 4)
    for size, other_size, heads, ranks, dim in ((16, 64, 8, 2, 128), (128, 16, 4, 4, 80)):
        made = [
            TransferFixture(
                subject, block_size=each, num_kv_heads=heads, head_ranks=count, head_dim=dim, num_layers=2,
                num_blocks=2 * (2 * length // each + 4),
            )
            for each, count in ((size, ranks), (other_size, 1))
        ]  # fmt: skip
        sender, receiver = made
        count = min(length, sender.room, receiver.room // 2)
        rows = sender.rows(count)
        handle = sender.cache.export(sender.sequence_of(rows))
        receiver.received(receiver.rows(min(count, 300)))
        transfer = receiver.cache.begin(count)
        edges = [each for each in (255, 257, 1024) if each < count]
        for layer, tokens, span in receiver.parts(count, cuts=edges, splits=(1,) if receiver.heads > 1 else ()):
            got = sender.cache.send(handle, layer, list(tokens), list(span))
            receiver.cache.arrive(transfer, layer, tokens[0], list(span), *got)
        receiver.assert_reads(receiver.cache.commit(transfer), rows, f"a sequence of {count} tokens sent to another cache")
