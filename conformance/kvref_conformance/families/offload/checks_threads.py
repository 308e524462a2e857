"""MOVE-13: concurrent calls to a host store."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.checking.threads import in_threads
from kvref_conformance.conversation.exchange import kinds_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject

KEYS, AT_ONCE = 12, 2  # keys in use, and loads in progress per thread


@check("MOVE-13", "offload")
def threads_may_share_a_host_store(subject: Subject) -> None:
    store = new(subject, "offload", capacity=8)

    def work(thread: int, rng: np.random.Generator) -> None:
        for number in range(60):
            _store(store, int(rng.integers(KEYS)), arrives=number % 4 != 0)

    in_threads(subject, work)
    there = [key for key in range(KEYS) if store.lookup([key])]
    equal(
        store.num_free + len(there),
        store.config["capacity"],
        "num_free plus the number of keys that lookup finds, after all threads ended",
    )
    equal(len(set(store.places(there))), len(there), "number of distinct places of the keys that lookup finds")


@check("MOVE-13", "offload")
def a_store_that_stays_full_is_never_seen_with_room(subject: Subject) -> None:
    store = new(subject, "offload", capacity=8)
    count = store.config["capacity"]
    store.prepare_store(list(range(count)))
    store.complete_store(list(range(count)))

    def work(thread: int, rng: np.random.Generator) -> None:
        for number in range(1, 60):
            if thread:
                equal(store.num_free, 0, "num_free of a full store, while another thread evicts as many keys as it stores")
                continue
            keys = [number * count + each for each in range(count)]
            store.prepare_store(keys)
            store.complete_store(keys)

    in_threads(subject, work)


@check("MOVE-13", "offload")
def what_a_thread_loads_is_not_evicted(subject: Subject) -> None:
    store = new(subject, "offload", capacity=8)

    def work(thread: int, rng: np.random.Generator) -> None:
        held = dict[int, list[int]]()  # keys that this thread is loading, with their places
        for _ in range(60):
            _store(store, int(rng.integers(KEYS)))
            key = int(rng.integers(KEYS))
            if key not in held and _went("KeyNotFound", store.prepare_load, [key]):
                held[key] = list(store.places([key]))
            equal([store.lookup([each]) for each in held], [1] * len(held), "lookup of each key with a load in progress")
            equal({each: list(store.places([each])) for each in held}, held, "place of each key with a load in progress")
            if len(held) == AT_ONCE:
                store.complete_load([held.popitem()[0] for _ in range(AT_ONCE)])
        store.complete_load(list(held))

    in_threads(subject, work)
    more = [KEYS + number for number in range(store.config["capacity"])]
    store.prepare_store(more)  # no load is in progress, so every key can be evicted
    equal(store.num_free, 0, "num_free after prepare_store of as many keys as there are places")


def _went(kind: str, call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call succeeds. False if it raises an error of this kind, which concurrent calls may cause."""
    try:
        call(*args)
    except Exception as error:
        if kind not in kinds_of(error):
            raise
        return False
    return True


def _store(store: Handle, key: int, arrives: bool = True) -> None:
    """Store a key, unless it is already stored or there is no room."""
    new = list[int]()
    if _went("OutOfBlocks", lambda: new.extend(store.prepare_store([key])[0])) and new:
        store.complete_store(new, success=arrives)
