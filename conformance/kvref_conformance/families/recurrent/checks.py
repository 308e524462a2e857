"""Checks of the chapter RECURRENT."""

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import random_pair, require_sizes
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session


@check("RECURRENT-01", "recurrent")
def read_returns_tokens_in_order(subject: Subject) -> None:
    cache = Session(subject).cache
    require_sizes(cache, max_tokens=6)
    first, second = random_pair(subject, 2), random_pair(subject, 4)
    cache.append(*first)
    cache.append(*second)
    assert_equal(cache.length, 6, "length after appends of 2 and 4 tokens")
    keys, values = (np.concatenate(parts) for parts in zip(first, second, strict=True))
    assert_pair(cache.read(), (keys, values), "tokens after appends of 2 and 4")


@check("RECURRENT-02", "recurrent")
def append_to_a_full_cache_raises(subject: Subject) -> None:
    session = Session(subject, max_tokens=3)
    most = session.cache.config["max_tokens"]
    session.cache.append(*random_pair(subject, most))
    with raises("CapacityExceeded"):
        session.cache.append(*random_pair(subject, 1))
    session.look()


@check("RECURRENT-03", "recurrent")
def clear_removes_all_tokens(subject: Subject) -> None:
    session = Session(subject)
    session.cache.append(*random_pair(subject, 2))
    session.cache.clear()
    assert_equal(session.cache.length, 0, "length after clear")
    session.cache.append(*random_pair(subject, 1))
    session.look()
