"""Checks of the chapter CROSS."""

from contextlib import suppress
from itertools import permutations
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    raises,
    random_queries,
    unstated_scale,
)
from kvref_conformance.testlib.fixtures import different_size, padded_arguments, random_pair, require_sizes
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session

Pair = tuple[NDArray, NDArray]
LOUD = 1e4  # padding that dominates attention if it is seen


class CrossFixture(Session):
    """A cache, and the source (or None) and the tokens of each of its rows, [n, num_kv_heads, head_dim] each."""

    def __init__(self, subject: Subject, *sources: int | None, **sizes: Any) -> None:
        """Creates a cache and writes sources of these lengths, those that are not None. Rows beyond the limits are left out."""
        super().__init__(subject, **{"batch_size": len(sources)} | sizes)
        number = self.cache.config["batch_size"]
        require_sizes(self.cache, batch_size=min(2, len(sources)))
        self.sources: list[Pair | None] = [None] * number
        self.rows: list[Pair] = [random_pair(subject, 0)] * number
        self.write({row: count for row, count in enumerate(sources[:number]) if count is not None})

    def write(self, counts: dict[int, int], padding: float = LOUD, more: int = 0) -> None:
        """Writes sources of these lengths, by row."""
        if counts:
            new = [random_pair(self.subject, count) for count in counts.values()]
            self.cache.write_source(rows=list(counts), **padded_arguments(new, padding, more))
            for row, pair in zip(counts, new, strict=True):
                self.sources[row] = pair

    def append(self, *counts: int, padding: float = LOUD) -> None:
        """Append these numbers of tokens to the rows. Counts beyond the rows are left out."""
        new = [random_pair(self.subject, count) for count in counts[: len(self.rows)]]
        self.cache.append(**padded_arguments(new, padding))
        self.rows = [(np.concatenate([a, c]), np.concatenate([b, d])) for (a, b), (c, d) in zip(self.rows, new, strict=True)]

    def trim(self, *counts: int) -> None:
        counts = counts[: len(self.rows)]
        self.cache.trim(list(counts))
        self.rows = [(k[: len(k) - count], v[: len(v) - count]) for (k, v), count in zip(self.rows, counts, strict=True)]

    def filter(self, *rows: int) -> None:
        self.cache.filter(list(rows))
        self.rows, self.sources = [self.rows[row] for row in rows], [self.sources[row] for row in rows]

    def clear(self, row: int) -> None:
        self.cache.clear(row)
        self.rows[row], self.sources[row] = random_pair(self.subject, 0), None

    def contains(self, what: str) -> None:
        """Raise ClauseViolation unless each row has the source and the tokens that it must have."""
        self.has_sources(what)
        with suppress(NotOffered):
            self.has_tokens(what)

    def has_sources(self, what: str) -> None:
        with suppress(NotOffered):
            assert_equal(self.cache.batch_size, len(self.rows), f"batch_size {what}")
        for row, source in enumerate(self.sources):
            if source is None:
                with raises("SourceNotWritten"):
                    self.cache.read_source(row)
                continue
            with suppress(NotOffered):
                assert_equal(self.cache.source_length(row), len(source[0]), f"source_length of row {row} {what}")
            assert_pair(self.cache.read_source(row), _by_head(source), f"source of row {row} {what}")

    def has_tokens(self, what: str) -> None:
        for row, tokens in enumerate(self.rows):
            with suppress(NotOffered):
                assert_equal(self.cache.length(row), len(tokens[0]), f"length of row {row} {what}")
            assert_pair(self.cache.read(row), _by_head(tokens), f"tokens of row {row} {what}")

    def attends(self, count: int, what: str, stated: bool = True) -> None:
        """Compare attention with that over the source of each row alone. stated: whether the call has a scale."""
        subject = self.subject
        scale = default_scale(subject) if stated else unstated_scale(subject)
        queries = [random_queries(subject, count) for _ in self.rows]
        query = np.stack([each.swapaxes(0, 1) for each in queries])
        got = np.asarray(self.cache.attend_source(query, *([scale] if stated else [])))
        assert_equal(list(got.shape), list(query.shape), f"shape of attention {what}")
        for row, source in enumerate(self.sources):
            assert source is not None
            where = f"attention of {count} queries in row {row}, with {len(source[0])} entries, {what}"
            out = got[row].swapaxes(0, 1)
            if not len(source[0]):
                assert_true(not out.any(), where, "zeros", out)
                continue
            assert_within(out, *expected_attention(subject, queries[row], *source, scale=scale), where)


