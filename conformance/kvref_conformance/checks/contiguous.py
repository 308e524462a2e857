"""CONTIG: the growing cache [batch, kv heads, capacity, head_dim]."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, same, shaped
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, batch_major, new, tokens
from kvref_conformance.drivers.in_process import Handle, Subject, writable
from kvref_conformance.oracle.elements import round_to


def rows(subject: Subject, count: int, batch: int = 1) -> tuple[NDArray, NDArray]:
    """Keys and values [batch, heads, count, dim]."""

    def one() -> NDArray:
        return np.concatenate([batch_major(tokens(subject, count)) for _ in range(batch)])

    return one(), one()


def filled(subject: Subject, count: int, **config: Any) -> tuple[Handle, NDArray, NDArray]:
    cache, (keys, values) = new(subject, "contiguous", **config), rows(subject, count, config.get("batch_size", 1))
    cache.append(keys, values)
    return cache, keys, values


@check("CONTIG-01", "contiguous")
def a_new_cache_is_empty(subject: Subject) -> None:
    equal(new(subject, "contiguous").seq_len, 0, "length of a new cache")


@check("CONTIG-01", "contiguous")
def a_new_cache_has_its_initial_capacity(subject: Subject) -> None:
    for initial, maximum, capacity in ((3, 20, 3), (0, 20, 0), (50, 20, 20)):
        cache = new(subject, "contiguous", initial_capacity=initial, max_seq_len=maximum)
        equal(cache.capacity, capacity, f"capacity of a new cache with initial_capacity {initial}, max_seq_len {maximum}")


@check("CONTIG-02", "contiguous")
def tokens_are_read_in_order(subject: Subject) -> None:
    cache, (keys, values), at = new(subject, "contiguous"), rows(subject, 12), 0
    for count in (1, 4, 1, 1, 5):
        part = slice(at, at + count)
        cache.append(keys[:, :, part], values[:, :, part])
        at += count
        equal(cache.seq_len, at, "length")
        pair(cache.read(), (keys[:, :, :at], values[:, :, :at]), f"{at} tokens")


@check("CONTIG-03", "contiguous")
def an_empty_cache_reads_as_no_tokens(subject: Subject) -> None:
    for batch in (1, 2):
        cache, none = new(subject, "contiguous", batch_size=batch), rows(subject, 0, batch)
        pair(cache.read(), none, "a new cache")
        cache.append(*none)
        pair(cache.read(), none, "a cache to which no token was appended")


@check("CONTIG-04", "contiguous")
def capacity_doubles_until_it_fits(subject: Subject) -> None:
    cases = ((0, 20, [(1, 1), (1, 2), (1, 4), (4, 8)]), (3, 20, [(3, 3), (1, 6), (9, 20)]), (2, 100, [(17, 32)]))
    for initial, maximum, steps in (*cases, (5, 7, [(6, 7)])):
        cache = new(subject, "contiguous", initial_capacity=initial, max_seq_len=maximum)
        for count, capacity in steps:
            cache.append(*rows(subject, count))
            equal(cache.capacity, capacity, f"capacity at {cache.seq_len} tokens, from {initial}, at most {maximum}")


@check("CONTIG-05", "contiguous")
def growing_keeps_every_bit(subject: Subject) -> None:
    for initial in (0, 1, 3):
        cache, keys, values = filled(subject, 2, initial_capacity=initial)
        for _ in range(8):
            more = rows(subject, 2)
            keys, values = np.concatenate([keys, more[0]], axis=2), np.concatenate([values, more[1]], axis=2)
            cache.append(*more)
            pair(cache.read(), (keys, values), f"{keys.shape[2]} tokens")


@check("CONTIG-06", "contiguous")
def full_is_full(subject: Subject) -> None:
    cache, keys, values = filled(subject, 20)
    equal(cache.seq_len, 20, "length of a cache filled to max_seq_len")
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, 1))
    equal(cache.seq_len, 20, "length of a full cache after one token more was refused")
    pair(cache.read(), (keys, values), "a full cache after one token more was refused")


@check("CONTIG-06", "contiguous")
def what_does_not_fit_does_not_grow(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)
    with raises("CapacityExceeded"):
        cache.append(*rows(subject, 19))
    equal((cache.seq_len, cache.capacity), (2, 3), "length and capacity after an append that did not fit")
    pair(cache.read(), (keys, values), "a cache after an append that did not fit")


@check("CONTIG-07", "contiguous")
def raw_buffers_hold_the_tokens(subject: Subject) -> None:
    for dtype in subject.formats("float32", "float16"):
        cache, keys, values = filled(subject, 4, dtype=dtype)
        for got, want in zip(cache.as_is("raw"), (keys, values), strict=True):
            buffer = subject.numpy(got)
            shaped(buffer[:, :, :4], (1, HEADS, 4, DIM), "the used part of the raw buffer")
            if buffer.dtype.kind == "f":  # where the library lacks the dtype these are codes
                same(buffer[:, :, :4], round_to(want, dtype), f"the first 4 tokens of the raw {dtype} buffer")


@check("CONTIG-07", "contiguous")
def raw_buffers_have_the_caches_capacity(subject: Subject) -> None:
    cache, _, _ = filled(subject, 4)
    for buffer in cache.raw():
        shaped(buffer, (1, HEADS, cache.capacity, DIM), "the raw buffer")


@check("CONTIG-08", "contiguous")
def raw_buffers_stay_the_same_memory(subject: Subject) -> None:
    subject.in_this_process()
    cache, keys, _ = filled(subject, 1, initial_capacity=8)
    before = cache.as_is("raw")[0]
    writable(before, "raw buffers that can be written to")
    for count in (2, 3, 2):  # to the last token there is room for
        more = rows(subject, count)
        cache.append(*more)
        keys = np.concatenate([keys, more[0]], axis=2)
    same(subject.numpy(before)[:, :, :8], keys, "raw keys fetched before three appends")
    cache.reset()
    cache.append(*more)
    same(subject.numpy(before)[:, :, :2], more[0], "raw keys fetched before a reset and an append")


@check("CONTIG-09", "contiguous")
def a_fused_append_is_an_append(subject: Subject) -> None:
    plain, fused = new(subject, "contiguous"), new(subject, "contiguous")
    for count in (2, 1, 5):
        keys, values = rows(subject, count)
        plain.append(keys, values)
        fused.append_fused(np.stack([keys, values]))
        equal((fused.seq_len, fused.capacity), (plain.seq_len, plain.capacity), "length and capacity")
        pair(fused.read(), plain.read(), "tokens after a fused append")


@check("CONTIG-10", "contiguous")
def advancing_makes_tokens_readable(subject: Subject) -> None:
    subject.in_this_process()
    cache, keys, values = filled(subject, 2, initial_capacity=5)
    more = rows(subject, 3)
    for buffer, new_rows in zip(cache.as_is("raw"), more, strict=True):
        writable(buffer, "raw buffers that can be written to")
        buffer[:, :, 2:5, :] = subject.own(new_rows).array
    cache.advance(3)
    equal(cache.seq_len, 5, "length after advancing by 3 from 2")
    want = tuple(np.concatenate(parts, axis=2) for parts in zip((keys, values), more, strict=True))
    pair(cache.read(), (want[0], want[1]), "tokens after advancing by 3")


@check("CONTIG-10", "contiguous")
def advancing_past_capacity_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 2)  # capacity 3, max_seq_len 20
    with raises("CapacityExceeded"):
        cache.advance(2)
    equal(cache.seq_len, 2, "length after advancing past capacity was refused")
    with raises("PositionOutOfRange"):
        cache.advance(-1)
    pair(cache.read(), (keys, values), "tokens after advancing was refused")


@check("CONTIG-11", "contiguous")
def a_reset_keeps_capacity(subject: Subject) -> None:
    cache, _, _ = filled(subject, 10)
    capacity = cache.capacity
    cache.reset()
    equal(cache.capacity, capacity, "capacity after reset")


@check("CONTIG-11", "contiguous")
def a_reset_forgets(subject: Subject) -> None:
    cache, _, _ = filled(subject, 10)
    cache.reset()
    equal(cache.seq_len, 0, "length after reset")
    pair(cache.read(), rows(subject, 0), "a cache after reset")
    keys, values = rows(subject, 2)
    cache.append(keys, values)
    pair(cache.read(), (keys, values), "2 tokens after reset")


@check("CONTIG-12", "contiguous")
def values_are_stored_in_the_caches_dtype(subject: Subject) -> None:
    for dtype in subject.formats("float32", "float16", "bfloat16"):
        cache, keys, values = filled(subject, 5, dtype=dtype)
        pair(cache.read(), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("CONTIG-13", "contiguous")
def sequences_of_a_batch_are_independent(subject: Subject) -> None:
    cache, keys, values = filled(subject, 4, batch_size=3)
    more = rows(subject, 3, batch=3)
    more[0][1], more[1][1] = 0, 0  # the middle sequence's tokens are zero
    cache.append(*more)
    want = tuple(np.concatenate(parts, axis=2) for parts in zip((keys, values), more, strict=True))
    pair(cache.read(), (want[0], want[1]), "a batch of 3")
