"""Derived operations: their results, their limits, and that derivations that cannot work are not reported."""

from threading import Event, Thread, current_thread

import numpy as np
import pytest
from restricted import Restricted

import kvref
from kvref_conformance.calls import subject as subject_module
from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.exceptions import ClauseViolation, NotOffered, OperationDeclined
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of

SIZES = {"num_blocks": 4, "block_size": 2, "num_kv_heads": 1, "head_dim": 3, "dtype": "float32"}
STEPS = [f"paged.{name}" for name in ("create", "drop", "append_step", "gather")]
TOKEN = np.ones((1, 1, 3), np.float32)


def behind(made):
    """kvref's caches, with another paged cache."""
    implementation = Restricted(families=())
    implementation.paged = made
    return implementation


def begun(implementation, num_layers=1):
    """A subject and a paged cache of it."""
    subject = CheckRunner(implementation).begin_family("paged")
    return subject, subject.new("paged", num_layers=num_layers, **SIZES)


def test_a_way_that_does_not_reach_is_not_told_of():
    subject, cache = begun(Restricted(operations=["paged.create", "paged.block_table"], families=["paged"]))
    with pytest.raises(NotOffered, match="slots of positions without a block"):
        cache.slot_mapping(cache.create(), 0, 0, 1)
    assert subject.derivations_used == {}


def test_derivations_that_threads_abandon_at_the_same_time_are_not_reported(monkeypatch):
    """The second thread begins its derivation before the first abandons its own, and abandons it later."""
    subject, cache = begun(Restricted(operations=["paged.create"], families=["paged"]))
    both, failures = Event(), []

    def derive(cache, sequence, layer):
        if current_thread() is second:
            both.set()
            first.join()
        else:
            second.start()
            both.wait()
        raise OperationDeclined("paged.read")

    def gather():
        try:
            cache.gather(sequence, 0)
        except OperationDeclined as declined:
            failures.append(str(declined))

    monkeypatch.setattr(subject_module, "derivations", lambda op: [DerivedOperation(op, "PAGED-12", ("read",), derive)])
    sequence, (first, second) = cache.create(), (Thread(target=gather) for _ in range(2))
    first.start()
    first.join()
    second.join()
    assert (len(failures), subject.derivations_used) == (2, {})


class Cache:
    """A cache with four methods; a subclass adds others."""

    def __init__(self, **config):
        cache = kvref.PagedCache(kvref.PagedConfig(**config))
        self.create, self.write, self.read, self.length = cache.create, cache.write, cache.read, cache.length


class Counts(Cache):
    gather = 3  # not callable: for example a number of calls


def test_what_cannot_be_called_is_something_else_of_the_same_name():
    subject, cache = begun(behind(Counts))
    sequence = cache.create()
    cache.write(sequence, 0, 0, TOKEN, TOKEN)
    assert np.array_equal(cache.gather(sequence, 0)[0], TOKEN)
    assert subject.derivations_used == {"paged.gather": "paged.gather through length and read"}
    with pytest.raises(OperationDeclined):
        cache.as_is("gather", sequence, 0)


def test_slots_that_are_never_refused_end_with_the_pool():
    class Endless(Cache):
        def slot_mapping(self, sequence, layer, start, count):
            assert start < 100, "asked on and on"
            return [start]

    _, cache = begun(behind(Endless))
    with pytest.raises(ClauseViolation, match="PositionOutOfRange past the last block of the pool") as broken:
        cache.block_table(cache.create(), 0)
    assert broken.value.clause == "PAGED-06"


def test_a_cache_of_steps_alone_is_judged_in_one_layer(monkeypatch):
    steps, step = Restricted({"num_layers": 1}, STEPS, ["paged"]), kvref.PagedCache.append_step

    def verdict(clause):
        ((_, checks),) = select_checks(clause, "paged").items()
        return verdict_of(CheckRunner(steps).judge_clause([check for check in checks if check.run]))

    shown = ("LAW-04", "LAW-05", "PAGED-01", "PAGED-03", "PAGED-07")
    assert {verdict(clause) for clause in shown} == {"passed"}
    monkeypatch.setattr(kvref.PagedCache, "append_step", lambda self, ids, keys, values: step(self, ids, keys, values * 2))
    assert verdict("LAW-04") == "failed"


@pytest.mark.parametrize(("num_layers", "layer"), [(2, 0), (1, 1)])
def test_a_step_is_no_append_to_one_layer_of_several(num_layers, layer):
    _, cache = begun(Restricted(operations=["paged.create", "paged.append_step"], families=["paged"]), num_layers)
    with pytest.raises(NotOffered, match="append to one of several layers"):
        cache.append([cache.create()], layer, TOKEN, TOKEN)


@pytest.mark.parametrize("missing", ["gather", "read", "length", "slot_mapping", "block_table"])
def test_positions_are_not_derived_after_release_before(missing):
    implementation = Restricted(operations=[f"paged.{name}" for name in ("create", "write", "release_before", *OTHERS[missing])])
    _, cache = begun(implementation)
    sequence = cache.create()
    cache.write(sequence, 0, 0, *[np.repeat(TOKEN, 5, axis=0)] * 2)
    arguments = {"read": ([4],), "slot_mapping": (0, 2)}.get(missing, ())
    getattr(cache, missing)(sequence, 0, *arguments)
    cache.release_before(sequence, 4)
    with pytest.raises(NotOffered, match=r"released|after release_before"):
        getattr(cache, missing)(sequence, 0, *arguments)


OTHERS = {
    "gather": ["length", "read"], "read": ["gather"], "length": ["gather"], "slot_mapping": ["block_table"],
    "block_table": ["slot_mapping"],
}  # fmt: skip