def _by_head(pair: Pair) -> Pair:
    return pair[0].swapaxes(0, 1), pair[1].swapaxes(0, 1)


@check("CROSS-01abc", "cross")
def write_source_for_all_rows_reads_their_entries(subject: Subject) -> None:
    for counts in ((2, 5, 1), (3, 3, 3), (1, 0, 4)):
        CrossFixture(subject, *counts).has_sources(f"after write_source of {counts} entries")


@check("CROSS-01ab", "cross")
def write_source_for_some_rows_in_any_order(subject: Subject) -> None:
    for rows in ((1, 0), (1,), (0, 1), (2, 0, 1)):
        fixture = CrossFixture(subject, None, None, None)
        if max(rows) >= len(fixture.rows):
            continue
        fixture.write({row: 2 + at for at, row in enumerate(rows)})
        fixture.has_sources(f"after write_source of rows {list(rows)}")
        fixture.write({row: 3 for row in range(len(fixture.rows)) if row not in rows}, more=1)
        fixture.has_sources(f"after write_source of rows {list(rows)}, and of the others")


@check("CROSS-01d", "cross")
def unknown_rows_of_sources_raise(subject: Subject) -> None:
    fixture = CrossFixture(subject, 2, None)
    for row in subject.integers(-1, len(fixture.rows)):
        for name in ("read_source", "source_length"):
            with suppress(NotOffered), raises("RowOutOfRange"):
                getattr(fixture.cache, name)(row)
        with suppress(NotOffered):
            with raises("RowOutOfRange"):
                fixture.cache.write_source([1, row], **padded_arguments([random_pair(subject, 2)] * 2, LOUD))
            fixture.has_sources("after write_source raised")


@check("CROSS-01d", "cross")
def rows_that_a_filter_removed_are_unknown(subject: Subject) -> None:
    for rows in ((1,), (0,), (0, 2), (2, 1)):
        fixture = CrossFixture(subject, 2, 4, 3)
        number = len(fixture.rows)
        if max(rows) >= number:
            continue
        fixture.filter(*rows)
        for row in range(len(rows), number):
            for name in ("read_source", "source_length"):
                with suppress(NotOffered), raises("RowOutOfRange"):
                    getattr(fixture.cache, name)(row)
            with suppress(NotOffered), raises("RowOutOfRange"):
                fixture.cache.write_source([row], **padded_arguments([random_pair(subject, 2)], LOUD))
        fixture.has_sources(f"after filter({list(rows)}) and calls with the rows that it removed")


@check("CROSS-02a", "cross")
def read_source_before_write_source_raises(subject: Subject) -> None:
    fixture = CrossFixture(subject, 2, None, None)
    fixture.has_sources("beside a row with a source")
    with suppress(NotOffered), raises("SourceNotWritten"):
        fixture.cache.source_length(1)
    with suppress(NotOffered):
        fixture.append(1, 1, 1)
        fixture.has_sources("after an append")


@check("CROSS-02a", "cross")
def attend_source_with_an_unwritten_row_raises(subject: Subject) -> None:
    for sources in ((None, None), (2, None), (None, 3), (0, None)):
        fixture = CrossFixture(subject, *sources)
        query = np.ones((len(fixture.rows), subject.heads, 1, subject.dim), np.float32)
        with raises("SourceNotWritten"):
            fixture.cache.attend_source(query)


@check("LAW-10", "cross")
def attend_source_of_a_wrong_shape_raises(subject: Subject) -> None:
    """The law adapter cannot judge it, because its rows have no sources."""
    fixture = CrossFixture(subject, 2, 3)
    rows, heads, dim = len(fixture.rows), subject.heads, subject.dim
    wrong = [(rows, heads, 1, dim + 1), (rows + 1, heads, 1, dim), (heads, 1, dim)]
    if heads > 2:
        wrong.append((rows, different_size(heads), 1, dim))
    for shape in wrong:
        with raises("ShapeMismatch"):
            fixture.cache.attend_source(np.ones(shape, np.float32))
    fixture.attends(1, "after queries of wrong shapes")


