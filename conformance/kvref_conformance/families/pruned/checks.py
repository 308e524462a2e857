"""Checks of the chapter PRUNED."""

from contextlib import suppress
from itertools import product
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
    may_raise,
    raises,
    random_queries,
    unstated_scale,
)
from kvref_conformance.testlib.fixtures import random_pair, require_sizes
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session


class PrunedFixture(Session):
    """A cache, and all tokens that were appended to it."""

    def __init__(self, subject: Subject, count: int, **sizes: Any) -> None:
        super().__init__(subject, **sizes)
        self.heads = range(self.cache.config["num_kv_heads"])
        self.keys, self.values = random_pair(subject, 0)
        self.append(count)

    def append(self, count: int) -> None:
        new = random_pair(self.subject, count)
        step = self.subject.size("tokens", max(1, count))
        for start in range(0, count, step):
            self.cache.append(*(part[start : start + step] for part in new))
        self.keys, self.values = (np.concatenate(parts) for parts in zip((self.keys, self.values), new, strict=True))

    def prune(self, stored: list[list[int]], keep: list[list[int]]) -> None:
        """Prune so that each head keeps the tokens at the positions `keep` of those at `stored`."""
        scores = [[float(position in kept) for position in here] for here, kept in zip(stored, keep, strict=True)]
        self.cache.prune(np.array(scores, np.float32), len(keep[0]))

    def contains(self, positions: list[list[int]], what: str) -> None:
        """Raise ClauseViolation unless each head reads the tokens at these positions."""
        rows = np.array(positions).T
        by_head = np.arange(len(self.heads))
        with suppress(NotOffered):
            for head in self.heads:
                assert_equal(list(self.cache.positions(head)), positions[head], f"positions of head {head} {what}")
        assert_pair(self.cache.read(), (self.keys[rows, by_head], self.values[rows, by_head]), f"tokens {what}")


def per_head(subject_heads: range, *choices: list[int]) -> list[list[int]]:
    """The choices in turn, one for each head."""
    return [choices[head % len(choices)] for head in subject_heads]


def random_scores(subject: Subject, heads: int, count: int) -> NDArray:
    """Different scores, in a random order."""
    return np.array([subject.rng.permutation(count) for _ in range(heads)], np.float32)


@check("PRUNED-01abc", "pruned")
def append_after_prune_reads_in_order(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 5)
    everything = per_head(fixture.heads, [0, 1, 2, 3, 4])
    fixture.contains(everything, "before the first prune")
    kept = per_head(fixture.heads, [0, 2, 4], [0, 1, 3], [2, 3, 4])
    # The best score is that of the newest token, so that an order by scores is not the order of positions.
    scores = [[position + 1.0 if position in each else 0.0 for position in range(5)] for each in kept]
    fixture.cache.prune(np.array(scores, np.float32), 3)
    fixture.contains(kept, "after prune")
    fixture.append(2)
    fixture.contains([[*each, 5, 6] for each in kept], "after prune and append")


@check("PRUNED-01c", "pruned")
def positions_of_unknown_heads_raise(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 1)
    for head in subject.integers(-1, len(fixture.heads)):
        with raises("HeadOutOfRange"):
            fixture.cache.positions(head)


@check("PRUNED-02ab", "pruned")
def prune_keeps_the_largest_scores(subject: Subject) -> None:
    for sinks, recent, keep in (
        (0, 0, 4),
        (1, 0, 4),
        (0, 1, 4),
        (2, 1, 4),
        (2, 2, 4),
        (0, 4, 4),
        (3, 0, 4),
        (0, 0, 1),
        (1, 3, 7),
    ):
        fixture = PrunedFixture(subject, 8)
        scores = random_scores(subject, len(fixture.heads), 8)
        fixture.cache.prune(scores, keep, sinks, recent)
        want = []
        for row in scores.tolist():
            others = sorted(range(sinks, 8 - recent), key=row.__getitem__, reverse=True)[: keep - sinks - recent]
            want.append(sorted([*range(sinks), *others, *range(8 - recent, 8)]))
        fixture.contains(want, f"after prune to {keep} tokens with {sinks} sinks and {recent} recent ones")


