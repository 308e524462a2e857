"""Attention in tiles: compared with exact attention over all tokens, and its memory."""

import sys
import tracemalloc

import numpy as np
import pytest
from marks import half_long

import kvref
from kvref.attention import Sight, attended
from kvref.backend import backend
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.oracle import attention as oracle
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import all_checks

FAMILIES = ("paged", "prefix", "quantized", "tiered", "windowed", "grouped", "latent", "channels")


def drawn(count, heads, dim, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, heads, dim)).astype(np.float32) for _ in range(2)]


ALL = Sight()


def in_pieces(query, keys, values, scale, at, sight=ALL, sink=None, at_once=32, on=None):
    on = on or backend("reference")

    def read(start, stop):
        assert 0 < stop - start <= at_once
        return on.asarray(keys[start:stop]), on.asarray(values[start:stop])

    given = on.asarray(query), np.asarray(at), read, np.arange(len(keys)), scale, sight, on
    return np.asarray(on.to_numpy(attended(*given, None if sink is None else on.asarray(sink), at_once)))


def views(at, count, sight):
    return [np.flatnonzero(sight.sees(each, np.arange(count))) for each in at]


LOUD = {  # the position of the largest score, and the range of scores
    "even": lambda keys: keys,
    "all equal": lambda keys: keys * 0 + 1,
    "the first": lambda keys: keys * np.where(np.arange(len(keys)) == 0, 40, 1)[:, None, None],
    "the last": lambda keys: keys * np.where(np.arange(len(keys)) == len(keys) - 1, 40, 1)[:, None, None],
    "rising": lambda keys: keys * np.linspace(0, 40, len(keys))[:, None, None],
}


@pytest.mark.parametrize("name", ["numpy", "reference", "reference:array_api_strict"])
@pytest.mark.parametrize("loud", LOUD)
@pytest.mark.parametrize("sink", [False, True])
def test_pieces_are_within_the_bound_of_exact_attention(name, loud, sink):
    keys, values = drawn(333, 2, 16)
    keys = LOUD[loud](keys).astype(np.float32)
    query, at = drawn(3, 4, 16, 1)[0], [40, 200, 332]
    given = np.array([3.0, -np.inf, 0.0, 100.0], np.float32) if sink else None
    sight = Sight(window=150, sinks=5)
    got = in_pieces(query, keys, values, 0.25, at, sight, given, on=backend(name))
    want, bound = oracle.attention(query, keys, values, scale=0.25, views=views(at, 333, sight), logit_sink=given)
    assert (np.abs(got - want) <= bound + oracle.U * np.abs(want)).all()


def test_a_query_that_sees_nothing_gets_zeros_and_one_whose_scores_are_all_minus_infinity_nan():
    keys, values = drawn(100, 1, 4)
    keys[:, 0, 0] = -np.inf
    query = np.array([[[1.0, 0, 0, 0]]] * 2, np.float32)
    with np.errstate(invalid="ignore"):
        got = in_pieces(query, keys, values, 1.0, [-1, 99])
    assert not got[0].any()
    assert np.isnan(got[1]).all()
    with np.errstate(invalid="ignore"):
        assert not in_pieces(query[1:], keys, values, 1.0, [99], sink=np.zeros(1, np.float32)).any()


@pytest.mark.parametrize("name", ["numpy", "reference:array_api_strict"])
def test_what_a_query_does_not_see_has_no_effect(name):
    keys, values = drawn(100, 2, 4)
    query = drawn(2, 2, 4, 1)[0]
    right = in_pieces(query, keys, values, 0.5, [40, 99], on=backend(name))
    for part in (keys, values):
        part[70] = np.nan
    got = in_pieces(query, keys, values, 0.5, [40, 99], on=backend(name))
    assert (got[0] == right[0]).all()
    assert np.isnan(got[1]).all()


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", half_long(FAMILIES))
def test_every_cache_attends_in_pieces_as_the_clauses_say(family, monkeypatch):
    monkeypatch.setattr(sys.modules["kvref.attention"], "TOKENS", 2)  # `import kvref.attention` would return the function
    judge = CheckRunner(OnBackend(backend("numpy")), Effort(examples=6))
    for check in all_checks():
        if check.family == family and not check.option and check.clause != "LAW-18":
            outcome = judge.judge_check(check)
            assert getattr(outcome, "verdict", "failed") in ("passed", "not offered"), (check.name, outcome)


def caches(count):
    yield "quantized", kvref.QuantizedCache(kvref.QuantizedConfig(1, count, 4, 128, "int8"), backend("numpy"))
    paged = kvref.PagedCache(
        kvref.PagedConfig(num_blocks=count // 16, num_layers=1, num_kv_heads=4, head_dim=128, dtype="q4_0"), backend("numpy")
    )
    yield "paged", paged


def test_no_copy_of_a_whole_cache_is_made():
    count, query = 8192, drawn(1, 8, 128, 1)[0]
    for name, cache in caches(count):
        keys, values = drawn(count, 4, 128)
        if name == "paged":
            where = cache.create(), 0
            cache.write(*where, 0, keys, values)
        else:
            where = (0,)
            cache.append(0, keys, values)
        tracemalloc.start()
        cache.attend(*where, query)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (keys.nbytes + values.nbytes) / 4, name