@check("CROSS-02b", "cross")
def sources_of_no_entries_are_written(subject: Subject) -> None:
    fixture = CrossFixture(subject, 0, 3, 0)
    fixture.has_sources("with sources of 0 entries")
    with suppress(NotOffered):
        fixture.attends(1, "beside sources of 0 entries")
    with suppress(NotOffered):
        every = CrossFixture(subject, 0, 0)
        every.has_sources("without any entry")
        every.attends(2, "without any entry")


@check("CROSS-03a", "cross")
def a_second_source_raises(subject: Subject) -> None:
    for first, second in ((3, 3), (3, 1), (2, 5), (0, 2), (0, 0)):
        fixture = CrossFixture(subject, first, None)
        with raises("SourceAlreadyWritten"):
            fixture.cache.write_source([0], **padded_arguments([random_pair(subject, second)], LOUD))
        fixture.has_sources(f"of {first} entries after write_source of {second} raised")


@check("CROSS-03ab", "cross")
def a_second_source_in_a_batch_changes_no_row(subject: Subject) -> None:
    for rows in ((0, 1), (1, 0), (1, 1)):
        fixture = CrossFixture(subject, 3, None)
        with raises("SourceAlreadyWritten"):
            fixture.cache.write_source(list(rows), **padded_arguments([random_pair(subject, 2), random_pair(subject, 4)], LOUD))
        fixture.has_sources(f"after write_source of {list(rows)} raised")


@check("CROSS-04a", "cross")
def appends_and_trims_keep_sources(subject: Subject) -> None:
    fixture = CrossFixture(subject, 5, 1, 3)
    for counts in ((3, 3, 3), (1, 2, 0), (1, 1, 1)):
        fixture.append(*counts)
        fixture.has_sources(f"after an append of {counts} tokens")
    with suppress(NotOffered):
        for counts in ((1, 1, 1), (2, 0, 1), (2, 5, 2)):
            fixture.trim(*counts)
            fixture.has_sources(f"after trim({list(counts)})")
            with suppress(NotOffered):
                fixture.attends(1, f"after trim({list(counts)})")


@check("CROSS-04b", "cross")
def write_source_keeps_tokens(subject: Subject) -> None:
    fixture = CrossFixture(subject, None, None, None)
    for row in range(len(fixture.rows)):
        fixture.append(2, 1, 3)
        fixture.write({row: 4 - row})
        fixture.has_tokens(f"after write_source of row {row}")
    fixture.append(1, 1, 1)
    fixture.has_tokens("after write_source and an append")


@check("CROSS-05a", "cross")
def attend_source_reads_all_entries_of_each_row(subject: Subject) -> None:
    fixture = CrossFixture(subject, 6, 2, 4)
    for count in (1, 3, 8):
        with suppress(NotOffered):
            fixture.attends(count, "without tokens")
    fixture.attends(1, "without tokens")
    fixture.attends(1, "without a scale", stated=False)
    with suppress(NotOffered):
        for counts in ((1, 1, 1), (2, 7, 0)):
            fixture.append(*counts)
            fixture.attends(1, f"after an append of {counts} tokens")
    with suppress(NotOffered):
        fixture.attends(3, "with several queries")


@check("CROSS-05b", "cross")
def finite_padding_of_sources_has_no_effect(subject: Subject) -> None:
    for padding in (0.0, LOUD, -LOUD):
        _with_padding(subject, padding)


@check("CROSS-05c", "cross")
def padding_of_sources_that_is_not_finite_has_no_effect(subject: Subject) -> None:
    for padding in (np.nan, np.inf, -np.inf):
        _with_padding(subject, padding)


def _with_padding(subject: Subject, padding: float) -> None:
    fixture, what = CrossFixture(subject, None, None, None), f"with {padding} in padding"
    counts = dict(enumerate((1, 4, 2)[: len(fixture.rows)]))
    fixture.write(counts, padding=padding, more=1)
    fixture.has_sources(what)
    with suppress(NotOffered):
        fixture.attends(2, what)
    with suppress(NotOffered):
        fixture.filter(*range(len(fixture.rows) - 1, -1, -1))
        fixture.has_sources(f"{what}, after a filter")
        fixture.attends(1, f"{what}, after a filter")


@check("CROSS-05d", "cross")
def attend_source_of_no_entries_returns_zeros(subject: Subject) -> None:
    for sources in ((0, 3, 1), (2, 0, 0), (0, 0, 0)):
        with suppress(NotOffered):
            CrossFixture(subject, *sources).attends(2, f"with sources of {sources} entries")
    CrossFixture(subject, 3, 0, 2).attends(1, "beside a source of 0 entries")