@check("PRUNED-02a", "pruned")
def prune_again_keeps_the_first_and_last_stored_tokens(subject: Subject) -> None:
    """Positions 0 and 5 are evicted, so the first and the last stored tokens are at other positions."""
    for sinks, recent, scores in ((0, 1, [5.0, 4.0, 3.0]), (1, 0, [3.0, 4.0, 5.0]), (1, 1, [3.0, 5.0, 4.0])):
        fixture = PrunedFixture(subject, 6)
        stored = per_head(fixture.heads, [1, 2, 4], [2, 3, 4], [1, 3, 4])
        fixture.prune(per_head(fixture.heads, [*range(6)]), stored)
        fixture.cache.prune(np.array([scores] * len(fixture.heads), np.float32), 2, sinks, recent)
        want = [[first, last] for first, _, last in stored]
        fixture.contains(want, f"after a second prune with the scores {scores}, {sinks} sinks and {recent} recent tokens")


@check("PRUNED-02a", "pruned")
def prune_keeps_sinks_and_recent_tokens_with_the_smallest_scores(subject: Subject) -> None:
    for largest in (6e4, 6e4 if subject.dtype == "float16" else 3e38):
        fixture = PrunedFixture(subject, 5)
        scores = [-largest, largest, largest, largest, -largest]
        fixture.cache.prune(np.array([scores] * len(fixture.heads), np.float32), 3, 1, 1)
        fixture.contains(per_head(fixture.heads, [0, 1, 4]), f"after prune with the scores {scores}, a sink and a recent token")


@check("PRUNED-02b", "pruned")
def prune_keeps_the_earlier_of_equal_scores(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 20)
    scores = np.full((len(fixture.heads), 20), 2.0, np.float32)
    scores[:, 3], scores[:, 18] = 1.0, 3.0
    fixture.cache.prune(scores, 10)
    fixture.contains(per_head(fixture.heads, [0, 1, 2, 4, 5, 6, 7, 8, 9, 18]), "after prune with equal scores")
    fixture.cache.prune(np.array([[-0.0, 0.0] * 5] * len(fixture.heads), np.float32), 3)
    fixture.contains(per_head(fixture.heads, [0, 1, 2]), "after prune with the scores -0.0 and 0.0")


@check("PRUNED-02b", "pruned")
def prune_with_negative_scores(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 4)
    fixture.cache.prune(np.array([[-3.0, -1.0, -2.0, -4.0]] * len(fixture.heads), np.float32), 3, 0, 1)
    fixture.contains(per_head(fixture.heads, [1, 2, 3]), "after prune with negative scores")
    fixture.cache.prune(np.array([[-6e4, -1e3, 6e4]] * len(fixture.heads), np.float32), 2)
    fixture.contains(per_head(fixture.heads, [2, 3]), "after prune with small numbers")


@check("PRUNED-02b", "pruned")
def prune_compares_scores_in_float32(subject: Subject) -> None:
    """Scores that are equal in fewer than 24 bits of precision."""
    for scores in ([1.0, np.nextafter(np.float32(1), np.float32(2))], [2.0**24 - 1, 2.0**24]):
        fixture = PrunedFixture(subject, 2)
        fixture.cache.prune(np.array([scores] * len(fixture.heads), np.float32), 1)
        fixture.contains(per_head(fixture.heads, [1]), f"after prune with the scores {scores}")


@check("PRUNED-02c", "pruned")
def prune_of_few_tokens_changes_nothing(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 0)
    scores = np.zeros((len(fixture.heads), 0), np.float32)
    fixture.cache.prune(scores, 1)
    fixture.append(3)
    for keep in (3, 4, 100):
        fixture.cache.prune(random_scores(subject, len(fixture.heads), 3), keep, 1, 1)
        fixture.contains(per_head(fixture.heads, [0, 1, 2]), f"after prune of 3 tokens to {keep}")


