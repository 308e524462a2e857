"""The latent cache: its bound compared with exact arithmetic, errors that the bound must reject, and the bytes of its records."""

import re
from fractions import Fraction

import numpy as np
import pytest

import kvref
from kvref import errors
from kvref.latent import LatentCache, LatentConfig, expanded, latent_bound, record_of
from kvref_conformance.oracle.formats import mla as oracle

BACKENDS = ("reference", "reference:array_api_strict", "numpy", pytest.param("torch", marks=pytest.mark.torch))


def cache_of(rows, rank, name="reference", dtype="float32"):
    cache = LatentCache(LatentConfig(rank, rows.shape[1] - rank, max(1, len(rows)), dtype), kvref.backend(name))
    cache.append(rows[:, :rank], rows[:, rank:])
    return cache


def f32(array):
    return np.asarray(array, np.float32)


def normal(seed):
    rng = np.random.default_rng(seed)
    queries, heads, tokens, nope, rank, rope, value = (int(n) for n in rng.integers(1, 9, 7))
    rank *= int(rng.integers(1, 20))
    shapes = (queries, heads, nope + rope), (tokens, rank + rope), (heads, nope, rank), (heads, value, rank)
    loud = 2.0 ** rng.integers(-3, 4)
    return [f32(rng.normal(size=shape) * (loud if at == 1 else 1)) for at, shape in enumerate(shapes)]


def cancelling(seed):
    """Large products of both signs whose scores are nearly 0."""
    query, rows, up_keys, up_values = normal(seed)
    up_keys[:, :, 1::2] = -up_keys[:, :, : up_keys.shape[2] - 1 : 2][:, :, : up_keys[:, :, 1::2].shape[2]]
    rank = up_keys.shape[2]
    rows[:, 1:rank:2] = rows[:, 0 : rank - 1 : 2][:, : rows[:, 1:rank:2].shape[1]] * f32(1 + 2.0**-12)
    return query, rows * f32(8), up_keys, up_values


def equal_scores(seed):
    query, rows, up_keys, up_values = normal(seed)
    return query, np.repeat(rows[:1], 300, axis=0), up_keys, up_values


def tiny(seed):
    """Products of two numbers that underflow, and products of three that do not."""
    query, rows, up_keys, up_values = normal(seed)
    return query * f32(1e-30), rows * f32(1e30), up_keys * f32(1e-12), up_values * f32(1e-30)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("made", [normal, cancelling, equal_scores, tiny])
@pytest.mark.parametrize("causal", [False, True])
def test_absorbed_and_expanded_lie_within_one_bound_of_exact(name, made, causal):
    for seed in range(12):
        query, rows, up_keys, up_values = made(seed)
        backend, scale = kvref.backend(name), (0.3, 1.7)[seed % 2]
        cache = cache_of(rows, up_keys.shape[2], name)
        want, bound = oracle.attention(query, rows, up_keys, up_values, scale=scale, causal=causal)
        absorbed = cache.attend(query, up_keys, up_values, scale=scale, causal=causal)
        long_way = expanded(query, cache.read(), up_keys, up_values, scale=scale, causal=causal, backend=backend)
        for got in (absorbed, long_way):
            assert (np.abs(backend.to_numpy(got).astype(np.float64) - want) <= bound).all()


def test_both_bounds_are_one_formula():
    for seed in range(20):
        query, rows, up_keys, up_values = (each.astype(np.float64) for each in normal(seed))
        _, want = oracle.attention(query, rows, up_keys, up_values, scale=0.3)
        for head in range(query.shape[1]):
            got = latent_bound(query[:, head], rows, up_keys[head], up_values[head], 0.3)
            np.testing.assert_allclose(got, want[:, head], rtol=1e-9)


def test_the_oracle_is_exact_where_fractions_are():
    """With one token, and with two tokens of equal scores, attention needs no exponential."""
    rng = np.random.default_rng(3)
    query, up_keys, up_values = (f32(rng.normal(size=shape)) for shape in ((1, 1, 5), (1, 3, 7), (1, 4, 7)))
    row = f32(rng.normal(size=(1, 9)))
    for rows in (row, np.repeat(row, 2, axis=0), np.concatenate([row, row * np.r_[np.zeros(7), np.ones(2)].astype(np.float32)])):
        # then only the rope part, which is equal, contributes to the scores
        up = np.zeros_like(up_keys) if len(rows) == 2 else up_keys
        got, bound = oracle.attention(query, rows, up, up_values, scale=0.5)
        for d in range(4):
            products = [Fraction(float(up_values[0, d, j])) * Fraction(float(c[j])) for c in rows for j in range(7)]
            assert abs(Fraction(float(got[0, 0, d])) - sum(products) / len(rows)) < Fraction(1, 2**48)
        assert (bound > 0).all()


