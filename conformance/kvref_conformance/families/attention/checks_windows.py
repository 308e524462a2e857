"""Checks of WIN for attention functions: windows, sink tokens, chunks and logit sinks."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kvref_conformance.checking.attending import LOUD_SCALE, exact, looking_at, loud_at_ends, normal
from kvref_conformance.checking.expect import shaped, within
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.attention.checks import fitted, inputs
from kvref_conformance.oracle.attention import seen
from kvref_conformance.oracle.elements import round_to

SINKS = (-math.inf, 0.0, 1.5, -3.0, 20.0)


def sizes(queries: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields (queries, tokens): the given queries, one per token, and one."""
    yield from ((queries, count), (count, count), (1, count))


def windows(subject: Subject, queries: int, count: int, window: int, sinks: int = 0, chunk: int = 0) -> None:
    """Checks windowed attention over random tokens."""
    query, keys, values = inputs(subject, *fitted(subject, queries, 4, 2, count, 8))
    got = subject.new("attention").window_attention(query, keys, values, scale=0.5, window=window, sinks=sinks, chunk=chunk)
    views = [seen(at, window, sinks, chunk) for at in range(count - queries, count)]
    want, bound = exact(subject, query, keys, values, scale=0.5, views=views)
    words = f"a window of {window}" + f", {sinks} sinks" * bool(sinks) + f", chunks of {chunk}" * bool(chunk)
    within(got, want, bound, f"attention of the last {queries} of {count} tokens, with {words}")


@check("WIN-01", "attention")
def a_window_counts_the_querys_own_token(subject: Subject) -> None:
    for window in (1, 2, 5, 12, 13, 40):
        for queries, count in sizes(5, 12):
            windows(subject, queries, count, window)


@check("WIN-05ac", "attention")
def sinks_are_seen_besides_the_window(subject: Subject) -> None:
    for window, sinks in ((3, 2), (1, 4), (5, 11), (5, 12), (2, 1)):
        for queries, count in sizes(5, 12):
            windows(subject, queries, count, window, sinks)


@check("WIN-07", "attention")
def a_chunk_begins_where_the_last_one_ended(subject: Subject) -> None:
    for chunk in (4, 1, 5, 12, 13):
        for queries, count in (*sizes(5, 12), *sizes(2, 13)):
            windows(subject, queries, count, chunk, chunk=chunk)


@check("WIN-08", "attention")
def a_logit_sink_takes_its_share_once(subject: Subject) -> None:
    for sink in SINKS:
        for queries, count in ((1, 1), (3, 9), (1, 200)):
            _shared_with(subject, queries, count, (sink,))


@check("WIN-08", "attention")
def each_query_head_has_a_sink_of_its_own(subject: Subject) -> None:
    for queries, count in ((1, 1), (3, 9), (1, 70)):
        _shared_with(subject, queries, count, SINKS[1:])


def _shared_with(subject: Subject, queries: int, count: int, sinks: Sequence[float]) -> None:
    for causal in (False, True) if queries <= count else (False,):
        query, keys, values = inputs(subject, *fitted(subject, queries, 4, 2, count, 8))
        sink = round_to(np.resize(np.array(sinks, np.float32), query.shape[1]), subject.dtype)
        got = subject.new("attention").sink_attention(query, keys, values, scale=0.5, causal=causal, logit_sink=sink)
        want, bound = exact(subject, query, keys, values, scale=0.5, causal=causal, logit_sink=sink)
        within(got, want, bound, f"attention of {queries} queries over {count} tokens, with logit sinks {sink.tolist()}")


@check("LAW-18", "attention")
def windows_end_where_they_should(subject: Subject) -> None:
    for count, window, sinks, chunk in ((1300, 512, 0, 0), (700, 255, 4, 0), (1100, 256, 0, 256), (300, 299, 0, 0)):
        ends_of_views(subject, 66, count, window, sinks, chunk)


@check("LAW-18", "attention", real=True)
def windows_of_models_end_where_they_should(subject: Subject) -> None:
    for count, window, sinks, chunk in ((9000, 4096, 0, 0), (5000, 1024, 128, 0), (16_400, 8192, 0, 8192)):
        ends_of_views(subject, 130, count, window, sinks, chunk)


def ends_of_views(subject: Subject, queries: int, count: int, window: int, sinks: int, chunk: int) -> None:
    """Checks that some of the last queries see exactly the tokens in their view, at both ends."""
    _, heads, kv_heads, _, dim = fitted(subject, queries, 4, 2, count, 64)
    rows = sorted({0, 1, 15, 16, 63, 64, queries - 2, queries - 1})[:dim]
    views = [seen(count - queries + row, window, sinks, chunk) for row in rows]
    keys, values = loud_at_ends(count, kv_heads, dim, views), normal(subject, count, kv_heads, dim)
    query = looking_at([rows.index(row) if row in rows else None for row in range(queries)], heads, dim)
    got = subject.new("attention").window_attention(
        query, keys, values, scale=LOUD_SCALE, window=window, sinks=sinks, chunk=chunk
    )
    want, bound = exact(subject, query[rows], keys, values, scale=LOUD_SCALE, views=views)
    what = f"attention of queries {rows} of the last {queries} of {count} tokens, with a window of {window}"
    within(shaped(got, query.shape, what)[rows], want, bound, f"{what}, {sinks} sinks and chunks of {chunk}")
