"""MOVE-06, MOVE-08, MOVE-09: lookup in a host store, and keys that must be kept while a store or load is in progress."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import kinds_of
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, may_raise, raises, true
from kvref_conformance.testlib.fixtures import at_least, new
from kvref_conformance.testlib.integer_types import REFUSED, Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.law_adapter import tried, within_bounds
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.thread_stress import in_threads

FIRST = 2**40  # keys are hashes, which exceed 32 bits


def stored(store: ObjectProxy, keys: list[int]) -> None:
    """Store keys in two calls, `prepare_store` and `complete_store`."""
    store.prepare_store(keys)
    store.complete_store(keys)


def full(subject: Subject, capacity: int = 4, least: int = 1) -> tuple[ObjectProxy, list[int]]:
    """A full store and its keys, least recently used first. Each key was stored separately."""
    store = new(subject, "offload", capacity=capacity)
    at_least(store, capacity=least)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    for key in keys:
        stored(store, [key])
    return store, keys


def found(store: ObjectProxy, keys: list[int]) -> list[int]:
    """The keys that `lookup` finds, with one call per key."""
    return [key for key in keys if store.lookup([key])]


def gone(store: ObjectProxy, keys: list[int]) -> list[int]:
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
    assert_equal(store.lookup([1, 2]), 0, "number of keys that lookup finds in a new store")
    store.prepare_store([1, 2])
    assert_equal(store.lookup([1, 2]), 0, "number of keys that lookup finds before complete_store")
    store.complete_store([1])
    assert_equal(store.lookup([1, 2]), 1, "number of keys that lookup finds after complete_store of the first of two")
    assert_equal(found(store, [1, 2]), [1], "keys that lookup finds after complete_store of 1")
    store.complete_store([2])
    assert_equal(store.lookup([1, 2]), 2, "number of keys that lookup finds after complete_store of both")


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
        assert_equal(
            store.lookup(list(names)),
            want,
            f"number of keys that lookup finds of {list(names)}, of which {missing} is not stored",
        )
    assert_equal(store.lookup(keys), len(keys), "number of keys that lookup finds of all stored keys")


@check("MOVE-06b", "offload")
def looking_changes_nothing(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    for _ in range(3):
        store.lookup(keys[:1])
        store.lookup([FIRST - 1])
    assert_equal(store.num_free, 0, "num_free after lookup in a full store")
    in_order(subject)
    assert_equal(gone(store, [FIRST - 1]), keys[:1], "keys evicted after lookup of the least recently used key")


@check("MOVE-08ab", "offload")
def a_store_that_failed_leaves_a_miss(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    free = store.num_free
    store.prepare_store([1, 2])
    store.complete_store([1], success=False)
    assert_equal(store.num_free, free - 1, "num_free after complete_store reported that one of two stores failed")
    store.complete_store([2])
    assert_equal(found(store, [1, 2]), [2], "keys that lookup finds after the store of key 1 failed")
    assert_equal(
        [list(part) for part in store.prepare_store([1, 2])],
        [[1], []],
        "keys to store and keys evicted by prepare_store after the store of key 1 failed",
    )
    assert_equal(store.lookup([1]), 0, "number of keys that lookup finds before complete_store of the failed key")
    store.complete_store([1])
    assert_equal(store.lookup([1, 2]), 2, "number of keys that lookup finds after the failed key was stored")


@check("MOVE-08a", "offload")
def all_that_failed_can_be_stored_again(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    for _ in range(3):
        assert_equal(
            list(store.prepare_store(keys)[0]), keys, "keys to store of prepare_store, after earlier stores of all keys failed"
        )
        store.complete_store(keys, success=False)
        assert_equal(store.num_free, len(keys), "num_free after every store failed")
    stored(store, keys)
    assert_equal(store.lookup(keys), len(keys), "number of keys that lookup finds after the last store succeeded")


@check("MOVE-08c", "offload")
def completing_what_is_not_being_stored_changes_nothing(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    stored(store, [1])
    free = store.num_free
    for key, success in ((2, True), (1, False), (1, True), (2, False)):
        with may_raise("KeyNotFound"):
            store.complete_store([key], success=success)
        assert_equal(
            found(store, [1, 2]),
            [1],
            f"keys that lookup finds after complete_store([{key}], {success}) without a store in progress",
        )
        assert_equal(store.num_free, free, f"num_free after complete_store([{key}], {success}) without a store in progress")


@check("MOVE-08c", "offload")
def a_complete_store_that_raises_completes_no_key(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    for keys in ([1, 2], [2, 1]):
        store.prepare_store([1])
        raised = True
        with may_raise("KeyNotFound"):
            store.complete_store(keys)
            raised = False
        assert_equal(
            store.lookup([1]),
            0 if raised else 1,
            f"number of keys that lookup finds of [1] after complete_store({keys}), of which 2 has no store in progress",
        )
        assert_equal(store.lookup([2]), 0, f"number of keys that lookup finds of [2] after complete_store({keys})")
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
    assert_equal(store.lookup(keys[:1]), 1, "number of keys that lookup finds of a key with a load in progress")
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
    assert_equal(
        store.lookup(keys),
        len(keys),
        "number of keys that lookup finds, whose stores were in progress when prepare_store raised OutOfBlocks",
    )
    assert_equal(len(gone(store, [1])), 1, "number of keys evicted after complete_store")


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
    assert_equal(gone(store, more), keys, "keys evicted after complete_load of three loads")


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
    assert_equal(gone(store, more), keys, "keys evicted after complete_load of loads that listed one key twice")


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
    assert_equal(gone(store, more), keys, "keys evicted after prepare_load of all of them and an unknown key raised KeyNotFound")


# LAW-19, LAW-20: laws in the form that applies to this family only.


@check("LAW-19", "offload")
def free_places_are_never_more_than_there_are(subject: Subject) -> None:
    store = new(subject, "offload", capacity=3)
    total = store.config["capacity"]
    keys = [FIRST + number for number in range(total)]
    wrong: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [("prepare_store", store.prepare_store, (keys,))]
    for success in (False, False, True, True, False):
        wrong += [("complete_store", store.complete_store, (keys[:1], success)), ("complete_load", store.complete_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([*keys, *keys],)), ("prepare_load", store.prepare_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([FIRST - 1 - number],)) for number in range(total + 2)]
    for name, call, args in wrong:
        tried(call, *args)
        within_bounds([("num_free", store.num_free, total)], f"{name}{args}")


@check("LAW-20", "offload")
def keys_are_integers_of_any_type(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Seen]:
        store = typed.new("offload", capacity=100)
        for keys in ([5, 100], [100, 120]):
            prepared = typed.call(store, "prepare_store", keys)
            yield f"prepare_store({keys})", prepared if prepared == REFUSED else [list(part) for part in prepared]
        yield "complete_store([100])", typed.call(store, "complete_store", [100])
        yield (
            "numbers of keys that lookup finds of [100] and of [100, 5]",
            (store.lookup([100]), typed.call(store, "lookup", [100, 5])),
        )
        yield "num_free", store.num_free

    the_same_in_any_type(subject, script)


# LAW-18: host stores of thousands of blocks.

PROMPT = 90  # number of keys per prompt


@check("LAW-18", "offload")
def a_host_store_of_thousands_is_filled_twice(subject: Subject) -> None:
    in_order(subject)
    store = new(subject, "offload", capacity=3000)
    total, first = store.config["capacity"], 2**52
    prompts = [list(range(start, start + PROMPT)) for start in range(first, first + 2 * total, PROMPT)]
    for keys in prompts:
        if len(keys) <= total:
            store.complete_store(list(store.prepare_store(keys)[0]))
    whole = [keys for keys in prompts if store.lookup(keys) == len(keys)]
    kept = whole[-(total // PROMPT) :]
    assert_equal(len(kept), min(total // PROMPT, len(prompts)), "number of recent prompts of which lookup finds every key")
    held = sorted(place for keys in kept for place in store.places(keys))
    assert_equal(len(set(held)), len(held), "number of distinct places of the keys that lookup finds")
    if total >= PROMPT:
        assert_equal(
            store.lookup(prompts[0]),
            0 if total < PROMPT * len(prompts) else PROMPT,
            "number of keys that lookup finds of the first prompt",
        )


# MOVE-10, MOVE-11: the capacity of a host store, and which keys it evicts when it is full.


@check("MOVE-10a", "offload")
def every_block_has_a_place_of_its_own(subject: Subject) -> None:
    store, keys = full(subject)
    held, total, lay = list(keys), len(keys), dict(zip(keys, store.places(keys), strict=True))
    for number in range(2 * total):
        key = FIRST - number - 1
        for lost in gone(store, [key]):
            held.remove(lost)
            del lay[lost]
        held.append(key)
        lay |= {key: next(iter(store.places([key])))}
        if number % 3 == 0:
            store.complete_store([key], success=False)
            held.remove(key)
            del lay[key]
        else:
            store.complete_store([key])
        assert_equal(
            dict(zip(held, store.places(held), strict=True)),
            {key: lay[key] for key in held},
            "place of each stored key, compared with its place when it was stored",
        )
        true(
            len(set(lay.values())) == len(held) and all(0 <= place < total for place in lay.values()),
            "place of each stored key", f"distinct places in [0, {total})", lay,
        )  # fmt: skip
    with raises("KeyNotFound"):
        store.places([FIRST - 3 * total])


@check("MOVE-10b", "offload")
def free_places_are_those_without_a_block(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    total = store.config["capacity"]
    assert_equal(store.num_free, total, "num_free of a new store")
    for number in range(total):
        store.prepare_store([number])
        assert_equal(store.num_free, total - number - 1, f"num_free with {number + 1} keys, one of them with a store in progress")
        store.complete_store([number])
        assert_equal(store.num_free, total - number - 1, f"num_free with {number + 1} keys")
    for number in range(total, 2 * total):
        stored(store, [number])
        assert_equal(store.num_free, 0, "num_free of a full store")


@check("MOVE-10b", "offload")
def the_capacity_is_as_asked(subject: Subject) -> None:
    store = new(subject, "offload")
    assert_equal(store.capacity, store.config["capacity"], "capacity")


@check("MOVE-10c", "offload")
def what_is_there_is_not_stored_again(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=3)
    free = store.num_free
    stored(store, [1])
    store.prepare_store([2])
    assert_equal(
        [list(part) for part in store.prepare_store([1, 3, 2])],
        [[3], []],
        "keys to store and keys evicted by prepare_store([1, 3, 2]), with 1 stored and 2 in progress",
    )
    assert_equal(store.num_free, free - 3, "num_free with three keys")
    assert_equal(found(store, [1, 2, 3]), [1], "keys that lookup finds, with stores of 2 and 3 in progress")
    assert_equal(
        [list(part) for part in store.prepare_store([1, 2, 3])],
        [[], []],
        "keys to store and keys evicted by prepare_store of keys that are stored or in progress",
    )


@check("MOVE-10c", "offload")
def a_key_named_twice_takes_one_place(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    free = store.num_free
    assert_equal(list(store.prepare_store([5, 6, 5])[0]), [5, 6], "keys to store of prepare_store([5, 6, 5])")
    assert_equal(store.num_free, free - 2, "num_free with two keys")
    store.complete_store([5, 6], success=False)
    assert_equal(store.num_free, free, "num_free after the stores of both keys failed")


@check("MOVE-10d", "offload")
def as_many_are_evicted_as_have_to_be(subject: Subject) -> None:
    store, keys = full(subject, least=3)
    more = [FIRST - 1, FIRST - 2]
    lost = gone(store, more)
    assert_equal(len(lost), 2, "number of keys evicted by prepare_store of two keys in a full store")
    assert_equal(found(store, keys), [key for key in keys if key not in lost], "keys that lookup finds after two were evicted")
    store.complete_store(more[:1], success=False)
    assert_equal(gone(store, [FIRST - 3]), [], "keys evicted by prepare_store of one key with one free place")


@check("MOVE-10e", "offload")
def nothing_goes_for_what_has_no_room(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    more = [FIRST - number for number in range(1, len(keys) + 2)]
    for asked in (more, [keys[-1], *more[:-1]]):
        with raises("OutOfBlocks"):
            store.prepare_store(asked)
        assert_equal(store.lookup(keys), len(keys), "number of keys that lookup finds after prepare_store raised OutOfBlocks")
        assert_equal(store.num_free, 0, "num_free after prepare_store raised OutOfBlocks")
        assert_equal(found(store, more), [], "new keys that lookup finds after prepare_store raised OutOfBlocks")


@check("MOVE-10d", "offload")
def nothing_is_evicted_that_the_call_names(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    others = [FIRST - number for number in range(1, len(keys))]
    assert_equal(
        [sorted(part) for part in store.prepare_store([keys[0], *others])],
        [sorted(others), keys[1:]],
        "keys to store and keys evicted",
    )
    assert_equal(found(store, keys), keys[:1], "keys that lookup finds after all others were evicted")


@check("MOVE-11a", "offload")
def what_was_used_longest_ago_goes_first(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    assert_equal(gone(store, [FIRST - 1]), keys[:1], "keys evicted, when the first stored key is the least recently used")
    store.complete_store([FIRST - 1])
    store.prepare_store([keys[1]])
    assert_equal(gone(store, [FIRST - 2]), [keys[2]], "keys evicted after prepare_store of the least recently used key")


@check("MOVE-11ac", "offload")
def what_is_touched_goes_last(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    store.touch([FIRST - 9, keys[0]])
    assert_equal(
        (store.num_free, store.lookup(keys)), (0, len(keys)), "num_free and the number of keys that lookup finds after touch"
    )
    assert_equal(gone(store, [FIRST - 1]), [keys[1]], "keys evicted after touch of the least recently used key")


@check("MOVE-11a", "offload")
def what_is_loaded_goes_last(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    store.prepare_load(keys[:1])
    store.complete_load(keys[:1])
    assert_equal(gone(store, [FIRST - 1]), [keys[1]], "keys evicted after a load of the least recently used key")


@check("MOVE-11b", "offload")
def the_end_of_a_prefix_goes_before_its_beginning(subject: Subject) -> None:
    in_order(subject)
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=3)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    stored(store, keys)
    assert_equal(gone(store, [1]), keys[-1:], "keys evicted of a prefix that was stored in one call")
    store.complete_store([1])
    store.touch([keys[1], keys[0]])
    store.touch([1, *keys[2:]])
    assert_equal(
        gone(store, [2]), keys[:1], "keys evicted after touch of [second, first]: the last key in the call is used longest ago"
    )


# MOVE-13: concurrent calls to a host store.

KEYS, AT_ONCE = 12, 2  # keys in use, and loads in progress per thread


@check("MOVE-13", "offload")
def threads_may_share_a_host_store(subject: Subject) -> None:
    store = new(subject, "offload", capacity=8)

    def work(thread: int, rng: np.random.Generator) -> None:
        for number in range(60):
            _store(store, int(rng.integers(KEYS)), arrives=number % 4 != 0)

    in_threads(subject, work)
    there = [key for key in range(KEYS) if store.lookup([key])]
    assert_equal(
        store.num_free + len(there),
        store.config["capacity"],
        "num_free plus the number of keys that lookup finds, after all threads ended",
    )
    assert_equal(len(set(store.places(there))), len(there), "number of distinct places of the keys that lookup finds")


@check("MOVE-13", "offload")
def a_store_that_stays_full_is_never_seen_with_room(subject: Subject) -> None:
    store = new(subject, "offload", capacity=8)
    count = store.config["capacity"]
    store.prepare_store(list(range(count)))
    store.complete_store(list(range(count)))

    def work(thread: int, rng: np.random.Generator) -> None:
        for number in range(1, 60):
            if thread:
                assert_equal(store.num_free, 0, "num_free of a full store, while another thread evicts as many keys as it stores")
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
            assert_equal([store.lookup([each]) for each in held], [1] * len(held), "lookup of each key with a load in progress")
            assert_equal({each: list(store.places([each])) for each in held}, held, "place of each key with a load in progress")
            if len(held) == AT_ONCE:
                store.complete_load([held.popitem()[0] for _ in range(AT_ONCE)])
        store.complete_load(list(held))

    in_threads(subject, work)
    more = [KEYS + number for number in range(store.config["capacity"])]
    store.prepare_store(more)  # no load is in progress, so every key can be evicted
    assert_equal(store.num_free, 0, "num_free after prepare_store of as many keys as there are places")


def _went(kind: str, call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call succeeds. False if it raises an error of this kind, which concurrent calls may cause."""
    try:
        call(*args)
    except Exception as error:
        if kind not in kinds_of(error):
            raise
        return False
    return True


def _store(store: ObjectProxy, key: int, arrives: bool = True) -> None:
    """Store a key, unless it is already stored or there is no room."""
    new = list[int]()
    if _went("OutOfBlocks", lambda: new.extend(store.prepare_store([key])[0])) and new:
        store.complete_store(new, success=arrives)
