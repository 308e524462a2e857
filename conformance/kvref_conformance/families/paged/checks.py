"""Checks of PAGED: sequences in blocks; and of the laws about blocks, sequences and layers."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered, OperationDeclined
from kvref_conformance.families.paged.fixture import (
    PagedFixture,
    Pair,
    in_use,
    just_room,
    layers_of,
    offered,
    reserve,
    room,
    small_session,
    tables_alone,
    to_be_filled,
    with_room,
    write_or_ensure_capacity,
)
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import block_table_of, new_object, random_pair, random_tokens
from kvref_conformance.testlib.integer_types import Observation, RaisedError, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.law_adapter import unknown_ids
from kvref_conformance.testlib.registry import check


def filled_session(subject: Subject, blocks: int, more: int, entries: int = 4, **sizes: Any) -> tuple[PagedFixture, int, int]:
    """Returns a session, a sequence, and its length in layer 0: `blocks` full blocks and `more` tokens."""
    session = small_session(subject, entries, sequences=1, **sizes)
    sequence, length = session.cache.create(), blocks * session.size + more
    write_or_ensure_capacity(subject, session.cache, sequence, 0, 0, *session.random_tokens(length))
    return session, sequence, length


@check("PAGED-01ab", "paged")
def create_returns_an_id_that_was_never_used(subject: Subject) -> None:
    cache, used, live = with_room(subject, 1), set[int](), 0
    for _ in range(4):
        keep = live < subject.size("sequences", 5) - 1
        ids = [cache.create() for _ in range(1 + keep)]
        assert_true(len({*ids}) == len(ids) and not {*ids} & used, "ids of new sequences", f"distinct ids not in {used}", ids)
        used |= {*ids}
        live += keep
        cache.drop(ids[-1])
        with raises("SequenceNotFound"):
            cache.gather(ids[-1], 0)


@check("PAGED-02a", "paged")
def create_allocates_no_block(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequence = cache.create()
    in_use(subject, cache, {sequence: 0}, "after create")


@check("PAGED-02b", "paged")
def create_returns_an_empty_sequence(subject: Subject) -> None:
    cache = with_room(subject, 1)
    sequence = cache.create()
    assert_equal({cache.length(sequence, layer) for layer in layers_of(cache)}, {0}, "lengths of a new sequence")


@check("PAGED-03", "paged")
def write_allocates_blocks_when_needed(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 3, 4)):
        most = max(13, 2 * size + 1)
        cache = with_room(subject, -(-most // size) + 1, block_size=size)
        sequence = cache.create()
        for count in range(1, most + 1):
            write_or_ensure_capacity(subject, cache, sequence, 0, count - 1, *random_pair(subject, 1))
            in_use(subject, cache, {sequence: -(-count // size)}, f"with {count} tokens and block_size {size}")


@check("PAGED-04ab", "paged")
def ensure_capacity_allocates_only_missing_entries(subject: Subject) -> None:
    session = small_session(subject, 4, sequences=1)
    sequence, size = session.cache.create(), session.size
    for count, entries in ((2 * size + 1, 3), (2 * size + 1, 3), (size - 1, 3), (0, 3), (3 * size, 3), (3 * size + 1, 4)):
        if count or not tables_alone(subject):  # without tokens it need not accept 0
            session.cache.ensure_capacity(sequence, count)
        in_use(subject, session.cache, {sequence: entries}, f"after ensure_capacity({count})")


@check("PAGED-05a", "paged")
def ensure_capacity_without_room_allocates_nothing(subject: Subject) -> None:
    cache = just_room(subject, 3)
    sequence, size, entries = cache.create(), cache.config["block_size"], room(cache)
    cache.ensure_capacity(sequence, (entries - 2) * size)
    with raises("OutOfBlocks"):
        cache.ensure_capacity(sequence, (entries + 1) * size)
    in_use(subject, cache, {sequence: entries - 2}, "after OutOfBlocks")
    cache.ensure_capacity(sequence, entries * size)
    in_use(subject, cache, {sequence: entries}, "after ensure_capacity up to the last block")


@check("PAGED-05b", "paged")
def write_without_room_allocates_nothing(subject: Subject) -> None:
    cache = to_be_filled(subject, 3, one_short=True)
    sequence, entries = cache.create(), room(cache)
    count = entries * cache.config["block_size"]
    cache.write(sequence, 0, 0, *random_pair(subject, count))
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, count, *random_pair(subject, 1))
    in_use(subject, cache, {sequence: entries}, "after OutOfBlocks")


@check("PAGED-05a", "paged")
def ensure_capacity_beyond_any_pool_allocates_nothing(subject: Subject) -> None:
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
def slot_mapping_is_block_times_size_plus_offset(subject: Subject) -> None:
    session, sequence, length = filled_session(subject, 3, 2)
    size, cache = session.size, session.cache
    try:
        table = cache.block_table(sequence, 0)
    except OperationDeclined:  # then the slots themselves show the blocks
        table = [slot // size for slot in cache.slot_mapping(sequence, 0, 0, length)[::size]]
    for start, count in ((0, length), (2, size + 2), (length - 1, 1), (size + 1, 0)):
        want = [table[p // size] * size + p % size for p in range(start, start + count)]
        got = [int(slot) for slot in cache.slot_mapping(sequence, 0, start, count)]
        assert_equal(got, want, f"slots of positions [{start}, {start + count})")
    for start in (length, *subject.integers(-1)):  # after the last block, and before the first
        with raises("PositionOutOfRange"):
            cache.slot_mapping(sequence, 0, start, size)


@check("PAGED-07ab", "paged")
def drop_frees_every_block_of_the_sequence(subject: Subject) -> None:
    session, sequence, _ = filled_session(subject, 3, 1, 6)
    cache, last, count = session.cache, session.layers[-1], session.size + 1
    others = [cache.create() for _ in range(subject.size("sequences", 2) - 1)]
    for other in others:
        write_or_ensure_capacity(subject, cache, other, last, 0, *session.random_tokens(count))
    cache.drop(sequence)
    in_use(subject, cache, dict.fromkeys(others, 2), "after a drop")
    if others and not tables_alone(subject):
        session.look()
    for other in others:
        cache.drop(other)
    in_use(subject, cache, {}, "after the last drop")


@check("PAGED-08", "paged")
def any_operation_on_an_unknown_sequence_raises(subject: Subject) -> None:
    session, num_calls = small_session(subject, 1, sequences=1), 0
    cache, layers = session.cache, len(session.layers)
    sequences = [cache.create() for _ in range(subject.size("sequences", 2))]
    dropped = sequences.pop()
    cache.drop(dropped)
    live = sequences[0] if sequences else cache.create()
    keys, values = session.random_tokens(1)
    cache.write(live, 0, 0, keys, values)
    step = np.stack([keys] * layers)
    query = random_tokens(subject, 1, subject.heads * subject.size("group_size", 1))
    for unknown in (dropped, max(dropped, live) + 1, *unknown_ids(subject, live)):
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
                num_calls += 1
    if not num_calls:
        raise NotOffered("an operation on a sequence")
    session.look()


@check("PAGED-09a", "paged")
def length_counts_the_tokens_of_each_layer(subject: Subject) -> None:
    session, sequence, length = filled_session(subject, 1, 1)
    for count in (length, length + 1):
        want = [count] + [0] * (len(session.layers) - 1)
        lengths = [session.cache.length(sequence, layer) for layer in session.layers]
        assert_equal(lengths, want, f"lengths after {count} tokens in layer 0")
        session.write(sequence, 0, count, 1)


@check("PAGED-09b", "paged")
def ensure_capacity_changes_no_length(subject: Subject) -> None:
    cache = with_room(subject, 3)
    sequence = cache.create()
    cache.ensure_capacity(sequence, 3 * cache.config["block_size"])
    assert_equal(cache.length(sequence, 0), 0, "length after ensure_capacity alone")


@check("PAGED-09ac", "paged")
def write_before_the_end_changes_no_length(subject: Subject) -> None:
    session, sequence, length = filled_session(subject, 1, 3)
    session.write(sequence, 0, 1, 2)
    assert_equal(session.cache.length(sequence, 0), length, "length after overwriting 2 tokens in the middle")
    session.write(sequence, 0, length - 1, 2)
    what = "length after overwriting the last token and appending one"
    assert_equal(session.cache.length(sequence, 0), length + 1, what)


@check("PAGED-10", "paged")
def write_past_the_end_raises(subject: Subject) -> None:
    session, sequence, length = filled_session(subject, 1, 1)
    for start in subject.integers(length + 1, length + 2, 10 * session.size, -1):
        with raises("PositionOutOfRange", *["OutOfBlocks"] * (start > length + 2)):  # a small pool has too few blocks for it
            session.write(sequence, 0, start, 1)
    for layer in session.layers[1:]:
        with raises("PositionOutOfRange"):
            session.write(sequence, layer, 1, 1)
    session.look()


@check("PAGED-11ab", "paged")
def write_before_the_end_changes_no_other_position(subject: Subject) -> None:
    session, sequence, length = filled_session(subject, 3, 1)
    for position in (0, session.size - 1, session.size, length - 1):
        keys, values = (np.array(part) for part in session.cache.gather(sequence, 0))
        key, value = session.random_tokens(1)
        session.cache.write(sequence, 0, position, key, value)
        keys[position], values[position] = key[0], value[0]
        assert_pair(session.cache.gather(sequence, 0), (keys, values), f"tokens after overwriting position {position}")


@check("PAGED-14", "paged")
def write_works_with_any_block_size(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 5, 7, 16)):
        session, sequence, length = filled_session(subject, 1, 10, -(-25 // size) + 2, block_size=size)
        more = session.random_tokens(max(4, size))
        session.cache.write(sequence, 0, length, *more)
        keys, values = session.cache.gather(sequence, 0)
        assert_pair((keys[length:], values[length:]), more, f"tokens from position {length} on in blocks of {size}")
        if offered(partial(session.write, sequence, 0, length - 2, max(6, size))):
            session.look()


@check("PAGED-15a", "paged")
def utilization_is_the_share_of_allocated_blocks(subject: Subject) -> None:
    cache = with_room(subject, 4)
    assert_equal(cache.utilization, 0.0, "utilization of a new cache")
    sequence = cache.create()
    write_or_ensure_capacity(subject, cache, sequence, 0, 0, *random_pair(subject, cache.config["block_size"] + 1))
    used, total = 2 * cache.config["num_layers"], cache.config["num_blocks"]
    got, what = cache.utilization, f"utilization with {used} of {total} blocks allocated"
    assert_true(abs(got - used / total) <= 2.0**-22 * used / total, what, str(used / total), got)
    cache.drop(sequence)
    assert_equal(cache.utilization, 0.0, "utilization after drop")


@check("PAGED-15a", "paged")
def utilization_counts_a_shared_block_once(subject: Subject) -> None:
    subject.require_size(sequences=3)
    session = small_session(subject, 8, sequences=3)
    cache, parent = session.cache, session.create(2 * session.size)
    for _ in range(2):
        cache.fork(parent)
        total, used = cache.config["num_blocks"], len(session.listed())
        got, what = cache.utilization, f"utilization with {used} of {total} blocks in the tables of forks"
        assert_true(abs(got - used / total) <= 2.0**-22 * used / total, what, str(used / total), got)


@check("PAGED-15b", "paged")
def utilization_of_0_blocks_is_0(subject: Subject) -> None:
    if subject.size("num_blocks", 0):
        raise NotOffered(f"a cache of 0 blocks, where its limits say {subject.limits.limit('paged', 'num_blocks')}")
    assert_equal(new_object(subject, subject.family, num_blocks=0).utilization, 0.0, "utilization of a cache of 0 blocks")


@check("ATTN-10", "paged")
def attend_covers_the_values_that_gather_returns(subject: Subject) -> None:
    count, few = subject.size("sequences", 2), subject.size("block_size", 3) + 1
    session = small_session(subject, 4 * count, sequences=1)
    sequences = [session.cache.create() for _ in range(count)]
    for start in (0, few):
        for sequence in sequences:
            session.write(sequence, 0, start, few)
    query, scale, read = random_queries(subject, 2), default_scale(subject), session.cache.gather(sequences[-1], 0)
    want, bound = expected_attention(subject, query, *read, scale=scale)
    assert_within(session.cache.attend(sequences[-1], 0, query, scale), want, bound, "attention over a sequence")


@check("ATTN-10", "paged")
def attend_of_several_queries_covers_every_layer(subject: Subject) -> None:
    entries = -(-20 // subject.size("block_size", 4))
    for heads, group in ((2, 3), (3, 4), (1, 1)):
        count = subject.size("num_layers", 4)
        sizes = {"num_layers": 4, "num_kv_heads": heads}
        session = PagedFixture(subject, lambda sizes=sizes: with_room(subject, entries, **sizes))  # type: ignore[misc]
        sequence = session.create(*(max(1, 20 - layer) for layer in range(count)))
        for layer in session.layers:
            queries = (5, 2, 3, 4)[layer % 4]
            query = random_tokens(subject, queries, session.row[0] * subject.size("group_size", group), session.row[1])
            read, scale = gather_or_read(session.cache, sequence, layer), default_scale(subject)
            want, bound = expected_attention(subject, query, *read, scale=scale)
            what = f"attention of {queries} queries with {query.shape[1]} heads in layer {layer}"
            assert_within(session.cache.attend(sequence, layer, query, scale), want, bound, what)


# Checks of PAGED: appending to and reading from several sequences at once.


def write_or_append(session: PagedFixture, sequence: int, layer: int, length: int, count: int) -> None:
    """Writes tokens at the end of a sequence, or appends them one at a time if there is no write operation."""
    try:
        session.write(sequence, layer, length, count)
    except OperationDeclined:
        for _ in range(count):
            session.cache.append([sequence], layer, *session.random_tokens(1))


def three_sequences(subject: Subject, **sizes: Any) -> tuple[PagedFixture, list[int]]:
    """Returns a cache with sequences of 3, 0 and 5 tokens per layer, or the last of these if the limits allow fewer."""
    session = small_session(subject, 6 + 40 // subject.size("block_size", 3), sequences=1, **sizes)
    lengths = (3, 0, 5)[-subject.size("sequences", 3) :]
    sequences = [session.cache.create() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        for layer in session.layers:
            write_or_append(session, sequence, layer, 0, length)
    return session, sequences


def batches(sequences: list[int], *orders: tuple[int, ...]) -> list[list[int]]:
    """Returns batches of sequences, given by their indices, without those of which a sequence does not exist."""
    return [[sequences[i] for i in order] for order in orders if max(order, default=0) < len(sequences)]


def step_of_tokens(session: PagedFixture, count: int) -> Pair:
    """Returns keys and values [num_layers, count, num_kv_heads, head_dim]."""
    rows = [session.random_tokens(count) for _ in session.layers]
    keys, values = (np.stack(part) for part in zip(*rows, strict=True))
    return keys, values


@check("PAGED-16a", "paged")
def append_writes_at_the_end_of_each_sequence(subject: Subject) -> None:
    session, sequences = three_sequences(subject)
    for batch in batches(sequences, (2, 0, 1), (1, 2), (0,), ()):
        session.cache.append(batch, 0, *session.random_tokens(len(batch)))
        session.look()


@check("PAGED-16a", "paged")
def append_gives_a_repeated_sequence_several_tokens(subject: Subject) -> None:
    session, sequences = three_sequences(subject)
    for batch in batches(sequences, (0, 1, 0), (0, 0)):
        session.cache.append(batch, 0, *session.random_tokens(len(batch)))
        session.look()


@check("PAGED-16a", "paged")
def append_writes_to_no_other_sequence(subject: Subject) -> None:
    subject.require_size(sequences=2)
    session, (dropped, *others) = three_sequences(subject)
    cache, layer = session.cache, session.layers[-1]
    cache.drop(dropped)
    last, (keys, values) = cache.create(), session.random_tokens(2)
    cache.append([last, others[-1]], layer, keys, values)
    assert_pair(cache.gather(last, layer), (keys[:1], values[:1]), "a sequence created after another was dropped")
    assert_pair(cache.read(others[-1], layer, [5]), (keys[1:], values[1:]), "the last token of another sequence of the batch")
    session.look()


@check("PAGED-16b", "paged")
def append_step_writes_in_every_layer(subject: Subject) -> None:
    session, sequences = three_sequences(subject)
    write_or_append(session, sequences[-1], 0, 5, 1)  # layer 0 has more tokens than the other layers
    batch = sequences[::-1][:2]
    keys, values = step_of_tokens(session, len(batch))
    session.cache.append_step(batch, keys, values)
    for layer in session.layers:
        for row, sequence in enumerate(batch):
            got = [part[-1] for part in session.cache.gather(sequence, layer)]
            assert_pair(got, (keys[layer, row], values[layer, row]), f"the last token of sequence {row} in layer {layer}")
    session.look()


@check("PAGED-16a", "paged")
def append_allocates_blocks_for_every_sequence_of_the_batch(subject: Subject) -> None:
    count, size = subject.size("sequences", 5), subject.size("block_size", 1)
    session = small_session(subject, 2 * count + 2, sequences=1, block_size=1)
    sequences = [session.cache.create() for _ in range(count)]
    for _ in range(size + 1):
        session.cache.append(sequences, 0, *session.random_tokens(count))
    session.look()
    in_use(subject, session.cache, dict.fromkeys(sequences, 2), f"after {size + 1} tokens per sequence")


@check("PAGED-16b", "paged")
def append_step_allocates_blocks_for_every_sequence_of_the_batch(subject: Subject) -> None:
    count = subject.size("sequences", 5)
    session = small_session(subject, count + 1, sequences=1, block_size=1)
    sequences = [session.cache.create() for _ in range(count)]
    session.append_step(sequences)
    session.look()
    in_use(subject, session.cache, dict.fromkeys(sequences, 1), "after a step")


def append_without_room(subject: Subject, append: Callable[[PagedFixture, list[int]], object]) -> None:
    """Raises ClauseViolation unless batches that lack a block, or have an unknown sequence, raise and change nothing."""
    session = PagedFixture(subject, lambda: to_be_filled(subject, 4, block_size=2))
    size, first, entries = session.size, session.cache.create(), room(session.cache)
    lengths, kinds, second = {first: entries * size - 1}, ["SequenceNotFound"], first
    if subject.size("sequences", 2) > 1:
        second = session.cache.create()
        lengths = {first: (entries - 1) * size, second: 1}
        kinds += ["OutOfBlocks"] if size == 1 else []  # then the pool has no block for the other token either
    for sequence, count in lengths.items():
        write_or_append(session, sequence, 0, 0, count)
    before = session.blocks()
    for batch, errors in (([second, first], ["OutOfBlocks"]), ([second, max(lengths) + 77], kinds)):
        with raises(*errors):
            append(session, batch)
        session.look()
        assert_equal(session.blocks(), before, f"blocks after a batch without room raised {errors[0]}")


@check("PAGED-16c", "paged")
def append_without_room_changes_nothing(subject: Subject) -> None:
    append_without_room(subject, lambda session, batch: session.cache.append(batch, 0, *session.random_tokens(len(batch))))


@check("PAGED-16c", "paged")
def append_step_without_room_changes_nothing(subject: Subject) -> None:
    append_without_room(subject, lambda session, batch: session.append_step(batch))


@check("PAGED-17a", "paged")
def gather_batch_concatenates_the_sequences(subject: Subject) -> None:
    session, sequences = three_sequences(subject)
    layer = session.layers[-1]
    for batch in batches(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        _, _, offsets = session.cache.gather_batch(batch, layer)
        lengths = [session.length(sequence, layer) for sequence in batch]
        assert_equal([int(each) for each in offsets], [sum(lengths[:i]) for i in range(len(batch) + 1)], f"offsets of {batch}")


@check("PAGED-17b", "paged")
def lengths_returns_the_length_of_each_sequence(subject: Subject) -> None:
    session, sequences = three_sequences(subject)
    known = dict(zip(sequences, (3, 0, 5)[-len(sequences) :], strict=True))
    for batch in batches(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        got = [int(each) for each in session.cache.lengths(batch, session.layers[-1])]
        assert_equal(got, [known[sequence] for sequence in batch], f"lengths of {batch}")


@check("PAGED-17c", "paged")
def block_tables_pads_short_tables_with_minus_one(subject: Subject) -> None:
    session, sequences = three_sequences(subject, block_size=2)
    for layer in session.layers:
        tables = {sequence: block_table_of(session.cache, sequence, layer) for sequence in sequences}
        for batch in batches(sequences, (0, 1, 2), (2, 0), (1,), (0, 0), ()):
            got = np.asarray(session.cache.block_tables(batch, layer))
            most = max((len(tables[sequence]) for sequence in batch), default=0)
            assert_true(got.shape == (len(batch), most), f"shape of block_tables of {batch}", str((len(batch), most)), got.shape)
            padded = [tables[sequence] + [-1] * (most - len(tables[sequence])) for sequence in batch]
            assert_equal(got.tolist(), padded, f"block_tables of {batch}")


# Checks of PAGED: which sequence owns a block, and which tokens are read from it.


def interleaved_sequences(subject: Subject) -> tuple[ObjectProxy, dict[int, Pair]]:
    """Returns a cache with sequences whose blocks interleave, and the tokens of each in layer 0."""
    cache, size = with_room(subject, 4 * subject.size("sequences", 2)), subject.size("block_size", 3)
    count = 2 * size + 2
    tokens = {cache.create(): random_pair(subject, count) for _ in range(subject.size("sequences", 2))}
    for start in range(0, count, max(2, size // 2)):
        for sequence, parts in tokens.items():
            cache.write(sequence, 0, start, *(part[start : start + max(2, size // 2)] for part in parts))
    return cache, tokens


def gather_or_read(cache: ObjectProxy, sequence: int, layer: int = 0) -> Pair:
    """Returns every token of a layer, by `gather` or, if it is missing, by `read`."""
    try:
        found: Pair = cache.gather(sequence, layer)
    except OperationDeclined:
        found = cache.read(sequence, layer, list(range(cache.length(sequence, layer))))
    return found


@check("PAGED-12a", "paged")
def gather_returns_every_token_in_order(subject: Subject) -> None:
    cache, tokens = interleaved_sequences(subject)
    for sequence, wrote in tokens.items():
        assert_pair(cache.gather(sequence, 0), wrote, f"sequence {sequence}")


@check("PAGED-12b", "paged")
def read_returns_the_tokens_at_the_positions(subject: Subject) -> None:
    cache, tokens = interleaved_sequences(subject)
    for sequence, (keys, values) in tokens.items():
        last = len(keys) - 1
        for order in ([last, 0, last // 2, last // 2], list(range(last + 1))):
            got = cache.read(sequence, 0, order)
            assert_pair(got, (keys[order], values[order]), f"positions {order} of sequence {sequence}")


@check("PAGED-12ab", "paged")
def gather_reads_blocks_in_the_order_of_the_table(subject: Subject) -> None:
    subject.require_size(sequences=4)
    for dropped in ((2, 0), (0, 2)):  # the order in which blocks return to the pool
        cache = to_be_filled(subject, 8, num_layers=1)
        sequences = [cache.create() for _ in range(4)]
        for sequence, entries in zip(sequences, (2, 2, 2, room(cache) - 6), strict=True):
            reserve(subject, cache, sequence, entries)
        for number in dropped:
            cache.drop(sequences[number])
        sequence, wrote = cache.create(), random_pair(subject, 4 * cache.config["block_size"])
        cache.write(sequence, 0, 0, *wrote)
        assert_pair(gather_or_read(cache, sequence), wrote, "a sequence in reused blocks")


@check("PAGED-12c", "paged")
def write_rounds_once_to_a_narrow_dtype(subject: Subject) -> None:
    for dtype in subject.formats("float16", "bfloat16", "float32"):
        cache = with_room(subject, 4, dtype=dtype)
        sequence, (keys, values) = cache.create(), random_pair(subject, 2 * cache.config["block_size"] + 1)
        cache.write(sequence, 0, 0, keys, values)
        rounded = round_to(keys, dtype), round_to(values, dtype)
        assert_pair(gather_or_read(cache, sequence), rounded, f"tokens of a {dtype} cache")


@check("PAGED-13abc", "paged")
def block_table_lists_no_block_of_another_table(subject: Subject) -> None:
    cache, live, most = with_room(subject, 2 * subject.size("sequences", 6)), list[int](), subject.size("sequences", 6)
    for step in range(12):
        if len(live) == most:
            cache.drop(live.pop(0))
        live.append(cache.create())
        reserve(subject, cache, live[-1], 1 + step % 5 // 3)
        if step % 3 == 2 and len(live) > 1:
            cache.drop(live.pop(0))
            cache.drop(live.pop())
        tables = [[block_table_of(cache, sequence, layer) for layer in layers_of(cache)] for sequence in live]
        blocks = [block for each in tables for table in each for block in table]
        what = "number of distinct blocks in all tables, compared with the number of entries"
        assert_equal(len(blocks), len(set(blocks)), what)
        assert_true(set(blocks) <= set(range(cache.config["num_blocks"])), "block ids", "ids below num_blocks", blocks)
        if subject.limits.switch(subject.family, "one_block_table"):  # id b is block b * num_layers + layer
            for each in tables:
                own = [[block // len(each) for block in table] for table in each]
                assert_equal(own, own[:1] * len(own), "the block table, read from each layer")


@check("PAGED-13a", "paged")
def write_in_a_full_pool_changes_no_other_sequence(subject: Subject) -> None:
    session, count = PagedFixture(subject, lambda: to_be_filled(subject, 6)), subject.size("sequences", 3)
    cache, entries = session.cache, room(session.cache)
    shares = [entries // count] * (count - 1) + [entries - entries // count * (count - 1)]
    live = {cache.create(): share for share in shares}
    write_in_turns(session, live)
    with suppress(NotOffered):
        in_use(subject, cache, live, "in a full pool")
    session.look()
    dropped = next(iter(live))
    cache.drop(dropped)
    write_in_turns(session, {cache.create(): live[dropped]})
    session.look()


def write_in_turns(session: PagedFixture, entries: dict[int, int]) -> None:
    """Fills empty sequences with entries[sequence] blocks of tokens per layer, one block at a time."""
    for entry in range(max(entries.values())):
        for sequence, count in entries.items():
            if entry < count:
                session.write_in_each_layer(sequence, entry * session.size, session.size)


# Checks of LAW-01, LAW-02, LAW-03, LAW-05 and LAW-20 for this family.


@check("LAW-01", "paged")
def write_without_room_changes_nothing(subject: Subject) -> None:
    session = PagedFixture(subject, lambda: to_be_filled(subject, 2, one_short=True))
    sequence, entries, size = session.cache.create(), room(session.cache), session.size
    length = 0
    for free, count in ((2, 2 * size + 1), (0, 1)):  # free entries, and tokens that need one more
        session.write(sequence, 0, length, (entries - free) * size - length)
        length = (entries - free) * size
        session.look()
        with raises("OutOfBlocks"):
            session.write(sequence, 0, length, count)
        in_use(subject, session.cache, {sequence: entries - free}, "after a write that raised OutOfBlocks")
        assert_equal(session.cache.length(sequence, 0), length, "length after a write that raised OutOfBlocks")
        session.look()


@check("LAW-20", "paged")
def sequences_layers_and_positions_may_be_of_every_integer_type(subject: Subject) -> None:
    keys, values = random_pair(subject, 130)
    size = subject.size("block_size", 16)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache: ObjectProxy = typed.new(subject.family, num_blocks=max(100, 300 // size + 4), block_size=16)
        sequence, layer, looked = cache.create(), layers_of(cache)[-1], 0

        def slots() -> Any:
            found = typed.call(cache, "slot_mapping", sequence, layer, 100, 30)
            return found if isinstance(found, RaisedError) else [slot % size for slot in found]

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

    assert_same_for_integer_types(subject, script)


@check("LAW-03ab", "paged")
def any_operation_leaves_each_block_free_or_in_one_table(subject: Subject) -> None:
    cache, lengths, most = with_room(subject, 1), dict[int, int](), subject.size("sequences", 60)
    size = cache.config["block_size"]
    for _ in range(60):
        if lengths and subject.rng.random() < 0.3:
            sequence = int(subject.rng.choice(list(lengths)))
            cache.drop(sequence)
            del lengths[sequence]
        else:
            sequences = [*lengths, cache.create()] if len(lengths) < most else [*lengths]
            lengths.setdefault(sequences[-1], 0)
            sequence = int(subject.rng.choice(sequences))
            start, count = lengths[sequence], int(subject.rng.integers(0, 2 * size))
            free = room(cache) - sum(-(-length // size) for length in lengths.values())
            if -(-(start + count) // size) - -(-start // size) <= free:
                write_or_ensure_capacity(subject, cache, sequence, 0, start, *random_pair(subject, count))
                lengths[sequence] += count
        in_use(subject, cache, {sequence: -(-length // size) for sequence, length in lengths.items()}, "of the live sequences")
        try:
            listed = Counter(
                b for sequence in lengths for layer in layers_of(cache) for b in block_table_of(cache, sequence, layer)
            )
        except NotOffered:
            continue  # only the number of free blocks is observable
        assert_equal(max(listed.values(), default=1), 1, "the largest number of tables that list one block")


@check("LAW-05ab", "paged")
def read_of_a_position_that_was_never_written_raises(subject: Subject) -> None:
    session = small_session(subject, 3, sequences=1)
    cache, size = session.cache, session.size
    dropped = cache.create()
    session.write(dropped, 0, 0, 3 * size)
    cache.drop(dropped)
    sequence = cache.create()
    with suppress(NotOffered):
        cache.ensure_capacity(sequence, 3 * size)
    session.write(sequence, 0, 0, size + 1)
    for position in (size + 1, size + 2, 3 * size - 1):
        with raises("PositionOutOfRange"):
            cache.read(sequence, 0, [position])
    for layer in session.layers[1:]:
        with raises("PositionOutOfRange"):
            cache.read(sequence, layer, [0])
    session.look()


@check("LAW-05c", "paged")
def drop_of_non_finite_tokens_has_no_effect_on_later_attention(subject: Subject) -> None:
    session = PagedFixture(subject, lambda: to_be_filled(subject, 4))
    cache, count, scale = session.cache, room(session.cache) * session.size, default_scale(subject)
    filler = cache.create()
    with may_raise("NonFinite"):
        for layer in session.layers:
            cache.write(filler, layer, 0, *(np.full_like(part, np.nan) for part in session.random_tokens(count)))
    cache.drop(filler)
    sequence = session.create(session.size + 1)
    for layer, queries in product(session.layers, (1, 3)):
        query = random_queries(subject, queries)
        want, bound = expected_attention(subject, query, *gather_or_read(cache, sequence, layer), scale=scale)
        what = f"attention of {queries} queries in layer {layer}, in blocks that contained NaN"
        assert_within(cache.attend(sequence, layer, query, scale), want, bound, what)


@check("LAW-02a", "paged")
def write_to_one_sequence_and_layer_changes_no_other(subject: Subject) -> None:
    count = subject.size("sequences", 2)
    session = small_session(subject, count * -(-7 // subject.size("block_size", 3)), sequences=1)
    sequences = [session.cache.create() for _ in range(count)]
    places = [(sequence, layer) for sequence in sequences for layer in session.layers]
    if len(places) == 1:
        raise NotOffered("two sequences or two layers, where its limits say 1")
    for position in range(7):
        for sequence, layer in places:
            session.write(sequence, layer, position, 1)
    session.look()


@check("LAW-02a", "paged")
def write_before_the_end_of_one_sequence_changes_no_other(subject: Subject) -> None:
    session = small_session(subject, 2 * -(-7 // subject.size("block_size", 3)))
    sequence, other = session.create(7), session.create(7)
    before = session.cache.gather(other, 0)
    session.write(sequence, 0, 2, 1)
    assert_pair(session.cache.gather(other, 0), before, "the other sequence")
    session.look()
