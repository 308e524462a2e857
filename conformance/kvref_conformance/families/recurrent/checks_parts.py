"""Checks of RECUR-17: states that are saved and loaded in parts."""

from contextlib import suppress
from itertools import permutations
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.recurrent.fixture import RecurrentFixture
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_true, may_raise, raises
from kvref_conformance.testlib.fixtures import supported_formats
from kvref_conformance.testlib.registry import check

HEADLINE = {
    "num_layers": 1, "num_heads": 2, "channels": 1, "num_inputs": 2, "key_dim": 1, "value_dim": 1, "delta_rule": 0,
}  # fmt: skip


def fixture_with_heads(subject: Subject, heads: int = 2, **changes: Any) -> RecurrentFixture:
    """Returns a cache with at least two layers and `heads` heads."""
    fixture = RecurrentFixture(subject, num_heads=heads, **changes)
    fixture.need(num_layers=2, num_heads=heads)
    return fixture


def ways_to_split(fixture: RecurrentFixture) -> list[list[dict[str, list[int]]]]:
    """Returns lists of parts that are the whole state: by layers, by heads, and by both."""
    layers, heads = fixture.config["num_layers"], fixture.config["num_heads"]
    by_layers, by_heads = [{"layers": [0, 1]}, {"layers": [1, layers]}], [{"heads": [0, 1]}, {"heads": [1, heads]}]
    uneven = [{"layers": [0, 1]}, *({"layers": [1, layers]} | span for span in by_heads)]
    return [by_heads, by_layers, uneven]


def save_parts(fixture: RecurrentFixture, sequence: int, spans: list[dict[str, list[int]]] | None = None) -> list[NDArray]:
    """Saves a state in parts, by default two ranges of heads."""
    return [fixture.cache.save(sequence, **span) for span in spans or ways_to_split(fixture)[0]]


@check("RECUR-17ab", "recurrent")
def load_of_two_heads_restores_the_inputs_and_the_matrix_of_each(subject: Subject) -> None:
    """Head 0 gets the inputs and values 1 and 2, head 1 gets 10 and 20. The matrix of a head is their sum."""
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject, **HEADLINE)
    if any(fixture.config[name] != size for name, size in HEADLINE.items()):
        raise NotOffered("a state of two heads with two inputs, and a matrix of one number")
    saved, loaded = fixture.cache.create(), fixture.cache.create()
    column = np.array([[1, 10], [2, 20]], np.float32)[None, :, :, None]
    ones = np.ones((1, 2, 2, 1), np.float32)
    fixture.cache.append(saved, column, ones, column, np.ones((1, 2, 2, 2), np.float32))
    for span, inputs, matrix, length in (([1, 2], [0, 0, 0, 0], [0, 0], 0), ([0, 1], [1, 10, 2, 20], [3, 30], 2)):
        fixture.cache.load(loaded, fixture.cache.save(saved, heads=span))
        when = f"after load of the heads {span}"
        assert_equal(int(fixture.cache.length(loaded)), length, f"length {when}")
        assert_same(np.ravel(fixture.cache.read_inputs(loaded, 0)), np.array(inputs, np.float32), f"inputs {when}")
        assert_same(np.ravel(fixture.cache.read_matrix(loaded, 0)), np.array(matrix, np.float32), f"matrices {when}")


