"""Checks of the chapter SPARSE. Index keys, index queries and weights are small integers, so that index scores are exact."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import different_size, random_pair, random_tokens, require_sizes
from kvref_conformance.testlib.law_adapter import unknown_ids
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session


class SparseFixture(Session):
    """A cache with one sequence, whose tokens have known keys, values and index keys."""

    def __init__(self, subject: Subject, scores: Sequence[int] = (), **sizes: Any) -> None:
        """scores: the index scores of the first tokens, for `query`."""
        super().__init__(subject, **sizes)
        self.top_k, self.index_dim = self.cache.config["top_k"], self.cache.config["index_dim"]
        self.sequence = int(self.cache.create())
        self.keys, self.values = random_pair(subject, 0)
        self.append(self.sequence, scores)

    def index_keys(self, scores: Sequence[int]) -> NDArray:
        """Index keys with these index scores, for `query`. Scores of at most 0 are all 0."""
        keys = self.subject.rng.integers(-3, 4, (len(scores), self.index_dim)).astype(np.float32)
        keys[:, 0] = scores
        return keys

    def append(self, sequence: int, scores: Sequence[int]) -> tuple[NDArray, NDArray]:
        """Append tokens with these index scores, and return their keys and values."""
        new, index_keys = random_pair(self.subject, len(scores)), self.index_keys(scores)
        self._append(sequence, *new, index_keys)
        if sequence == self.sequence:
            self.keys, self.values = (np.concatenate(parts) for parts in zip((self.keys, self.values), new, strict=True))
        return new

    def append_number(self, value: float, count: int) -> None:
        """Append tokens all of whose numbers are `value`, NaN or infinite, if the cache accepts them."""
        rows = *random_pair(self.subject, count), self.index_keys([0] * count)
        with may_raise("NonFinite"):
            self._append(self.sequence, *(np.full_like(part, value) for part in rows))

    def append_index_keys(self, index_keys: NDArray) -> None:
        """Append tokens with these index keys to `sequence`."""
        self._append(self.sequence, *random_pair(self.subject, len(index_keys)), index_keys)

    def _append(self, sequence: int, *rows: NDArray) -> None:
        step = self.subject.size("tokens", max(1, count := len(rows[0])))
        for start in range(0, count, step):
            self.cache.append(sequence, *(part[start : start + step] for part in rows))

    def query(self, count: int = 1) -> tuple[NDArray, NDArray]:
        """Index queries and weights for which the index score of a token is the first number of its index key."""
        queries = np.zeros((count, 1, self.index_dim), np.float32)
        queries[:, :, 0] = 1.0
        return queries, np.ones((count, 1), np.float32)

    def selects(self, sequence: int, *rows: Sequence[int], causal: bool = False, what: str) -> None:
        """Raise ClauseViolation unless the queries choose these positions, one list per query."""
        want = np.full((len(rows), self.top_k), -1)
        for row, chosen in enumerate(rows):
            want[row, : len(chosen)] = chosen
        arguments = (sequence, *self.query(len(rows)), causal)[: 4 if causal else 3]
        assert_equal(np.asarray(self.cache.select(*arguments)).tolist(), want.tolist(), f"selection {what}")


def best(scores: Sequence[float], count: int) -> list[int]:
    """The positions of the largest scores, ascending. No two scores are equal."""
    return sorted(sorted(range(len(scores)), key=lambda at: -scores[at])[:count])


def assert_scores(got: Sequence[int], scores: Sequence[int], count: int, what: str) -> None:
    """Raise ClauseViolation unless the positions `got` have the `count` largest of the scores, some of which can be equal."""
    found = sorted((scores[at] for at in got if 0 <= at < len(scores)), reverse=True)
    assert_equal(found, sorted(scores, reverse=True)[:count], f"the scores of the {what}")


def random_integers(subject: Subject, most: int, *shape: int) -> NDArray:
    return subject.rng.integers(-most, most + 1, shape).astype(np.float32)


@check("SPARSE-01ab", "sparse")
def append_stores_three_rows_per_token(subject: Subject) -> None:
    fixture = SparseFixture(subject)
    cache, index_keys = fixture.cache, random_integers(subject, 9, 9, fixture.index_dim)
    keys, values = random_pair(subject, 9)
    step = subject.size("tokens", 4)
    for start in range(0, 9, step):
        cache.append(fixture.sequence, *(part[start : start + step] for part in (keys, values, index_keys)))
    assert_pair(cache.read(fixture.sequence), (keys, values), "keys and values after append")
    assert_same(cache.read_index(fixture.sequence), index_keys, "index keys after append")
    assert_equal(cache.length(fixture.sequence), 9, "length after append of 9 tokens")


@check("SPARSE-01c", "sparse")
def append_of_uneven_arrays_changes_nothing(subject: Subject) -> None:
    fixture = SparseFixture(subject, [3, 1])
    (keys, values), index_keys = random_pair(subject, 2), fixture.index_keys([5, 6])
    wrong = [index_keys[:1], index_keys[:0], np.zeros((2, fixture.index_dim + 1), np.float32), index_keys[:, None], index_keys[0]]
    wrong += [np.zeros((2, different_size(fixture.index_dim)), np.float32)]
    if subject.size("tokens", 3) == 3:
        wrong.append(np.zeros((3, fixture.index_dim), np.float32))
    if subject.size("tokens", 2) == 2:
        for each in wrong:
            with raises("ShapeMismatch"):
                fixture.cache.append(fixture.sequence, keys, values, each)
    for count in (0, 1):
        with raises("ShapeMismatch"):
            fixture.cache.append(fixture.sequence, keys[:count], values[: 1 - count], index_keys[:1])
    fixture.look()
    fixture.append(fixture.sequence, [4])
    fixture.look()


@check("SPARSE-02ac", "sparse")
def select_chooses_the_largest_scores(subject: Subject) -> None:
    for count in (7, 12, 20):
        fixture = SparseFixture(subject, scores := [int(each) for each in subject.rng.permutation(count)])
        if count > fixture.top_k:
            fixture.selects(fixture.sequence, best(scores, fixture.top_k), what=f"among {count} tokens")


@check("SPARSE-02a", "sparse")
def select_adds_the_scores_of_heads(subject: Subject) -> None:
    fixture = SparseFixture(subject)
    index_keys = random_integers(subject, 5, 15, fixture.index_dim)
    fixture.append_index_keys(index_keys)
    for heads in (1, 2, 5):
        queries, weights = random_integers(subject, 4, 3, heads, fixture.index_dim), random_integers(subject, 3, 3, heads)
        got = np.asarray(fixture.cache.select(fixture.sequence, queries, weights))
        for row in range(3):
            products = np.maximum(queries[row].astype(int) @ index_keys.T.astype(int), 0)
            scores = (weights[row].astype(int) @ products).tolist()
            what = f"selection of a query with {heads} heads and the weights {weights[row].tolist()}"
            assert_scores(got[row].tolist(), scores, fixture.top_k, what)


@check("SPARSE-02a", "sparse")
def select_compares_negative_scores(subject: Subject) -> None:
    fixture = SparseFixture(subject, scores := [5, 1, 4, 2, 3, 9, 7, 8, 6])
    queries, weights = fixture.query()
    got = np.asarray(fixture.cache.select(fixture.sequence, queries, -weights))
    chosen = best([-score for score in scores], fixture.top_k)
    want = chosen + [-1] * (fixture.top_k - len(chosen))
    assert_equal(got[0].tolist(), want, "selection with a negative weight")


@check("SPARSE-02bc", "sparse")
def select_among_few_tokens_chooses_all(subject: Subject) -> None:
    for count in range(8):
        fixture = SparseFixture(subject, range(count, 0, -1))
        if count <= fixture.top_k:
            fixture.selects(fixture.sequence, [*range(count)], what=f"among {count} tokens")


@check("SPARSE-02a", "sparse")
def select_among_equal_scores(subject: Subject) -> None:
    for scores in ([0, -1, 2, 0, -5, 2, 2, 0, 1, 2, -3, 0, 2, 1], [-1] * 18):
        fixture = SparseFixture(subject, scores)
        got = np.asarray(fixture.cache.select(fixture.sequence, *fixture.query()))[0].tolist()
        assert_scores(got, [max(0, score) for score in scores], fixture.top_k, "selection among equal scores")


@check("SPARSE-02d", "sparse")
def select_of_random_numbers(subject: Subject) -> None:
    fixture = SparseFixture(subject)
    fixture.append_index_keys(random_tokens(subject, 20, 1, fixture.index_dim)[:, 0])
    queries = random_tokens(subject, 4, 2, fixture.index_dim)
    weights = random_tokens(subject, 4, 1, 2)[:, 0]
    fixture.cache.select(fixture.sequence, queries, weights)  # the model computes the exact scores and the bound


@check("SPARSE-02d", "sparse")
def select_distinguishes_close_scores(subject: Subject) -> None:
    """Scores that differ by 4E, so that only one choice is within the bound. As float16 or bfloat16, nearly all are equal.

    All numbers are positive, so that E is (D + H + 1) 2**-23 times the largest score. An index key is the first one multiplied by
    1 + rank * (D + H + 1) 2**-21, and rounded to float32, which changes a score by at most E / 8.
    """
    if subject.dtype != "float32":
        raise NotOffered(f"arrays of float32, where its limits say {subject.dtype}")
    fixture, heads = SparseFixture(subject), 2
    ranks = [int(each) for each in subject.rng.permutation(20)]
    queries, weights, first = (
        subject.rng.uniform(1, 2, shape).astype(np.float32)
        for shape in ((4, heads, fixture.index_dim), (4, heads), (1, fixture.index_dim))
    )
    factors = 1 + np.array(ranks)[:, None] * (fixture.index_dim + heads + 1) * 2.0**-21
    fixture.append_index_keys((first * factors).astype(np.float32))
    got = np.asarray(fixture.cache.select(fixture.sequence, queries, weights))
    for row in got[:, : len(ranks)].tolist():
        assert_equal(row, best(ranks, fixture.top_k), "selection among scores that differ by 4E")


@check("SPARSE-03", "sparse")
def causal_select_ignores_later_tokens(subject: Subject) -> None:
    fixture = SparseFixture(subject, scores := [3, 5, 1, 4, 2, 6, 8, 7, 9, 11, 10, 12])
    for count in (1, 4, 12):
        rows = [best(scores[: 12 - count + 1 + row], fixture.top_k) for row in range(count)]
        fixture.selects(fixture.sequence, *rows, causal=True, what=f"of {count} causal queries")
    fixture = SparseFixture(subject, [2, 1])
    fixture.selects(fixture.sequence, [], [0], [0, 1][: fixture.top_k], causal=True, what="of 3 causal queries after 2 tokens")


@check("SPARSE-03", "sparse")
def causal_select_with_very_negative_scores(subject: Subject) -> None:
    """Tokens that a query sees have scores far below 0, also below large negative numbers that hide tokens, as -1e9."""
    fixture = SparseFixture(subject, scores := list(range(12, 0, -1)))
    queries, weights = fixture.query(2)
    weight = np.float32(-(2.0**12) if subject.dtype == "float16" else -(2.0**100))
    chosen = np.asarray(fixture.cache.select(fixture.sequence, queries, weight * weights, True))[0]
    want = best([-score for score in scores[:11]], fixture.top_k)
    assert_equal(chosen.tolist(), want + [-1] * (fixture.top_k - len(want)), "selection of a causal query with negative scores")


@check("SPARSE-04a", "sparse")
def attend_reads_chosen_tokens(subject: Subject) -> None:
    scores = [int(each) for each in subject.rng.permutation(15)]
    fixture = SparseFixture(subject, scores)
    for count, causal in ((2, False), (1, True), (4, True), (15, True)):
        views = [best(scores[: 15 - count + 1 + row] if causal else scores, fixture.top_k) for row in range(count)]
        _attends(fixture, views, causal)


@check("SPARSE-04b", "sparse")
def attend_ignores_nan_in_other_tokens(subject: Subject) -> None:
    fixture = SparseFixture(subject, [9])
    nan = np.full((1, *fixture.keys.shape[1:]), np.nan, np.float32)
    with may_raise("NonFinite"):
        fixture.cache.append(fixture.sequence, nan, nan, fixture.index_keys([1]))
        fixture.keys, fixture.values = np.concatenate([fixture.keys, nan]), np.concatenate([fixture.values, nan])
        scores = [9, 1, *range(10, 18)]
        fixture.append(fixture.sequence, scores[2:])
        chosen = best(scores, fixture.top_k)
        if 1 not in chosen:
            _attends(fixture, [chosen], causal=False)


@check("SPARSE-04b", "sparse")
def causal_attend_ignores_nan_in_later_tokens(subject: Subject) -> None:
    fixture = SparseFixture(subject, scores := [*range(10, 18)])
    nan = np.full((1, *fixture.keys.shape[1:]), np.nan, np.float32)
    with may_raise("NonFinite"):
        fixture.cache.append(fixture.sequence, nan, nan, fixture.index_keys([1]))
        fixture.keys, fixture.values = np.concatenate([fixture.keys, nan]), np.concatenate([fixture.values, nan])
        if len(scores) >= fixture.top_k:  # the last query does not choose it either
            _attends(fixture, [best(scores, fixture.top_k)] * 2, causal=True)


@check("SPARSE-04c", "sparse")
def attend_without_visible_tokens_returns_zeros(subject: Subject) -> None:
    fixture = SparseFixture(subject)
    _attends(fixture, [[]] * 2, causal=False)
    _attends(fixture, [[]] * 3, causal=True)
    fixture.append(fixture.sequence, [2, 1])
    _attends(fixture, [[], [0], [0, 1][: fixture.top_k]], causal=True)


def _attends(fixture: SparseFixture, views: Sequence[Sequence[int]], causal: bool) -> None:
    """Compare attention with that over the tokens at these positions, one list per query."""
    query, scale = random_queries(fixture.subject, len(views)), default_scale(fixture.subject)
    arguments = (fixture.sequence, query, *fixture.query(len(views)), scale, causal)[: 6 if causal else 5]
    got = np.asarray(fixture.cache.attend(*arguments))
    for row, view in enumerate(views):
        what = f"attention of query {row} of {len(views)}, which chooses the positions {list(view)}"
        if not view:
            assert_within(got[row], np.zeros_like(query[row]), np.zeros_like(query[row]), what)
            continue
        keys, values = fixture.keys[list(view)], fixture.values[list(view)]
        want, bound = expected_attention(fixture.subject, query[row : row + 1], keys, values, scale=scale)
        assert_within(got[row : row + 1], want, bound, what)


@check("SPARSE-04d", "sparse")
def select_and_attend_with_uneven_arrays_raise(subject: Subject) -> None:
    fixture = SparseFixture(subject, [1, 2, 3])
    (queries, weights), cache, sequence = fixture.query(2), fixture.cache, fixture.sequence
    wide = np.zeros((2, 1, fixture.index_dim + 1), np.float32)
    for wrong in (
        (queries[:1], weights),
        (queries, weights[:1]),
        (queries, weights[:, 0]),
        (queries[0], weights),
        (wide, weights),
    ):
        with raises("ShapeMismatch"):
            cache.select(sequence, *wrong)
        with raises("ShapeMismatch"):
            cache.attend(sequence, random_queries(subject, 2), *wrong)
    for count in (1, 3):
        with raises("ShapeMismatch"):
            cache.attend(sequence, random_queries(subject, count), queries, weights)


@check("SPARSE-05ab", "sparse")
def forks_do_not_share_new_index_keys(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for count in (1, 3, 4, 6, 8):
        fixture = SparseFixture(subject, [*range(count)])
        sequence, cache = fixture.sequence, fixture.cache
        child = int(cache.fork(sequence))
        fixture.look()
        fixture.append(child, [20, 21])
        fixture.append(sequence, [10, 11, 12])
        fixture.look()
        mine = [*range(count), 10, 11, 12]
        fixture.selects(sequence, best(mine, fixture.top_k), what="after a fork")
        fixture.selects(child, best([*mine[:count], 20, 21], fixture.top_k), what="of a fork")
        cache.truncate(child, count - 1)
        fixture.append(child, [30])
        fixture.look()
        cache.drop(sequence)
        fixture.append(child, [31])
        fixture.selects(child, best([*range(count - 1), 30, 31], fixture.top_k), what="of a fork after its parent was dropped")
        fixture.look()


@check("SPARSE-06ab", "sparse")
def truncate_and_drop_remove_tokens(subject: Subject) -> None:
    fixture = SparseFixture(subject, [*range(10)])
    cache, sequence = fixture.cache, fixture.sequence
    for length in (8, 8, 5, 0):
        cache.truncate(sequence, length)
        assert_equal(cache.length(sequence), length, f"length after truncate to {length}")
        fixture.look()
    fixture.append(sequence, [1, 2])
    for length in subject.integers(-1, 3):
        with raises("PositionOutOfRange"):
            cache.truncate(sequence, length)
    fixture.look()
    cache.drop(sequence)
    for name, arguments in (("length", ()), ("read_index", ()), ("truncate", (0,)), ("select", fixture.query()), ("offload", ())):
        with raises("SequenceNotFound"):
            getattr(cache, name)(sequence, *arguments)


@check("SPARSE-06b", "sparse")
def ids_of_dropped_sequences_are_not_reused(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = SparseFixture(subject, [1, 2])
    fixture.require_new_ids(fixture.cache.create)
    fixture.require_new_ids(lambda: fixture.cache.fork(fixture.sequence))


@check("SPARSE-06b", "sparse")
def restore_does_not_reuse_ids(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = SparseFixture(subject, [1, 2])
    handle = fixture.cache.offload(fixture.sequence)
    fixture.require_new_ids(lambda: fixture.cache.restore(handle))


@check("SPARSE-06c", "sparse")
def removed_index_keys_are_not_chosen(subject: Subject) -> None:
    blocks = -(-20 // subject.size("block_size", 4))
    fixture = SparseFixture(subject, [50 + each for each in range(20)], num_blocks=blocks)
    cache, sequence = fixture.cache, fixture.sequence
    cache.truncate(sequence, 0)
    scores = [3, 1, 2, 5, 4, 7, 6, 9, 8]
    fixture.append(sequence, scores)
    fixture.selects(sequence, best(scores, fixture.top_k), what="after truncate and append")
    cache.drop(sequence)
    other = int(cache.create())
    fixture.append(other, scores[::-1])
    fixture.selects(other, best(scores[::-1], fixture.top_k), what="in blocks of a dropped sequence")
    fixture.append(other, [60])
    cache.truncate(other, len(scores))
    fixture.selects(other, best(scores[::-1], fixture.top_k), what="after truncate")


@check("SPARSE-06c", "sparse")
def select_ignores_nan_and_infinity_in_removed_tokens(subject: Subject) -> None:
    for fixture, scores, what in _sequences_after_removed_tokens(subject):
        fixture.selects(fixture.sequence, best(scores, fixture.top_k), what=what)


@check("LAW-05c", "sparse")
def attend_ignores_nan_and_infinity_in_removed_tokens(subject: Subject) -> None:
    for fixture, scores, _ in _sequences_after_removed_tokens(subject):
        _attends(fixture, [best(scores, fixture.top_k)], causal=False)


def _sequences_after_removed_tokens(subject: Subject) -> Iterator[tuple[SparseFixture, list[int], str]]:
    """A fixture's sequence, the index scores of its tokens, and which tokens with NaN or infinities were removed before."""
    for value in (np.nan, np.inf, -np.inf):
        fixture = SparseFixture(subject)
        cache, scores = fixture.cache, [3, 1, 2, 5, 4, 7, 6, 9, 8]
        fixture.append_number(value, cache.config["num_blocks"] * cache.config["block_size"])
        cache.drop(fixture.sequence)
        fixture.sequence = int(cache.create())
        fixture.append(fixture.sequence, scores)
        yield fixture, scores, f"in memory of a dropped sequence whose numbers were all {value}"
        for length in (9, 8, 7):
            fixture.append_number(value, 2)
            cache.truncate(fixture.sequence, length)
            yield fixture, scores[:length], f"after truncate of tokens whose numbers were all {value}"


