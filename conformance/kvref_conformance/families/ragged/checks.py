"""Checks of the chapter RAGGED."""

from collections.abc import Sequence
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
from kvref_conformance.testlib.fixtures import padded_arguments, random_pair, require_sizes
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session

Pair = tuple[NDArray, NDArray]
LOUD = 1e4  # padding that dominates attention if it is seen


class RaggedFixture(Session):
    """A cache, and the keys and values of each of its rows, [n, num_kv_heads, head_dim] each."""

    def __init__(self, subject: Subject, *counts: int, **options: Any) -> None:
        """Creates a cache with these numbers of tokens in its rows. Rows beyond the limits are left out."""
        super().__init__(subject, **{"batch_size": len(counts)} | {k: v for k, v in options.items() if k == "max_tokens"})
        self.number = self.cache.config["batch_size"]
        self.rows: list[Pair] = [random_pair(subject, 0)] * self.number
        require_sizes(self.cache, batch_size=min(2, len(counts)))
        if any(counts):
            self.append(*counts, **{name: value for name, value in options.items() if name != "max_tokens"})

    def append(self, *counts: int, left: bool = False, padding: float = LOUD, more: int = 0) -> None:
        """Append these numbers of tokens to the rows. Counts beyond the rows are left out."""
        new = [random_pair(self.subject, count) for count in counts[: len(self.rows)]]
        self.cache.append(**padded_arguments(new, padding, more, left))
        self.rows = [(np.concatenate([a, c]), np.concatenate([b, d])) for (a, b), (c, d) in zip(self.rows, new, strict=True)]

    def extend(self, *counts: int, left: bool = False, padding: float = LOUD, more: int = 0) -> None:
        new = [random_pair(self.subject, count) for count in counts]
        self.cache.extend(**padded_arguments(new, padding, more, left))
        self.rows = self.rows + new

    def filter(self, *rows: int) -> None:
        self.cache.filter(list(rows))
        self.rows = [self.rows[row] for row in rows]

    def trim(self, *counts: int) -> None:
        counts = counts[: len(self.rows)]
        self.cache.trim(list(counts))
        self.rows = [(k[: len(k) - count], v[: len(v) - count]) for (k, v), count in zip(self.rows, counts, strict=True)]

    def contains(self, what: str) -> None:
        """Raise ClauseViolation unless each row has the tokens that it must have."""
        with suppress(NotOffered):
            assert_equal(self.cache.batch_size, len(self.rows), f"batch_size {what}")
        for row, (keys, values) in enumerate(self.rows):
            with suppress(NotOffered):
                assert_equal(self.cache.length(row), len(keys), f"length of row {row} {what}")
            want = keys.swapaxes(0, 1), values.swapaxes(0, 1)
            assert_pair(self.cache.read(row), want, f"tokens of row {row} {what}")

    def attends(self, count: int, what: str, causal: bool = False, stated: bool = True) -> None:
        """Compare attention with that over the tokens of each row alone. stated: whether the call has a scale."""
        subject = self.subject
        scale = default_scale(subject) if stated else unstated_scale(subject)
        queries = [random_queries(subject, count) for _ in self.rows]
        query = np.stack([each.swapaxes(0, 1) for each in queries])
        arguments = (query, scale, causal)[: 3 if causal else 2 if stated else 1]
        got = np.asarray(self.cache.attend(*arguments))
        assert_equal(list(got.shape), list(query.shape), f"shape of attention {what}")
        for row, (keys, values) in enumerate(self.rows):
            for at in range(count):
                seen = max(0, len(keys) - count + at + 1) if causal else len(keys)
                where = f"attention of query {at} of {count} in row {row}, with {len(keys)} tokens, {what}"
                out = got[row, :, at : at + 1].swapaxes(0, 1)
                if not seen:
                    assert_true(not out.any(), where, "zeros", out)
                    continue
                want, bound = expected_attention(subject, queries[row][at : at + 1], keys[:seen], values[:seen], scale=scale)
                assert_within(out, want, bound, where)


@check("RAGGED-01ac", "ragged")
def append_with_padding_on_the_right_reads_tokens_in_order(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 5, 1)
    fixture.contains("after the first append")
    fixture.append(4, 1, 3, more=2)
    fixture.contains("after a second append")
    fixture.append(1, 1, 1)
    fixture.contains("after an append of one token per row")


