"""MOVE-06, MOVE-08, MOVE-09: lookup in a host store, and keys that must be kept while a store or load is in progress."""

from kvref_conformance.checking.expect import equal, may_raise, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import NotOffered

FIRST = 2**40  # keys are hashes, which exceed 32 bits


def stored(store: Handle, keys: list[int]) -> None:
    """Store keys in two calls, `prepare_store` and `complete_store`."""
    store.prepare_store(keys)
    store.complete_store(keys)


def full(subject: Subject, capacity: int = 4, least: int = 1) -> tuple[Handle, list[int]]:
    """A full store and its keys, least recently used first. Each key was stored separately."""
    store = new(subject, "offload", capacity=capacity)
    at_least(store, capacity=least)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    for key in keys:
        stored(store, [key])
    return store, keys


def found(store: Handle, keys: list[int]) -> list[int]:
    """The keys that `lookup` finds, with one call per key."""
    return [key for key in keys if store.lookup([key])]


def gone(store: Handle, keys: list[int]) -> list[int]:
    """The keys that `prepare_store` evicts to make room for the given keys, sorted."""
    return sorted(store.prepare_store(keys)[1])


def in_order(subject: Subject) -> None:
    """Raises NotOffered if the implementation declares another eviction order."""
    if subject.limits.switch(subject.family, "other_eviction_order"):
        raise NotOffered("the eviction order of MOVE-11, where its limits say other_eviction_order")


