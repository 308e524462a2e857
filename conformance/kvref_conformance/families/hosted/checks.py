"""MOVE-12: blocks are copied to the host and back bit for bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.families.hosted.model import Hosted
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS, group_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.testlib.assertions import KeptResults, assert_pair, assert_reads, raises
from kvref_conformance.testlib.fixtures import new_object, random_pair, require_sizes, sample_formats, supported_formats
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import content_pair


class HostedFixture(Session):
    """A store of blocks with random tokens. The model contains what each block and each place reads back as."""

    model: Hosted

    def __init__(self, subject: Subject, **sizes: Any) -> None:
        """Raises NotOffered if the limits leave less than two blocks or places."""
        super().__init__(subject, **sizes)
        require_sizes(self.cache, num_blocks=2, capacity=2)
        self.blocks: int = self.cache.config["num_blocks"]
        self.places: int = self.cache.config["capacity"]

    def write(self, *blocks: int) -> None:
        for block in blocks:
            self.cache.write(block, *block_of_tokens(self.subject, self.cache))


def fixtures_of_formats(subject: Subject) -> Iterator[HostedFixture]:
    """Yields a store in one or more supported formats of every kind, with two groups per row."""
    for format in sample_formats(subject, supported_formats(subject, "format", *all_families()["hosted"].formats["format"])):
        yield HostedFixture(subject, format=format, **{"head_dim": 2 * group_of(format)} if group_of(format) > 1 else {})


def block_of_tokens(subject: Subject, store: ObjectProxy) -> tuple[NDArray, NDArray]:
    return random_pair(subject, *(store.config[name] for name in ("block_size", "num_kv_heads", "head_dim")))


@check("MOVE-12ab", "hosted")
def to_device_restores_blocks_bit_for_bit(subject: Subject) -> None:
    for fixture in fixtures_of_formats(subject):
        fixture.write(0, 1)
        before = fixture.cache.read(0)
        fixture.cache.to_host([0, 1], [1, 0])
        fixture.write(0, 1)
        fixture.cache.to_device([1], [1])
        assert_pair(fixture.cache.read(1), before, "block 0, copied to the host and back as block 1")


@check("LAW-17", "hosted")
def read_results_stay_after_later_calls(subject: Subject) -> None:
    kept, fixture = KeptResults(subject), HostedFixture(subject)
    for block in (0, 1, 0):
        fixture.write(block)
        kept.add(f"read({block})", fixture.cache.as_is("read", block))
    kept.assert_unchanged()


@check("LAW-04", "hosted")
@check("MOVE-12a", "hosted")
def to_device_restores_the_values_of_the_format(subject: Subject) -> None:
    for fixture in fixtures_of_formats(subject):
        store, format = fixture.cache, fixture.cache.config["format"]
        keys, values = block_of_tokens(subject, store)
        store.write(0, keys, values)
        store.to_host([0], [1])
        store.to_device([1], [1])
        wanted = read_as(keys, format), read_as(values, format)
        for block in (0, 1):
            assert_reads(subject, store.read(block), wanted, f"block {block} in {format}", format)


@check("MOVE-12b", "hosted")
def to_host_copies_independently_of_the_source(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    fixture.write(0)
    before = fixture.cache.read(0)
    fixture.cache.to_host([0], [0])
    fixture.write(0)
    fixture.cache.to_device([0], [1])
    assert_pair(fixture.cache.read(1), before, "a block copied back from the host, after its original was overwritten")
    fixture.look()
    fixture.cache.to_host([0], [0])
    fixture.look()


@check("MOVE-12ab", "hosted")
def copies_take_effect_in_the_order_of_the_calls(subject: Subject) -> None:
    """Makes several random copies before it reads, so that places and blocks are overwritten after they were copied."""
    for format in supported_formats(subject, "format", *PLAIN_FORMATS)[:1]:
        for _ in range(12):
            fixture = HostedFixture(subject, format=format)
            blocks = min(fixture.blocks, 3)
            fixture.write(*range(blocks))
            fixture.cache.to_host([0, 1], [0, 1])
            for _ in range(8):
                block, place = int(subject.rng.integers(0, blocks)), int(subject.rng.integers(0, 2))
                if subject.rng.integers(0, 2):
                    fixture.cache.to_host([block], [place])
                else:
                    fixture.cache.to_device([place], [block])
            fixture.look()


@check("MOVE-12a", "hosted")
def to_host_copies_several_blocks_to_several_places(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    count = min(fixture.blocks, fixture.places)
    blocks, places = list(range(count)), [fixture.places - 1 - block for block in range(count)]
    fixture.write(*blocks)
    fixture.cache.to_host(blocks, places)
    fixture.cache.to_host([], [])
    fixture.cache.to_device(places, [*blocks[1:], 0])
    fixture.look()


@check("LAW-01", "hosted")
@check("MOVE-12c", "hosted")
def to_host_and_to_device_that_raise_copy_nothing(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    fixture.write(0, 1)
    fixture.cache.to_host([0, 1], [0, 1])
    wrong: list[tuple[list[int], list[int], str]] = [
        ([1, fixture.blocks], [0, 1], "SlotOutOfRange"), ([1, 0], [0, fixture.places], "SlotOutOfRange"),
        ([1, 0], [0], "ShapeMismatch"), ([1], [0, 1], "ShapeMismatch"),
        *([([1, number], [0, 1], "SlotOutOfRange") for number in subject.integers(-1)]),
        *([([1, 0], [0, number], "SlotOutOfRange") for number in subject.integers(-1)]),
    ]  # fmt: skip
    fixture.look()
    for blocks, places, kind in wrong:
        with raises(kind):
            fixture.cache.to_host(blocks, places)
        with raises(kind):
            fixture.cache.to_device(places, blocks)
        fixture.look()
    fixture.cache.to_device([0, 1], [0, 1])
    fixture.look()


@check("LAW-10", "hosted")
def write_of_a_wrong_shape_raises(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    fixture.write(0)
    keys, values = block_of_tokens(subject, fixture.cache)
    for axis in range(3):  # tokens, heads, dim
        long_keys, long_values = (np.concatenate([part, part], axis) for part in (keys, values))
        for pair in ((long_keys, long_values), (long_keys, values), (keys, long_values), (keys[0], values[0])):
            with raises("ShapeMismatch"):
                fixture.cache.write(0, *pair)
            fixture.look()


@check("LAW-11", "hosted")
def read_and_write_of_a_block_out_of_range_raise(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    fixture.write(0)
    for block in (fixture.blocks, fixture.blocks + 10**6, *subject.integers(-1)):
        with raises("SlotOutOfRange"):
            fixture.cache.read(block)
        with raises("SlotOutOfRange"):
            fixture.cache.write(block, *block_of_tokens(subject, fixture.cache))
        fixture.look()


@check("FMT-LEVEL-04b", "hosted")
def write_of_float64_raises(subject: Subject) -> None:
    fixture = HostedFixture(subject)
    fixture.write(0)
    keys, values = block_of_tokens(subject, fixture.cache)
    for wide in ((keys.astype(np.float64), values), (keys, values.astype(np.float64))):
        with raises("DtypeMismatch"):
            fixture.cache.write(0, *wide)
        fixture.look()


# LAW-20: a law in the form that applies to this family only.


@check("LAW-20", "hosted")
def copies_accept_every_integer_type(subject: Subject) -> None:
    """There are more than 256 slots, so that 8-bit indices overflow."""
    tokens = list[tuple[object, object]]()

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        store = typed.new("hosted", num_blocks=100, capacity=100)
        last = min(store.config["num_blocks"], store.config["capacity"]) - 1
        if not tokens:
            tokens.append(block_of_tokens(subject, store))
        yield "write of a block", typed.call(store, "write", last, *tokens[0])
        yield "to_host of the block", typed.call(store, "to_host", [last], [last])
        yield "to_device of the block", typed.call(store, "to_device", [last], [0])
        yield "read of the copy", typed.call(store, "read", 0)

    assert_same_for_integer_types(subject, script)


# LAW-18: hundreds of blocks of production sizes.


@check("LAW-18", "hosted")
def to_device_restores_hundreds_of_blocks(subject: Subject) -> None:
    store = new_object(subject, "hosted", num_blocks=150, block_size=16, head_dim=64, capacity=300)
    blocks, places, size, heads, dim = (
        store.config[name] for name in ("num_blocks", "capacity", "block_size", "num_kv_heads", "head_dim")
    )
    rounds = max(1, places // max(blocks, 1))
    order = subject.rng.permutation(places).tolist()
    for start in range(0, rounds * blocks, max(blocks, 1)):
        for block in range(blocks):
            store.write(block, *content_pair(start + block, 0, range(size), heads, dim))
        store.to_host(list(range(blocks)), order[start : start + blocks])
    for start in range(0, rounds * blocks, max(blocks, 1)):
        store.to_device(order[start : start + blocks], list(range(blocks)))
        for block in range(blocks):
            want = content_pair(start + block, 0, range(size), heads, dim)
            assert_pair(store.read(block), want, f"block {start + block}")
