"""Checks of PAGED: sequences in blocks."""

from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import (
    in_use,
    just_room,
    layers_of,
    reserve,
    room,
    stay,
    tables_alone,
    to_be_filled,
    with_room,
    write_or_ensure_capacity,
)
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.outcome import Declined, NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    queries,
    raises,
    true,
)
from kvref_conformance.testlib.fixtures import blocks_of, new, pair_of_tokens, random_tokens
from kvref_conformance.testlib.registry import check

Pair = tuple[NDArray, NDArray]


def written(
    subject: Subject, blocks: int, more: int, entries: int = 4, **sizes: Any
) -> tuple[ObjectProxy, int, NDArray, NDArray]:
    """Returns a cache, a sequence, and its tokens in layer 0: they fill `blocks` blocks, with `more` further tokens."""
    cache = with_room(subject, entries, **sizes)
    keys, values = pair_of_tokens(subject, blocks * cache.config["block_size"] + more)
    sequence = cache.create()
    write_or_ensure_capacity(subject, cache, sequence, 0, 0, keys, values)
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
    assert_equal({cache.length(sequence, layer) for layer in layers_of(cache)}, {0}, "lengths of a new sequence")


@check("PAGED-03", "paged")
def blocks_come_when_needed(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 3, 4)):
        most = max(13, 2 * size + 1)
        cache = with_room(subject, -(-most // size) + 1, block_size=size)
        sequence = cache.create()
        for count in range(1, most + 1):
            write_or_ensure_capacity(subject, cache, sequence, 0, count - 1, *pair_of_tokens(subject, 1))
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
        assert_equal(got, want, f"slots of positions [{start}, {start + count})")
    for start in (length, *subject.integers(-1)):  # after the last block, and before the first
        with raises("PositionOutOfRange"):
            cache.slot_mapping(sequence, 0, start, size)


@check("PAGED-07ab", "paged")
def dropping_gives_back_every_block(subject: Subject) -> None:
    cache, sequence, _, _ = written(subject, 3, 1, 6)
    others = [cache.create() for _ in range(subject.size("sequences", 2) - 1)]
    last, rows = layers_of(cache)[-1], pair_of_tokens(subject, cache.config["block_size"] + 1)
    for other in others:
        write_or_ensure_capacity(subject, cache, other, last, 0, *rows)
    cache.drop(sequence)
    in_use(subject, cache, dict.fromkeys(others, 2), "after a drop")
    for other in others:
        if not tables_alone(subject):
            assert_pair(cache.gather(other, last), rows, "the remaining sequence")
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
    step, query = (
        np.stack([keys] * len(layers_of(cache))),
        random_tokens(subject, 1, subject.heads * subject.size("group_size", 1)),
    )
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
    assert_pair(cache.gather(known, 0), (keys, values), "the live sequence")


@check("PAGED-09a", "paged")
def length_counts_what_was_written(subject: Subject) -> None:
    cache, sequence, keys, _ = written(subject, 1, 1)
    for count in (len(keys), len(keys) + 1):
        want = [count] + [0] * (len(layers_of(cache)) - 1)
        assert_equal(
            [cache.length(sequence, layer) for layer in layers_of(cache)], want, f"lengths after {count} tokens in layer 0"
        )
        cache.write(sequence, 0, count, *pair_of_tokens(subject, 1))


@check("PAGED-09b", "paged")
def capacity_is_no_length(subject: Subject) -> None:
    cache = with_room(subject, 3)
    sequence = cache.create()
    cache.ensure_capacity(sequence, 3 * cache.config["block_size"])
    assert_equal(cache.length(sequence, 0), 0, "length after ensure_capacity alone")


@check("PAGED-09ac", "paged")
def overwriting_changes_no_length(subject: Subject) -> None:
    cache, sequence, keys, _ = written(subject, 1, 3)
    length = len(keys)
    cache.write(sequence, 0, 1, *pair_of_tokens(subject, 2))
    assert_equal(cache.length(sequence, 0), length, "length after overwriting 2 tokens in the middle")
    cache.write(sequence, 0, length - 1, *pair_of_tokens(subject, 2))
    assert_equal(cache.length(sequence, 0), length + 1, "length after overwriting the last token and appending one")


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
    assert_pair(cache.gather(sequence, 0), (keys, values), "tokens after rejected writes past the end")


@check("PAGED-11ab", "paged")
def overwriting_changes_one_position(subject: Subject) -> None:
    cache, sequence, keys, values = written(subject, 3, 1)
    size = cache.config["block_size"]
    for position in (0, size - 1, size, 3 * size):
        new_keys, new_values = pair_of_tokens(subject, 1)
        cache.write(sequence, 0, position, new_keys, new_values)
        keys[position], values[position] = new_keys[0], new_values[0]
        assert_pair(cache.gather(sequence, 0), (keys, values), f"tokens after overwriting position {position}")


@check("PAGED-14", "paged")
def any_block_size_works(subject: Subject) -> None:
    for size in block_sizes(subject):
        cache, sequence, keys, values = written(subject, 1, 10, -(-25 // size) + 2, block_size=size)
        more = pair_of_tokens(subject, max(4, size))
        cache.write(sequence, 0, len(keys), *more)
        want = joined((keys, values), more)
        assert_pair(cache.gather(sequence, 0), want, f"{len(want[0])} tokens in blocks of {size}")


@check("PAGED-14", "paged")
def tokens_are_overwritten_in_blocks_of_any_size(subject: Subject) -> None:
    for size in block_sizes(subject):
        cache, sequence, keys, values = written(subject, 1, 10, -(-25 // size) + 2, block_size=size)
        start, more = len(keys) - 2, pair_of_tokens(subject, max(6, size))
        cache.write(sequence, 0, start, *more)
        want = joined((keys[:start], values[:start]), more)
        assert_pair(cache.gather(sequence, 0), want, f"{len(want[0])} tokens in blocks of {size}")


def block_sizes(subject: Subject) -> list[int]:
    return list(dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 5, 7, 16)))


@check("PAGED-15a", "paged")
def utilization_follows_the_pool(subject: Subject) -> None:
    cache = with_room(subject, 4)
    assert_equal(cache.utilization, 0.0, "utilization of a new cache")
    sequence = cache.create()
    write_or_ensure_capacity(subject, cache, sequence, 0, 0, *pair_of_tokens(subject, cache.config["block_size"] + 1))
    used, total = 2 * cache.config["num_layers"], cache.config["num_blocks"]
    got, what = cache.utilization, f"utilization with {used} of {total} blocks allocated"
    true(abs(got - used / total) <= 2.0**-22 * used / total, what, str(used / total), got)
    cache.drop(sequence)
    assert_equal(cache.utilization, 0.0, "utilization after drop")


@check("PAGED-15b", "paged")
def utilization_of_no_blocks_is_0(subject: Subject) -> None:
    if subject.size("num_blocks", 0):
        raise NotOffered(f"a cache of 0 blocks, where its limits say {subject.limits.of('paged', 'num_blocks')}")
    assert_equal(new(subject, subject.family, num_blocks=0).utilization, 0.0, "utilization of a cache of 0 blocks")


# Checks of ATTN-10: attention over the values that the cache reads as.


@check("ATTN-10", "paged")
def attention_over_pages_is_over_what_they_read_as(subject: Subject) -> None:
    count, few = subject.size("sequences", 2), subject.size("block_size", 3) + 1
    cache = with_room(subject, 4 * count)
    sequences = [cache.create() for _ in range(count)]
    for at in (0, few):
        for sequence in sequences:
            cache.write(sequence, 0, at, *pair_of_tokens(subject, few))
    query = queries(subject, 2)
    want, bound = expected_attention(subject, query, *cache.gather(sequence, 0), scale=default_scale(subject))
    assert_within(cache.attend(sequence, 0, query, default_scale(subject)), want, bound, "attention over a sequence")


# Checks of PAGED: appending to and reading from several sequences at once.


def write_or_append(cache: ObjectProxy, sequence: int, layer: int, length: int, keys: NDArray, values: NDArray) -> None:
    """Writes tokens at the end of a sequence, or appends them one at a time if there is no write operation."""
    try:
        cache.write(sequence, layer, length, keys, values)
    except Declined:
        for row in range(len(keys)):
            cache.append([sequence], layer, keys[row : row + 1], values[row : row + 1])


def several(subject: Subject, **config: Any) -> tuple[ObjectProxy, list[int], list[Pair]]:
    """Returns a cache with sequences of 3, 0 and 5 tokens per layer (fewer if its limits say so), and the tokens of each."""
    cache = with_room(subject, 6 + 40 // subject.size("block_size", 3), **config)
    tokens = [pair_of_tokens(subject, count) for count in (3, 0, 5)[-subject.size("sequences", 3) :]]
    sequences = [cache.create() for _ in tokens]
    for sequence, (keys, values) in zip(sequences, tokens, strict=True):
        for layer in layers_of(cache):
            write_or_append(cache, sequence, layer, 0, keys, values)
    return cache, sequences, tokens


def orders(sequences: list[int], *wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the wanted batches whose sequences all exist."""
    return [order for order in wanted if max(order, default=0) < len(sequences)]


def step_of(subject: Subject, cache: ObjectProxy, count: int) -> Pair:
    """Returns keys and values [num_layers, count, num_kv_heads, head_dim]."""
    keys, values = (np.stack(each) for each in zip(*(pair_of_tokens(subject, count) for _ in layers_of(cache)), strict=True))
    return keys, values


@check("PAGED-16a", "paged")
def a_batch_is_appended_one_by_one(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    before = [len(keys) for keys, _ in tokens]
    for order in orders(sequences, (2, 0, 1), (1, 2), (0,), (), (0, 1, 0), (0, 0)):
        keys, values = pair_of_tokens(subject, len(order))
        cache.append([sequences[i] for i in order], 0, keys, values)
        for row, i in enumerate(order):
            tokens[i] = joined(tokens[i], (keys[row : row + 1], values[row : row + 1]))
        for i, sequence in enumerate(sequences):
            assert_pair(cache.gather(sequence, 0), tokens[i], f"sequence {i} after an append to {order}")
            for layer in layers_of(cache)[1:]:
                assert_equal(cache.length(sequence, layer), before[i], f"length of layer {layer}, to which nothing was appended")


@check("PAGED-16a", "paged")
def a_batch_goes_to_the_sequences_it_names(subject: Subject) -> None:
    subject.need(sequences=2)
    cache, (gone, *others), (_, *tokens) = several(subject)
    layer = layers_of(cache)[-1]
    cache.drop(gone)
    last = cache.create()
    keys, values = pair_of_tokens(subject, 2)
    cache.append([last, others[-1]], layer, keys, values)
    assert_pair(cache.gather(last, layer), (keys[:1], values[:1]), "a sequence created after another was dropped")
    assert_pair(cache.gather(others[-1], layer), joined(tokens[-1], (keys[1:], values[1:])), "another sequence of the batch")
    for other in others[:-1]:
        assert_equal(cache.length(other, layer), 0, "length of a sequence that is not in the batch")


@check("PAGED-16b", "paged")
def a_step_is_appended_in_every_layer(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    more = pair_of_tokens(subject, 1)
    write_or_append(cache, sequences[-1], 0, 5, *more)  # layer 0 has more tokens than the other layers
    named = list(range(len(sequences)))[::-1][:2]
    keys, values = step_of(subject, cache, len(named))
    cache.append_step([sequences[i] for i in named], keys, values)
    for layer in layers_of(cache):
        before = [*tokens[:-1], joined(tokens[-1], more) if layer == 0 else tokens[-1]]
        for row, i in enumerate(named):
            want = joined(before[i], (keys[layer, row : row + 1], values[layer, row : row + 1]))
            assert_pair(cache.gather(sequences[i], layer), want, f"layer {layer} of sequence {i}")
    for sequence, wrote in zip(sequences[:-2], tokens[:-2], strict=True):
        assert_pair(cache.gather(sequence, 0), wrote, "a sequence that is not in the batch")


@check("PAGED-16a", "paged")
def every_sequence_of_a_batch_may_take_blocks_at_once(subject: Subject) -> None:
    count, size = subject.size("sequences", 5), subject.size("block_size", 1)
    cache = with_room(subject, 2 * count + 2, block_size=1)
    sequences = [cache.create() for _ in range(count)]
    wrote = list[tuple[Pair, ...]]()  # per append, the tokens of each sequence
    for _ in range(size + 1):
        keys, values = pair_of_tokens(subject, count)
        cache.append(sequences, 0, keys, values)
        wrote.append(tuple((keys[row : row + 1], values[row : row + 1]) for row in range(count)))
    for row, (sequence, tokens) in enumerate(zip(sequences, zip(*wrote, strict=True), strict=True)):
        assert_pair(cache.gather(sequence, 0), joined(*tokens), f"sequence {row} of {count}")
    in_use(subject, cache, dict.fromkeys(sequences, 2), f"after {len(wrote)} tokens per sequence")


@check("PAGED-16b", "paged")
def every_sequence_of_a_step_may_take_blocks_at_once(subject: Subject) -> None:
    count = subject.size("sequences", 5)
    cache = with_room(subject, count + 1, block_size=1)
    sequences, (keys, values) = [cache.create() for _ in range(count)], step_of(subject, cache, count)
    cache.append_step(sequences, keys, values)
    for row, sequence in enumerate(sequences):
        for layer in layers_of(cache):
            want = keys[layer, row : row + 1], values[layer, row : row + 1]
            assert_pair(cache.gather(sequence, layer), want, f"layer {layer} of sequence {row} of {count}")
    in_use(subject, cache, dict.fromkeys(sequences, 1), "after a step")


def full(subject: Subject) -> tuple[ObjectProxy, dict[int, int], list[tuple[list[int], list[str]]]]:
    """Returns a full cache, the length of each sequence in layer 0, and (invalid batch, kinds of its error)."""
    cache = to_be_filled(subject, 4, block_size=2)
    size, first = cache.config["block_size"], cache.create()
    lengths, unknown, named = {first: room(cache) * size - 1}, ["SequenceNotFound"], first
    if subject.size("sequences", 2) > 1:
        named = cache.create()
        lengths = {first: (room(cache) - 1) * size, named: 1}
        unknown += ["OutOfBlocks"] if size == 1 else []  # then the pool has no block for the other token either
    for sequence, count in lengths.items():
        write_or_append(cache, sequence, 0, 0, *pair_of_tokens(subject, count))
    return cache, lengths, [([named, first], ["OutOfBlocks"]), ([named, max(lengths) + 77], unknown)]


def nothing_written(subject: Subject, cache: ObjectProxy, lengths: dict[int, int], when: str) -> None:
    assert_equal({sequence: cache.length(sequence, 0) for sequence in lengths}, lengths, f"lengths {when}")
    size = cache.config["block_size"]
    in_use(subject, cache, {sequence: -(-length // size) for sequence, length in lengths.items()}, when)


@check("PAGED-16c", "paged")
def a_batch_that_does_not_fit_writes_nothing(subject: Subject) -> None:
    cache, lengths, batches = full(subject)
    for batch, kinds in batches:
        with raises(*kinds):
            cache.append(batch, 0, *pair_of_tokens(subject, len(batch)))
        nothing_written(subject, cache, lengths, f"after a batch without room raised {kinds[0]}")


@check("PAGED-16c", "paged")
def a_step_that_does_not_fit_writes_nothing(subject: Subject) -> None:
    cache, lengths, batches = full(subject)
    for batch, kinds in batches:
        with raises(*kinds):
            cache.append_step(batch, *step_of(subject, cache, len(batch)))
        nothing_written(subject, cache, lengths, f"after a batch without room raised {kinds[0]}")


@check("PAGED-17a", "paged")
def a_batch_is_gathered_with_its_offsets(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    layer, none = layers_of(cache)[-1], (tokens[0][0][:0], tokens[0][1][:0])
    for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        keys, values, offsets = cache.gather_batch([sequences[i] for i in order], layer)
        lengths = [len(tokens[i][0]) for i in order]
        assert_equal([int(each) for each in offsets], [sum(lengths[:i]) for i in range(len(order) + 1)], f"offsets of {order}")
        assert_pair((keys, values), joined(none, *(tokens[i] for i in order)), f"sequences {order}")


@check("PAGED-17b", "paged")
def lengths_of_a_batch_are_those_of_its_sequences(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        lengths = [len(tokens[i][0]) for i in order]
        assert_equal(list(cache.lengths([sequences[i] for i in order], layers_of(cache)[-1])), lengths, f"lengths of {order}")


@check("PAGED-17c", "paged")
def tables_of_a_batch_are_filled_up_with_minus_one(subject: Subject) -> None:
    cache, sequences, _ = several(subject, block_size=2)
    for layer in layers_of(cache):
        tables = [blocks_of(cache, sequence, layer) for sequence in sequences]
        for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0, 0)):
            got = np.asarray(cache.block_tables([sequences[i] for i in order], layer))
            most = max(len(tables[i]) for i in order)
            true(got.shape == (len(order), most), f"shape of block_tables of {order}", str((len(order), most)), got.shape)
            assert_equal(got.tolist(), [tables[i] + [-1] * (most - len(tables[i])) for i in order], f"block_tables of {order}")


# Checks of PAGED: which sequence owns a block, and which tokens are read from it.


def in_turn(subject: Subject) -> tuple[ObjectProxy, dict[int, Pair]]:
    """Returns a cache with sequences whose blocks interleave, and the tokens of each in layer 0."""
    cache, size = with_room(subject, 4 * subject.size("sequences", 2)), subject.size("block_size", 3)
    count = 2 * size + 2
    streams = {cache.create(): pair_of_tokens(subject, count) for _ in range(subject.size("sequences", 2))}
    for at in range(0, count, max(2, size // 2)):
        for sequence, parts in streams.items():
            cache.write(sequence, 0, at, *(part[at : at + max(2, size // 2)] for part in parts))
    return cache, streams


def all_of(cache: ObjectProxy, sequence: int) -> Pair:
    """Returns every token of layer 0, by `gather` or, if it is missing, by `read`."""
    try:
        found: Pair = cache.gather(sequence, 0)
    except Declined:
        found = cache.read(sequence, 0, list(range(cache.length(sequence, 0))))
    return found


@check("PAGED-12a", "paged")
def gathering_gives_every_token_in_order(subject: Subject) -> None:
    cache, streams = in_turn(subject)
    for sequence, wrote in streams.items():
        assert_pair(cache.gather(sequence, 0), wrote, f"sequence {sequence}")


@check("PAGED-12b", "paged")
def reading_gives_the_tokens_asked_for(subject: Subject) -> None:
    cache, streams = in_turn(subject)
    for sequence, (keys, values) in streams.items():
        last = len(keys) - 1
        for order in ([last, 0, last // 2, last // 2], list(range(last + 1))):
            got = cache.read(sequence, 0, order)
            assert_pair(got, (keys[order], values[order]), f"positions {order} of sequence {sequence}")


@check("PAGED-12ab", "paged")
def gathering_reads_blocks_in_the_tables_order(subject: Subject) -> None:
    subject.need(sequences=4)
    for dropped in ((2, 0), (0, 2)):  # the order in which blocks return to the pool
        cache = to_be_filled(subject, 8, num_layers=1)
        first = [cache.create() for _ in range(4)]
        for sequence, entries in zip(first, (2, 2, 2, room(cache) - 6), strict=True):
            reserve(subject, cache, sequence, entries)
        for each in dropped:
            cache.drop(first[each])
        sequence, wrote = cache.create(), pair_of_tokens(subject, 4 * cache.config["block_size"])
        cache.write(sequence, 0, 0, *wrote)
        assert_pair(all_of(cache, sequence), wrote, "a sequence in reused blocks")


@check("PAGED-12c", "paged")
def narrow_dtypes_round_once(subject: Subject) -> None:
    for dtype in subject.formats("float16", "bfloat16", "float32"):
        cache, sequence, keys, values = written(subject, 2, 1, dtype=dtype)
        assert_pair(all_of(cache, sequence), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("PAGED-13abc", "paged")
def no_block_is_in_two_tables(subject: Subject) -> None:
    cache, live, most = with_room(subject, 2 * subject.size("sequences", 6)), list[int](), subject.size("sequences", 6)
    for step in range(12):
        if len(live) == most:
            cache.drop(live.pop(0))
        live.append(cache.create())
        reserve(subject, cache, live[-1], 1 + step % 5 // 3)
        if step % 3 == 2 and len(live) > 1:
            cache.drop(live.pop(0))
            cache.drop(live.pop())
        tables = [[blocks_of(cache, sequence, layer) for layer in layers_of(cache)] for sequence in live]
        blocks = [block for each in tables for table in each for block in table]
        assert_equal(
            len(blocks), len(set(blocks)), "number of distinct blocks in all tables, compared with the number of entries"
        )
        true(set(blocks) <= set(range(cache.config["num_blocks"])), "block ids", "ids below num_blocks", blocks)
        if subject.limits.switch(subject.family, "one_block_table"):  # id b is block b * num_layers + layer
            for each in tables:
                own = [[block // len(each) for block in table] for table in each]
                assert_equal(own, own[:1] * len(own), "the block table, read from each layer")


@check("PAGED-13a", "paged")
def everyones_tokens_stay_in_a_full_pool(subject: Subject) -> None:
    cache, size, most = to_be_filled(subject, 6), subject.size("block_size", 3), subject.size("sequences", 3)
    share = room(cache) // most
    live = {cache.create(): share for _ in range(most - 1)} | {cache.create(): room(cache) - share * (most - 1)}
    wrote = fill(subject, cache, live)
    with suppress(NotOffered):
        in_use(subject, cache, live, "in a full pool")
    look(cache, wrote, "in a full pool")
    dropped = next(iter(live))
    cache.drop(dropped)
    wrote = {place: parts for place, parts in wrote.items() if place[0] != dropped}
    wrote |= fill(subject, cache, {cache.create(): live[dropped]})
    look(cache, wrote, f"after another sequence reused blocks of {size} tokens")


Place = tuple[int, int]  # (sequence, layer)


def fill(subject: Subject, cache: ObjectProxy, entries: dict[int, int]) -> dict[Place, Pair]:
    """Fills empty sequences with entries[sequence] blocks of tokens in turns, and returns the tokens that were written."""
    size, wrote = cache.config["block_size"], dict[Place, Pair]()
    places = [(sequence, layer) for sequence in entries for layer in layers_of(cache)]
    tokens = {place: pair_of_tokens(subject, entries[place[0]] * size) for place in places}
    for start in range(0, max(entries.values()) * size, size):
        for (sequence, layer), (keys, values) in tokens.items():
            end = start + size
            if start < len(keys):
                with may_raise("OutOfBlocks"):  # if blocks are lost, which other clauses judge
                    cache.write(sequence, layer, start, keys[start:end], values[start:end])
                    wrote[sequence, layer] = keys[:end], values[:end]
    return wrote


def look(cache: ObjectProxy, wrote: dict[Place, Pair], when: str) -> None:
    for (sequence, layer), parts in wrote.items():
        assert_pair(cache.gather(sequence, layer), parts, f"sequence {sequence}, layer {layer}, {when}")
