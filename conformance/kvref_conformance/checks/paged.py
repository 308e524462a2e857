"""PAGED: sequences in blocks."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Handle, Subject
from kvref_conformance.oracle.elements import round_to


def written(subject: Subject, count: int, **config: Any) -> tuple[Handle, int, NDArray, NDArray]:
    """A cache with one sequence of `count` tokens in layer 0."""
    cache, (keys, values) = new(subject, "paged", **config), pair_of_tokens(subject, count)
    sequence = cache.create()
    cache.write(sequence, 0, 0, keys, values)
    return cache, sequence, keys, values


@check("PAGED-01", "paged")
def ids_are_never_used_again(subject: Subject) -> None:
    cache, seen = new(subject, "paged"), set[int]()
    for _ in range(4):
        first, second = cache.create(), cache.create()
        true(first != second and not {first, second} & seen, "ids of new sequences", f"two not in {seen}", (first, second))
        seen |= {first, second}
        cache.drop(second)
        with raises("SequenceNotFound"):
            cache.gather(second, 0)


@check("PAGED-02", "paged")
def a_new_sequence_holds_no_block(subject: Subject) -> None:
    cache = new(subject, "paged")
    sequence = cache.create()
    equal(cache.num_free_blocks, 24, "free blocks after create")
    equal([blocks_of(cache, sequence, layer) for layer in (0, 1)], [[], []], "block tables of a new sequence")
    equal(cache.length(sequence, 0), 0, "length of a new sequence")


@check("PAGED-03", "paged")
def blocks_come_when_needed(subject: Subject) -> None:
    for block_size in (1, 3, 4):
        cache = new(subject, "paged", block_size=block_size, num_blocks=40)
        sequence = cache.create()
        for count in range(1, 14):
            cache.write(sequence, 0, count - 1, *pair_of_tokens(subject, 1))
            blocks = -(-count // block_size)
            held = [len(blocks_of(cache, sequence, layer)) for layer in (0, 1)]
            equal(held, [blocks, blocks], f"blocks a layer for {count} tokens of block_size {block_size}")
            equal(cache.num_free_blocks, 40 - 2 * blocks, "free blocks")


@check("PAGED-04", "paged")
def capacity_is_ensured_once(subject: Subject) -> None:
    cache = new(subject, "paged")
    sequence = cache.create()
    for count, blocks in ((7, 3), (7, 3), (2, 3), (0, 3), (9, 3), (10, 4)):
        cache.ensure_capacity(sequence, count)
        held = [len(blocks_of(cache, sequence, layer)) for layer in (0, 1)]
        equal(held, [blocks, blocks], f"blocks a layer after ensure_capacity({count})")


@check("PAGED-05", "paged")
def a_request_that_does_not_fit_takes_nothing(subject: Subject) -> None:
    cache = new(subject, "paged", num_blocks=7)
    sequence, other = cache.create(), cache.create()
    cache.ensure_capacity(other, 3)
    with raises("OutOfBlocks"):
        cache.ensure_capacity(sequence, 9)  # 6 blocks, 5 free
    equal(cache.num_free_blocks, 5, "free blocks after OutOfBlocks")
    equal(blocks_of(cache, sequence, 0), [], "block table after OutOfBlocks")
    cache.ensure_capacity(sequence, 6)
    equal(cache.num_free_blocks, 1, "free blocks after a request that fits")


@check("PAGED-05", "paged")
def a_request_that_fits_no_pool_takes_nothing(subject: Subject) -> None:
    cache = new(subject, "paged")
    sequence = cache.create()
    for count in (2**31, 2**53 - 1):
        with raises("OutOfBlocks"):
            cache.ensure_capacity(sequence, count)
    for count in () if subject.by_value else (2**63 - 1, 2**64 - 1):  # more than JSON has, and than some can be given at all
        with raises("Exception"):
            cache.ensure_capacity(sequence, count)
    equal(cache.num_free_blocks, 24, "free blocks after requests for more tokens than any pool holds")
    equal(blocks_of(cache, sequence, 0), [], "block table after them")


@check("PAGED-06", "paged")
def a_slot_is_block_times_size_plus_offset(subject: Subject) -> None:
    cache, sequence, _, _ = written(subject, 11)
    table = blocks_of(cache, sequence, 0)
    for start, count in ((0, 11), (2, 5), (10, 1), (4, 0)):
        want = [table[p // 3] * 3 + p % 3 for p in range(start, start + count)]
        got = [int(slot) for slot in cache.slot_mapping(sequence, 0, start, count)]
        equal(got, want, f"slots of positions {start}..{start + count}")
    with raises("PositionOutOfRange"):
        cache.slot_mapping(sequence, 0, 11, 2)  # 12 is past the 4 blocks
    with raises("PositionOutOfRange"):
        cache.slot_mapping(sequence, 0, -1, 1)


@check("PAGED-07", "paged")
def dropping_gives_back_every_block(subject: Subject) -> None:
    cache, sequence, _, _ = written(subject, 10)
    other = cache.create()
    rows = pair_of_tokens(subject, 4)
    cache.write(other, 1, 0, *rows)
    cache.drop(sequence)
    equal(cache.num_free_blocks, 20, "free blocks after a drop")
    pair(cache.gather(other, 1), rows, "the sequence that stayed")
    cache.drop(other)
    equal(cache.num_free_blocks, 24, "free blocks after the last drop")


@check("PAGED-08", "paged")
def an_unknown_sequence_raises(subject: Subject) -> None:
    cache, known, keys, values = written(subject, 2)
    dropped = cache.create()
    cache.drop(dropped)
    for unknown in (dropped, dropped + 1, -1):
        calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("drop", ()), ("ensure_capacity", (1,)), ("write", (0, 0, keys, values)), ("read", (0, [0])), ("gather", (0,)),
            ("length", (0,)), ("block_table", (0,)), ("slot_mapping", (0, 0, 1)),
        )  # fmt: skip
        for method, arguments in calls:
            with raises("SequenceNotFound"):
                getattr(cache, method)(unknown, *arguments)
    pair(cache.gather(known, 0), (keys, values), "the known sequence")


@check("PAGED-09", "paged")
def length_counts_what_was_written(subject: Subject) -> None:
    cache = new(subject, "paged")
    sequence = cache.create()
    cache.ensure_capacity(sequence, 9)
    equal(cache.length(sequence, 0), 0, "length after ensure_capacity alone")
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 4))
    equal([cache.length(sequence, layer) for layer in (0, 1)], [4, 0], "lengths after 4 tokens in layer 0")
    cache.write(sequence, 0, 1, *pair_of_tokens(subject, 2))
    equal(cache.length(sequence, 0), 4, "length after overwriting 2 tokens in the middle")
    cache.write(sequence, 0, 3, *pair_of_tokens(subject, 2))
    equal(cache.length(sequence, 0), 5, "length after overwriting the last token and adding one")


@check("PAGED-10", "paged")
def there_are_no_holes(subject: Subject) -> None:
    cache, sequence, keys, values = written(subject, 4)
    for start in (5, 6, 30, -1):  # there would be blocks for any of them
        with raises("PositionOutOfRange"):
            cache.write(sequence, 0, start, *pair_of_tokens(subject, 1))
    with raises("PositionOutOfRange"):
        cache.write(sequence, 1, 1, *pair_of_tokens(subject, 1))
    pair(cache.gather(sequence, 0), (keys, values), "tokens after writes past the end were refused")


@check("PAGED-11", "paged")
def overwriting_changes_one_position(subject: Subject) -> None:
    cache, sequence, keys, values = written(subject, 10)
    for position in (0, 2, 3, 9):
        new_keys, new_values = pair_of_tokens(subject, 1)
        cache.write(sequence, 0, position, new_keys, new_values)
        keys[position], values[position] = new_keys[0], new_values[0]
        pair(cache.gather(sequence, 0), (keys, values), f"tokens after overwriting position {position}")


@check("PAGED-12", "paged")
def gathering_gives_every_token_in_order(subject: Subject) -> None:
    cache, streams = new(subject, "paged"), {}
    for sequence in (cache.create(), cache.create()):
        streams[sequence] = pair_of_tokens(subject, 8)
    for at in range(0, 8, 2):  # the sequences' blocks interleave
        for sequence, (keys, values) in streams.items():
            cache.write(sequence, 0, at, keys[at : at + 2], values[at : at + 2])
    for sequence, (keys, values) in streams.items():
        pair(cache.gather(sequence, 0), (keys, values), f"sequence {sequence}")
        order = [7, 0, 3, 3]
        pair(cache.read(sequence, 0, order), (keys[order], values[order]), f"positions {order} of sequence {sequence}")


@check("PAGED-12", "paged")
def gathering_reads_blocks_in_the_tables_order(subject: Subject) -> None:
    cache = new(subject, "paged", num_blocks=8, num_layers=1)
    first = [cache.create() for _ in range(4)]
    for sequence in first:
        cache.ensure_capacity(sequence, 6)
    for sequence in (first[2], first[0]):
        cache.drop(sequence)
    sequence, (keys, values) = cache.create(), pair_of_tokens(subject, 12)
    cache.write(sequence, 0, 0, keys, values)
    pair(cache.gather(sequence, 0), (keys, values), "a sequence in recycled blocks")


@check("PAGED-12", "paged")
def narrow_dtypes_round_once(subject: Subject) -> None:
    for dtype in subject.formats("float16", "bfloat16", "float32"):
        cache, sequence, keys, values = written(subject, 7, dtype=dtype)
        pair(cache.gather(sequence, 0), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("PAGED-13", "paged")
def no_block_is_in_two_tables(subject: Subject) -> None:
    cache, live = new(subject, "paged"), list[int]()
    for step in range(12):
        live.append(cache.create())
        cache.ensure_capacity(live[-1], 1 + step % 5)
        if step % 3 == 2:
            cache.drop(live.pop(0))
            cache.drop(live.pop())
        blocks = [block for s in live for layer in (0, 1) for block in blocks_of(cache, s, layer)]
        equal(len(blocks), len(set(blocks)), "distinct blocks in all tables")
        true(set(blocks) <= set(range(24)), "blocks", "within the pool", blocks)


@check("PAGED-14", "paged")
def any_block_size_works(subject: Subject) -> None:
    for block_size in (1, 2, 3, 5, 7, 16):
        cache, sequence, keys, values = written(subject, 11, block_size=block_size, num_blocks=40)
        more = pair_of_tokens(subject, 6)
        cache.write(sequence, 0, 9, *more)
        want = [np.concatenate([part[:9], new_rows]) for part, new_rows in zip((keys, values), more, strict=True)]
        pair(cache.gather(sequence, 0), (want[0], want[1]), f"15 tokens in blocks of {block_size}")


@check("PAGED-15", "paged")
def utilization_follows_the_pool(subject: Subject) -> None:
    cache = new(subject, "paged", num_blocks=8)
    equal(cache.utilization, 0.0, "utilization of a new cache")
    sequence = cache.create()
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 4))
    equal(cache.utilization, 0.5, "utilization with 4 of 8 blocks in use")
    cache.drop(sequence)
    equal(cache.utilization, 0.0, "utilization after the drop")
    equal(new(subject, "paged", num_blocks=0).utilization, 0.0, "utilization of a cache of no blocks")