@check("CROSS-06a", "cross")
def filter_selects_sources_and_tokens(subject: Subject) -> None:
    number = CrossFixture(subject, None, None, None).cache.config["batch_size"]
    for rows in (order for size in range(1, number + 1) for order in permutations(range(number), size)):
        fixture = CrossFixture(subject, 2, 4, 1)
        with suppress(NotOffered):
            fixture.append(3, 1, 2)
        fixture.filter(*rows)
        fixture.contains(f"after filter({list(rows)})")
        with suppress(NotOffered):
            fixture.append(*[1] * len(rows))
            fixture.contains(f"after filter({list(rows)}) and an append")
        with suppress(NotOffered):
            fixture.attends(1, f"after filter({list(rows)})")


@check("CROSS-06a", "cross")
def filter_selects_rows_without_a_source(subject: Subject) -> None:
    for rows in ((1, 0), (1,), (0,)):
        fixture = CrossFixture(subject, 2, None)
        fixture.filter(*rows)
        fixture.contains(f"after filter({list(rows)})")
        fixture.write({row: 3 for row, source in enumerate(fixture.sources) if source is None})
        fixture.contains(f"after filter({list(rows)}) and write_source")


@check("CROSS-06b", "cross")
def filter_of_a_repeated_row_copies_source_and_tokens(subject: Subject) -> None:
    for rows in ((1, 1), (0, 1, 0), (1, 0, 0, 1)):
        fixture = CrossFixture(subject, 2, 3)
        fixture.filter(*rows)
        fixture.contains(f"after filter({list(rows)})")
        with suppress(NotOffered):
            fixture.append(*range(1, len(rows) + 1))
            fixture.contains(f"after filter({list(rows)}) and an append")
        with suppress(NotOffered):
            fixture.clear(0)
            fixture.contains(f"after filter({list(rows)}) and clear(0)")
            fixture.write({0: 1})
            fixture.contains(f"after filter({list(rows)}), clear(0) and write_source")


@check("CROSS-06b", "cross")
def trim_of_a_repeated_row_trims_one_copy(subject: Subject) -> None:
    for rows in ((1, 1), (0, 1, 0), (1, 0, 0, 1)):
        for trimmed in range(len(rows)):
            fixture = CrossFixture(subject, 2, 3)
            fixture.append(3, 2)
            fixture.filter(*rows)
            fixture.trim(*[int(row == trimmed) for row in range(len(rows))])
            fixture.has_tokens(f"after filter({list(rows)}) and trim of row {trimmed}")


@check("CROSS-06c", "cross")
def filter_of_unknown_rows_keeps_both_parts(subject: Subject) -> None:
    fixture = CrossFixture(subject, 2, 4, 1)
    with suppress(NotOffered):
        fixture.append(1, 2, 3)
    number = len(fixture.rows)
    wrong: list[list[int]] = [[], [number], *([-1, 0] for _ in subject.integers(-1)), [1, number]]
    for rows in wrong:
        with raises("RowOutOfRange"):
            fixture.cache.filter(rows)
        fixture.contains(f"after filter({rows}) raised")


@check("CROSS-07ac", "cross")
def clear_removes_both_parts_of_one_row(subject: Subject) -> None:
    for row in (0, 1, 2):
        fixture = CrossFixture(subject, 2, 4, 1)
        if row < len(fixture.rows):
            with suppress(NotOffered):
                fixture.append(3, 1, 2)
            fixture.clear(row)
            fixture.contains(f"after clear({row})")


@check("CROSS-07b", "cross")
def a_shorter_source_after_clear_has_no_old_entries(subject: Subject) -> None:
    for first, second in ((6, 2), (3, 1), (4, 0), (2, 5), (3, 3)):
        fixture = CrossFixture(subject, first, 7)
        with suppress(NotOffered):
            fixture.append(2, 3)
        fixture.clear(0)
        fixture.write({0: second}, more=2)
        fixture.contains(f"after clear of {first} entries and write_source of {second}")
        with suppress(NotOffered):
            fixture.append(1, 1)
            fixture.contains(f"after clear of {first} entries, write_source of {second} and an append")
        with suppress(NotOffered):
            fixture.attends(2, f"after clear of {first} entries and write_source of {second}")


