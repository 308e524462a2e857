"""Checks of host stores: lookup, places, evictions, and keys that must stay while a store or load is in progress."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.testlib.assertions import KeptResults, assert_equal, assert_true, may_raise, raises
from kvref_conformance.testlib.fixtures import new_object, require_sizes
from kvref_conformance.testlib.integer_types import Observation, RaisedError, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.law_adapter import assert_counters_within_bounds, call_tolerating_errors
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.thread_stress import run_in_threads

FIRST = 2**40  # keys are hashes, which exceed 32 bits


class StoreFixture(Session):
    """A host store with a key per place, if `full`: each was stored separately, the least recently used one first."""

    def __init__(self, subject: Subject, least: int = 1, full: bool = True) -> None:
        """least: the capacity that the check needs. Raises NotOffered if the limits do not allow it."""
        super().__init__(subject, capacity=4)
        require_sizes(self.cache, capacity=least)
        self.capacity: int = self.cache.config["capacity"]
        self.keys = [FIRST + number for number in range(self.capacity)]
        self.other_keys = [FIRST - 1 - number for number in range(2 * self.capacity)]  # never stored before a check does it
        for key in self.keys if full else ():
            self.store([key])

    def store(self, keys: list[int]) -> None:
        self.cache.prepare_store(keys)
        self.cache.complete_store(keys)

    def store_new(self, keys: list[int], success: bool = True) -> None:
        """Stores those of the keys that are not stored yet, in one call that names all of them."""
        self.cache.complete_store(list(self.cache.prepare_store(keys)[0]), success=success)

    def load(self, keys: list[int]) -> None:
        self.cache.prepare_load(keys)
        self.cache.complete_load(keys)

    def look(self, *names: str) -> None:
        super().look(*(names or ("num_free", "lookup", "places")))

    def evicted_for(self, *keys: int) -> list[int]:
        """Returns the keys that `prepare_store` evicts to make room for the given keys, sorted."""
        return sorted(self.cache.prepare_store(list(keys))[1])


def require_lru(subject: Subject) -> None:
    """Raises NotOffered if the implementation declares another eviction order."""
    if subject.limits.switch(subject.family, "other_eviction_order"):
        raise NotOffered("the eviction order of MOVE-11, where its limits say other_eviction_order")


@check("MOVE-06a", "offload")
def lookup_finds_a_key_after_complete_store(subject: Subject) -> None:
    store = StoreFixture(subject, least=2, full=False)
    for keys in ([1], [2]):
        store.cache.prepare_store([1, 2])
        store.look("lookup")
        store.cache.complete_store(keys)
        store.look("lookup")
    assert_equal(store.cache.lookup([1, 2]), 2, "number of keys that lookup finds")


@check("MOVE-06c", "offload")
def prepare_load_of_a_key_being_stored_raises(subject: Subject) -> None:
    store = StoreFixture(subject, least=2, full=False)
    store.store([1])
    store.cache.prepare_store([2])
    for keys in ([2], [1, 2], [2, 1], [3], [1, 3]):
        with raises("KeyNotFound"):
            store.cache.prepare_load(keys)
    store.cache.complete_store([2])
    store.cache.prepare_load([1, 2])


@check("MOVE-06a", "offload")
def lookup_counts_the_keys_before_the_first_missing_one(subject: Subject) -> None:
    store = StoreFixture(subject, least=3)
    keys, missing = store.keys, FIRST - 1
    cases = {(missing, *keys): 0, (keys[0], missing, keys[1]): 1, (keys[2], keys[0], keys[1], missing): 3, (): 0}
    for names, want in (cases | {tuple(keys): len(keys)}).items():
        assert_equal(store.cache.lookup(list(names)), want, f"number of keys that lookup finds, of which {missing} is missing")


@check("MOVE-06b", "offload")
def lookup_changes_nothing(subject: Subject) -> None:
    store = StoreFixture(subject, least=2)
    for _ in range(3):
        store.cache.lookup(store.keys[:1])
        store.cache.lookup([FIRST - 1])
    assert_equal(store.cache.num_free, 0, "num_free after lookup in a full store")
    require_lru(subject)
    assert_equal(store.evicted_for(FIRST - 1), store.keys[:1], "keys evicted after lookup of the least recently used key")


@check("MOVE-08ab", "offload")
def complete_store_without_success_frees_the_place(subject: Subject) -> None:
    store = StoreFixture(subject, least=2, full=False)
    free = store.cache.num_free
    store.cache.prepare_store([1, 2])
    store.cache.complete_store([1], success=False)
    assert_equal(store.cache.num_free, free - 1, "num_free after one of two stores failed")
    store.cache.complete_store([2])
    store.look("lookup")
    prepared = [list(part) for part in store.cache.prepare_store([1, 2])]
    assert_equal(prepared, [[1], []], "keys to store and keys evicted, after the store of key 1 failed")
    store.look("lookup")
    store.cache.complete_store([1])
    assert_equal(store.cache.lookup([1, 2]), 2, "number of keys that lookup finds after the failed key was stored")


@check("MOVE-08a", "offload")
def prepare_store_accepts_keys_whose_store_failed(subject: Subject) -> None:
    store = StoreFixture(subject, full=False)
    for _ in range(3):
        assert_equal(list(store.cache.prepare_store(store.keys)[0]), store.keys, "keys to store, whose earlier stores failed")
        store.cache.complete_store(store.keys, success=False)
        store.look()
    store.store(store.keys)
    assert_equal(store.cache.lookup(store.keys), store.capacity, "number of keys that lookup finds after a store succeeded")


@check("MOVE-08c", "offload")
def complete_store_without_a_store_in_progress_changes_nothing(subject: Subject) -> None:
    store = StoreFixture(subject, full=False)
    store.store([1])
    free = store.cache.num_free
    for key, success in ((2, True), (1, False), (1, True), (2, False)):
        with may_raise("KeyNotFound"):
            store.cache.complete_store([key], success=success)
        numbers = store.cache.lookup([1]), store.cache.lookup([2]), store.cache.num_free
        assert_equal(numbers, (1, 0, free), f"lookup of 1 and of 2, and num_free, after complete_store([{key}], {success})")


@check("MOVE-08c", "offload")
def complete_store_that_raises_completes_no_key(subject: Subject) -> None:
    store = new_object(subject, "offload", capacity=4)
    for keys in ([1, 2], [2, 1]):
        store.prepare_store([1])
        raised = True
        with may_raise("KeyNotFound"):
            store.complete_store(keys)
            raised = False
        what = f"after complete_store({keys}), of which 2 has no store in progress"
        assert_equal(store.lookup([1]), 0 if raised else 1, f"number of keys that lookup finds of [1] {what}")
        assert_equal(store.lookup([2]), 0, f"number of keys that lookup finds of [2] {what}")
        if not raised:
            return
        store.complete_store([1], success=False)


@check("MOVE-09ad", "offload")
def prepare_store_does_not_evict_a_key_being_loaded(subject: Subject) -> None:
    store = StoreFixture(subject, least=2)
    oldest, others = store.keys[0], store.other_keys
    store.cache.prepare_load([oldest])
    for key in others[: store.capacity - 1]:
        evicted = store.evicted_for(key)
        assert_true(oldest not in evicted, "keys evicted", f"not {oldest}, which has a load in progress", evicted)
        store.cache.complete_store([key])
    assert_equal(store.cache.lookup([oldest]), 1, "number of keys that lookup finds of a key with a load in progress")
    with raises("OutOfBlocks"):
        store.cache.prepare_store(others[store.capacity :])
    store.cache.complete_load([oldest])
    evicted = store.evicted_for(*others[store.capacity :])
    assert_true(oldest in evicted, "keys evicted after complete_load", f"{oldest} among them", evicted)


@check("MOVE-09ad", "offload")
def prepare_store_does_not_evict_a_key_being_stored(subject: Subject) -> None:
    store = StoreFixture(subject, full=False)
    store.cache.prepare_store(store.keys)
    with raises("OutOfBlocks"):
        store.cache.prepare_store([1])
    store.cache.complete_store(store.keys)
    assert_equal(store.cache.lookup(store.keys), store.capacity, "number of keys that lookup finds after complete_store")
    assert_equal(len(store.evicted_for(1)), 1, "number of keys evicted after complete_store")


@check("MOVE-09bd", "offload")
def complete_load_ends_one_of_several_loads(subject: Subject) -> None:
    store = StoreFixture(subject)
    for _ in range(3):
        store.cache.prepare_load(store.keys)
    for _ in range(3):
        with raises("OutOfBlocks"):
            store.cache.prepare_store([FIRST - 1])
        store.cache.complete_load(store.keys)
    evicted = store.evicted_for(*store.other_keys[: store.capacity])
    assert_equal(evicted, store.keys, "keys evicted after complete_load of three loads")


@check("MOVE-09bcd", "offload")
def load_of_a_key_listed_twice_counts_twice(subject: Subject) -> None:
    store = StoreFixture(subject)
    twice, more = store.keys[:1] * 2, store.other_keys[: store.capacity]
    store.cache.prepare_load(twice)
    store.cache.complete_load(twice[:1])
    with raises("KeyNotFound"):
        store.cache.complete_load(twice)  # only one of the two loads is still in progress
    with raises("OutOfBlocks"):
        store.cache.prepare_store(more)
    store.cache.complete_load(twice[:1])
    store.cache.prepare_load(twice)
    store.cache.complete_load(twice)
    assert_equal(store.evicted_for(*more), store.keys, "keys evicted after complete_load of loads that listed one key twice")


@check("MOVE-09c", "offload")
def complete_load_without_a_load_in_progress_raises(subject: Subject) -> None:
    store = StoreFixture(subject)
    with raises("KeyNotFound"):
        store.cache.complete_load(store.keys[:1])
    store.cache.prepare_load(store.keys)
    store.cache.complete_load(store.keys)
    for wrong in (store.keys[:1], [FIRST - 1]):
        with raises("KeyNotFound"):
            store.cache.complete_load(wrong)
    store.cache.prepare_load(store.keys)
    with raises("OutOfBlocks"):
        store.cache.prepare_store([FIRST - 1])


@check("LAW-01", "offload")
def prepare_load_that_raises_starts_no_load(subject: Subject) -> None:
    for when in ("without another call", "after prepare_load of all of them and an unknown key raised KeyNotFound"):
        store = StoreFixture(subject)
        if when.startswith("after"):
            with raises("KeyNotFound"):
                store.cache.prepare_load([*store.keys, FIRST - 1])
        assert_equal(store.evicted_for(*store.other_keys[: store.capacity]), store.keys, f"keys evicted {when}")


# LAW-19, LAW-20: laws in the form that applies to this family only.


@check("LAW-19", "offload")
def num_free_stays_between_zero_and_the_capacity(subject: Subject) -> None:
    store = new_object(subject, "offload", capacity=3)
    total = store.config["capacity"]
    keys = [FIRST + number for number in range(total)]
    wrong: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [("prepare_store", store.prepare_store, (keys,))]
    for success in (False, False, True, True, False):
        wrong += [("complete_store", store.complete_store, (keys[:1], success)), ("complete_load", store.complete_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([*keys, *keys],)), ("prepare_load", store.prepare_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([FIRST - 1 - number],)) for number in range(total + 2)]
    for name, call, args in wrong:
        call_tolerating_errors(call, *args)
        assert_counters_within_bounds([("num_free", store.num_free, total)], f"{name}{args}")


@check("LAW-20", "offload")
def keys_may_be_of_every_integer_type(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Observation]:
        store = typed.new("offload", capacity=100)
        for keys in ([5, 100], [100, 120]):
            prepared = typed.call(store, "prepare_store", keys)
            yield f"prepare_store({keys})", prepared if isinstance(prepared, RaisedError) else [list(part) for part in prepared]
        yield "complete_store([100])", typed.call(store, "complete_store", [100])
        yield (
            "numbers of keys that lookup finds of [100] and of [100, 5]",
            (store.lookup([100]), typed.call(store, "lookup", [100, 5])),
        )
        yield "num_free", store.num_free

    assert_same_for_integer_types(subject, script)


# LAW-18: host stores of thousands of blocks.

PROMPT = 90  # number of keys per prompt


@check("LAW-18", "offload")
def lookup_finds_the_latest_of_thousands_of_keys(subject: Subject) -> None:
    require_lru(subject)
    store = new_object(subject, "offload", capacity=3000)
    total, first = store.config["capacity"], 2**52
    prompts = [list(range(start, start + PROMPT)) for start in range(first, first + 2 * total, PROMPT)]
    for keys in prompts:
        if len(keys) <= total:
            store.complete_store(list(store.prepare_store(keys)[0]))
    recent = [keys for keys in prompts if store.lookup(keys) == len(keys)][-(total // PROMPT) :]
    assert_equal(len(recent), min(total // PROMPT, len(prompts)), "number of recent prompts of which lookup finds every key")
    places = [place for keys in recent for place in store.places(keys)]
    assert_equal(len(set(places)), len(places), "number of distinct places of the keys that lookup finds")
    if total >= PROMPT:
        count = 0 if total < PROMPT * len(prompts) else PROMPT
        assert_equal(store.lookup(prompts[0]), count, "number of keys that lookup finds of the first prompt")


# MOVE-10, MOVE-11: the capacity of a host store, and which keys it evicts when it is full.


@check("MOVE-10a", "offload")
def places_are_distinct_and_stay(subject: Subject) -> None:
    store = StoreFixture(subject)
    assert_equal(
        sorted(store.cache.places(store.keys)), list(range(store.capacity)), "places of the keys of a full store, sorted"
    )
    for number, key in enumerate(store.other_keys):
        store.cache.prepare_store([key])
        store.look("places")
        store.cache.complete_store([key], success=number % 3 > 0)
        store.look("places")
    with raises("KeyNotFound"):
        store.cache.places([FIRST - 3 * store.capacity])


@check("MOVE-10b", "offload")
def num_free_counts_the_places_without_a_key(subject: Subject) -> None:
    store = StoreFixture(subject, full=False)
    assert_equal(store.cache.num_free, store.capacity, "num_free of a new store")
    for number, key in enumerate([*store.keys, *store.other_keys]):
        store.cache.prepare_store([key])
        store.look("num_free")
        store.cache.complete_store([key])
        assert_equal(store.cache.num_free, max(0, store.capacity - number - 1), f"num_free after stores of {number + 1} keys")


@check("MOVE-10b", "offload")
def capacity_is_the_requested_one(subject: Subject) -> None:
    store = new_object(subject, "offload")
    assert_equal(store.capacity, store.config["capacity"], "capacity")


@check("MOVE-10c", "offload")
def prepare_store_leaves_out_stored_keys(subject: Subject) -> None:
    store = StoreFixture(subject, least=3, full=False)
    store.store([1])
    store.cache.prepare_store([2])
    for keys, want in (([1, 3, 2], [[3], []]), ([1, 2, 3], [[], []])):
        prepared = [list(part) for part in store.cache.prepare_store(keys)]
        assert_equal(prepared, want, f"keys to store and keys evicted by prepare_store({keys})")
        store.look("num_free", "lookup")


@check("MOVE-10c", "offload")
def prepare_store_uses_one_place_for_a_key_listed_twice(subject: Subject) -> None:
    store = StoreFixture(subject, least=2, full=False)
    assert_equal(list(store.cache.prepare_store([5, 6, 5])[0]), [5, 6], "keys to store of prepare_store([5, 6, 5])")
    store.look("num_free")
    store.cache.complete_store([5, 6], success=False)
    store.look("num_free")


@check("MOVE-10d", "offload")
def prepare_store_evicts_as_few_keys_as_needed(subject: Subject) -> None:
    store = StoreFixture(subject, least=3)
    lost = store.evicted_for(FIRST - 1, FIRST - 2)
    assert_equal(len(lost), 2, "number of keys evicted by prepare_store of two keys in a full store")
    store.look("lookup")
    store.cache.complete_store([FIRST - 1], success=False)
    assert_equal(store.evicted_for(FIRST - 3), [], "keys evicted by prepare_store of one key with one free place")


@check("MOVE-10e", "offload")
def prepare_store_that_raises_evicts_nothing(subject: Subject) -> None:
    store = StoreFixture(subject, least=2)
    more = store.other_keys[: store.capacity + 1]
    for keys in (more, [store.keys[-1], *more[:-1]]):
        with raises("OutOfBlocks"):
            store.cache.prepare_store(keys)
        assert_equal(store.cache.lookup(store.keys), store.capacity, "number of keys that lookup finds after OutOfBlocks")
        store.look("num_free", "lookup")


@check("MOVE-10d", "offload")
def prepare_store_does_not_evict_the_keys_of_the_call(subject: Subject) -> None:
    store = StoreFixture(subject, least=2)
    others = store.other_keys[: store.capacity - 1]
    prepared = [sorted(part) for part in store.cache.prepare_store([store.keys[0], *others])]
    assert_equal(prepared, [sorted(others), store.keys[1:]], "keys to store and keys evicted")
    store.look("lookup")


@check("MOVE-11a", "offload")
def prepare_store_evicts_the_least_recently_used_key(subject: Subject) -> None:
    require_lru(subject)
    store = StoreFixture(subject, least=3)
    assert_equal(store.evicted_for(FIRST - 1), store.keys[:1], "keys evicted, when the first stored key is the oldest")
    store.cache.complete_store([FIRST - 1])
    store.cache.prepare_store([store.keys[1]])
    assert_equal(store.evicted_for(FIRST - 2), [store.keys[2]], "keys evicted after prepare_store of the least recently used key")


@check("MOVE-11ac", "offload")
def touch_makes_a_key_the_most_recently_used(subject: Subject) -> None:
    require_lru(subject)
    store = StoreFixture(subject, least=3)
    store.cache.touch([FIRST - 9, store.keys[0]])
    store.look("num_free", "lookup")
    assert_equal(store.evicted_for(FIRST - 1), [store.keys[1]], "keys evicted after touch of the least recently used key")


@check("MOVE-11a", "offload")
def prepare_load_makes_a_key_the_most_recently_used(subject: Subject) -> None:
    require_lru(subject)
    store = StoreFixture(subject, least=3)
    store.cache.prepare_load(store.keys[:1])
    store.cache.complete_load(store.keys[:1])
    assert_equal(store.evicted_for(FIRST - 1), [store.keys[1]], "keys evicted after a load of the least recently used key")


@check("MOVE-11b", "offload")
def prepare_store_evicts_the_end_of_a_prefix_first(subject: Subject) -> None:
    require_lru(subject)
    store = StoreFixture(subject, least=3, full=False)
    store.store(store.keys)
    assert_equal(store.evicted_for(1), store.keys[-1:], "keys evicted of a prefix that was stored in one call")
    store.cache.complete_store([1])
    store.cache.touch([store.keys[1], store.keys[0]])
    store.cache.touch([1, *store.keys[2:]])
    assert_equal(store.evicted_for(2), store.keys[:1], "keys evicted: the last key of a call of touch is the oldest of the call")


@check("MOVE-11ab", "offload")
def prepare_store_evicts_keys_in_the_order_of_their_last_use(subject: Subject) -> None:
    """Makes one call that is a use of some keys or of none, then evicts one key after the other. The model predicts each."""
    require_lru(subject)
    uses: tuple[Callable[[StoreFixture, int, int, int], None], ...] = (
        lambda store, a, b, new: store.store_new([a, b, new]),
        lambda store, a, b, new: store.store_new([b, new, a]),
        lambda store, a, b, new: store.store_new([new, a, b]),
        lambda store, a, b, new: store.load([b, a]),
        lambda store, a, b, new: store.cache.touch([a, new, b]),
        lambda store, a, b, new: refused(store, "prepare_load", [a, new]),
        lambda store, a, b, new: refused(store, "prepare_load", [new, b, a]),
        lambda store, a, b, new: refused(store, "complete_load", [a, b]),
        lambda store, a, b, new: refused(store, "places", [a, new]),
        lambda store, a, b, new: store.look("lookup", "places"),
        lambda store, a, b, new: store.store_new([a, new], success=False),
    )
    for use in uses:
        store = StoreFixture(subject, least=3)
        use(store, store.keys[0], store.keys[1], FIRST - 100)
        for key in store.other_keys[: store.capacity]:
            store.store([key])


def refused(store: StoreFixture, name: str, keys: list[int]) -> None:
    with raises("KeyNotFound"):
        getattr(store.cache, name)(keys)


# LAW-17 and LAW-18: the lists that a host store returns, and stores of thousands of keys.


@check("LAW-17", "offload")
def results_stay_after_later_calls(subject: Subject) -> None:
    kept, store = KeptResults(subject), StoreFixture(subject, full=False)
    keys = [FIRST + number for number in range(2 * store.capacity)]
    for key in keys:  # each of the second half takes the place of a key of the first half
        kept.add(f"prepare_store([{key}])", store.cache.as_is("prepare_store", [key]))
        kept.add(f"places([{key}])", store.cache.as_is("places", [key]))
        store.cache.complete_store([key])
    kept.assert_unchanged()


@check("LAW-18", "offload")
def places_of_thousands_of_keys_are_distinct(subject: Subject) -> None:
    """Places exceed 16 bits, and every key is evicted once."""
    store = new_object(subject, "offload", capacity=70_000)
    count = store.config["capacity"]
    first, second = ([start + 3 * number for number in range(count)] for start in (FIRST, 2 * FIRST))
    for keys, evicted in ((first, set[int]()), (second, set(first))):
        stored, lost = (set(part) for part in store.prepare_store(keys))
        assert_true(stored == set(keys), "keys that prepare_store returns as new", f"all {count}", len(stored))
        assert_true(lost == evicted, "keys that prepare_store evicts", f"the {len(evicted)} stored before", len(lost))
        store.complete_store(keys)
        assert_equal((store.lookup(keys), store.num_free), (count, 0), f"keys that lookup finds, and num_free, of {count} stored")
        places = [int(place) for place in store.places(keys)]
        assert_true(
            set(places) == set(range(count)), "places of the keys of a full store", f"all {count}, each once", len(set(places))
        )
    assert_equal(store.lookup(first), 0, "keys that lookup finds of those that were evicted")


# MOVE-13: concurrent calls to a host store.

KEYS, AT_ONCE = 12, 2  # keys in use, and loads in progress per thread


@check("MOVE-13", "offload")
def store_by_several_threads_loses_no_place(subject: Subject) -> None:
    store = new_object(subject, "offload", capacity=8)

    def work(thread: int, rng: np.random.Generator) -> None:
        for number in range(60):
            _store(store, int(rng.integers(KEYS)), arrives=number % 4 != 0)

    run_in_threads(subject, work)
    keys = [key for key in range(KEYS) if store.lookup([key])]
    assert_equal(store.num_free + len(keys), store.config["capacity"], "num_free plus the number of keys that lookup finds")
    assert_equal(len(set(store.places(keys))), len(keys), "number of distinct places of the keys that lookup finds")


@check("MOVE-13", "offload")
def num_free_of_a_full_store_stays_zero_in_other_threads(subject: Subject) -> None:
    store = new_object(subject, "offload", capacity=8)
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

    run_in_threads(subject, work)


@check("MOVE-13", "offload")
def prepare_load_protects_a_key_from_other_threads(subject: Subject) -> None:
    store = new_object(subject, "offload", capacity=8)

    def work(thread: int, rng: np.random.Generator) -> None:
        loading = dict[int, list[int]]()  # keys that this thread is loading, with their places
        for _ in range(60):
            _store(store, int(rng.integers(KEYS)))
            key = int(rng.integers(KEYS))
            if key not in loading and _succeeds("KeyNotFound", store.prepare_load, [key]):
                loading[key] = list(store.places([key]))
            assert_equal(
                [store.lookup([each]) for each in loading], [1] * len(loading), "lookup of each key with a load in progress"
            )
            assert_equal(
                {each: list(store.places([each])) for each in loading}, loading, "place of each key with a load in progress"
            )
            if len(loading) == AT_ONCE:
                store.complete_load([loading.popitem()[0] for _ in range(AT_ONCE)])
        store.complete_load(list(loading))

    run_in_threads(subject, work)
    more = [KEYS + number for number in range(store.config["capacity"])]
    store.prepare_store(more)  # no load is in progress, so every key can be evicted
    assert_equal(store.num_free, 0, "num_free after prepare_store of as many keys as there are places")


def _succeeds(kind: str, call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call succeeds. False if it raises an error of this kind, which concurrent calls may cause."""
    try:
        call(*args)
    except Exception as error:
        if kind not in error_kinds(error):
            raise
        return False
    return True


def _store(store: ObjectProxy, key: int, arrives: bool = True) -> None:
    """Store a key, unless it is already stored or there is no room."""
    new = list[int]()
    if _succeeds("OutOfBlocks", lambda: new.extend(store.prepare_store([key])[0])) and new:
        store.complete_store(new, success=arrives)