@check("RECUR-17ab", "recurrent")
def load_of_parts_in_any_order_restores_the_state(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for heads, count in ((2, 5), (3, 1), (2, 0)):
        fixture = fixture_with_heads(subject, heads)
        saved = fixture.filled(count, "real")
        before = fixture.state(saved)
        for spans in ways_to_split(fixture):
            parts = save_parts(fixture, saved, spans)
            for order in permutations(range(len(parts))):
                loaded = fixture.filled(3)
                own = fixture.state(loaded)
                for number in order:
                    assert_equal(int(fixture.cache.length(loaded)), 3, f"length before load of the part {spans[number]}")
                    fixture.check_same(loaded, own, f"before load of the part {spans[number]}")
                    fixture.cache.load(loaded, parts[number])
                what = f"after load of the parts {[spans[number] for number in order]}"
                assert_equal(int(fixture.cache.length(loaded)), count, f"length {what}")
                fixture.check_same(loaded, before, what)
                fixture.cache.drop(loaded)


@check("RECUR-17a", "recurrent")
def load_of_parts_restores_every_format(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for name in ("dtype", "matrix_dtype"):
        for format in supported_formats(subject, name, *PLAIN_FORMATS):
            formats: dict[str, Any] = {name: format}
            fixture = fixture_with_heads(subject, **formats)
            saved, loaded = fixture.filled(4, "real"), fixture.cache.create()
            for part in save_parts(fixture, saved):
                fixture.cache.load(loaded, part)
            fixture.check_same(loaded, fixture.state(saved), f"after load of all parts, with {name} {format}")
            tokens = fixture.tokens(2)
            for sequence in (saved, loaded):
                fixture.cache.append(sequence, **tokens)
            fixture.check_same(loaded, fixture.state(saved), "after load of all parts and the same append")


@check("RECUR-17a", "recurrent")
def load_of_parts_into_two_sequences_keeps_them_apart(subject: Subject) -> None:
    subject.require_size(sequences=4)
    fixture = fixture_with_heads(subject, num_blocks=9)
    fixture.need(num_blocks=6)
    saved = [fixture.filled(2), fixture.filled(4)]
    loaded = [fixture.cache.create() for _ in saved]
    parts = [save_parts(fixture, sequence) for sequence in saved]
    for number in (0, 1):
        for sequence, of_sequence in zip(loaded, parts, strict=True):
            fixture.cache.load(sequence, of_sequence[number])
    for sequence, other in zip(saved, loaded, strict=True):
        fixture.check_same(other, fixture.state(sequence), "after its parts and those of another sequence were loaded in turn")


@check("RECUR-17a", "recurrent")
def load_of_parts_restores_the_state_after_rejected_drafts(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = fixture_with_heads(subject, max_drafts=2)
    fixture.need(max_drafts=2)
    saved, loaded = fixture.filled(2), fixture.filled(1)
    before = fixture.state(saved)
    fixture.append(saved, 2)
    fixture.cache.truncate(saved, 2)
    for part in save_parts(fixture, saved):
        fixture.cache.load(loaded, part)
    fixture.check_same(loaded, before, "after load of parts saved after rejected drafts")


@check("RECUR-17c", "recurrent")
def load_of_a_wrong_part_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=3)
    fixture = fixture_with_heads(subject)
    saved, longer, loaded = fixture.filled(3), fixture.filled(4), fixture.filled(2)
    before, own = fixture.state(saved), fixture.state(loaded)
    first, second = save_parts(fixture, saved)
    of_longer = save_parts(fixture, longer)[1]
    one_layer = fixture.cache.save(saved, layers=[0, 1])  # one of its heads is already loaded, the other is not
    damaged = np.array(second)
    damaged[len(damaged) * 2 // 3] ^= 1
    fixture.cache.load(loaded, first)
    for wrong, kinds in ((of_longer, ["ConfigError"]), (first, ["ConfigError"]), (one_layer, ["ConfigError"]),
                         (damaged, ["FileDamaged", "ConfigError"]), (second[:-1], ["FileDamaged", "ConfigError"])):  # fmt: skip
        with raises(*kinds):
            fixture.cache.load(loaded, wrong)
        fixture.check_same(loaded, own, "after load of a wrong part raised")
    fixture.cache.load(loaded, second)
    fixture.check_same(loaded, before, "after all parts, and rejected wrong ones")


@check("RECUR-17d", "recurrent")
def operations_between_loads_of_parts_act_on_the_present_state(subject: Subject) -> None:
    """Makes the same calls on a sequence with a loaded part and on another one without parts."""
    subject.require_size(sequences=3)
    fixture = fixture_with_heads(subject, num_blocks=12, max_drafts=2)
    fixture.need(num_blocks=7, max_drafts=2)
    saved, loaded, twin = fixture.filled(4), fixture.cache.create(), fixture.cache.create()
    first, second = save_parts(fixture, saved)
    before = fixture.state(saved)
    fixture.cache.load(loaded, first)

    def both(name: str, **arguments: Any) -> None:
        with suppress(NotOffered):
            for sequence in (twin, loaded):
                getattr(fixture.cache, name)(sequence, **arguments)
        fixture.check_same(loaded, fixture.state(twin), f"after {name} between two parts")

    both("append", **fixture.tokens(1))
    both("checkpoint")
    both("append", **fixture.tokens(3))
    both("commit", tokens=[1, 2, 3])
    both("truncate", length=2)
    both("append", **fixture.tokens(2))
    both("truncate", length=1)
    fixture.cache.load(twin, fixture.cache.save(loaded))
    fixture.check_same(twin, fixture.state(loaded), "of a sequence that was saved between two parts")
    with suppress(NotOffered):
        child = fixture.cache.fork(loaded)
        fixture.check_same(child, fixture.state(twin), "of a fork between two parts")
    fixture.append(loaded, 1)
    fixture.cache.load(loaded, second)
    fixture.check_same(loaded, before, "after all parts, with other calls between them")
    fixture.look_at_states()
    for length in (1, 2):
        with may_raise("NotTruncatable"):
            fixture.cache.truncate(loaded, length)
            break
    fixture.look_at_states()


@check("RECUR-17d", "recurrent")
def fork_between_loads_of_parts_leaves_the_parts_with_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=3)
    fixture = fixture_with_heads(subject)
    saved, loaded = fixture.filled(4), fixture.filled(1)
    first, second = save_parts(fixture, saved)
    own = fixture.state(loaded)
    fixture.cache.load(loaded, first)
    child = fixture.cache.fork(loaded)
    fixture.cache.load(child, second)
    fixture.check_same(child, own, "of a fork after the second part was loaded into it, and the first one into its parent")
    fixture.cache.load(loaded, second)
    fixture.check_same(loaded, fixture.state(saved), "of the parent after both parts")
    fixture.cache.load(child, first)
    fixture.check_same(child, fixture.state(saved), "of the fork after both parts")


@check("RECUR-17e", "recurrent")
def loaded_parts_have_one_block(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = fixture_with_heads(subject)
    saved = fixture.filled(2)
    parts, whole = save_parts(fixture, saved, ways_to_split(fixture)[2]), fixture.cache.save(saved)
    free = int(fixture.cache.num_free_blocks)

    def check_free(used: int, when: str) -> None:
        assert_equal(int(fixture.cache.num_free_blocks), free - used, f"free blocks {when}")

    loaded = fixture.cache.create()
    for part in parts[:-1]:
        fixture.cache.load(loaded, part)
        check_free(2, "with a sequence and some loaded parts")
    fixture.cache.load(loaded, parts[-1])
    check_free(1, "after the last part")
    fixture.cache.load(loaded, parts[0])
    fixture.cache.load(loaded, whole)
    check_free(1, "after load of a part, and then of the whole")
    fixture.cache.load(loaded, parts[0])
    check_free(2, "with a part that was loaded again")
    fixture.cache.drop(loaded)
    check_free(0, "after drop of a sequence with a loaded part")
    fixture.look_at_states()


@check("RECUR-13bc", "recurrent")
def load_of_a_first_part_needs_a_free_block(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = fixture_with_heads(subject, num_blocks=3)
    saved, loaded = fixture.filled(2), fixture.filled(3)
    first, second = save_parts(fixture, saved)
    own, free = fixture.state(loaded), int(fixture.cache.num_free_blocks)
    for _ in range(free):
        fixture.cache.create()
    with raises("OutOfBlocks"):
        fixture.cache.load(loaded, first)
    fixture.check_same(loaded, own, "after load of a part raised OutOfBlocks")
    fixture.cache.drop(saved)
    fixture.cache.load(loaded, first)
    assert_equal(int(fixture.cache.num_free_blocks), 0, "free blocks with a loaded part")
    fixture.cache.load(loaded, second)
    assert_equal(int(fixture.cache.num_free_blocks), 1, "free blocks after the last part")
    assert_true(int(fixture.cache.length(loaded)) == 2, "length after the last part", "2", fixture.cache.length(loaded))


@check("RECUR-17f", "recurrent")
def save_of_a_part_out_of_range_raises(subject: Subject) -> None:
    fixture = fixture_with_heads(subject)
    sequence = fixture.filled(2)
    fixture.cache.save(sequence, layers=[0, 1], heads=[0, 1])
    for name, kind, size in (("layers", "LayerOutOfRange", "num_layers"), ("heads", "HeadOutOfRange", "num_heads")):
        stop = fixture.config[size]
        for span in ([-1, 1], [0, stop + 1], [stop, stop + 1], [-1, stop]):
            with raises(kind):
                fixture.cache.save(sequence, **{name: span})
    fixture.look_at_states()
