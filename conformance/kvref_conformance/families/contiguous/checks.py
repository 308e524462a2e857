"""Checks of CONTIG: one growing buffer for a batch of sequences, and of EDIT, LAW-18 and LAW-20 for this family."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import require_writable
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.contiguous.law_adapter import ContiguousLawAdapter
from kvref_conformance.families.contiguous.model import Contiguous
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import CODED_DTYPES
from kvref_conformance.oracle.formats.small_floats import decoded, encode, round_to
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_same, assert_shape, raises
from kvref_conformance.testlib.fixtures import (
    clamp_to_limits,
    new_object,
    random_pair,
    random_tokens,
    require_sizes,
    supported_formats,
    to_batch_major,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair

Pair = tuple[NDArray, NDArray]
DTYPES = ("float32", "float16", "bfloat16")


def decode_buffer(buffer: NDArray, dtype: str) -> NDArray:
    """Returns the numbers in a raw buffer of this dtype. If an array library lacks the dtype, the buffer contains its codes."""
    return decoded(dtype)[buffer] if _contains_codes(buffer, dtype) else buffer


def encode_for_buffer(rows: NDArray, buffer: NDArray, dtype: str) -> NDArray:
    """Returns `rows` as they are written into a raw buffer of this dtype."""
    return encode(rows, dtype).astype(buffer.dtype) if _contains_codes(buffer, dtype) else rows


def _contains_codes(buffer: NDArray, dtype: str) -> bool:
    return dtype in CODED_DTYPES and buffer.dtype.kind in "iu"


def random_rows(subject: Subject, batch: int, count: int) -> Pair:
    """Returns random keys and values [batch, heads, count, dim]."""
    keys, values = (np.concatenate([to_batch_major(random_tokens(subject, count)) for _ in range(batch)]) for _ in range(2))
    return keys, values


def concatenate_tokens(*pairs: Pair) -> Pair:
    keys, values = (np.concatenate(parts, axis=2) for parts in zip(*pairs, strict=True))
    return keys, values


class ContiguousFixture(Session):
    """A cache to which random tokens are appended."""

    model: Contiguous

    def __init__(self, subject: Subject, count: int | None = None, **changes: Any) -> None:
        """count: the number of tokens to append. Raises NotOffered if the limits leave less room."""
        super().__init__(subject, **changes)
        if count is not None:
            require_sizes(self.cache, max_seq_len=count)
            self.append(count)

    def random(self, count: int) -> Pair:
        return random_rows(self.subject, self.model.sizes[0], count)

    def append(self, count: int) -> Pair:
        """Appends `count` random tokens, and returns them."""
        tokens = self.random(count)
        self.cache.append(*tokens)
        return tokens


def growing_caches(subject: Subject, *sizes: tuple[int, int]) -> list[ContiguousFixture]:
    """Returns new caches with (initial_capacity, max_seq_len) near each of `sizes`, as far as the limits allow them to grow.

    Raises NotOffered if there is none.
    """
    sessions = [ContiguousFixture(subject, initial_capacity=initial, max_seq_len=most) for initial, most in sizes]
    if growing := [session for session in sessions if session.model.room < session.model.most]:
        return growing
    raise NotOffered("a cache that grows, where its limits allow only initial capacities of the full size")


def cache_with_room(subject: Subject, capacity: int, **changes: Any) -> tuple[ContiguousFixture, int]:
    """Returns a cache with a token and an initial capacity near `capacity`, and how many more tokens fit before it grows."""
    session = ContiguousFixture(subject, 1, initial_capacity=capacity, **changes)
    while (room := session.model.room - len(session.model.tokens)) < 1:
        if session.model.room == session.model.most:
            raise NotOffered("room for two tokens")
        session.append(1)
    return session, room


@check("CONTIG-01a", "contiguous")
def new_returns_an_empty_cache(subject: Subject) -> None:
    assert_equal(new_object(subject, "contiguous").seq_len, 0, "length of a new cache")


@check("CONTIG-01b", "contiguous")
def new_allocates_the_initial_capacity(subject: Subject) -> None:
    for wanted, limit in ((3, 20), (0, 20), (50, 20)):
        cache = new_object(subject, "contiguous", initial_capacity=wanted, max_seq_len=limit)
        assert_equal(
            cache.capacity, min(cache.config["initial_capacity"], cache.config["max_seq_len"]), "capacity of a new cache"
        )


@check("CONTIG-02", "contiguous")
def read_returns_tokens_in_order(subject: Subject) -> None:
    subject.require_size(max_seq_len=12)
    session = ContiguousFixture(subject)
    tokens = session.random(0)
    for count in (1, 4, 1, 1, 5):
        tokens = concatenate_tokens(tokens, session.append(count))
        assert_equal(session.cache.seq_len, tokens[0].shape[2], "length")
        assert_pair(session.cache.read(), tokens, "all tokens")


@check("CONTIG-03", "contiguous")
def read_of_a_new_cache_returns_no_tokens(subject: Subject) -> None:
    for batch in (1, 2):
        session = ContiguousFixture(subject, batch_size=batch)
        assert_pair(session.cache.read(), session.random(0), "a new cache")


@check("CONTIG-03", "contiguous")
def read_after_an_append_of_no_tokens_returns_none(subject: Subject) -> None:
    session = ContiguousFixture(subject, 0)
    assert_pair(session.cache.read(), session.random(0), "a cache after an append of 0 tokens")


@check("CONTIG-04", "contiguous")
def capacity_doubles_until_the_tokens_fit(subject: Subject) -> None:
    """Appends one token more than fit, more than twice as many, and up to the maximum, which no doubling reaches."""
    for at_once in (False, True):
        for session in growing_caches(subject, (0, 20), (3, 20), (2, 100), (5, 7)):
            capacity, most, length = session.model.room, session.model.most, 0
            first = max(1, capacity)
            for total in (8 * first + 1, most - 1) if at_once else (first, first + 1, 2 * first + 1, 6 * first, most - 1):
                if length < total < most:
                    session.append(total - length)
                    length = total
                    while capacity < total:
                        capacity = min(max(1, 2 * capacity), most)
                    assert_equal(session.cache.capacity, capacity, f"capacity at {total} tokens")


@check("CONTIG-05", "contiguous")
def growth_keeps_every_bit(subject: Subject) -> None:
    for session in growing_caches(subject, (0, 20), (1, 20), (3, 20)):
        most, step = session.model.most, max(2, session.model.room // 2)  # so that it grows more than once
        tokens = session.random(0)
        for start in range(0, min(9 * step, most), step):
            tokens = concatenate_tokens(tokens, session.append(min(step, most - start)))
            assert_pair(session.cache.read(), tokens, "all tokens")


@check("CONTIG-06ab", "contiguous")
def append_to_a_full_cache_raises(subject: Subject) -> None:
    session = ContiguousFixture(subject)
    tokens = session.append(session.model.most)
    assert_equal(session.cache.seq_len, session.model.most, "length of a cache filled to max_seq_len")
    with raises("CapacityExceeded"):
        session.append(1)
    session.look("seq_len")
    assert_pair(session.cache.read(), tokens, "a full cache after a rejected append")


@check("CONTIG-06b", "contiguous")
def append_of_too_many_tokens_changes_nothing(subject: Subject) -> None:
    session = ContiguousFixture(subject, 2)
    before = session.cache.read()
    with raises("CapacityExceeded"):
        session.append(session.model.most - 1)
    session.look("seq_len", "capacity", "read")
    assert_pair(session.cache.read(), before, "2 tokens after a rejected append")


@check("CONTIG-07b", "contiguous")
def raw_returns_the_tokens(subject: Subject) -> None:
    subject.require_size(max_seq_len=4)
    for dtype in supported_formats(subject, "dtype", *DTYPES):
        session = ContiguousFixture(subject, dtype=dtype)
        tokens = session.append(4)
        for buffer, want in zip(session.cache.as_is("raw"), tokens, strict=True):
            used = assert_shape(subject.numpy(buffer)[:, :, :4], want.shape, "the used part of the raw buffer")
            assert_same(decode_buffer(used, dtype), round_to(want, dtype), f"the first 4 tokens of the raw {dtype} buffer")


@check("CONTIG-07a", "contiguous")
def raw_returns_buffers_of_the_capacity(subject: Subject) -> None:
    session = ContiguousFixture(subject, 4)
    batch, heads, dim = session.model.sizes
    for buffer in session.cache.raw():
        assert_shape(buffer, (batch, heads, session.cache.capacity, dim), "the raw buffer")


@check("CONTIG-08", "contiguous")
def raw_buffers_remain_the_same_memory(subject: Subject) -> None:
    """Appends up to the capacity, resets and appends again."""
    subject.require_same_process()
    session, room = cache_with_room(subject, 8)
    cache, dtype = session.cache, session.cache.config["dtype"]
    buffer = cache.as_is("raw")[0]
    require_writable(buffer, "raw buffers that can be written to")
    for count in (room // 3, room // 3, room - 2 * (room // 3)):
        if count:
            session.append(count)
    keys = cache.read()[0]
    found = decode_buffer(subject.numpy(buffer), dtype)
    assert_same(found[:, :, : keys.shape[2]], keys, "raw keys that were returned before three appends")
    cache.reset()
    keys, _ = session.append(count)
    found = decode_buffer(subject.numpy(buffer), dtype)
    assert_same(found[:, :, :count], keys, "raw keys that were returned before reset and append")


@check("CONTIG-09", "contiguous")
def append_fused_equals_append(subject: Subject) -> None:
    subject.require_size(max_seq_len=8)
    session = ContiguousFixture(subject)
    tokens = session.random(0)
    for count in (2, 1, 5):
        fused = session.random(count)
        session.cache.append_fused(np.stack(fused))
        session.look("seq_len", "capacity", "raw")
        tokens = concatenate_tokens(tokens, fused)
        assert_pair(session.cache.read(), tokens, "tokens after a fused append")


@check("CONTIG-10a", "contiguous")
def advance_makes_tokens_readable(subject: Subject) -> None:
    """Writes tokens into the raw buffers several times, each time after `truncate`, and to a length that was read before."""
    subject.require_same_process()
    for dtype in supported_formats(subject, "dtype", *DTYPES):
        session, room = cache_with_room(subject, 5, dtype=dtype)
        cache, before = session.cache, session.cache.read()
        length = before[0].shape[2]
        for count in (room, room, 1, room):
            tokens = session.random(count)
            for buffer, rows in zip(cache.as_is("raw"), tokens, strict=True):
                require_writable(buffer, "raw buffers that can be written to")
                own = subject.to_own_array(encode_for_buffer(rows, subject.numpy(buffer), dtype))
                buffer[:, :, length : length + count, :] = own.array
            cache.advance(count)
            assert_equal(cache.seq_len, length + count, f"length after advance({count}) at {length}")
            keys, values = (round_to(part, dtype) for part in tokens)
            assert_pair(cache.read(), concatenate_tokens(before, (keys, values)), f"tokens after advance({count})")
            try:
                cache.truncate(length)
            except NotOffered:
                break


@check("CONTIG-10b", "contiguous")
def advance_past_the_capacity_raises(subject: Subject) -> None:
    session = ContiguousFixture(subject, 2)  # capacity 3 and max_seq_len 20, if the limits allow it
    with raises("CapacityExceeded"):
        session.cache.advance(session.cache.capacity - 1)
    session.look()
    assert_equal(session.cache.seq_len, 2, "length after a rejected advance")


@check("CONTIG-10c", "contiguous")
def advance_by_a_negative_number_raises(subject: Subject) -> None:
    session = ContiguousFixture(subject, 2)
    with raises("PositionOutOfRange"):
        session.cache.advance(-1)
    session.look()
    assert_equal(session.cache.seq_len, 2, "length after a rejected advance")


@check("CONTIG-11a", "contiguous")
def reset_keeps_the_capacity(subject: Subject) -> None:
    cache = ContiguousFixture(subject, 7).cache
    capacity = cache.capacity
    cache.reset()
    assert_equal(cache.capacity, capacity, "capacity after reset")


@check("CONTIG-11b", "contiguous")
def reset_removes_all_tokens(subject: Subject) -> None:
    session = ContiguousFixture(subject, 7)
    session.cache.reset()
    assert_equal(session.cache.seq_len, 0, "length after reset")
    assert_pair(session.cache.read(), session.random(0), "a cache after reset")
    session.append(2)
    session.look()


@check("CONTIG-12", "contiguous")
def append_rounds_to_the_dtype(subject: Subject) -> None:
    subject.require_size(max_seq_len=5)
    for dtype in supported_formats(subject, "dtype", *DTYPES):
        session = ContiguousFixture(subject, dtype=dtype)
        keys, values = session.append(5)
        assert_pair(session.cache.read(), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("CONTIG-13", "contiguous")
def append_keeps_sequences_of_a_batch_separate(subject: Subject) -> None:
    subject.require_size(batch_size=2, max_seq_len=7)
    session = ContiguousFixture(subject, batch_size=3)
    tokens, more = session.append(4), session.random(3)
    more[0][1], more[1][1] = 0, 0  # the second sequence's tokens are zero
    session.cache.append(*more)
    assert_pair(session.cache.read(), concatenate_tokens(tokens, more), "tokens of all sequences")


# Checks of EDIT for the contiguous cache: `truncate` and `reorder`.


def rows(subject: Subject, cache: ObjectProxy, count: int) -> Pair:
    return random_rows(subject, cache.config["batch_size"], count)


def filled(subject: Subject, count: int, **config: Any) -> tuple[ObjectProxy, NDArray, NDArray]:
    cache = new_object(subject, "contiguous", **config)
    require_sizes(cache, max_seq_len=count)
    keys, values = rows(subject, cache, count)
    cache.append(keys, values)
    return cache, keys, values


def leading(given: Pair, length: int, dtype: str) -> Pair:
    """Returns what the first `length` of these tokens read as."""
    keys, values = (round_to(part[:, :, :length], dtype) for part in given)
    return keys, values


def holds(cache: ObjectProxy, given: Pair, length: int, when: str) -> None:
    """Raises ClauseViolation unless the cache contains exactly the first `length` of these tokens."""
    assert_equal(cache.seq_len, length, f"length {when}")
    assert_pair(cache.read(), leading(given, length, cache.config["dtype"]), f"tokens {when}")


@check("EDIT-01d", "contiguous")
def truncate_keeps_the_capacity_and_the_raw_buffer(subject: Subject) -> None:
    cache, keys, _ = filled(subject, 7)
    capacity = cache.capacity
    cache.truncate(2)
    assert_equal(cache.capacity, capacity, "capacity after truncate(2)")
    assert_same(
        decode_buffer(cache.raw()[0][:, :, :2], cache.config["dtype"]), keys[:, :, :2], "the first 2 tokens of the raw buffer"
    )
    cache.truncate(0)
    assert_equal(cache.capacity, capacity, "capacity after truncate(0)")


@check("EDIT-01d", "contiguous")
def truncate_keeps_the_memory_of_raw_buffers(subject: Subject) -> None:
    subject.require_same_process()
    cache, _, _ = filled(subject, 7)
    before = cache.as_is("raw")[0]
    require_writable(before, "raw buffers that can be written to")
    cache.truncate(2)
    more = rows(subject, cache, 1)
    cache.append(*more)
    seen = decode_buffer(subject.numpy(before), cache.config["dtype"])
    assert_same(seen[:, :, 2:3], more[0], "the key at position 2 of the buffer that raw returned before truncate and append")


@check("EDIT-03", "contiguous")
def truncate_makes_room_up_to_max_seq_len(subject: Subject) -> None:
    cache = new_object(subject, "contiguous")
    require_sizes(cache, max_seq_len=2)
    most = cache.config["max_seq_len"]
    cache.append(*rows(subject, cache, most))
    cache.truncate(1)
    kept = cache.read()
    given = rows(subject, cache, most - 1)
    cache.append(*given)
    holds(
        cache,
        concatenate_tokens((kept[0], kept[1]), given),
        most,
        "of a full cache after truncate(1) and appends up to max_seq_len",
    )
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, cache, 1))


def batch_of_tokens(subject: Subject, count: int | None = 4, **changes: Any) -> ContiguousFixture:
    """Returns a cache with several sequences of different tokens."""
    subject.require_size(batch_size=2)
    return ContiguousFixture(subject, count, batch_size=3, **changes)


def orders(batch: int) -> list[list[int]]:
    """Returns arguments of `reorder` that keep the batch size: rotate, swap, one row everywhere, leave one out, none."""
    every = list(range(batch))
    return [
        every[1:] + every[:1],
        [*every[:-2], every[-1], every[-2]],
        [batch - 1] * batch,
        [every[-1], *every[:-1]][:batch],
        every,
    ]


@check("EDIT-07a", "contiguous")
def reorder_moves_every_token_of_a_row(subject: Subject) -> None:
    """In one dtype every list of rows that keeps the batch size."""
    tried = False
    for dtype in supported_formats(subject, "dtype", *DTYPES):
        session = batch_of_tokens(subject, dtype=dtype)
        batch = session.model.sizes[0]
        every = [] if tried or batch > 3 else [list(order) for order in product(range(batch), repeat=batch)]
        tried = True
        for order in [*orders(batch), *every]:
            if len({*order}) < batch:
                session = batch_of_tokens(subject, dtype=dtype)  # of different sequences again
            keys, values = session.cache.read()
            session.cache.reorder(order)
            session.look("seq_len")
            assert_pair(session.cache.read(), (keys[order], values[order]), f"tokens of a {dtype} cache after reorder({order})")


@check("EDIT-07a", "contiguous")
def reorder_of_an_empty_batch_is_followed_by_appends(subject: Subject) -> None:
    subject.require_size(max_seq_len=2)
    session = batch_of_tokens(subject, None)
    session.cache.reorder(orders(session.model.sizes[0])[0])
    session.append(2)
    session.look()


@check("EDIT-07ab", "contiguous")
def reorder_changes_the_batch_size(subject: Subject) -> None:
    subject.require_size(max_seq_len=8)
    batch, sizes = subject.size("batch_size", 3), subject.limits.limit("contiguous", "batch_size")
    wanted = [each for each in ([batch - 1], [0] * 2, [0, *range(batch)], [batch - 1, 0]) if sizes.allows(len(each))]
    if not wanted:
        raise NotOffered(f"reorder to another batch size than {batch}")
    for order in wanted:
        session = batch_of_tokens(subject)
        session.cache.reorder(order)
        session.look()
        session.append(4)
        session.look()


@check("EDIT-07c", "contiguous")
def reorder_keeps_the_raw_buffers(subject: Subject) -> None:
    subject.require_same_process()
    cache = batch_of_tokens(subject).cache
    buffers = cache.as_is("raw")
    for buffer in buffers:
        require_writable(buffer, "raw buffers that can be written to")
    cache.reorder(orders(cache.config["batch_size"])[0])
    for buffer, want in zip(buffers, cache.read(), strict=True):
        found = decode_buffer(subject.numpy(buffer), cache.config["dtype"])[:, :, :4]
        assert_same(found, want, "a raw buffer that was returned before reorder")


@check("EDIT-07d", "contiguous")
def reorder_keeps_the_capacity(subject: Subject) -> None:
    cache = batch_of_tokens(subject).cache
    capacity, order = cache.capacity, orders(cache.config["batch_size"])[0]
    for rows_left in (order, order[:-1]):
        if subject.limits.limit("contiguous", "batch_size").allows(len(rows_left)):
            cache.reorder(rows_left)
            assert_equal(cache.capacity, capacity, f"capacity after reorder({rows_left})")


@check("EDIT-08", "contiguous")
def append_to_copies_of_a_row_keeps_them_separate(subject: Subject) -> None:
    subject.require_size(max_seq_len=7)
    for dtype in supported_formats(subject, "dtype", *DTYPES):
        session = batch_of_tokens(subject, 3, dtype=dtype)
        session.cache.reorder([1] * session.model.sizes[0])
        for count in (1, 2, 1):
            session.append(count)
            session.look()


@check("EDIT-08", "contiguous")
def write_into_the_buffer_of_a_row_leaves_its_copies(subject: Subject) -> None:
    subject.require_same_process()
    subject.require_size(batch_size=2, max_seq_len=3)
    cache = new_object(subject, "contiguous", batch_size=3)  # no session, because the model knows nothing of writes into buffers
    batch, dtype = cache.config["batch_size"], cache.config["dtype"]
    cache.append(*random_rows(subject, batch, 3))
    cache.reorder([1] * batch)
    keys, values = (np.array(part) for part in cache.read())
    for part, buffer in zip((keys, values), cache.as_is("raw"), strict=True):
        require_writable(buffer, "raw buffers that can be written to")
        part[0] *= np.float32(2)
        own: NDArray = encode_for_buffer(part[0], subject.numpy(buffer), dtype)
        buffer[0, :, :3, :] = subject.to_own_array(own).array
    assert_pair(cache.read(), (keys, values), "tokens after an in-place write to one of several copies of a row")


@check("EDIT-09", "contiguous")
def reorder_with_an_unknown_row_raises(subject: Subject) -> None:
    session = ContiguousFixture(subject, 4, batch_size=3)
    batch, before = session.model.sizes[0], session.cache.read()
    for row in subject.integers(-1, -batch, batch, batch + 1):
        for order in ([row, *range(1, batch)], [*range(1, batch), row], [row] * batch):
            with raises("RowOutOfRange"):
                session.cache.reorder(order)
            session.look()
            assert_pair(session.cache.read(), before, "tokens after a rejected reorder")


# Checks of LAW-20 for this family.


@check("LAW-20", "contiguous")
def advance_accepts_every_integer_type(subject: Subject) -> None:
    def advancing(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=300)
        for time in range(4):
            yield f"advance(100), call {time + 1}", typed.call(cache, "advance", 100)
            yield f"seq_len after advance(100), call {time + 1}", cache.seq_len

    assert_same_for_integer_types(subject, advancing)


@check("LAW-20", "contiguous")
def new_accepts_every_integer_type(subject: Subject) -> None:
    keys, values = map(ContiguousLawAdapter(subject).to_cache_layout, random_pair(subject, 110))

    def growing(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("contiguous", max_seq_len=120, initial_capacity=100)
        yield "append of 110 tokens", typed.call(cache, "append", keys, values)
        yield "capacity at 110 tokens", cache.capacity
        yield "110 tokens", typed.call(cache, "read")

    assert_same_for_integer_types(subject, growing)


@check("LAW-20", "contiguous")
def reorder_accepts_every_integer_type(subject: Subject) -> None:
    subject.require_size(batch_size=2)
    batch = clamp_to_limits(subject, "contiguous", batch_size=3)["batch_size"]
    keys, values = (np.concatenate([to_batch_major(random_tokens(subject, 2)) for _ in range(batch)]) for _ in ("keys", "values"))

    def turning(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("contiguous", batch_size=3)
        require_sizes(cache, max_seq_len=2)
        cache.append(keys, values)
        rows = [*range(1, batch), 0]
        yield f"reorder({rows})", typed.call(cache, "reorder", rows)
        yield f"tokens after reorder({rows})", typed.call(cache, "read")

    assert_same_for_integer_types(subject, turning)


# Checks of LAW-18: a growing buffer that is filled to its last token each time it has grown.


def content_rows(streams: Sequence[int], positions: range, written: WrittenContent) -> Iterator[NDArray]:
    """Yields the keys and the values [batch, heads, n, dim] that belong at these positions, with one stream per row."""
    pairs = [content_pair(stream, 0, positions, written.heads, written.dim) for stream in streams]
    yield from (np.stack([pair[part].transpose(1, 0, 2) for pair in pairs]) for part in (0, 1))


def append_content(
    cache: ObjectProxy, streams: Sequence[int], positions: range, written: WrittenContent, fused: bool = False
) -> None:
    rows = content_rows(streams, positions, written)
    if fused:
        cache.append_fused(np.stack(list(rows)))
    else:
        cache.append(*rows)
    for stream in streams:
        written.add_up_to(stream, 0, positions.stop)


def assert_cache_contains(cache: ObjectProxy, streams: Sequence[NDArray | int], count: int, written: WrittenContent) -> None:
    """Raises ClauseViolation unless row i contains the first `count` tokens of stream i (`streams` can name a stream per
    position).
    """
    keys, values = cache.read()
    for b, stream in enumerate(streams):
        assert_content((keys[b].transpose(1, 0, 2), values[b].transpose(1, 0, 2)), stream, 0, range(count), written)


@check("LAW-18", "contiguous")
def append_fills_buffers_to_their_last_token(subject: Subject) -> None:
    for initial, heads, dim in ((16, 2, 96), (100, 1, 128), (256, 1, 64), (1, 3, 80)):
        cache = new_object(
            subject, "contiguous", num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=8 * initial + 600
        )
        config, at = cache.config, 0
        written = WrittenContent(config["num_kv_heads"], config["head_dim"])
        capacity, end = config["initial_capacity"], affordable_tokens(subject, config["max_seq_len"], 2)
        while at < end:
            for stop in (min(capacity, end), min(capacity + 1, end)):  # the token after the capacity makes the buffer grow
                if stop > at:
                    append_content(cache, [0] * config["batch_size"], range(at, stop), written)
                    assert_cache_contains(cache, [0], stop, written)
                    at = stop
                    with suppress(NotOffered):
                        grown = min(max(1, 2 * capacity) if at > capacity else capacity, config["max_seq_len"])
                        assert_equal(cache.capacity, grown, f"capacity at {at} tokens")
            capacity = max(1, 2 * capacity)


@check("LAW-18", "contiguous")
def append_grows_all_sequences_of_a_batch(subject: Subject) -> None:
    cache = new_object(subject, "contiguous", batch_size=12, num_kv_heads=2, head_dim=80, initial_capacity=16, max_seq_len=520)
    streams, at = range(cache.config["batch_size"]), 0
    written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
    for count in (15, 1, 1, 47, 1, 64, 129, 255, 1):
        stop = min(at + count, cache.config["max_seq_len"])
        append_content(cache, streams, range(at, stop), written, fused=not count % 2)
        at = stop
    assert_cache_contains(cache, streams, at, written)


@check("LAW-18", "contiguous")
def reorder_of_long_beams_moves_every_token(subject: Subject) -> None:
    subject.require_size(batch_size=2)
    cache = new_object(subject, "contiguous", batch_size=12, num_kv_heads=2, head_dim=80, initial_capacity=16, max_seq_len=600)
    batch, at = cache.config["batch_size"], 0
    written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
    streams = np.zeros((batch, 0), int)  # the stream of each row and position
    for time, count in enumerate((15, 2, 110, 2, 126, 2, 255, 1)):
        count = min(count, affordable_tokens(subject, cache.config["max_seq_len"], 8) - at)
        own = [time * batch + row for row in range(batch)]
        append_content(cache, own, range(at, at + count), written)
        streams, at = np.concatenate([streams, np.repeat(np.array(own)[:, None], count, axis=1)], axis=1), at + count
        order = [(3 * row + time) // 2 % batch for row in range(batch)]
        cache.reorder(order)
        streams = streams[order]
        assert_cache_contains(cache, list(streams), at, written)
