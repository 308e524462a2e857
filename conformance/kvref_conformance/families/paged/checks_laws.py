"""Checks of LAW-01, LAW-02, LAW-03, LAW-05 and LAW-20 for this family."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.integers import REFUSED, Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import in_use, layers_of, put, room, to_be_filled, with_room
from kvref_conformance.families.paged.stream import PagedStream
from kvref_conformance.outcome import NotOffered


@check("LAW-01", "paged")
def blocks_are_taken_all_or_none(subject: Subject) -> None:
    cache = to_be_filled(subject, 2, one_short=True)
    sequence, entries, size = cache.create(), room(cache), cache.config["block_size"]
    kept, (keys, values) = (entries - 2) * size, pair_of_tokens(subject, 2 * size + 1)
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, kept))
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, kept, keys, values)
    in_use(subject, cache, {sequence: entries - 2}, "after a write that raised OutOfBlocks")
    equal(cache.length(sequence, 0), kept, "length after a write that raised OutOfBlocks")
    cache.write(sequence, 0, kept, keys[:-1], values[:-1])
    in_use(subject, cache, {sequence: entries}, "after a write up to the last block")


@check("LAW-01", "paged")
def a_token_that_does_not_fit_leaves_no_trace(subject: Subject) -> None:
    cache = to_be_filled(subject, 2, one_short=True)
    sequence, entries = cache.create(), room(cache)
    wrote = pair_of_tokens(subject, entries * cache.config["block_size"])
    cache.write(sequence, 0, 0, *wrote)
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, len(wrote[0]), *pair_of_tokens(subject, 1))
    in_use(subject, cache, {sequence: entries}, "after an append that raised OutOfBlocks")
    pair(cache.gather(sequence, 0), wrote, "tokens after an append that raised OutOfBlocks")


@check("LAW-20", "paged")
def sequences_layers_and_positions_may_be_of_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 130)
    size = subject.size("block_size", 16)

    def script(typed: Typed) -> Iterator[Seen]:
        cache: Handle = typed.new(subject.family, num_blocks=max(100, 300 // size + 4), block_size=16)
        sequence, layer, looked = cache.create(), layers_of(cache)[-1], 0

        def slots() -> Any:
            found = typed.call(cache, "slot_mapping", sequence, layer, 100, 30)
            return found if found == REFUSED else [slot % size for slot in found]

        def write(start: int, stop: int) -> Any:
            given = keys[start % 2**63 : stop], values[start % 2**63 : stop]
            return typed.call(cache, "write", sequence, layer, start, *given), cache.length(sequence, layer)

        call, free = partial(partial, typed.call, cache), ("free blocks", lambda: cache.num_free_blocks)
        looks: list[tuple[str, Callable[[], Any]]] = []
        for count in (100, 2**64 - 1):
            looks += [(f"ensure_capacity({count})", call("ensure_capacity", sequence, count)), free]
        for start, stop in ((0, 100), (100, 130), (2**63, 1)):
            looks += [(f"write from {start} on, and the length", partial(write, start, stop)), free]
        looks += [("offsets in their blocks of the slots of [100, 130)", slots)]
        looks += [("positions 120 and 3", call("read", sequence, layer, [120, 3])), ("drop", call("drop", sequence)), free]
        for what, look in looks:
            try:
                found = look()
                looked += 1
            except NotOffered:
                found = "not offered"
            yield what, found
        if not looked:
            raise NotOffered("an operation with integer arguments")

    the_same_in_any_type(subject, script)


@check("LAW-03ab", "paged")
def every_block_belongs_to_the_tables_that_list_it(subject: Subject) -> None:
    cache, lengths, most = with_room(subject, 1), dict[int, int](), subject.size("sequences", 60)
    size = cache.config["block_size"]
    for _ in range(60):
        if lengths and subject.rng.random() < 0.3:
            sequence = int(subject.rng.choice(list(lengths)))
            cache.drop(sequence)
            del lengths[sequence]
        else:
            there = [*lengths, cache.create()] if len(lengths) < most else [*lengths]
            lengths.setdefault(there[-1], 0)
            sequence = int(subject.rng.choice(there))
            start, count = lengths[sequence], int(subject.rng.integers(0, 2 * size))
            free = room(cache) - sum(-(-length // size) for length in lengths.values())
            if -(-(start + count) // size) - -(-start // size) <= free:
                put(subject, cache, sequence, 0, start, *pair_of_tokens(subject, count))
                lengths[sequence] += count
        in_use(subject, cache, {sequence: -(-length // size) for sequence, length in lengths.items()}, "of the live sequences")
        try:
            listed = Counter(b for sequence in lengths for layer in layers_of(cache) for b in blocks_of(cache, sequence, layer))
        except NotOffered:
            continue  # only the number of free blocks is observable
        equal(max(listed.values(), default=1), 1, "the largest number of tables that list one block")


@check("LAW-05ab", "paged")
def a_position_never_written_cannot_be_read(subject: Subject) -> None:
    cache = with_room(subject, 3)
    old, size = cache.create(), cache.config["block_size"]
    cache.write(old, 0, 0, *pair_of_tokens(subject, 3 * size))
    cache.drop(old)
    sequence = cache.create()
    keys, values = pair_of_tokens(subject, size + 1)
    with suppress(NotOffered):
        cache.ensure_capacity(sequence, 3 * size)
    cache.write(sequence, 0, 0, keys, values)
    for position in (size + 1, size + 2, 3 * size - 1):
        with raises("PositionOutOfRange"):
            cache.read(sequence, 0, [position])
    for layer in layers_of(cache)[1:]:
        with raises("PositionOutOfRange"):
            cache.read(sequence, layer, [0])
    pair(cache.gather(sequence, 0), (keys, values), f"{size + 1} tokens in blocks of a dropped sequence")


@check("LAW-02a", "paged")
def sequences_and_layers_are_apart(subject: Subject) -> None:
    streams, rows = [], []
    first = PagedStream(subject)
    more = [first.another().sequence for _ in range(subject.size("sequences", 2) - 1)]
    for sequence in (first.sequence, *more):
        for layer in layers_of(first.cache):
            streams.append(first.beside(sequence, layer))
            rows.append(pair_of_tokens(subject, 7))
    if len(streams) == 1:
        raise NotOffered("two sequences or two layers, where its limits say 1")
    for at in range(7):
        for stream, (keys, values) in zip(streams, rows, strict=True):
            stream.append(keys[at : at + 1], values[at : at + 1])
    for stream, wanted in zip(streams, rows, strict=True):
        pair(stream.read(), wanted, f"sequence {stream.sequence}, layer {stream.layer}")


@check("LAW-02a", "paged")
def overwriting_one_sequence_changes_no_other(subject: Subject) -> None:
    subject.need(sequences=2)
    first = PagedStream(subject)
    streams = [first, first.another()]
    rows = [pair_of_tokens(subject, 7) for _ in streams]
    for stream, wrote in zip(streams, rows, strict=True):
        stream.append(*wrote)
    new = pair_of_tokens(subject, 1)
    first.cache.write(first.sequence, 0, 2, *new)
    for part, token in zip(rows[0], new, strict=True):
        part[2] = token[0]
    for stream, wanted in zip(streams, rows, strict=True):
        pair(stream.read(), wanted, f"sequence {stream.sequence}")
