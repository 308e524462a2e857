"""Checks of LAW-01, LAW-02, LAW-03, LAW-05 and LAW-20 for this family."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import (
    in_use,
    layers_of,
    room,
    to_be_filled,
    with_room,
    write_or_ensure_capacity,
)
from kvref_conformance.families.paged.law_adapter import PagedLawAdapter
from kvref_conformance.families.paged.soak_driver import SoakPagedCache
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import blocks_of, pair_of_tokens
from kvref_conformance.testlib.integer_types import REFUSED, Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.production_sizes import BLOCK_SIZES, DIMS, affordable
from kvref_conformance.testlib.registry import check


@check("LAW-01", "paged")
def blocks_are_taken_all_or_none(subject: Subject) -> None:
    cache = to_be_filled(subject, 2, one_short=True)
    sequence, entries, size = cache.create(), room(cache), cache.config["block_size"]
    kept, (keys, values) = (entries - 2) * size, pair_of_tokens(subject, 2 * size + 1)
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, kept))
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, kept, keys, values)
    in_use(subject, cache, {sequence: entries - 2}, "after a write that raised OutOfBlocks")
    assert_equal(cache.length(sequence, 0), kept, "length after a write that raised OutOfBlocks")
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
    assert_pair(cache.gather(sequence, 0), wrote, "tokens after an append that raised OutOfBlocks")


@check("LAW-20", "paged")
def sequences_layers_and_positions_may_be_of_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 130)
    size = subject.size("block_size", 16)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache: ObjectProxy = typed.new(subject.family, num_blocks=max(100, 300 // size + 4), block_size=16)
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
                write_or_ensure_capacity(subject, cache, sequence, 0, start, *pair_of_tokens(subject, count))
                lengths[sequence] += count
        in_use(subject, cache, {sequence: -(-length // size) for sequence, length in lengths.items()}, "of the live sequences")
        try:
            listed = Counter(b for sequence in lengths for layer in layers_of(cache) for b in blocks_of(cache, sequence, layer))
        except NotOffered:
            continue  # only the number of free blocks is observable
        assert_equal(max(listed.values(), default=1), 1, "the largest number of tables that list one block")


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
    assert_pair(cache.gather(sequence, 0), (keys, values), f"{size + 1} tokens in blocks of a dropped sequence")


@check("LAW-02a", "paged")
def sequences_and_layers_are_apart(subject: Subject) -> None:
    streams, rows = [], []
    first = PagedLawAdapter(subject)
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
        assert_pair(stream.read(), wanted, f"sequence {stream.sequence}, layer {stream.layer}")


@check("LAW-02a", "paged")
def overwriting_one_sequence_changes_no_other(subject: Subject) -> None:
    subject.need(sequences=2)
    first = PagedLawAdapter(subject)
    streams = [first, first.another()]
    rows = [pair_of_tokens(subject, 7) for _ in streams]
    for stream, wrote in zip(streams, rows, strict=True):
        stream.append(*wrote)
    new = pair_of_tokens(subject, 1)
    first.cache.write(first.sequence, 0, 2, *new)
    for part, token in zip(rows[0], new, strict=True):
        part[2] = token[0]
    for stream, wanted in zip(streams, rows, strict=True):
        assert_pair(stream.read(), wanted, f"sequence {stream.sequence}")


# Checks of LAW-18: the paged cache at the sizes of serving.

ENTRIES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025)  # entries of a block table
MOST = 2400  # blocks in all, if the cache has more layers than the check needs


def pages(subject: Subject, num_blocks: int, **sizes: Any) -> SoakPagedCache:
    wanted = {"block_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    return SoakPagedCache(subject, num_blocks=num_blocks, **wanted)


def entries(subject: Subject, wanted: int, num_layers: int = 1) -> dict[str, int]:
    """Returns sizes of a pool with `wanted` blocks per layer, or fewer if MOST limits it."""
    layers = subject.size("num_layers", num_layers)
    each = wanted if layers <= num_layers else min(wanted, MOST // layers)
    return {"num_blocks": max(1, each) * layers, "num_layers": num_layers}


@check("LAW-18", "paged")
def tables_grow_more_than_once(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = pages(subject, **entries(subject, 1200))
    long, beside = cache.create(), cache.create()
    last = affordable(subject, ENTRIES[-1] * cache.size, len(cache.layers))
    for before, count in pairwise((0, *ENTRIES)):
        tokens = count * cache.size - 3 - cache.live[long].lengths[0]
        if cache.live[long].lengths[0] + tokens <= last and cache.fits([long], tokens):
            cache.fill(long, tokens)
            cache.fill(beside, 5)
        if before < 65:
            cache.look(long)
        cache.look(beside)
    cache.look(long)
    cache.counted()


@check("LAW-18", "paged")
def hundreds_of_sequences_share_a_pool(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = pages(subject, **entries(subject, 1200, num_layers=2))
    some = cache.config["num_blocks"] // len(cache.layers) // 3  # no sequence gets more than 3 blocks per layer
    count = subject.size("sequences", max(2, min(300, some)))
    numbers = [cache.create() for _ in range(count)]
    for number in numbers:
        cache.fill(number, affordable(subject, number % 31, 2 * count))
    for _ in range(12):
        if cache.fits(numbers):
            cache.step(numbers)
    for layer in cache.layers:
        cache.look_at_batch(numbers, layer)
    cache.owned()
    for number in numbers[::3]:
        cache.drop(number)
    cache.counted()
    for _ in range(count // 5):
        number = cache.create()
        cache.fill(number, affordable(subject, 20 + number % 16, 2 * count))
    for layer in cache.layers:
        cache.look_at_batch(list(cache.live), layer)
    cache.owned()


@check("LAW-18", "paged")
def sequences_come_and_go_in_thousands(subject: Subject) -> None:
    cache = pages(subject, **entries(subject, 64))
    alive = subject.size("sequences", 20)
    for number in range(1000):
        tokens = affordable(subject, 10 + number % 23, 1000)
        while cache.live and (len(cache.live) >= alive or not cache.takes(tokens)):
            oldest = min(cache.live)
            if number % 100 == 0:
                cache.look(oldest)
            cache.drop(oldest)
        cache.fill(cache.create(), tokens, layers=[number % len(cache.layers)])
    for number in cache.live:
        cache.look(number)
    cache.counted()


@check("LAW-18", "paged")
def blocks_are_told_apart_in_a_pool_of_thousands(subject: Subject) -> None:
    far_apart(subject, 4200, (256, 1024, 2048, 4096))


@check("LAW-18", "paged", real=True)
def blocks_are_told_apart_past_16_bits(subject: Subject) -> None:
    far_apart(subject, 70_000, (256, 4096, 32_768, 65_536))


def far_apart(subject: Subject, num_blocks: int, places: tuple[int, ...]) -> None:
    """Checks sequences that begin in the blocks `places`, if blocks are allocated in ascending order."""
    subject.need(sequences=4)
    cache = pages(subject, num_blocks=num_blocks)
    most, layers = subject.size("sequences", 2 * len(places) + 2) // 2 - 1, len(cache.layers)
    cache.fill(cache.create(), 3 * cache.size)
    fillers = []
    for place in [place for place in places if place < cache.config["num_blocks"] - 4 * layers][-most:]:
        before = (place - (cache.config["num_blocks"] - cache.free)) // layers
        if before > 0:
            fillers.append(cache.create())
            cache.reserve(fillers[-1], before * cache.size)
            cache.fill(cache.create(), 3 * cache.size - 1)
    if not fillers:
        raise NotOffered(f"block {places[0]} and above: the pool has {cache.config['num_blocks']} blocks")
    for filler in fillers[::2]:
        cache.drop(filler)
    cache.counted()
    again = cache.create()
    cache.fill(again, affordable(subject, 100 * cache.size, layers))
    for number in (number for number in cache.live if number not in fillers):
        cache.look(number)
    cache.owned()
    for number in list(cache.live):
        cache.drop(number)
    cache.reserve(cache.create(), cache.config["num_blocks"] // layers * cache.size)  # every block is free again
    cache.counted()


@check("LAW-18", "paged")
def layers_may_differ_by_hundreds_of_tokens(subject: Subject) -> None:
    subject.need(sequences=2, num_layers=2)
    cache = pages(subject, num_kv_heads=2, **entries(subject, 80, num_layers=5))
    first, second = cache.create(), cache.create()
    for tokens in (1, 16, 112, 171):
        for layer in cache.layers[:-1]:
            cache.fill(first, affordable(subject, tokens + layer, 2 * len(cache.layers)), layers=[layer])
            cache.fill(second, affordable(subject, tokens, 2 * len(cache.layers)) // (layer + 1), layers=[layer])
            if tokens < 20 and layer % 2:
                break  # later layers have fewer tokens, and keep them
    for number in (first, second):
        cache.look(number)
    cache.counted()


@check("LAW-18", "paged")
def blocks_of_any_size_are_filled_to_their_end(subject: Subject) -> None:
    for block_size, dim in zip((*BLOCK_SIZES, 16, 128), DIMS, strict=True):
        cache = pages(subject, block_size=block_size, num_kv_heads=3, head_dim=dim, **entries(subject, 20, num_layers=2))
        numbers, layers = [cache.create() for _ in range(subject.size("sequences", 3))], cache.layers[-2:]
        layer = layers[-1]
        for tokens in (cache.size - 1, 1, 1, cache.size + 1):
            for number in numbers:
                cache.fill(number, affordable(subject, tokens, 6 * len(DIMS) * len(layers)), layers)
        for _ in range(3):
            if cache.fits(numbers):
                cache.step(numbers)
        for number in numbers:
            cache.look(number, layers)
            length = cache.live[number].lengths[layer]
            wanted = (2 * cache.size + 1, 0, cache.size, cache.size - 1, 2 * cache.size)
            cache.look_at(number, layer, [position for position in wanted if position < length])
        one = cache.live[numbers[len(numbers) // 2]]
        across = range(cache.size - 1, min(cache.size + 2, one.blocks * cache.size))
        table = [int(block) for block in cache.cache.block_table(one.id, layer)]
        slots = [int(slot) for slot in cache.cache.slot_mapping(one.id, layer, across.start, len(across))]
        want = [table[p // cache.size] * cache.size + p % cache.size for p in across]
        assert_equal(slots, want, f"slots of positions [{across.start}, {across.stop}) in blocks of {cache.size}")


@check("LAW-18", "paged", real=True)
def a_pool_is_filled_and_emptied_many_times(subject: Subject) -> None:
    cache = pages(subject, num_blocks=4200, num_layers=2, num_kv_heads=2, head_dim=128)
    most, rounds = subject.size("sequences", 4200), 5000 // len(cache.layers)
    for number in range(rounds):
        tokens = affordable(subject, int(subject.rng.integers(1, 300)), rounds)
        while cache.live and (len(cache.live) >= most or not cache.takes(tokens)):
            oldest = int(subject.rng.choice(list(cache.live)))
            cache.look(oldest, layers=[number % len(cache.layers)])
            cache.drop(oldest)
        cache.fill(cache.create(), tokens)
    cache.counted()
    for number in cache.live:
        cache.look(number)