@check("RAGGED-01bc", "ragged")
def append_with_padding_on_the_left_reads_tokens_in_order(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 5, 1, left=True, more=1)
    fixture.contains("after the first append")
    fixture.append(1, 1, 1)
    fixture.contains("after an append of one token per row")
    with suppress(NotOffered):
        fixture.append(4, 1, 3, left=True)
        fixture.contains("after a second append with padding on the left")


@check("RAGGED-01abc", "ragged")
def appends_with_padding_on_both_sides_read_tokens_in_order(subject: Subject) -> None:
    for first in (True, False):
        fixture = RaggedFixture(subject, 3, 1, 2, left=first)
        for left in (not first, first):
            fixture.append(1, 2, 4, left=left)
            fixture.contains(f"after appends with padding on the {'left' if left else 'right'}")


@check("RAGGED-01d", "ragged")
def reads_of_unknown_rows_raise(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 1)
    for row in subject.integers(-1, len(fixture.rows)):
        for name in ("read", "length"):
            with suppress(NotOffered), raises("RowOutOfRange"):
                getattr(fixture.cache, name)(row)


@check("RAGGED-02", "ragged")
def length_counts_tokens_only(subject: Subject) -> None:
    for left in (False, True):
        fixture, want = RaggedFixture(subject, 1, 4, 2, left=left), [1, 4, 2]
        for step in range(3):
            for row in range(fixture.number):
                assert_equal(fixture.cache.length(row), want[row] + step, f"length of row {row} after {step} more tokens per row")
            fixture.append(1, 1, 1)


@check("RAGGED-03a", "ragged")
def finite_padding_has_no_effect(subject: Subject) -> None:
    _has_no_effect(subject, (0.0, LOUD, -LOUD, 1e30))


@check("RAGGED-03b", "ragged")
def padding_that_is_not_finite_has_no_effect(subject: Subject) -> None:
    _has_no_effect(subject, (np.nan, np.inf, -np.inf))


def _has_no_effect(subject: Subject, numbers: Sequence[float]) -> None:
    tried, missing = 0, None
    for left in (False, True):
        for padding in numbers:
            try:
                _with_padding(subject, left, padding)
                tried += 1
            except NotOffered as reason:
                missing = reason
    if missing is not None and not tried:
        raise missing


def _with_padding(subject: Subject, left: bool, padding: float) -> None:
    """Raise ClauseViolation if padding changes what rows read, or attention, which is left out if it is not offered."""
    fixture, what = RaggedFixture(subject, 1, 3, 2, left=left, padding=padding, more=1), f"with {padding} in padding"
    fixture.contains(what)
    for change in ("", "after an append", "after a filter", "after an extend"):
        with suppress(NotOffered):
            if change == "after an append":
                fixture.append(1, 1, 1)
            elif change == "after a filter":
                fixture.filter(*range(len(fixture.rows) - 1, 0, -1))
            elif change:
                fixture.extend(2, 4, left=left, padding=padding)
        fixture.contains(f"{what} {change}".strip())
        with suppress(NotOffered):
            fixture.attends(1, f"{what} {change}".strip())


@check("RAGGED-04a", "ragged")
def attend_reads_the_tokens_of_each_row(subject: Subject) -> None:
    for left in (False, True):
        fixture = RaggedFixture(subject, 2, 6, 1, left=left)
        for step in range(3):
            fixture.append(1, 1, 1)
            fixture.attends(1, f"after {step + 1} more tokens per row")
        with suppress(NotOffered):
            fixture.attends(3, "with several queries")
        fixture.attends(1, "without a scale", stated=False)


@check("RAGGED-04b", "ragged")
def attend_with_a_causal_mask_uses_the_length_of_each_row(subject: Subject) -> None:
    for left in (False, True):
        fixture = RaggedFixture(subject, 2, 6, 1, left=left)
        for count in (1, 3, 4):
            fixture.append(count, count, count)
            fixture.attends(count, f"after an append of {count} tokens", causal=True)
        for count in (2, 5):
            with suppress(NotOffered):
                fixture.attends(count, "with other numbers of queries than of appended tokens", causal=True)


@check("RAGGED-04b", "ragged")
def attend_with_a_causal_mask_after_other_numbers_of_tokens(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 6, 3)
    for counts in ((4, 2, 3), (2, 3, 2), (1, 2, 5)):
        fixture.append(*counts)
        for count in range(1, min(counts) + 1):
            fixture.attends(count, f"after an append of {list(counts)} tokens", causal=True)
    with suppress(NotOffered):
        for count in (2, 4, 12):
            fixture.attends(count, "with more queries than a row got tokens", causal=True)


