"""MOVE-12: blocks are copied to the host and back bit for bit."""

from collections.abc import Iterator
from typing import Any

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.testlib.assertions import assert_pair, raises, reads
from kvref_conformance.testlib.fixtures import at_least, formats_of, new, pair_of_tokens, sample_formats
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import pair_of_content


def formats(subject: Subject) -> list[str]:
    """One or more supported formats of every kind."""
    return sample_formats(subject, formats_of(subject, "format", *all_families()["hosted"].formats["format"]))


def made(subject: Subject, format: str, **sizes: int) -> ObjectProxy:
    """A store in this format, with two groups per row."""
    store = new(subject, "hosted", format=format, **{"head_dim": 2 * group_of(format)} if group_of(format) > 1 else {}, **sizes)
    at_least(store, num_blocks=2, capacity=2)
    return store


def block_of_tokens(subject: Subject, store: ObjectProxy) -> tuple[NDArray, NDArray]:
    return pair_of_tokens(subject, *(store.config[name] for name in ("block_size", "num_kv_heads", "head_dim")))


def written(subject: Subject, store: ObjectProxy, block: int) -> Any:
    """Write random tokens to a block and return its dequantized rows."""
    store.write(block, *block_of_tokens(subject, store))
    return store.read(block)


@check("MOVE-12ab", "hosted")
def blocks_come_back_bit_for_bit(subject: Subject) -> None:
    for format in formats(subject):
        store = made(subject, format)
        before = [written(subject, store, block) for block in (0, 1)]
        store.to_host([0, 1], [1, 0])
        for block in (0, 1):
            written(subject, store, block)
        store.to_device([1], [1])
        assert_pair(store.read(1), before[0], f"block 0 in {format}, copied to the host and back as block 1")
        store.to_device([0], [0])
        assert_pair(store.read(0), before[1], f"block 1 in {format}, copied to the host and back as block 0")
        assert_pair(store.read(1), before[0], f"block 1 in {format}, after block 0 was copied")


@check("LAW-04", "hosted")
@check("MOVE-12a", "hosted")
def what_comes_back_is_what_was_written(subject: Subject) -> None:
    for format in formats(subject):
        store = made(subject, format)
        keys, values = block_of_tokens(subject, store)
        store.write(0, keys, values)
        store.to_host([0], [1])
        store.to_device([1], [1])
        wanted = read_as(keys, format), read_as(values, format)
        for block in (0, 1):
            reads(subject, store.read(block), wanted, f"block {block} in {format}", format)


@check("MOVE-12b", "hosted")
def what_was_copied_does_not_change_with_its_source(subject: Subject) -> None:
    store = new(subject, "hosted")
    at_least(store, num_blocks=2, capacity=1)
    before = written(subject, store, 0)
    store.to_host([0], [0])
    other = written(subject, store, 0)
    store.to_device([0], [1])
    assert_pair(store.read(1), before, "a block copied back from the host, after its original was overwritten on the device")
    assert_pair(store.read(0), other, "the overwritten original on the device")
    store.to_host([0], [0])
    assert_pair(store.read(1), before, "a block copied back from the host, after its place on the host was overwritten")


@check("MOVE-12a", "hosted")
def several_blocks_go_to_several_places(subject: Subject) -> None:
    store = new(subject, "hosted")
    at_least(store, num_blocks=2, capacity=2)
    count = min(store.config["num_blocks"], store.config["capacity"])
    before = [written(subject, store, block) for block in range(count)]
    places = [store.config["capacity"] - 1 - block for block in range(count)]
    store.to_host(list(range(count)), places)
    store.to_host([], [])
    turned = [*range(1, count), 0]
    store.to_device(places, turned)
    for block, want in zip(turned, before, strict=True):
        assert_pair(store.read(block), want, f"block {block}, copied from place {places[turned.index(block)]}")


@check("LAW-01", "hosted")
@check("MOVE-12c", "hosted")
def a_copy_that_is_wrong_copies_nothing(subject: Subject) -> None:
    store = new(subject, "hosted")
    at_least(store, num_blocks=2, capacity=2)
    blocks, places = store.config["num_blocks"], store.config["capacity"]
    one, two = (written(subject, store, block) for block in (0, 1))
    store.to_host([0, 1], [0, 1])
    wrong: list[tuple[list[int], list[int], str]] = [
        ([1, blocks], [0, 1], "SlotOutOfRange"), ([1, 0], [0, places], "SlotOutOfRange"), ([1, 0], [0], "ShapeMismatch"),
        ([1], [0, 1], "ShapeMismatch"), *([([1, number], [0, 1], "SlotOutOfRange") for number in subject.integers(-1)]),
        *([([1, 0], [0, number], "SlotOutOfRange") for number in subject.integers(-1)]),
    ]  # fmt: skip
    for from_blocks, to_places, kind in wrong:
        with raises(kind):
            store.to_host(from_blocks, to_places)
        with raises(kind):
            store.to_device(to_places, from_blocks)
        for block, want in ((0, one), (1, two)):
            assert_pair(
                store.read(block),
                want,
                f"block {block}, after copies between blocks {from_blocks} and places {to_places} raised {kind}",
            )
    store.to_device([0, 1], [0, 1])
    for block, want in ((0, one), (1, two)):
        assert_pair(store.read(block), want, f"block {block}, copied back from the host after every invalid copy raised an error")


# LAW-20: a law in the form that applies to this family only.


@check("LAW-20", "hosted")
def blocks_and_places_are_numbers_of_any_type(subject: Subject) -> None:
    """There are more than 256 slots, so that 8-bit indices overflow."""
    tokens = list[tuple[object, object]]()

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        store = typed.new("hosted", num_blocks=100, capacity=100)
        last = min(store.config["num_blocks"], store.config["capacity"]) - 1
        if not tokens:
            tokens.append(block_of_tokens(subject, store))
        yield "write of a block", typed.call(store, "write", last, *tokens[0])
        yield "to_host of the block", typed.call(store, "to_host", [last], [last])
        yield "to_device of the block", typed.call(store, "to_device", [last], [0])
        yield "read of the copy", typed.call(store, "read", 0)

    the_same_in_any_type(subject, script)


# LAW-18: hundreds of blocks of production sizes.


@check("LAW-18", "hosted")
def hundreds_of_blocks_go_to_the_host_and_back(subject: Subject) -> None:
    store = new(subject, "hosted", num_blocks=150, block_size=16, head_dim=64, capacity=300)
    blocks, places, size, heads, dim = (
        store.config[name] for name in ("num_blocks", "capacity", "block_size", "num_kv_heads", "head_dim")
    )
    rounds = max(1, places // max(blocks, 1))
    order = subject.rng.permutation(places).tolist()
    for turn in range(rounds):
        for block in range(blocks):
            store.write(block, *pair_of_content(turn * blocks + block, 0, range(size), heads, dim))
        store.to_host(list(range(blocks)), order[turn * blocks : (turn + 1) * blocks])
    for turn in range(rounds):
        store.to_device(order[turn * blocks : (turn + 1) * blocks], list(range(blocks)))
        for block in range(blocks):
            number = turn * blocks + block
            assert_pair(store.read(block), pair_of_content(number, 0, range(size), heads, dim), f"block {number}")
