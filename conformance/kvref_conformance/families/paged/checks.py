"""Checks of PAGED: sequences in blocks."""

from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new, pair_of_tokens, tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import (
    in_use,
    just_room,
    layers_of,
    put,
    room,
    stay,
    tables_alone,
    to_be_filled,
    with_room,
)
from kvref_conformance.outcome import Declined, NotOffered

Pair = tuple[NDArray, NDArray]


def written(subject: Subject, blocks: int, more: int, entries: int = 4, **sizes: Any) -> tuple[Handle, int, NDArray, NDArray]:
    """Returns a cache, a sequence, and its tokens in layer 0: they fill `blocks` blocks, with `more` further tokens."""
    cache = with_room(subject, entries, **sizes)
    keys, values = pair_of_tokens(subject, blocks * cache.config["block_size"] + more)
    sequence = cache.create()
    put(subject, cache, sequence, 0, 0, keys, values)
    return cache, sequence, keys, values


def joined(*pairs: Pair) -> Pair:
    keys, values = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return keys, values


@check("PAGED-01ab", "paged")
def ids_are_never_used_again(subject: Subject) -> None:
    cache, seen, kept = with_room(subject, 1), set[int](), 0
    for _ in range(4):
        keep = kept < subject.size("sequences", 5) - 1
        made = [cache.create() for _ in range(1 + keep)]
        true(len({*made}) == len(made) and not {*made} & seen, "ids of new sequences", f"distinct ids not in {seen}", made)
        seen |= {*made}
        kept += keep
        cache.drop(made[-1])
        with raises("SequenceNotFound"):
            cache.gather(made[-1], 0)


