"""Checks of EDIT-01, EDIT-02 and EDIT-03, and of LAW-18 and LAW-20 for `truncate`, on every family with `truncatable` streams."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.exceptions import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_reads, raises
from kvref_conformance.testlib.fixtures import round_to_input_dtype
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.law_adapter import (
    TRUNCATABLE,
    LawAdapter,
    assert_same_observables,
    assert_tokens_kept,
    fill_stream,
)
from kvref_conformance.testlib.production_sizes import FilledStream, affordable_tokens, power_of_two_edges
from kvref_conformance.testlib.registry import law

LOUD, QUIET = 2.0**8, 2.0**-8  # factors: the removed tokens would dominate, or lie below, any scale that they share with others


def truncatable(stream: LawAdapter, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
    """The family's truncatable streams. Raises NotOffered if there are none."""
    found = False
    for cache in stream.truncatable(tokens):
        found = True
        yield cache
    if not found:
        raise NotOffered(f"a cache from which any of {tokens} tokens can be truncated")


@law("EDIT-01ac", "truncatable")
def truncate_keeps_the_first_tokens(stream: LawAdapter) -> None:
    for cache in truncatable(stream):
        _, keys, values = fill_stream(cache, 7)
        assert_tokens_kept(cache, keys, values, f"before truncate, with {cache.config}")
        for length in (6, 3, 2, 0):
            before = cache.read()
            cache.truncate(length)
            when = f"after truncate({length}), with {cache.config}"
            assert_equal(len(cache), length, f"length {when}")
            assert_pair(cache.read(), (before[0][:length], before[1][:length]), f"tokens {when}, compared with before")
            assert_reads(cache.subject, cache.read(), cache.expected(keys[:length], values[:length]), f"tokens {when}")


@law("EDIT-02ab", "truncatable")
def truncate_past_the_end_raises(stream: LawAdapter) -> None:
    for cache in truncatable(stream):
        fill_stream(cache, 5)
        before = cache.all_observables()
        for length in cache.subject.integers(6, max(6, cache.room()), cache.room() + 1, -1, -5, -6):
            with raises("PositionOutOfRange"):
                cache.truncate(length)
            assert_same_observables(
                cache.all_observables(), before, f"after truncate({length}) of 5 tokens raised PositionOutOfRange"
            )
        before = cache.contents()
        cache.truncate(5)
        assert_same_observables(cache.contents(), before, "after truncate(5) of 5 tokens")


@law("EDIT-03", "truncatable")
def truncated_tokens_change_no_later_result(stream: LawAdapter) -> None:
    subject = stream.subject
    for cache in truncatable(stream):
        for factor in (LOUD, QUIET):
            cache = cache.new_cache(**cache.config)
            _, keys, values = fill_stream(cache, 4)
            assert_tokens_kept(cache, keys, values, f"before a draft, with {cache.config}")
            for draft, length, count in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # the last keeps one token of the draft
                drafted = [round_to_input_dtype(subject, part * factor) for part in cache.tokens(draft)]
                cache.append(*drafted)
                cache.truncate(length)
                more = cache.tokens(count)
                cache.append(*more)
                keys, values = (
                    np.concatenate([np.concatenate([old, new])[:length], last])
                    for old, new, last in zip((keys, values), drafted, more, strict=True)
                )
                other = cache.new_cache(**cache.config)
                other.append(keys, values)
                when = f"after a draft of {draft}, truncate({length}) and an append of {count}, with {cache.config}"
                assert_same_observables(cache.contents(), other.contents(), f"{when}, compared with a cache without the draft")
                assert_reads(subject, cache.read(), cache.expected(keys, values), f"tokens {when}")


@law("LAW-18", "truncatable", "sizes_for")
def truncate_works_at_any_length(stream: LawAdapter) -> None:
    """Drafts of five tokens are truncated at powers of two and their neighbors, upwards and downwards."""
    for cache in truncatable(stream, 600):
        long = FilledStream(cache)
        drafts = FilledStream(cache, 1, long.written)
        ends = power_of_two_edges(affordable_tokens(stream.subject, min(long.room, 600), 2) - 5)
        if not ends:
            raise NotOffered(f"room for 20 tokens, where its limits leave {long.room}")
        for end in ends:
            long.fill_to(end)
            drafts.count = end
            drafts.append(5)
            cache.truncate(end)
            long.assert_content()
        for end in reversed(ends):
            cache.truncate(end)
            long.count = end
            long.assert_content()


@law("LAW-20", "truncatable")
def truncate_accepts_every_integer_type(stream: LawAdapter) -> None:
    """The lengths are beyond the range of 8-bit integers, in sum, if the limits allow that."""
    large, small = (next(iter(stream.truncatable(tokens)), None) for tokens in (300, 31))
    cache, kept = (large, 100) if large is not None and large.room() >= 160 else (small, 18)
    if cache is None or cache.room() < 29:
        raise NotOffered("a cache from which any of 31 tokens can be truncated")
    keys, values = cache.tokens(kept + 10)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        one = cache.new_cache(**cache.config)
        one.append(keys, values)
        for time in range(3):
            yield f"truncate({kept}), call {time + 1}", typed.call(one.cache, "truncate", *one.truncate_arguments(kept))
            one.num_appended = kept
            one.append(keys[: kept * 3 // 5], values[: kept * 3 // 5])
            yield f"length after truncate and append, call {time + 1}", len(one)
        yield f"{kept * 8 // 5} tokens", one.read()

    assert_same_for_integer_types(stream.subject, script)