def scores_by_fractions(query, rows, up_keys, scale):
    """Exact scores [tokens] as fractions, for one query and head."""
    q, a = ([[Fraction(float(x)) for x in row] for row in np.atleast_2d(part)] for part in (query, up_keys))
    found = []
    for row in rows:
        c = [Fraction(float(x)) for x in row]
        nope = sum(q[0][i] * a[i][j] * c[j] for i in range(len(a)) for j in range(len(a[0])))
        rope = sum(x * y for x, y in zip(q[0][len(a) :], c[len(a[0]) :], strict=True))
        found.append(Fraction(scale) * (nope + rope))
    return found


def test_float32_scores_lie_within_the_part_of_the_bound_that_is_theirs():
    """Products added in float32 in each order, compared with exact arithmetic."""
    rng, u = np.random.default_rng(5), 2.0**-24
    for _ in range(40):
        nope, rank, rope = (int(n) for n in rng.integers(1, 12, 3))
        q, row, a = f32(rng.normal(size=nope + rope)), f32(rng.normal(size=rank + rope)), f32(rng.normal(size=(nope, rank)))
        (want,) = scores_by_fractions(q, row[None], a, 0.75)
        absorbed = np.concatenate([np.array([_sum(q[:nope] * a[:, j]) for j in range(rank)]), q[nope:]])
        key = np.concatenate([np.array([_sum(a[i] * row[:rank]) for i in range(nope)]), row[rank:]])
        k = nope + rank + rope + 1
        products = np.abs(q[:nope]) @ np.abs(a) @ np.abs(row[:rank]) + np.abs(q[nope:]) @ np.abs(row[rank:])
        bound = 0.75 * k * u / (1 - k * u) * float(products.astype(np.float64))
        for got in (_sum(absorbed * row), _sum(q * key)):
            assert abs(Fraction(float(got * np.float32(0.75))) - want) <= Fraction(bound)


def _sum(products):
    total = np.float32(0)
    for each in products:
        total = np.float32(total + each)
    return total


def positive(heads=2, tokens=9, nope=128, rank=512, rope=64, value=8):
    rng = np.random.default_rng(7)
    shapes = (1, heads, nope + rope), (tokens, rank + rope), (heads, nope, rank), (heads, value, rank)
    return [f32(rng.uniform(0.5, 1.5, size=shape)) for shape in shapes]


def mixed(heads=2, tokens=9, nope=128, rank=512, rope=64):
    """Like the judge's production sizes: each number of a head's key and value depends on a few numbers of the latent row."""
    rng = np.random.default_rng(11)
    query, rows = rng.normal(size=(1, heads, nope + rope)), rng.normal(size=(tokens, rank + rope))
    up_keys, up_values = (np.zeros((heads, nope, rank)) for _ in range(2))
    for part in (up_keys, up_values):
        for head in range(heads):
            for at, j in enumerate(rng.permutation(rank)):
                part[head, at % nope, j] = rng.uniform(0.5, 1.5) * rng.choice((-1, 1))
    return [f32(each) for each in (query, rows, up_keys, up_values)]


def in_half(rows, matrix):
    """A matrix product accumulated in float16."""
    found = np.zeros((len(rows), matrix.shape[1]), np.float16)
    for at in range(matrix.shape[0]):
        found += np.float16(rows[:, at : at + 1]) * np.float16(matrix[at])
    return f32(found)