@check("SPARSE-07ab", "sparse")
def restored_sequences_choose_the_same_tokens(subject: Subject) -> None:
    scores = [int(each) for each in subject.rng.permutation(11)]
    fixture = SparseFixture(subject, scores)
    cache, sequence = fixture.cache, fixture.sequence
    handle = cache.offload(sequence)
    fixture.look()
    cache.truncate(sequence, 6)
    fixture.append(sequence, [40, 41])
    cache.drop(sequence)
    other = int(cache.create())
    fixture.append(other, [30] * 9)  # in the blocks of the dropped sequence
    cache.drop(other)
    for round in range(2):
        restored = int(cache.restore(handle))
        fixture.selects(restored, best(scores, fixture.top_k), what=f"of restored sequence {round}")
        fixture.look()
        fixture.append(restored, [20])
        cache.truncate(restored, 11)
        cache.drop(restored)
    empty = int(cache.create())
    assert_equal(cache.length(int(cache.restore(cache.offload(empty)))), 0, "length of a restored empty sequence")


@check("SPARSE-07c", "sparse")
def discarded_copies_are_unknown(subject: Subject) -> None:
    fixture = SparseFixture(subject, [3, 1, 2])
    cache = fixture.cache
    first, second = (int(cache.offload(fixture.sequence)) for _ in range(2))
    cache.discard(first)
    for handle in (first, *(each for each in unknown_ids(subject, second) if each != first)):
        for name in ("restore", "discard"):
            with raises("KeyNotFound"):
                getattr(cache, name)(handle)
    handles = [first, second]
    for _ in range(3):
        handles.append(int(cache.offload(fixture.sequence)))
        cache.discard(handles[-1])  # the newest one
    assert_equal(len(set(handles)), len(handles), f"number of different handles among {handles}")
    with raises("KeyNotFound"):
        cache.restore(first)
    fixture.selects(int(cache.restore(second)), [0, 1, 2][: fixture.top_k], what="of a restored sequence")
    fixture.look()