@check("RAGGED-04c", "ragged")
def attend_without_visible_tokens_returns_zeros(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 0, 3, 1)
    fixture.attends(1, "beside rows with tokens")
    with suppress(NotOffered):
        fixture.attends(3, "beside rows with tokens", causal=True)


@check("RAGGED-05", "ragged")
def append_without_tokens_for_a_row_keeps_it(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 1, 3)
    for counts in ((0, 3, 1), (2, 0, 0), (0, 1, 0), (0, 0, 4)):
        fixture.append(*counts)
        fixture.contains(f"after an append of {counts} tokens")
    keys, values = (np.full((fixture.number, subject.heads, 2, subject.dim), LOUD, np.float32) for _ in range(2))
    fixture.cache.append(keys, values, [0] * fixture.number)
    fixture.contains("after an append of padding")


@check("RAGGED-06a", "ragged")
def filter_selects_rows_in_any_order(subject: Subject) -> None:
    for left in (False, True):
        number = RaggedFixture(subject, 0, 0, 0).number
        for rows in (order for size in range(1, number + 1) for order in permutations(range(number), size)):
            fixture = RaggedFixture(subject, 2, 4, 1, left=left)
            fixture.filter(*rows)
            fixture.contains(f"after filter({list(rows)})")
            fixture.append(*[1] * len(rows))
            fixture.contains(f"after filter({list(rows)}) and an append")
            with suppress(NotOffered):
                fixture.attends(1, f"after filter({list(rows)}) and an append")


@check("RAGGED-06a", "ragged")
def filter_before_the_first_append_selects_rows(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 0, 0, 0)
    fixture.filter(*range(1, fixture.number))
    fixture.append(*(2 for _ in fixture.rows))
    fixture.contains("after filter of empty rows and an append")


@check("RAGGED-06b", "ragged")
def filter_of_a_repeated_row_makes_copies(subject: Subject) -> None:
    for rows in ((1, 1), (0, 1, 0), (1, 0, 0, 1)):
        fixture = RaggedFixture(subject, 2, 3)
        fixture.filter(*rows)
        fixture.contains(f"after filter({list(rows)})")
        for _ in range(2):
            fixture.append(*[1] * len(rows))
            fixture.contains(f"after filter({list(rows)}) and appends")


@check("RAGGED-06c", "ragged")
def filter_of_unknown_rows_changes_nothing(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 2, 4, 1)
    number = fixture.number
    wrong: list[list[int]] = [[], [number], *([-1, 0] for _ in subject.integers(-1)), [0, number]]
    for rows in wrong:
        with raises("RowOutOfRange"):
            fixture.cache.filter(rows)
        fixture.contains(f"after filter({rows}) raised")


@check("RAGGED-07ab", "ragged")
def extend_adds_rows_of_other_lengths(subject: Subject) -> None:
    for first, second in (((2, 3), (6, 1)), ((1, 5), (2,)), ((3, 3), (3, 3)), ((2, 5), (4, 1, 2))):
        for left in (False, True):
            fixture = RaggedFixture(subject, *first, left=left)
            fixture.extend(*second, left=left, more=1)
            fixture.contains(f"of {list(first)} rows after an extend of {list(second)}")
            fixture.append(*[1] * len(fixture.rows))
            fixture.contains(f"of {list(first)} rows after an extend of {list(second)} and an append")
            with suppress(NotOffered):
                fixture.attends(1, "after an extend and an append")


@check("RAGGED-07b", "ragged")
def extend_adds_rows_after_appends_and_filters(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 3, 1, 6)
    fixture.append(1, 1, 1)
    fixture.filter(1, 0)
    for counts in ((1, 2), (9,)):
        fixture.extend(*counts)
        fixture.contains(f"after filter and an extend of {list(counts)}")
        fixture.append(*[1] * len(fixture.rows))
        fixture.contains(f"after filter, an extend of {list(counts)} and an append")


@check("RAGGED-07b", "ragged")
def extend_with_rows_without_tokens(subject: Subject) -> None:
    for first, second in (((2, 3), (0, 0)), ((2, 3), (0, 4)), ((0, 0), (2, 1)), ((0, 0), (0,)), ((0, 2), (3, 0))):
        fixture = RaggedFixture(subject, *first)
        fixture.extend(*second)
        fixture.contains(f"of {list(first)} rows after an extend of {list(second)}")
        fixture.append(*[2] * len(fixture.rows))
        fixture.contains(f"of {list(first)} rows after an extend of {list(second)} and an append")