@check("PAGED-02a", "paged")
def a_new_sequence_holds_no_block(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequence = cache.create()
    in_use(subject, cache, {sequence: 0}, "after create")


@check("PAGED-02b", "paged")
def a_new_sequence_holds_no_token(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequence = cache.create()
    equal({cache.length(sequence, layer) for layer in layers_of(cache)}, {0}, "lengths of a new sequence")


@check("PAGED-03", "paged")
def blocks_come_when_needed(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 3, 4)):
        most = max(13, 2 * size + 1)
        cache = with_room(subject, -(-most // size) + 1, block_size=size)
        sequence = cache.create()
        for count in range(1, most + 1):
            put(subject, cache, sequence, 0, count - 1, *pair_of_tokens(subject, 1))
            in_use(subject, cache, {sequence: -(-count // size)}, f"with {count} tokens and block_size {size}")


@check("PAGED-04ab", "paged")
def capacity_is_ensured_once(subject: Subject) -> None:
    cache = with_room(subject, 4)
    sequence, size = cache.create(), cache.config["block_size"]
    tables = list[list[int]]()
    for count, entries in ((2 * size + 1, 3), (2 * size + 1, 3), (size - 1, 3), (0, 3), (3 * size, 3), (3 * size + 1, 4)):
        if count or not tables_alone(subject):  # without tokens it need not accept 0
            cache.ensure_capacity(sequence, count)
        in_use(subject, cache, {sequence: entries}, f"after ensure_capacity({count})")
        if tables_alone(subject):
            tables = stay(subject, cache, sequence, tables, 0, f"after ensure_capacity({count})")


@check("PAGED-05a", "paged")
def a_request_that_does_not_fit_takes_nothing(subject: Subject) -> None:
    cache = just_room(subject, 3)
    sequence, size, entries = cache.create(), cache.config["block_size"], room(cache)
    cache.ensure_capacity(sequence, (entries - 2) * size)
    with raises("OutOfBlocks"):
        cache.ensure_capacity(sequence, (entries + 1) * size)
    in_use(subject, cache, {sequence: entries - 2}, "after OutOfBlocks")
    cache.ensure_capacity(sequence, entries * size)
    in_use(subject, cache, {sequence: entries}, "after ensure_capacity up to the last block")


@check("PAGED-05b", "paged")
def a_write_that_does_not_fit_takes_nothing(subject: Subject) -> None:
    cache = to_be_filled(subject, 3, one_short=True)
    sequence, entries = cache.create(), room(cache)
    count = entries * cache.config["block_size"]
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, count))
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, count, *pair_of_tokens(subject, 1))
    in_use(subject, cache, {sequence: entries}, "after OutOfBlocks")


@check("PAGED-05a", "paged")
def a_request_that_fits_no_pool_takes_nothing(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequence = cache.create()
    for count in (2**31, 2**53 - 1):
        with raises("OutOfBlocks"):
            cache.ensure_capacity(sequence, count)
    for count in () if subject.by_value else (2**63 - 1, 2**64 - 1):  # JSON and some languages lack these
        with raises("Exception"):
            cache.ensure_capacity(sequence, count)
    in_use(subject, cache, {sequence: 0}, "after requests for more tokens than any pool has room for")


@check("PAGED-06ab", "paged")
def a_slot_is_block_times_size_plus_offset(subject: Subject) -> None:
    cache, sequence, keys, _ = written(subject, 3, 2)
    size, length = cache.config["block_size"], len(keys)
    try:
        table = cache.block_table(sequence, 0)
    except Declined:  # then the slots themselves show the blocks
        table = [slot // size for slot in cache.slot_mapping(sequence, 0, 0, length)[::size]]
    for start, count in ((0, length), (2, size + 2), (length - 1, 1), (size + 1, 0)):
        want = [table[p // size] * size + p % size for p in range(start, start + count)]
        got = [int(slot) for slot in cache.slot_mapping(sequence, 0, start, count)]
        equal(got, want, f"slots of positions [{start}, {start + count})")
    for start in (length, *subject.integers(-1)):  # after the last block, and before the first
        with raises("PositionOutOfRange"):
            cache.slot_mapping(sequence, 0, start, size)


@check("PAGED-07ab", "paged")
def dropping_gives_back_every_block(subject: Subject) -> None:
    cache, sequence, _, _ = written(subject, 3, 1, 6)
    others = [cache.create() for _ in range(subject.size("sequences", 2) - 1)]
    last, rows = layers_of(cache)[-1], pair_of_tokens(subject, cache.config["block_size"] + 1)
    for other in others:
        put(subject, cache, other, last, 0, *rows)
    cache.drop(sequence)
    in_use(subject, cache, dict.fromkeys(others, 2), "after a drop")
    for other in others:
        if not tables_alone(subject):
            pair(cache.gather(other, last), rows, "the remaining sequence")
        cache.drop(other)
    in_use(subject, cache, {}, "after the last drop")


@check("PAGED-08", "paged")
def an_unknown_sequence_raises(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequences = [cache.create() for _ in range(subject.size("sequences", 2))]
    dropped = sequences.pop()
    cache.drop(dropped)
    known = sequences[0] if sequences else cache.create()
    (keys, values), made = pair_of_tokens(subject, 1), 0
    cache.write(known, 0, 0, keys, values)
    step, query = np.stack([keys] * len(layers_of(cache))), tokens(subject, 1, subject.heads * subject.size("group_size", 1))
    for unknown in subject.integers(dropped, max(dropped, known) + 1, -1):
        for method, *arguments in (
            ("drop", unknown), ("fork", unknown), ("truncate", unknown, 0), ("remove", unknown, 0, 0),
            ("ensure_capacity", unknown, 1), ("write", unknown, 0, 0, keys, values), ("read", unknown, 0, [0]),
            ("gather", unknown, 0), ("length", unknown, 0), ("block_table", unknown, 0), ("slot_mapping", unknown, 0, 0, 1),
            ("append", [unknown], 0, keys, values), ("append_step", [unknown], step, step), ("attend", unknown, 0, query, 1.0),
            ("gather_batch", [unknown], 0), ("lengths", [unknown], 0), ("block_tables", [unknown], 0),
        ):  # fmt: skip
            with suppress(NotOffered):
                with raises("SequenceNotFound"):
                    getattr(cache, str(method))(*arguments)
                made += 1
    if not made:
        raise NotOffered("an operation on a sequence")
    pair(cache.gather(known, 0), (keys, values), "the live sequence")


@check("PAGED-09a", "paged")
def length_counts_what_was_written(subject: Subject) -> None:
    cache, sequence, keys, _ = written(subject, 1, 1)
    for count in (len(keys), len(keys) + 1):
        want = [count] + [0] * (len(layers_of(cache)) - 1)
        equal([cache.length(sequence, layer) for layer in layers_of(cache)], want, f"lengths after {count} tokens in layer 0")
        cache.write(sequence, 0, count, *pair_of_tokens(subject, 1))


@check("PAGED-09b", "paged")
def capacity_is_no_length(subject: Subject) -> None:
    cache = with_room(subject, 3)
    sequence = cache.create()
    cache.ensure_capacity(sequence, 3 * cache.config["block_size"])
    equal(cache.length(sequence, 0), 0, "length after ensure_capacity alone")


@check("PAGED-09ac", "paged")
def overwriting_changes_no_length(subject: Subject) -> None:
    cache, sequence, keys, _ = written(subject, 1, 3)
    length = len(keys)
    cache.write(sequence, 0, 1, *pair_of_tokens(subject, 2))
    equal(cache.length(sequence, 0), length, "length after overwriting 2 tokens in the middle")
    cache.write(sequence, 0, length - 1, *pair_of_tokens(subject, 2))
    equal(cache.length(sequence, 0), length + 1, "length after overwriting the last token and appending one")


@check("PAGED-10", "paged")
def there_are_no_holes(subject: Subject) -> None:
    cache, sequence, keys, values = written(subject, 1, 1)
    length = len(keys)
    for start in subject.integers(length + 1, length + 2, 10 * cache.config["block_size"], -1):
        with raises("PositionOutOfRange", *["OutOfBlocks"] * (start > length + 2)):  # a small pool has too few blocks for it
            cache.write(sequence, 0, start, *pair_of_tokens(subject, 1))
    for layer in layers_of(cache)[1:]:
        with raises("PositionOutOfRange"):
            cache.write(sequence, layer, 1, *pair_of_tokens(subject, 1))
    pair(cache.gather(sequence, 0), (keys, values), "tokens after rejected writes past the end")


@check("PAGED-11ab", "paged")
def overwriting_changes_one_position(subject: Subject) -> None:
    cache, sequence, keys, values = written(subject, 3, 1)
    size = cache.config["block_size"]
    for position in (0, size - 1, size, 3 * size):
        new_keys, new_values = pair_of_tokens(subject, 1)
        cache.write(sequence, 0, position, new_keys, new_values)
        keys[position], values[position] = new_keys[0], new_values[0]
        pair(cache.gather(sequence, 0), (keys, values), f"tokens after overwriting position {position}")


@check("PAGED-14", "paged")
def any_block_size_works(subject: Subject) -> None:
    for size in block_sizes(subject):
        cache, sequence, keys, values = written(subject, 1, 10, -(-25 // size) + 2, block_size=size)
        more = pair_of_tokens(subject, max(4, size))
        cache.write(sequence, 0, len(keys), *more)
        want = joined((keys, values), more)
        pair(cache.gather(sequence, 0), want, f"{len(want[0])} tokens in blocks of {size}")


@check("PAGED-14", "paged")
def tokens_are_overwritten_in_blocks_of_any_size(subject: Subject) -> None:
    for size in block_sizes(subject):
        cache, sequence, keys, values = written(subject, 1, 10, -(-25 // size) + 2, block_size=size)
        start, more = len(keys) - 2, pair_of_tokens(subject, max(6, size))
        cache.write(sequence, 0, start, *more)
        want = joined((keys[:start], values[:start]), more)
        pair(cache.gather(sequence, 0), want, f"{len(want[0])} tokens in blocks of {size}")


def block_sizes(subject: Subject) -> list[int]:
    return list(dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 5, 7, 16)))


@check("PAGED-15a", "paged")
def utilization_follows_the_pool(subject: Subject) -> None:
    cache = with_room(subject, 4)
    equal(cache.utilization, 0.0, "utilization of a new cache")
    sequence = cache.create()
    put(subject, cache, sequence, 0, 0, *pair_of_tokens(subject, cache.config["block_size"] + 1))
    used, total = 2 * cache.config["num_layers"], cache.config["num_blocks"]
    got, what = cache.utilization, f"utilization with {used} of {total} blocks allocated"
    true(abs(got - used / total) <= 2.0**-22 * used / total, what, str(used / total), got)
    cache.drop(sequence)
    equal(cache.utilization, 0.0, "utilization after drop")


@check("PAGED-15b", "paged")
def utilization_of_no_blocks_is_0(subject: Subject) -> None:
    if subject.size("num_blocks", 0):
        raise NotOffered(f"a cache of 0 blocks, where its limits say {subject.limits.of('paged', 'num_blocks')}")
    equal(new(subject, subject.family, num_blocks=0).utilization, 0.0, "utilization of a cache of 0 blocks")
