"""The reference on immutable arrays: NumPy's made read-only, and JAX's if it is installed."""

import numpy as np
import pytest
from bugs.plant import in_source
from marks import half_long

import kvref
from kvref_conformance.families import names
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

NEED_MEMORY_TO_WRITE_INTO = {"LAW-08", "CONTIG-08"}
SLOW = {"KERN-06"}


def frozen(array):
    array.flags.writeable = False
    return array


class Frozen(kvref.ReferenceBackend):
    """A write in place raises, and kernels return copies, so that an old array keeps its contents."""

    def zeros(self, shape, dtype):
        return frozen(super().zeros(shape, dtype))

    def asarray(self, values, dtype=None):
        return frozen(np.array(values, dtype))

    def update(self, buffer, new, position):
        return frozen(super().update(buffer, new, position))

    def scatter(self, store, slots, new):
        return frozen(super().scatter(store, slots, new))


def verdicts(implementation, family, **effort):
    """Verdicts by clause, without LAW-18: small sizes show writes in place too."""
    judge = CheckRunner(implementation, Effort(**{"examples": 10} | effort))
    chosen = {clause.id: checks for clause, checks in select_checks(family=family).items() if clause.id != "LAW-18"}
    return {clause: verdict_of(judge.judge_clause(checks)) for clause, checks in chosen.items()}


def with_verdict(found, *verdicts):
    return {clause for clause, verdict in found.items() if verdict in verdicts}


@pytest.mark.extended
@pytest.mark.parametrize("family", half_long(names()))
def test_frozen_arrays_break_no_clause(family):
    found = verdicts(OnBackend(Frozen()), family)
    assert with_verdict(found, "not offered", "not run") <= NEED_MEMORY_TO_WRITE_INTO | SLOW
    assert with_verdict(found, "failed") == set()


KEPT = [
    ("contiguous", "kvref.contiguous.ContiguousCache.append", "self._keys = self._backend.update", "self._backend.update"),
    ("contiguous", "kvref.contiguous.ContiguousCache._grow", "values = self._backend.update", "self._backend.update"),
    ("buffers", "kvref.buffers.Buffer.extend", "self._memory = self._pool", "self._pool"),
    ("pooled", "kvref.buffers.Buffer.extend", "self._memory = self._pool", "self._pool"),
    ("paged", "kvref.token_store.SlotStore.put", "self._stored = Quantized(", "Quantized("),
    ("quantized", "kvref.token_store.SlotStore.put", "self._stored = Quantized(", "Quantized("),
    ("tiered", "kvref.token_store.SlotStore.put", "self._stored = Quantized(", "Quantized("),
    ("recurrent", "kvref.token_store.SlotStore.put", "self._stored = Quantized(", "Quantized("),
    ("kernels", "kvref.backend.ReferenceBackend.scatter", "store = at(store)", "at(store)"),
    ("attention", "kvref.backend.ReferenceBackend.attend", "out = at(out)", "at(out)"),
]


@pytest.mark.extended
@pytest.mark.parametrize(("family", "path", "old", "new"), KEPT, ids=lambda value: str(value)[:40])
def test_a_family_that_drops_what_a_kernel_returned_is_seen(family, path, old, new, monkeypatch):
    in_source(monkeypatch, path, old, new)
    assert with_verdict(verdicts(OnBackend(Frozen()), family, examples=3), "failed")


FLUSHED = {"FMT-CAST-01", "FMT-LEVEL-01", "FMT-AFF-01", "TIER-02"}  # XLA flushes numbers below 2^-126 to zero: docs/findings.md


@pytest.mark.jax
@pytest.mark.parametrize("family", names())
def test_jax_breaks_no_clause_but_those_of_subnormal_numbers(family):
    found = verdicts(load_implementation("reference:jax"), family, examples=2, timeout=300.0)  # each new shape is compiled
    assert with_verdict(found, "not offered", "not run") <= NEED_MEMORY_TO_WRITE_INTO | SLOW
    assert with_verdict(found, "failed") <= FLUSHED