@check("CROSS-07c", "cross")
def clear_of_unknown_rows_changes_nothing(subject: Subject) -> None:
    fixture = CrossFixture(subject, 2, 3)
    for row in subject.integers(-1, len(fixture.rows)):
        with raises("RowOutOfRange"):
            fixture.cache.clear(row)
        fixture.contains(f"after clear({row}) raised")


@check("CROSS-08ab", "cross")
def appends_add_tokens_in_order(subject: Subject) -> None:
    for sources in ((None, None, None), (2, 6, None), (3, 0, 1)):
        fixture = CrossFixture(subject, *sources)
        for counts in ((2, 5, 1), (1, 1, 1), (0, 3, 1)):
            fixture.append(*counts)
            fixture.has_tokens(f"after an append of {counts} tokens to rows with sources of {sources} entries")
    with suppress(NotOffered):
        fixture.append(0, 2, 1, padding=np.nan)
        fixture.has_tokens("with NaN in padding")


@check("CROSS-08b", "cross")
def unknown_rows_of_tokens_raise(subject: Subject) -> None:
    fixture = CrossFixture(subject, None, None)
    for row in subject.integers(-1, len(fixture.rows)):
        for name in ("read", "length"):
            with suppress(NotOffered), raises("RowOutOfRange"):
                getattr(fixture.cache, name)(row)


@check("CROSS-08c", "cross")
def trim_removes_the_last_tokens(subject: Subject) -> None:
    fixture = CrossFixture(subject, 1, 7, 3)
    fixture.append(4, 3, 5)
    for counts in ((1, 1, 1), (2, 0, 1), (0, 2, 0)):
        fixture.trim(*counts)
        fixture.has_tokens(f"after trim({list(counts)})")
    lengths = [len(keys) for keys, _ in fixture.rows]
    for row, length in enumerate(lengths):
        with raises("PositionOutOfRange"):
            fixture.cache.trim([length + 1 if each == row else 0 for each in range(len(lengths))])
        fixture.has_tokens(f"after trim of {length + 1} tokens of row {row} raised")


@check("CROSS-09ab", "cross")
def invalid_counts_of_both_parts_change_nothing(subject: Subject) -> None:
    fixture = CrossFixture(subject, None, None, 2)
    keys, values = (np.ones((2, subject.heads, 2, subject.dim), np.float32) for _ in range(2))
    number = len(fixture.rows)
    every = np.ones((number, subject.heads, 2, subject.dim), np.float32)
    wrong: list[tuple[str, list[int]]] = [("ShapeMismatch", [1]), ("ShapeMismatch", [1] * 5), ("PositionOutOfRange", [1, 3])]
    wrong += [("PositionOutOfRange", [-1, 1]) for _ in subject.integers(-1)]
    for kind, counts in wrong:
        with suppress(NotOffered):
            with raises(kind):
                fixture.cache.write_source([0, 1], keys, values, counts)
            fixture.has_sources(f"after write_source with the counts {counts} raised")
        padded = counts if kind == "ShapeMismatch" else [*counts, *[1] * (number - 2)]
        for name in ("append", "trim"):
            with suppress(NotOffered):
                with raises(kind):
                    fixture.cache.trim(padded) if name == "trim" else fixture.cache.append(every, every, padded)
                fixture.has_tokens(f"after {name} with the counts {padded} raised")


@check("CROSS-09c", "cross")
def sources_and_tokens_have_limits_of_their_own(subject: Subject) -> None:
    fixture = CrossFixture(subject, None, None, max_tokens=3, max_source=5)
    most, most_source = (fixture.cache.config[name] for name in ("max_tokens", "max_source"))
    for row in (0, 1):
        counts = [most_source + 1 if each == row else 1 for each in (0, 1)]
        with raises("CapacityExceeded"):
            fixture.cache.write_source([0, 1], **padded_arguments([random_pair(subject, count) for count in counts], LOUD))
        fixture.has_sources(f"after write_source of {counts} entries raised")
    fixture.write({1: most_source, 0: 1}, more=2)
    fixture.has_sources("of a full source")
    with suppress(NotOffered):
        fixture.append(most, most - 1)
        with raises("CapacityExceeded"):
            fixture.cache.append(**padded_arguments([random_pair(subject, count) for count in (1, 1)], LOUD))
        fixture.has_tokens("after an append of too many tokens raised")
        fixture.append(0, 1)
        fixture.contains("of full rows")