@check("SPARSE-08acd", "sparse")
def blocks_are_counted_once(subject: Subject) -> None:
    fixture = SparseFixture(subject, num_blocks=5)
    cache, sequence, size = fixture.cache, fixture.sequence, fixture.cache.config["block_size"]
    total = cache.config["num_blocks"]
    for count in range(1, 2 * size + 2):
        fixture.append(sequence, [count])
        assert_equal(cache.num_free_blocks, total - -(-count // size), f"num_free_blocks after {count} tokens")
    handle = cache.offload(sequence)
    fixture.look("num_free_blocks")
    room = total * size - (2 * size + 1)
    if subject.size("tokens", room + 1) == room + 1:
        with raises("OutOfBlocks"):
            cache.append(sequence, *random_pair(subject, room + 1), fixture.index_keys([1] * (room + 1)))
        fixture.look()
    for _ in range(total):
        with may_raise("OutOfBlocks"):
            cache.restore(handle)
    fixture.look()
    fixture.look("num_free_blocks")
    cache.drop(sequence)
    cache.restore(handle)
    fixture.look("num_free_blocks")


@check("SPARSE-08bc", "sparse")
def related_sequences_share_blocks_or_not(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = SparseFixture(subject, [*range(9)])
    cache, sequence = fixture.cache, fixture.sequence
    child = int(cache.fork(sequence))
    fixture.look("num_free_blocks")
    fixture.append(child, [1] * 5)
    fixture.look("num_free_blocks")
    cache.drop(sequence)
    fixture.look("num_free_blocks")
    cache.drop(child)
    assert_equal(cache.num_free_blocks, cache.config["num_blocks"], "num_free_blocks after all sequences were dropped")


# Checks of LAW-18: selections as large as those of models.


class ManyTokens(SparseFixture):
    """A cache with many tokens. An index key has its score as two digits of base 256, which bfloat16 represents exactly."""

    def index_keys(self, scores: Sequence[int]) -> NDArray:
        require_sizes(self.cache, index_dim=2)
        keys = super().index_keys(scores)
        keys[:, 0], keys[:, 1] = np.divmod(np.asarray(scores, np.float32), 256)
        return keys

    def query(self, count: int = 1) -> tuple[NDArray, NDArray]:
        queries, weights = super().query(count)
        queries[:, :, :2] = 256, 1
        return queries, weights


@check("LAW-18", "sparse")
def select_and_attend_choose_hundreds_of_tokens(subject: Subject) -> None:
    _choose_many(subject, top_k=130, counts=(129, 131, 400))


@check("LAW-18", "sparse", real=True)
def select_and_attend_choose_as_many_tokens_as_models(subject: Subject) -> None:
    _choose_many(subject, top_k=2048, counts=(2047, 2049, 4500))


def _choose_many(subject: Subject, top_k: int, counts: Sequence[int]) -> None:
    for count in (affordable_tokens(subject, each, len(counts)) for each in counts):
        scores = [int(each) for each in subject.rng.permutation(count)]
        fixture = ManyTokens(subject, top_k=top_k, index_dim=4, num_blocks=-(-count // 64), block_size=64)
        fixture.append(fixture.sequence, scores)
        seen = [scores[: count - 2 + row] for row in range(3)]
        fixture.selects(fixture.sequence, best(scores, fixture.top_k), what=f"among {count} tokens")
        _attends(fixture, [best(each, fixture.top_k) for each in seen], causal=True)
