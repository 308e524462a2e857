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
        raise NotOffered("blocks evicted in the order of MOVE-11, where its limits say other_eviction_order")


@check("MOVE-06a", "offload")
def what_is_half_stored_is_not_found(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    equal(store.lookup([1, 2]), 0, "keys found in a new store")
    store.prepare_store([1, 2])
    equal(store.lookup([1, 2]), 0, "keys found before their store was complete")
    store.complete_store([1])
    equal(store.lookup([1, 2]), 1, "keys found once the first of two was complete")
    equal(found(store, [1, 2]), [1], "the keys that are found")
    store.complete_store([2])
    equal(store.lookup([1, 2]), 2, "keys found once both were complete")


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
        equal(store.lookup(list(names)), want, f"keys found of {list(names)}, of which {missing} is not there")
    equal(store.lookup(keys), len(keys), "keys found of all")


@check("MOVE-06b", "offload")
def looking_changes_nothing(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    for _ in range(3):
        store.lookup(keys[:1])
        store.lookup([FIRST - 1])
    equal(store.num_free, 0, "free places after looking")
    in_order(subject)
    equal(gone(store, [FIRST - 1]), keys[:1], "keys evicted, where the oldest was looked for")


@check("MOVE-08ab", "offload")
def a_store_that_failed_leaves_a_miss(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    free = store.num_free
    store.prepare_store([1, 2])
    store.complete_store([1], success=False)
    equal(store.num_free, free - 1, "free places after one of two stores failed")
    store.complete_store([2])
    equal(found(store, [1, 2]), [2], "the keys that are found where the store of 1 failed")
    equal([list(part) for part in store.prepare_store([1, 2])], [[1], []], "what is to be stored, and evicted, the second time")
    equal(store.lookup([1]), 0, "keys found while it is stored again")
    store.complete_store([1])
    equal(store.lookup([1, 2]), 2, "keys found once it was stored again")


@check("MOVE-08a", "offload")
def all_that_failed_can_be_stored_again(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    for _ in range(3):
        equal(list(store.prepare_store(keys)[0]), keys, "keys to be stored, after all failed before")
        store.complete_store(keys, success=False)
        equal(store.num_free, len(keys), "free places after every store failed")
    stored(store, keys)
    equal(store.lookup(keys), len(keys), "keys found after the last store went well")


@check("MOVE-08c", "offload")
def completing_what_is_not_being_stored_changes_nothing(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    stored(store, [1])
    free = store.num_free
    for key, success in ((2, True), (1, False), (1, True), (2, False)):
        with may_raise("KeyNotFound"):
            store.complete_store([key], success=success)
        equal(found(store, [1, 2]), [1], f"the keys that are found after complete_store([{key}], {success})")
        equal(store.num_free, free, f"free places after complete_store([{key}], {success})")


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
            f"keys found of [1] after complete_store({keys}), of which 2 is not being stored",
        )
        equal(store.lookup([2]), 0, f"keys found of [2] after complete_store({keys})")
        if not raised:
            return
        store.complete_store([1], success=False)


@check("MOVE-09ad", "offload")
def what_is_being_loaded_is_not_evicted(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    store.prepare_load(keys[:1])
    others = [FIRST - number for number in range(1, len(keys) + 1)]
    for other in others[:-1]:
        true(keys[0] not in gone(store, [other]), "what is evicted", f"not {keys[0]}, which is being loaded", keys[0])
        store.complete_store([other])
    equal(store.lookup(keys[:1]), 1, "keys found of one that is being loaded")
    with raises("OutOfBlocks"):
        store.prepare_store([others[-1], *others[:-1]])
    store.complete_load(keys[:1])
    equal(gone(store, [others[-1], *others[:-1]]), keys[:1], "keys evicted once the load was over")


@check("MOVE-09ad", "offload")
def what_is_being_stored_is_not_evicted(subject: Subject) -> None:
    store = new(subject, "offload", capacity=3)
    at_least(store, capacity=1)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    store.prepare_store(keys)
    with raises("OutOfBlocks"):
        store.prepare_store([1])
    store.complete_store(keys)
    equal(store.lookup(keys), len(keys), "keys found that were being stored when another was refused")
    equal(len(gone(store, [1])), 1, "keys evicted once they were stored")


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
    equal(gone(store, more), keys, "keys evicted once three loads were over")


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
    equal(gone(store, more), keys, "keys evicted once every load was over that a call named twice")


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
    equal(gone(store, more), keys, "keys evicted, where a load of them all, and of one more, was refused")