@check("PRUNED-03ab", "pruned")
def heads_are_pruned_independently(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    for first, second in product(([0, 1], [2, 5], [3, 4]), repeat=2):
        fixture = PrunedFixture(subject, 6)
        everything = per_head(fixture.heads, [0, 1, 2, 3, 4, 5])
        fixture.prune(everything, per_head(fixture.heads, first, second))
        fixture.contains(per_head(fixture.heads, first, second), "after prune")
        fixture.append(1)
        both = per_head(fixture.heads, [*first, 6], [*second, 6])
        fixture.prune(both, per_head(fixture.heads, both[0][1:], both[1][:2]))
        fixture.contains(per_head(fixture.heads, both[0][1:], both[1][:2]), "after a second prune")


@check("PRUNED-04ab", "pruned")
def prune_keeps_positions(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 6)
    fixture.prune(per_head(fixture.heads, [*range(6)]), per_head(fixture.heads, [1, 4]))
    assert_equal(fixture.cache.length, 6, "length after 6 tokens and prune to 2")
    for count in range(1, 4):
        fixture.append(1)
        assert_equal(fixture.cache.length, 6 + count, "length after prune and append")
        fixture.contains(per_head(fixture.heads, [1, 4, *range(6, 6 + count)]), "after prune and append")


@check("PRUNED-05a", "pruned")
def attend_reads_stored_tokens_only(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 9)
    kept = per_head(fixture.heads, [0, 3, 4, 8], [1, 2, 6, 7])
    fixture.prune(per_head(fixture.heads, [*range(9)]), kept)
    _attends(fixture, kept, 2, causal=False)
    _attends(fixture, kept, 1, causal=False, stated=False)
    fixture.append(1)
    _attends(fixture, [[*each, 9] for each in kept], 1, causal=False)


@check("PRUNED-05b", "pruned")
def attend_with_a_causal_mask_compares_positions(subject: Subject) -> None:
    for kept in ([0, 7, 8, 9], [0, 2, 4, 9], [0, 1, 2, 3]):
        fixture = PrunedFixture(subject, 10)
        stored = per_head(fixture.heads, kept, [0, 5, 6, 8])
        fixture.prune(per_head(fixture.heads, [*range(10)]), stored)
        for count in (1, 3, 6, 10):
            _attends(fixture, stored, count, causal=True)


@check("PRUNED-05ab", "pruned")
def attend_ignores_nan_in_tokens_that_are_not_seen(subject: Subject) -> None:
    """In a token after the position of a causal query, and in an evicted one."""
    fixture = PrunedFixture(subject, 3)
    nan = np.full((1, *fixture.keys.shape[1:]), np.nan, np.float32)
    with may_raise("NonFinite"):
        fixture.cache.append(nan, nan)
        with suppress(NotOffered):
            query, scale = random_queries(subject, 2), default_scale(subject)
            want, bound = expected_attention(subject, query[:1], fixture.keys, fixture.values, scale=scale)
            got = np.asarray(fixture.cache.attend(query, scale, True))
            assert_within(got[:1], want, bound, "attention of a causal query before a token that contains NaN")
        kept = per_head(fixture.heads, [0, 1, 2])
        fixture.prune(per_head(fixture.heads, [0, 1, 2, 3]), kept)
        _attends(fixture, kept, 2, causal=False)


@check("PRUNED-05c", "pruned")
def attend_without_visible_tokens_returns_zeros(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 0)
    query = random_queries(subject, 2)
    assert_true(not np.any(fixture.cache.attend(query, 1.0)), "attention without tokens", "zeros", "other values")
    fixture.append(6)
    fixture.prune(per_head(fixture.heads, [*range(6)]), per_head(fixture.heads, [4, 5]))
    out = np.asarray(fixture.cache.attend(random_queries(subject, 4), 1.0, True))
    assert_true(not out[:2].any(), "attention of queries before the first stored token", "zeros", "other values")
    _attends(fixture, per_head(fixture.heads, [4, 5]), 4, causal=True)


def _attends(fixture: PrunedFixture, stored: list[list[int]], count: int, causal: bool, stated: bool = True) -> None:
    """Compare attention with that over the tokens at the positions `stored` of each head. stated: the call has a scale."""
    subject, length = fixture.subject, len(fixture.keys)
    scale = default_scale(subject) if stated else unstated_scale(subject)
    query = random_queries(subject, count)
    group = query.shape[1] // len(fixture.heads)
    got = np.asarray(fixture.cache.attend(*(query, scale, causal)[: 3 if causal else 2 if stated else 1]))
    for at, head in product(range(count), fixture.heads):
        seen = [position for position in stored[head] if not causal or position <= length - count + at]
        if not seen:
            continue
        of_head = slice(head * group, (head + 1) * group)
        keys, values = (part[seen, head : head + 1] for part in (fixture.keys, fixture.values))
        want, bound = expected_attention(subject, query[at : at + 1, of_head], keys, values, scale=scale)
        what = f"attention of query {at} of {count} in head {head}, which stores the positions {stored[head]}"
        assert_within(got[at : at + 1, of_head], want, bound, what)


@check("PRUNED-06ab", "pruned")
def append_counts_stored_tokens(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 0, max_tokens=5)
    most = fixture.cache.config["max_tokens"]
    fixture.append(most)
    for round in range(1, 4):
        with raises("CapacityExceeded"):
            fixture.cache.append(*random_pair(subject, 1))
        scores = random_scores(subject, len(fixture.heads), most)
        fixture.cache.prune(scores, most - 1)
        if subject.size("tokens", 2) == 2:
            with raises("CapacityExceeded"):
                fixture.cache.append(*random_pair(subject, 2))
        fixture.append(1)
        assert_equal(fixture.cache.length, most + round, "length of a full cache after prune and append")
        assert_equal(fixture.cache.stored_tokens, most, "stored_tokens of a full cache")
        fixture.look()


@check("PRUNED-06b", "pruned")
def positions_exceed_one_byte_in_a_small_cache(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 0, max_tokens=5)
    require_sizes(fixture.cache, max_tokens=2)
    stored = 0
    while len(fixture.keys) < 300:
        fixture.append(new := min(5, fixture.cache.config["max_tokens"]) - stored)
        fixture.cache.prune(np.array([range(stored + new)] * len(fixture.heads), np.float32), 1)
        stored = 1
    fixture.contains(per_head(fixture.heads, [len(fixture.keys) - 1]), f"after {len(fixture.keys)} tokens")
    assert_equal(fixture.cache.length, len(fixture.keys), "length")


@check("PRUNED-07abc", "pruned")
def prune_with_invalid_arguments_changes_nothing(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 5)
    heads, cache = len(fixture.heads), fixture.cache
    fixture.prune(per_head(fixture.heads, [*range(5)]), per_head(fixture.heads, [0, 2, 3, 4]))
    good = random_scores(subject, heads, 4)
    for count in (0, 3, 5):
        with raises("ShapeMismatch"):
            cache.prune(random_scores(subject, heads, count), 2)
    for shape in ((heads + 1, 4), (heads * 4,), (1, heads, 4)):
        with raises("ShapeMismatch"):
            cache.prune(np.zeros(shape, np.float32), 2)
    for value, place in product((np.nan, np.inf, -np.inf), ((0, 0), (heads - 1, 3))):
        scores = good.copy()
        scores[place] = value
        with raises("NonFinite"):
            cache.prune(scores, 2)
    negative = ((-1,), (2, -1), (2, 0, -1)) if subject.integers(-1) else ()
    for arguments in ((0,), (2, 3), (2, 0, 3), (2, 1, 2), *negative):
        with raises("PositionOutOfRange"):
            cache.prune(good, *arguments)
    fixture.contains(per_head(fixture.heads, [0, 2, 3, 4]), "after prune with invalid arguments")


@check("PRUNED-08ab", "pruned")
def truncate_removes_tokens_that_all_heads_store(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 8)
    stored = per_head(fixture.heads, [0, 1, 5, 6, 7], [2, 3, 4, 6, 7])
    fixture.prune(per_head(fixture.heads, [*range(8)]), stored)
    heads = len(fixture.heads)
    fixture.cache.truncate(7)
    fixture.contains([each[:4] for each in stored], "after truncate to 7")
    with raises("NotTruncatable"):  # a head has evicted position 4 or 5
        fixture.cache.truncate(4 if heads == 1 else 5)
    fixture.contains([each[:4] for each in stored], "after a rejected truncate")
    fixture.cache.truncate(6)
    fixture.keys, fixture.values = fixture.keys[:6], fixture.values[:6]
    fixture.append(2)
    fixture.contains([[*each[:3], 6, 7] for each in stored], "after truncate to 6 and append")


@check("PRUNED-08c", "pruned")
def truncate_past_the_end_raises(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 3)
    for length in subject.integers(-1, 4):
        with raises("PositionOutOfRange"):
            fixture.cache.truncate(length)
    fixture.contains(per_head(fixture.heads, [0, 1, 2]), "after a rejected truncate")
    fixture.cache.truncate(3)
    fixture.cache.truncate(0)
    assert_equal(fixture.cache.length, 0, "length after truncate to 0")


@check("PRUNED-09", "pruned")
def clear_removes_all_tokens(subject: Subject) -> None:
    fixture = PrunedFixture(subject, 4)
    fixture.prune(per_head(fixture.heads, [*range(4)]), per_head(fixture.heads, [0, 3]))
    fixture.cache.clear()
    assert_equal((fixture.cache.length, fixture.cache.stored_tokens), (0, 0), "length and stored_tokens after clear")
    fixture.keys, fixture.values = fixture.keys[:0], fixture.values[:0]
    fixture.append(2)
    fixture.contains(per_head(fixture.heads, [0, 1]), "after clear and append")
