"""MOVE-12: blocks are copied to the host and back bit for bit."""

from typing import Any

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import pair, raises, reads
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, few, formats_of, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.rows import read_as


def formats(subject: Subject) -> list[str]:
    """One or more supported formats of every kind."""
    return few(subject, formats_of(subject, "format", *all_families()["hosted"].formats["format"]))


def made(subject: Subject, format: str, **sizes: int) -> Handle:
    """A store in this format, with two groups per row."""
    store = new(subject, "hosted", format=format, **{"head_dim": 2 * group_of(format)} if group_of(format) > 1 else {}, **sizes)
    at_least(store, num_blocks=2, capacity=2)
    return store


def block_of_tokens(subject: Subject, store: Handle) -> tuple[NDArray, NDArray]:
    return pair_of_tokens(subject, *(store.config[name] for name in ("block_size", "num_kv_heads", "head_dim")))


def written(subject: Subject, store: Handle, block: int) -> Any:
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
        pair(store.read(1), before[0], f"block 0 in {format}, copied to the host and back as block 1")
        store.to_device([0], [0])
        pair(store.read(0), before[1], f"block 1 in {format}, copied to the host and back as block 0")
        pair(store.read(1), before[0], f"block 1 in {format}, after block 0 was copied")


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
    pair(store.read(1), before, "a block copied back from the host, after its original was overwritten on the device")
    pair(store.read(0), other, "the overwritten original on the device")
    store.to_host([0], [0])
    pair(store.read(1), before, "a block copied back from the host, after its place on the host was overwritten")


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
        pair(store.read(block), want, f"block {block}, copied from place {places[turned.index(block)]}")


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
            pair(
                store.read(block),
                want,
                f"block {block}, after copies between blocks {from_blocks} and places {to_places} raised {kind}",
            )
    store.to_device([0, 1], [0, 1])
    for block, want in ((0, one), (1, two)):
        pair(store.read(block), want, f"block {block}, copied back from the host after every invalid copy raised an error")