@check("MOVE-06a", "offload")
def what_is_half_stored_is_not_found(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    equal(store.lookup([1, 2]), 0, "number of keys that lookup finds in a new store")
    store.prepare_store([1, 2])
    equal(store.lookup([1, 2]), 0, "number of keys that lookup finds before complete_store")
    store.complete_store([1])
    equal(store.lookup([1, 2]), 1, "number of keys that lookup finds after complete_store of the first of two")
    equal(found(store, [1, 2]), [1], "keys that lookup finds after complete_store of 1")
    store.complete_store([2])
    equal(store.lookup([1, 2]), 2, "number of keys that lookup finds after complete_store of both")


@check("MOVE-06c", "offload")
def what_is_half_stored_is_not_loaded(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    stored(store, [1])
    store.prepare_store([2])
    for keys in ([2], [1, 2], [2, 1], [3], [1, 3]):
        with raises("KeyNotFound"):
            store.prepare_load(keys)
    store.complete_store([2])
    store.prepare_load([1, 2])


@check("MOVE-06a", "offload")
def keys_are_found_from_the_first_on(subject: Subject) -> None:
    store, keys = full(subject, least=3)
    missing = FIRST - 1
    asked = {(missing, *keys): 0, (keys[0], missing, keys[1]): 1, (keys[2], keys[0], keys[1], missing): 3, (): 0}
    for names, want in asked.items():
        equal(
            store.lookup(list(names)),
            want,
            f"number of keys that lookup finds of {list(names)}, of which {missing} is not stored",
        )
    equal(store.lookup(keys), len(keys), "number of keys that lookup finds of all stored keys")


@check("MOVE-06b", "offload")
def looking_changes_nothing(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    for _ in range(3):
        store.lookup(keys[:1])
        store.lookup([FIRST - 1])
    equal(store.num_free, 0, "num_free after lookup in a full store")
    in_order(subject)
    equal(gone(store, [FIRST - 1]), keys[:1], "keys evicted after lookup of the least recently used key")


@check("MOVE-08ab", "offload")
def a_store_that_failed_leaves_a_miss(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    free = store.num_free
    store.prepare_store([1, 2])
    store.complete_store([1], success=False)
    equal(store.num_free, free - 1, "num_free after complete_store reported that one of two stores failed")
    store.complete_store([2])
    equal(found(store, [1, 2]), [2], "keys that lookup finds after the store of key 1 failed")
    equal(
        [list(part) for part in store.prepare_store([1, 2])],
        [[1], []],
        "keys to store and keys evicted by prepare_store after the store of key 1 failed",
    )
    equal(store.lookup([1]), 0, "number of keys that lookup finds before complete_store of the failed key")
    store.complete_store([1])
    equal(store.lookup([1, 2]), 2, "number of keys that lookup finds after the failed key was stored")


@check("MOVE-08a", "offload")
def all_that_failed_can_be_stored_again(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    for _ in range(3):
        equal(list(store.prepare_store(keys)[0]), keys, "keys to store of prepare_store, after earlier stores of all keys failed")
        store.complete_store(keys, success=False)
        equal(store.num_free, len(keys), "num_free after every store failed")
    stored(store, keys)
    equal(store.lookup(keys), len(keys), "number of keys that lookup finds after the last store succeeded")


@check("MOVE-08c", "offload")
def completing_what_is_not_being_stored_changes_nothing(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    stored(store, [1])
    free = store.num_free
    for key, success in ((2, True), (1, False), (1, True), (2, False)):
        with may_raise("KeyNotFound"):
            store.complete_store([key], success=success)
        equal(
            found(store, [1, 2]),
            [1],
            f"keys that lookup finds after complete_store([{key}], {success}) without a store in progress",
        )
        equal(store.num_free, free, f"num_free after complete_store([{key}], {success}) without a store in progress")


@check("MOVE-08c", "offload")
def a_complete_store_that_raises_completes_no_key(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    for keys in ([1, 2], [2, 1]):
        store.prepare_store([1])
        raised = True
        with may_raise("KeyNotFound"):
            store.complete_store(keys)
            raised = False
        equal(
            store.lookup([1]),
            0 if raised else 1,
            f"number of keys that lookup finds of [1] after complete_store({keys}), of which 2 has no store in progress",
        )
        equal(store.lookup([2]), 0, f"number of keys that lookup finds of [2] after complete_store({keys})")
        if not raised:
            return
        store.complete_store([1], success=False)


@check("MOVE-09ad", "offload")
def what_is_being_loaded_is_not_evicted(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    store.prepare_load(keys[:1])
    others = [FIRST - number for number in range(1, len(keys) + 1)]
    for other in others[:-1]:
        true(
            keys[0] not in gone(store, [other]),
            "keys evicted by prepare_store",
            f"not {keys[0]}, which has a load in progress",
            keys[0],
        )
        store.complete_store([other])
    equal(store.lookup(keys[:1]), 1, "number of keys that lookup finds of a key with a load in progress")
    every = [FIRST - number for number in range(len(keys) + 1, 2 * len(keys) + 1)]  # new keys, which need all places
    with raises("OutOfBlocks"):
        store.prepare_store(every)
    store.complete_load(keys[:1])
    evicted = gone(store, every)
    true(keys[0] in evicted, "keys evicted after complete_load", f"{keys[0]} among them", evicted)


@check("MOVE-09ad", "offload")
def what_is_being_stored_is_not_evicted(subject: Subject) -> None:
    store = new(subject, "offload", capacity=3)
    at_least(store, capacity=1)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    store.prepare_store(keys)
    with raises("OutOfBlocks"):
        store.prepare_store([1])
    store.complete_store(keys)
    equal(
        store.lookup(keys),
        len(keys),
        "number of keys that lookup finds, whose stores were in progress when prepare_store raised OutOfBlocks",
    )
    equal(len(gone(store, [1])), 1, "number of keys evicted after complete_store")


@check("MOVE-09bd", "offload")
def a_block_is_kept_as_often_as_it_is_loaded(subject: Subject) -> None:
    store, keys = full(subject, capacity=1)
    more = [FIRST - number for number in range(1, len(keys) + 1)]
    for _ in range(3):
        store.prepare_load(keys)
    for _ in range(3):
        with raises("OutOfBlocks"):
            store.prepare_store(more[:1])
        store.complete_load(keys)
    equal(gone(store, more), keys, "keys evicted after complete_load of three loads")


@check("MOVE-09bcd", "offload")
def a_key_that_a_call_names_twice_counts_twice(subject: Subject) -> None:
    store, keys = full(subject, capacity=1)
    twice, more = keys[:1] * 2, [FIRST - number for number in range(1, len(keys) + 1)]
    store.prepare_load(twice)
    store.complete_load(keys[:1])
    with raises("KeyNotFound"):
        store.complete_load(twice)  # only one of the two loads is still in progress
    with raises("OutOfBlocks"):
        store.prepare_store(more)
    store.complete_load(keys[:1])
    store.prepare_load(twice)
    store.complete_load(twice)
    equal(gone(store, more), keys, "keys evicted after complete_load of loads that listed one key twice")


@check("MOVE-09c", "offload")
def a_load_is_not_given_back_twice(subject: Subject) -> None:
    store, keys = full(subject, capacity=1)
    with raises("KeyNotFound"):
        store.complete_load(keys[:1])
    store.prepare_load(keys)
    store.complete_load(keys)
    for wrong in (keys[:1], [FIRST - 1]):
        with raises("KeyNotFound"):
            store.complete_load(wrong)
    store.prepare_load(keys)
    with raises("OutOfBlocks"):
        store.prepare_store([FIRST - 1])


@check("LAW-01", "offload")
def a_load_that_is_refused_keeps_nothing(subject: Subject) -> None:
    store, keys = full(subject)
    with raises("KeyNotFound"):
        store.prepare_load([*keys, FIRST - 1])
    more = [FIRST - number for number in range(1, len(keys) + 1)]
    equal(gone(store, more), keys, "keys evicted after prepare_load of all of them and an unknown key raised KeyNotFound")