@check("RAGGED-08a", "ragged")
def trim_of_equal_counts_removes_the_last_tokens(subject: Subject) -> None:
    for left in (False, True):
        for count in (1, 2, 0):
            fixture = RaggedFixture(subject, 3, 5, 2, left=left)
            fixture.append(1, 1, 1)
            fixture.trim(count, count, count)
            fixture.contains(f"after trim of {count} tokens per row")
            fixture.append(2, 2, 2)
            fixture.contains(f"after trim of {count} tokens per row and an append")
            with suppress(NotOffered):
                fixture.attends(1, "after trim and an append")


@check("RAGGED-08b", "ragged")
def trim_of_other_counts_removes_the_last_tokens(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 4, 3, 5)
    for counts in ((2, 0, 1), (0, 0, 4), (1, 2, 0), (0, 1, 0)):
        fixture.trim(*counts)
        fixture.contains(f"after trim({list(counts)})")
        with suppress(NotOffered):
            fixture.attends(1, f"after trim({list(counts)})")
        fixture.append(1, 1, 1)
        fixture.contains(f"after trim({list(counts)}) and an append")


@check("RAGGED-08c", "ragged")
def trim_of_more_tokens_than_a_row_has_changes_nothing(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 3, 5, 1)
    counts = [1] * fixture.number
    for row, length in enumerate((3, 5, 1)[: fixture.number]):
        wrong = [*counts[:row], length + 1, *counts[row + 1 :]]
        with suppress(NotOffered):
            with raises("PositionOutOfRange"):
                fixture.cache.trim(wrong)
            fixture.contains(f"after trim({wrong}) raised")
    wrong = [4] * fixture.number
    with raises("PositionOutOfRange"):
        fixture.cache.trim(wrong)
    fixture.contains(f"after trim({wrong}) raised")


@check("RAGGED-09ab", "ragged")
def invalid_counts_change_nothing(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 3, 2, 4)
    number, cache = fixture.number, fixture.cache
    keys, values = (np.ones((number, subject.heads, 2, subject.dim), np.float32) for _ in range(2))
    few, many, large = [1] * (number - 1), [1] * (number + 1), [1] * (number - 1) + [3]
    negative = [[-1, *[1] * (number - 1)] for _ in subject.integers(-1)]
    wrong = [("ShapeMismatch", few), ("ShapeMismatch", many), ("ShapeMismatch", [1]), ("PositionOutOfRange", large)]
    wrong += [("PositionOutOfRange", each) for each in negative]
    for kind, counts in wrong:
        for name in ("append", "extend", "trim"):
            if name == "trim" and counts is large:
                continue
            with suppress(NotOffered):
                with raises(kind):
                    cache.trim(counts) if name == "trim" else getattr(cache, name)(keys, values, counts)
                fixture.contains(f"after {name} with the counts {counts} raised")


@check("RAGGED-10a", "ragged")
def append_of_more_than_max_tokens_changes_nothing(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 0, 0, 0, max_tokens=4)
    most = fixture.cache.config["max_tokens"]
    fixture.append(most, most - 2, most - 1)
    for counts in ((1, 0, 0), (0, 3, 0), (1, 1, 1)):
        new = [random_pair(subject, count) for count in counts[: fixture.number]]
        with raises("CapacityExceeded"):
            fixture.cache.append(**padded_arguments(new, 0.0))
        fixture.contains(f"after an append of {counts} tokens raised")
    with raises("CapacityExceeded"):
        fixture.cache.extend(**padded_arguments([random_pair(subject, count) for count in (1, most + 1)], 0.0))
    fixture.contains(f"after an extend of {[1, most + 1]} tokens raised")


@check("RAGGED-10b", "ragged")
def padding_takes_no_room(subject: Subject) -> None:
    fixture = RaggedFixture(subject, 0, 0, 0, max_tokens=4)
    most = fixture.cache.config["max_tokens"]
    for _ in range(most - 1):
        fixture.append(1, 0, 0, more=1)
        fixture.append(0, 1, 0)
        fixture.append(0, 0, 1, left=True, more=most + 3)
    fixture.append(1, 1, 1)
    fixture.contains("of full rows")
    fixture.extend(most, 1, more=3)
    fixture.contains("after an extend by a full row")
