"""Checks of RECUR: states, appends, forks, rollbacks, formats and files."""

from fractions import Fraction
from itertools import permutations

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.recurrent.fixture import RecurrentFixture, part_of
from kvref_conformance.families.recurrent.recurrence import Tokens
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_true, assert_within, may_raise, raises
from kvref_conformance.testlib.fixtures import supported_formats
from kvref_conformance.testlib.registry import check

RULES = (0, 1)  # SSD and the gated delta rule
KINDS = ("whole", "real")


def joined(*parts: Tokens) -> Tokens:
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


def check_inputs(fixture: RecurrentFixture, sequence: int, tokens: Tokens, when: str) -> None:
    """Raises ClauseViolation unless the inputs are the last of these tokens, after zeros."""
    count = fixture.config["num_inputs"]
    for layer in fixture.layers:
        given = tokens["inputs"][layer]
        want = np.concatenate([np.zeros((count, *given.shape[1:]), np.float32), given])[len(given) :]
        assert_same(fixture.cache.read_inputs(sequence, layer), want, f"inputs of layer {layer} {when}")


@check("RECUR-01a", "recurrent")
def read_inputs_returns_the_last_inputs(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence, count = fixture.filled(0), fixture.config["num_inputs"]
    tokens = fixture.tokens(0)
    for more in (0, 1, 1, count, 2 * count + 1, 1, max(1, count - 1)):
        tokens = joined(tokens, fixture.append(sequence, more)) if more else tokens
        check_inputs(fixture, sequence, tokens, f"after {tokens['keys'].shape[1]} tokens")


@check("RECUR-01bc", "recurrent")
def append_changes_its_own_sequence_alone(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject)
    sequences = [fixture.filled(3), fixture.filled(2)]
    for sequence in (*sequences, *sequences):
        other = sequences[0] + sequences[1] - sequence
        before = fixture.state(other)
        fixture.append(sequence, 2)
        fixture.check_same(other, before, "of another sequence after an append")
        fixture.look_at_states()
    assert_equal([int(fixture.cache.length(each)) for each in sequences], [7, 6], "lengths after appends of 3 and 2, and 2 and 2")


@check("RECUR-01b", "recurrent")
def layers_have_states_of_their_own(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(4)
    inputs = [fixture.cache.read_inputs(sequence, layer) for layer in (0, 1)]
    assert_true((np.asarray(inputs[0]) != np.asarray(inputs[1])).any(), "inputs of layers 0 and 1", "different ones", inputs[1])
    fixture.look_at_states()


def exact_matrix(tokens: Tokens, layer: int, head: int, delta: bool) -> list[list[Fraction]]:
    """The matrix of a head after all tokens, in fractions."""
    parts = [[[Fraction(float(x)) for x in token[head]] for token in tokens[name][layer]] for name in ("keys", "values", "gates")]
    matrix = [[Fraction(0)] * len(parts[1][0]) for _ in parts[0][0]]
    for key, value, (decay, strength) in zip(*parts, strict=True):
        matrix = [[decay * x for x in row] for row in matrix]
        read = [sum(k * row[j] for k, row in zip(key, matrix, strict=True)) for j in range(len(value))]
        written = [strength * (v - delta * r) for v, r in zip(value, read, strict=True)]
        matrix = [[x + k * w for x, w in zip(row, written, strict=True)] for k, row in zip(key, matrix, strict=True)]
    return matrix


@check("RECUR-02a", "recurrent")
def append_follows_the_recurrence_in_fractions(subject: Subject) -> None:
    """Compares a few tokens with fractions; the bound is that of 16 tokens in the format of the cache, doubled."""
    for delta in RULES:
        fixture = RecurrentFixture(subject, delta_rule=delta)
        sequence = fixture.cache.create()
        tokens = joined(*(fixture.append(sequence, count, "real") for count in (3, 1, 1)))
        unit = {"float32": 2.0**-12, "float16": 2.0**-6, "bfloat16": 2.0**-3}[fixture.config["matrix_dtype"]]
        for layer in fixture.layers:
            got = np.asarray(fixture.cache.read_matrix(sequence, layer))
            for head in range(fixture.config["num_heads"]):
                want = np.array(exact_matrix(tokens, layer, head, bool(fixture.config["delta_rule"])), np.float64)
                assert_within(got[head], want, unit * (1 + np.abs(want).max()), f"matrix of layer {layer}, head {head}")


@check("RECUR-02a", "recurrent")
def append_stays_within_the_bound(subject: Subject) -> None:
    for delta in RULES:
        fixture = RecurrentFixture(subject, delta_rule=delta)
        sequence = fixture.cache.create()
        for count in (1, 1, 5, 16, 2):
            fixture.append(sequence, count, "real")
            fixture.look_at_states()


@check("RECUR-02b", "recurrent")
def apply_multiplies_queries_by_the_matrix(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence, heads, width = fixture.filled(4), fixture.config["num_heads"], fixture.config["key_dim"]
    for layer in fixture.layers:
        before = fixture.cache.read_matrix(sequence, layer)
        query = np.zeros((width + 1, heads, width), np.float32)
        query[np.arange(width), :, np.arange(width)] = 1
        query[width] = 2
        got = np.asarray(fixture.cache.apply(sequence, layer, query))
        matrix = np.asarray(before, np.float32)
        assert_same(got[:width], matrix.transpose(1, 0, 2), f"read-outs of layer {layer} for queries with a single 1")
        assert_same(got[width], 2 * matrix.sum(axis=1), f"read-out of layer {layer} for a query of twos")
        assert_same(fixture.cache.read_matrix(sequence, layer), matrix, f"matrix of layer {layer} after apply")
    real = fixture.filled(3, "real")
    fixture.cache.apply(real, 0, fixture.tokens(3, kind="real")["keys"][0])


@check("RECUR-02c", "recurrent")
def append_of_integers_is_exact(subject: Subject) -> None:
    """A table by key: a write at full strength adds a value to the row of its key, or replaces the row."""
    for delta in RULES:
        fixture = RecurrentFixture(subject, delta_rule=delta)
        sequence = fixture.cache.create()
        tokens = joined(*(fixture.append(sequence, count) for count in (4, 1, 7)))
        for layer in fixture.layers:
            want = np.zeros((fixture.config["num_heads"], fixture.config["key_dim"], fixture.config["value_dim"]), np.float32)
            for key, value, gate in zip(*(tokens[name][layer] for name in ("keys", "values", "gates")), strict=True):
                for head, row in enumerate(key.argmax(axis=-1)):
                    if gate[head, 1]:
                        want[head, row] = value[head] + want[head, row] * (not fixture.config["delta_rule"])
            assert_same(
                fixture.cache.read_matrix(sequence, layer), want, f"matrices of layer {layer} after 12 tokens of integers"
            )


@check("RECUR-03ab", "recurrent")
def append_in_chunks_leaves_the_same_state(subject: Subject) -> None:
    subject.require_size(tokens=2)
    for delta in RULES:
        for kind in KINDS:
            fixture = RecurrentFixture(subject, num_layers=1, num_heads=1, delta_rule=delta, max_drafts=0)
            count = subject.size("tokens", 7)
            tokens, whole = fixture.tokens(count, kind=kind), fixture.cache.create()
            fixture.cache.append(whole, **tokens)
            fixture.look_at_states()
            inputs = [np.asarray(fixture.cache.read_inputs(whole, layer)) for layer in fixture.layers]
            want = fixture.state(whole)
            fixture.cache.drop(whole)
            for size in (1, 2, 5):
                pieces = fixture.cache.create()
                for start in range(0, count, size):
                    fixture.cache.append(pieces, **part_of(tokens, start, start + size))
                fixture.look_at_states()
                for layer in fixture.layers:
                    assert_same(fixture.cache.read_inputs(pieces, layer), inputs[layer], f"inputs after appends of {size} tokens")
                if kind == "whole":
                    fixture.check_same(pieces, want, f"after appends of {size} tokens, compared with one append")
                fixture.cache.drop(pieces)


@check("RECUR-03b", "recurrent")
def append_of_a_long_prompt_equals_its_chunks(subject: Subject) -> None:
    """More tokens than a kernel computes at once (64 or 128)."""
    for delta in RULES:
        fixture = RecurrentFixture(subject, delta_rule=delta)
        sequence = fixture.cache.create()
        for count in (130, 1, 63, 65):
            fixture.append(sequence, count)
            fixture.look_at_states()


def batch_of(fixture: RecurrentFixture, rows: int, width: int, kind: str = "whole") -> Tokens:
    """A batch of tokens [num_layers, rows, width, ...]."""
    return fixture.tokens(rows, width, kind=kind)


@check("RECUR-04ab", "recurrent")
def append_batch_ignores_padding(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for filler in (0.0, 1.0, np.nan, np.inf):
        fixture = RecurrentFixture(subject, num_layers=1, num_heads=1)
        sequences = [fixture.filled(count) for count in (2, 0, 3)]
        before, counts = fixture.state(sequences[2]), (1, 4, 0)
        batch = batch_of(fixture, 3, 4)
        for row, count in enumerate(counts):
            for each in batch.values():
                each[:, row, count:] = filler
        fixture.cache.append_batch(sequences, list(counts), **batch)
        fixture.check_same(sequences[2], before, f"of a row of padding of {filler}")
        check_inputs(fixture, sequences[1], {name: each[:, 1] for name, each in batch.items()}, f"next to padding of {filler}")
        fixture.look_at_states()
        fixture.append(sequences[0], 1)
        fixture.look_at_states()


@check("RECUR-04c", "recurrent")
def append_batch_with_a_count_out_of_range_raises(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(2)
    for count in (3, *subject.integers(-1)):
        with raises("PositionOutOfRange"):
            fixture.cache.append_batch([sequence], [count], **batch_of(fixture, 1, 2))
        fixture.look_at_states()


@check("RECUR-05ab", "recurrent")
def append_batch_in_any_order_appends_to_the_named_sequences(subject: Subject) -> None:
    subject.require_size(sequences=3)
    fixture = RecurrentFixture(subject)
    sequences = [fixture.filled(0) for _ in range(3)]
    told = {sequence: fixture.tokens(0) for sequence in sequences}
    for order in (*permutations(sequences), sequences[1:], sequences[:1]):
        batch = batch_of(fixture, len(order), 1)
        fixture.cache.append_batch(list(order), [1] * len(order), **batch)
        for row, sequence in enumerate(order):
            told[sequence] = joined(told[sequence], {name: each[:, row] for name, each in batch.items()})
        for sequence in sequences:
            check_inputs(fixture, sequence, told[sequence], f"of sequence {sequence} after a batch of {list(order)}")
        fixture.look_at_states()


@check("RECUR-05b", "recurrent")
def append_batch_after_a_drop_keeps_states_with_their_sequences(subject: Subject) -> None:
    subject.require_size(sequences=3)
    fixture = RecurrentFixture(subject)
    sequences = [fixture.filled(2) for _ in range(3)]
    fixture.cache.append_batch(sequences, [1, 1, 1], **batch_of(fixture, 3, 1))
    fixture.cache.drop(sequences.pop(0))
    fixture.cache.append_batch(sequences[::-1], [2, 1], **batch_of(fixture, 2, 2))
    fixture.look_at_states()


@check("RECUR-05c", "recurrent")
def append_batch_that_raises_changes_no_sequence(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject)
    first, second = fixture.filled(2), fixture.filled(1)
    before = [fixture.state(each) for each in (first, second)]
    with raises("SequenceNotFound"):
        fixture.cache.append_batch([first, second + 1000], [1, 1], **batch_of(fixture, 2, 1))
    with raises("PositionOutOfRange"):
        fixture.cache.append_batch([first, second], [1, 3], **batch_of(fixture, 2, 1))
    batch = batch_of(fixture, 2, 1)
    batch["values"][:, 1, 0] = np.nan
    with may_raise("NonFinite"):
        fixture.cache.append_batch([first, second], [1, 1], **batch)
        return
    for sequence, state in zip((first, second), before, strict=True):
        fixture.check_same(sequence, state, "after a batch that raised")


@check("RECUR-06a", "recurrent")
def create_starts_from_the_zero_state(subject: Subject) -> None:
    """Uses every block, so that a block is allocated again."""
    fixture = RecurrentFixture(subject, num_blocks=2)
    for _ in range(2 * fixture.config["num_blocks"] + 1):
        sequence = fixture.cache.create()
        for state in fixture.state(sequence):
            assert_same(state, np.zeros_like(np.asarray(state)), "state of a new sequence")
        assert_equal(int(fixture.cache.length(sequence)), 0, "length of a new sequence")
        fixture.append(sequence, 4)
        fixture.look_at_states()
        fixture.cache.drop(sequence)


@check("RECUR-06b", "recurrent")
def create_returns_a_new_id_and_drop_ends_it(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    ids = list[int]()
    for _ in range(4):
        sequence = fixture.cache.create()
        assert_true(sequence not in ids, "the id of a new sequence", f"an id not in {ids}", sequence)
        ids.append(sequence)
        fixture.cache.drop(sequence)
        for call in (fixture.cache.length, fixture.cache.checkpoint, fixture.cache.drop):
            with raises("SequenceNotFound"):
                call(sequence)


@check("RECUR-07ab", "recurrent")
def fork_is_independent_of_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for first, second in ((0, 1), (1, 0)):
        fixture = RecurrentFixture(subject)
        parent = fixture.filled(4)
        before = fixture.state(parent)
        pair = parent, fixture.cache.fork(parent)
        fixture.check_same(pair[1], before, "of a fork")
        fixture.append(pair[first], 2)
        fixture.check_same(pair[second], before, f"of the {('parent', 'fork')[second]} after an append to the other")
        fixture.append(pair[second], 1)
        fixture.look_at_states()
        fixture.cache.drop(pair[first])
        fixture.look_at_states()


@check("RECUR-07c", "recurrent")
def fork_after_truncate_copies_the_restored_state(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for drafts in (1, 2):
        fixture = RecurrentFixture(subject, max_drafts=2)
        fixture.need(max_drafts=2)
        sequence, states = fixture.filled(2), list[list[NDArray]]()
        states.append(fixture.state(sequence))
        fixture.append(sequence, drafts)
        fixture.cache.truncate(sequence, 2)
        child = fixture.cache.fork(sequence)
        fixture.append(sequence, 1)
        fixture.check_same(child, states[0], f"of a fork after {drafts} rejected drafts")
        fixture.look_at_states()


@check("RECUR-08a", "recurrent")
def truncate_to_the_present_length_changes_nothing(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(2)
    fixture.cache.checkpoint(sequence)
    fixture.append(sequence, 3)
    before = fixture.state(sequence)
    fixture.cache.truncate(sequence, 5)
    fixture.check_same(sequence, before, "after truncate to the present length")
    fixture.look_at_states()


@check("RECUR-08b", "recurrent")
def truncate_restores_zero_and_checkpoints(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(2)
    fixture.cache.checkpoint(sequence)
    at_two = fixture.state(sequence)
    fixture.append(sequence, 5)
    fixture.cache.truncate(sequence, 2)
    fixture.check_same(sequence, at_two, "after truncate to a checkpoint")
    fixture.append(sequence, 4)
    fixture.cache.truncate(sequence, 0)
    for state in fixture.state(sequence):
        assert_same(state, np.zeros_like(np.asarray(state)), "state after truncate to 0")
    fixture.append(sequence, 2)
    fixture.look_at_states()


@check("RECUR-08c", "recurrent")
def truncate_to_any_other_length_is_exact_or_raises(subject: Subject) -> None:
    """One append of several tokens, single appends, and a length just before and after a checkpoint."""
    for sizes in ((9,), (1,) * 9, (4, 5)):
        for length in range(1, 9):
            fixture = RecurrentFixture(subject)
            sequence, states = fixture.cache.create(), dict[int, list[NDArray]]()
            for size in sizes:
                fixture.append(sequence, size)
                states[int(fixture.cache.length(sequence))] = fixture.state(sequence)
                if fixture.cache.length(sequence) == 4:
                    fixture.cache.checkpoint(sequence)
            with may_raise("NotTruncatable"):
                fixture.cache.truncate(sequence, length)
            fixture.look_at_states()
            if length in states and fixture.cache.length(sequence) == length:
                fixture.check_same(sequence, states[length], f"after truncate to {length}")


@check("RECUR-08d", "recurrent")
def truncate_forgets_what_it_removes(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(1)
    for count in (2, 3):
        fixture.cache.checkpoint(sequence)
        fixture.append(sequence, count)
    fixture.cache.commit(sequence, list(range(6)))
    fixture.cache.truncate(sequence, 1)
    fixture.cache.commit(sequence, [0])
    fixture.append(sequence, 5)
    fixture.cache.commit(sequence, [0, 11, 12, 13, 14, 15])
    with may_raise("NotTruncatable"):
        fixture.cache.truncate(sequence, 3)
    fixture.look_at_states()
    fixture.cache.truncate(sequence, 1)
    fixture.look_at_states()


@check("RECUR-09ab", "recurrent")
def truncate_removes_any_number_of_drafts(subject: Subject) -> None:
    """Rejects each number of the drafts of appends that are shorter than, as long as, and longer than the limit."""
    for delta in RULES:
        for drafts in (1, 2, 3):
            fixture = RecurrentFixture(subject, delta_rule=delta, max_drafts=drafts)
            fixture.need(max_drafts=1)
            for before in (0, 3):
                for count in range(1, drafts + 3):
                    for rejected in range(1, min(count, fixture.config["max_drafts"]) + 1):
                        sequence, told = fixture.filled(before), fixture.tokens(count)
                        fixture.cache.append(sequence, **told)
                        fixture.cache.truncate(sequence, before + count - rejected)
                        if not before:
                            accepted = part_of(told, 0, count - rejected)
                            check_inputs(fixture, sequence, accepted, f"after {rejected} of {count} drafts were rejected")
                        fixture.look_at_states()
                        fixture.cache.drop(sequence)


@check("RECUR-09ab", "recurrent")
def truncate_in_two_calls_removes_drafts(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, max_drafts=3)
    fixture.need(max_drafts=3)
    sequence = fixture.filled(2, "real")
    fixture.append(sequence, 4, "real")
    for length in (5, 4, 3):
        fixture.cache.truncate(sequence, length)
        fixture.look_at_states()


@check("RECUR-09c", "recurrent")
def append_after_rejected_drafts_continues_from_the_accepted_ones(subject: Subject) -> None:
    """Rounds of drafts, as in speculative decoding, each with another number of accepted ones."""
    for delta in RULES:
        fixture = RecurrentFixture(subject, delta_rule=delta, max_drafts=3)
        fixture.need(max_drafts=3)
        sequence, told = fixture.filled(0), fixture.tokens(0)
        for accepted in (1, 0, 3, 2, 0, 0, 3, 1):
            drafts = fixture.tokens(3)
            fixture.cache.append(sequence, **drafts)
            length = told["keys"].shape[1] + accepted
            fixture.cache.truncate(sequence, length)
            told = joined(told, part_of(drafts, 0, accepted), fixture.append(sequence, 1))
            check_inputs(fixture, sequence, told, f"at length {length + 1}, after rounds of drafts")
            fixture.look_at_states()


@check("RECUR-09ac", "recurrent")
def append_batch_of_drafts_can_be_truncated(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject, max_drafts=2)
    fixture.need(max_drafts=2)
    sequences = [fixture.filled(2), fixture.filled(1)]
    for _ in range(3):
        lengths = [int(fixture.cache.length(each)) for each in sequences]
        fixture.cache.append_batch(sequences, [3, 2], **batch_of(fixture, 2, 3))
        fixture.cache.truncate(sequences[0], lengths[0] + 1)
        fixture.cache.truncate(sequences[1], lengths[1])
        fixture.look_at_states()
        fixture.append(sequences[1], 1)
        fixture.look_at_states()


@check("RECUR-15a", "recurrent")
def append_casts_inputs_to_their_format(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        fixture = RecurrentFixture(subject, dtype=dtype)
        sequence = fixture.cache.create()
        tokens = fixture.tokens(fixture.config["num_inputs"])
        tokens["inputs"] = round_to((tokens["inputs"] * np.float32(1.001953)).astype(np.float32), subject.dtype)
        fixture.cache.append(sequence, **tokens)
        for _ in range(2):
            for layer in fixture.layers:
                want = round_to(tokens["inputs"][layer], dtype)
                assert_same(fixture.cache.read_inputs(sequence, layer), want, f"{dtype} inputs of layer {layer}")
            fixture.cache.fork(sequence)
        fixture.look_at_states()


@check("RECUR-15b", "recurrent")
def append_adds_in_float32_and_rounds_once_per_token(subject: Subject) -> None:
    """Tokens of one append are at most as many roundings. Integers that the format represents need none."""
    for dtype in supported_formats(subject, "matrix_dtype", *PLAIN_FORMATS):
        for delta in RULES:
            fixture = RecurrentFixture(subject, matrix_dtype=dtype, delta_rule=delta)
            sequence = fixture.cache.create()
            for count in (1, 4, 1, 9):
                fixture.append(sequence, count, "real")
                fixture.look_at_states()
            fixture.cache.drop(sequence)
        fixture = RecurrentFixture(subject, matrix_dtype=dtype, delta_rule=0)
        sequence = fixture.filled(20)
        fixture.look_at_states()


@check("RECUR-15c", "recurrent")
def append_of_non_finite_tokens_never_reads_back_finite(subject: Subject) -> None:
    for part in ("inputs", "keys", "values", "gates"):
        for bad in (np.nan, np.inf):
            fixture = RecurrentFixture(subject)
            sequence = fixture.filled(1)
            tokens = fixture.tokens(1)
            tokens["gates"][:] = 1
            tokens[part][..., 0] = bad
            try:
                with may_raise("NonFinite"):
                    fixture.cache.append(sequence, **tokens)
                    name = "read_inputs" if part == "inputs" else "read_matrix"
                    got = np.asarray(getattr(fixture.cache, name)(sequence, 0))
                    assert_true(not np.isfinite(got).all(), f"{name} after {part} of {bad}", "a number that is not finite", got)
            finally:
                fixture.cache.drop(sequence)


@check("RECUR-16a", "recurrent")
def load_restores_the_state_bit_for_bit(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for count in (0, 1, 5):
        fixture = RecurrentFixture(subject)
        saved, loaded = fixture.filled(count, "real"), fixture.filled(3, "real")
        before = fixture.state(saved)
        fixture.cache.load(loaded, fixture.cache.save(saved))
        assert_equal(int(fixture.cache.length(loaded)), count, "length after load")
        fixture.check_same(loaded, before, f"after load of {count} tokens")
        tokens = fixture.tokens(2)
        for sequence in (saved, loaded):
            fixture.cache.append(sequence, **tokens)
        fixture.check_same(loaded, fixture.state(saved), "after load and the same append as to the saved sequence")


@check("RECUR-16a", "recurrent")
def load_restores_the_state_after_rejected_drafts(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, max_drafts=2)
    fixture.need(max_drafts=2)
    sequence = fixture.filled(2)
    before = fixture.state(sequence)
    fixture.append(sequence, 2)
    fixture.cache.truncate(sequence, 2)
    data = fixture.cache.save(sequence)
    fixture.append(sequence, 3)
    fixture.cache.load(sequence, data)
    fixture.check_same(sequence, before, "after load of a state saved after rejected drafts")


@check("RECUR-16b", "recurrent")
def load_leaves_no_checkpoint_draft_or_committed_token(subject: Subject) -> None:
    fixture = RecurrentFixture(subject)
    sequence = fixture.filled(1)
    fixture.cache.checkpoint(sequence)
    fixture.append(sequence, 3)
    fixture.cache.commit(sequence, [1, 2, 3, 4])
    other = fixture.filled(4)
    data = fixture.cache.save(other)
    fixture.cache.drop(other)
    free = fixture.cache.num_free_blocks
    fixture.cache.load(sequence, data)
    assert_equal(int(fixture.cache.num_free_blocks), int(free) + 1, "free blocks after load")
    for length in (1, 2, 3):
        with may_raise("NotTruncatable"):
            fixture.cache.truncate(sequence, length)
            break
    fixture.look_at_states()
    fixture.cache.load(sequence, data)
    fixture.cache.commit(sequence, [5, 6, 7, 8])
    fixture.look_at_states()
