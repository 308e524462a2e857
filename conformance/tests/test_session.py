"""Sessions: the model judges every call of a check, `look` finds wrong contents, calls without a model are not judged."""

import numpy as np
import pytest

import kvref
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.registry import all_checks
from kvref_conformance.testlib.session import JudgedCalls, Session


class LosesKeys(kvref.ContiguousCache):
    def read(self):
        keys, values = super().read()
        return keys * 0, values


class NeverRaises(kvref.ContiguousCache):
    def truncate(self, length):
        if length <= self.seq_len:
            super().truncate(length)


class ReadsNothing:
    """A cache that can only be filled."""

    def __init__(self, config, backend):
        self.cache = kvref.ContiguousCache(config, backend)

    def append(self, keys, values):
        self.cache.append(keys, values)


def session_with(cache, **changes):
    class Implementation(OnBackend):
        def contiguous(self, **config):
            return cache(kvref.ContiguousConfig(**config), self.backend)

    subject = Subject(Implementation(kvref.reference), np.random.default_rng(0), family="contiguous")
    return Session(subject, **changes)


def append(session, count):
    config = session.cache.config
    tokens = random_pair(session.subject, count, config["num_kv_heads"], config["head_dim"])
    session.cache.append(*(np.stack([part.transpose(1, 0, 2)] * config["batch_size"]) for part in tokens))


def test_a_correct_cache_passes_and_is_observed_completely():
    session = session_with(kvref.ContiguousCache)
    append(session, 3)
    session.look()
    session.look("capacity", "raw")
    made = [exchange.request.name for exchange in session.subject.call_trace]
    assert made == ["new", "append", "seq_len", "read", "capacity", "raw"]


def test_a_look_finds_wrong_contents_and_leaves_the_clause_to_the_check():
    session = session_with(LosesKeys)
    append(session, 3)
    with pytest.raises(ClauseViolation) as failure:
        session.look()
    assert (failure.value.clause, failure.value.what) == ("", "keys of contiguous.read[0, 0, 0, 0] (30 of 30 differ)")


def test_a_call_that_must_raise_is_judged():
    session = session_with(NeverRaises)
    append(session, 3)
    with pytest.raises(ClauseViolation, match="PositionOutOfRange"):
        session.cache.truncate(4)


def test_objects_of_several_sessions_are_judged_by_their_own_models():
    first = session_with(kvref.ContiguousCache)
    append(first, 3)
    second = Session(first.subject, head_dim=7)
    append(second, 2)
    first.look()
    second.look()
    assert first.subject.judged.runner.models.keys() == {first.cache.id, second.cache.id}


def test_a_cache_that_cannot_be_read_is_not_offered():
    session = session_with(ReadsNothing)
    append(session, 3)
    with pytest.raises(NotOffered):
        session.look()


def test_calls_that_no_model_covers_are_not_judged():
    session = session_with(LosesKeys)
    unjudged = session.subject.new("contiguous", **session.cache.config)
    del session.subject.judged.runner.models[unjudged.id]
    keys, _ = unjudged.read()
    assert keys.shape[2] == 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_models_cover_every_call_of_every_session(monkeypatch):
    """Except in four checks of the prefix cache. Its model is too slow for two at production sizes, and does not know the hits
    after a load, which the other two make.
    """
    uncovered = []

    class CountedCalls(JudgedCalls):
        def _expect(self, subject, exchange):
            super()._expect(subject, exchange)
            if self._expected is None:
                uncovered.append((subject.clause, exchange.request.op.partition(".")[0]))

    monkeypatch.setattr("kvref_conformance.testlib.session.JudgedCalls", CountedCalls)
    judge = CheckRunner(load_implementation("numpy"))
    for check in all_checks():
        if check.run:
            judge.judge_check(check)
    assert set(uncovered) == {(clause, "prefix") for clause in ("LAW-18", "LAW-01", "PREFIX-02")}