WRONG = {
    "without the rope part": lambda q, c, a, b: (q * np.r_[np.ones(128), np.zeros(64)], c, a, b),
    "the keys of the other head": lambda q, c, a, b: (q, c, a[::-1], b),
    "the values of the other head": lambda q, c, a, b: (q, c, a, b[::-1]),
    "a token less": lambda q, c, a, b: (q, c[:-1], a, b),
    "another token twice": lambda q, c, a, b: (q, np.r_[c[:-1], c[:1]], a, b),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_bound_lets_no_mistake_through_at_real_sizes(wrong):
    given, scale = mixed(), 0.05
    want, bound = oracle.attention(*given, scale=scale)
    got, _ = oracle.attention(*WRONG[wrong](*given), scale=scale)
    assert (np.abs(got - want) > 2 * bound).any()


def test_the_bound_lets_no_half_precision_and_no_other_part_of_the_row_through():
    query, rows, up_keys, up_values = positive()
    scale = 8 / (128 * 512)
    want, bound = oracle.attention(query, rows, up_keys, up_values, scale=scale)
    weights, _ = oracle.attention(query, rows, up_keys, np.repeat(np.eye(512)[None], 2, axis=0), scale=scale)
    assert (np.abs(in_half(weights[0, :1], up_values[0].T) - want[:, 0]) > 2 * bound[:, 0]).any()
    of_the_end = np.concatenate([rows[:, 64:], rows[:, 512:]], axis=1)
    got, _ = oracle.attention(query, of_the_end, up_keys, up_values, scale=0.0)
    want, bound = oracle.attention(query, rows, up_keys, up_values, scale=0.0)
    assert (np.abs(got - want) > 2 * bound).any()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_record_is_read_field_by_field(name):
    rng = np.random.default_rng(9)
    rows = f32(rng.normal(size=(7, 576)) * 2.0 ** rng.integers(-9, 9, size=(7, 1)))
    cache = cache_of(rows, 512, name, "packed")
    got = kvref.backend(name).to_numpy(cache.records())
    assert (got == oracle.expected_records(rows[:, :512], rows[:, 512:]).values).all()
    assert got.shape == (7, 656) and cache.num_bytes == 7 * 656
    fields = np.ascontiguousarray(got).view(record_of(cache.config))[:, 0]
    largest = np.abs(rows[:, :512].reshape(7, 4, 128)).max(axis=2)
    assert (fields["scales"] == largest / np.float32(448)).all()
    assert (oracle.read_records(got, 512) == kvref.backend(name).to_numpy(cache.read())).all()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dtype": "float7"}, "dtype: expected one of float32, float16, bfloat16, .*packed.*, got 'float7'"),
        ({"dtype": "q8_0", "rope_dim": 48}, "q8_0 rows: expected a width that is a multiple of 32, got 48"),
        ({"dtype": "packed", "rank": 192}, "rank: expected a multiple of 128 for packed rows, got 192"),
        ({"rope_dim": 0}, "rope_dim: expected an integer of at least 1, got 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, said):
    with pytest.raises(errors.ConfigError, match=said.replace("'", ".")):
        LatentConfig(**sizes)


def test_what_does_not_fit_is_said():
    query, rows, up_keys, up_values = positive(nope=3, rank=5, rope=2, value=4)
    cache = cache_of(rows, 5)
    for wrong, said in (
        ((query[..., 1:], up_keys, up_values), r"query: expected shape \[num_queries, 2, 5\], got \[1, 2, 4\]"),
        ((query, up_keys[..., 1:], up_values), r"up_keys: expected shape \[num_heads, nope_dim, 5\], got \[2, 3, 4\]"),
        ((query, up_keys, up_values[:1]), r"up_values: expected shape \[2, value_dim, 5\], got \[1, 4, 5\]"),
        ((query, up_keys[:, :0], up_values), r"expected a num_heads, nope_dim and value_dim of at least 1"),
    ):
        with pytest.raises(errors.ShapeMismatch, match=said):
            cache.attend(*wrong)


@pytest.mark.parametrize(
    ("up_keys", "words"),
    [
        (np.ones(()), "up_keys: expected shape [num_heads, nope_dim, rank], got []"),
        (np.ones((1, 4, 5)), "up_keys: expected a rank of at most 3, the width of a row, got 5"),
    ],
)
def test_matrices_that_do_not_fit_rows_are_refused(up_keys, words):
    query, rows, up_values = (np.ones(shape, np.float32) for shape in ((1, 1, 2), (2, 3), (1, 2, 5)))
    with pytest.raises(errors.ShapeMismatch, match=re.escape(words)):
        expanded(query, rows, up_keys.astype(np.float32), up_values)


def test_matrices_may_be_lists():
    query, rows = np.ones((1, 1, 4), np.float32), np.ones((3, 3), np.float32)
    got = expanded(query, rows, [[[1.0, 0.0]] * 3], [[[1.0, 2.0]]])
    assert got.tolist() == [[[3.0]]]
