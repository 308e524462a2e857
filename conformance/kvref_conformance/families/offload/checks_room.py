"""MOVE-10, MOVE-11: the capacity of a host store, and which keys it evicts when it is full."""

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.offload.checks import FIRST, found, full, gone, in_order, stored


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
        equal(
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
    equal(store.num_free, total, "num_free of a new store")
    for number in range(total):
        store.prepare_store([number])
        equal(store.num_free, total - number - 1, f"num_free with {number + 1} keys, one of them with a store in progress")
        store.complete_store([number])
        equal(store.num_free, total - number - 1, f"num_free with {number + 1} keys")
    for number in range(total, 2 * total):
        stored(store, [number])
        equal(store.num_free, 0, "num_free of a full store")


@check("MOVE-10b", "offload")
def the_capacity_is_as_asked(subject: Subject) -> None:
    store = new(subject, "offload")
    equal(store.capacity, store.config["capacity"], "capacity")


@check("MOVE-10c", "offload")
def what_is_there_is_not_stored_again(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=3)
    free = store.num_free
    stored(store, [1])
    store.prepare_store([2])
    equal(
        [list(part) for part in store.prepare_store([1, 3, 2])],
        [[3], []],
        "keys to store and keys evicted by prepare_store([1, 3, 2]), with 1 stored and 2 in progress",
    )
    equal(store.num_free, free - 3, "num_free with three keys")
    equal(found(store, [1, 2, 3]), [1], "keys that lookup finds, with stores of 2 and 3 in progress")
    equal(
        [list(part) for part in store.prepare_store([1, 2, 3])],
        [[], []],
        "keys to store and keys evicted by prepare_store of keys that are stored or in progress",
    )


@check("MOVE-10c", "offload")
def a_key_named_twice_takes_one_place(subject: Subject) -> None:
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=2)
    free = store.num_free
    equal(list(store.prepare_store([5, 6, 5])[0]), [5, 6], "keys to store of prepare_store([5, 6, 5])")
    equal(store.num_free, free - 2, "num_free with two keys")
    store.complete_store([5, 6], success=False)
    equal(store.num_free, free, "num_free after the stores of both keys failed")


@check("MOVE-10d", "offload")
def as_many_are_evicted_as_have_to_be(subject: Subject) -> None:
    store, keys = full(subject, least=3)
    more = [FIRST - 1, FIRST - 2]
    lost = gone(store, more)
    equal(len(lost), 2, "number of keys evicted by prepare_store of two keys in a full store")
    equal(found(store, keys), [key for key in keys if key not in lost], "keys that lookup finds after two were evicted")
    store.complete_store(more[:1], success=False)
    equal(gone(store, [FIRST - 3]), [], "keys evicted by prepare_store of one key with one free place")


@check("MOVE-10e", "offload")
def nothing_goes_for_what_has_no_room(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    more = [FIRST - number for number in range(1, len(keys) + 2)]
    for asked in (more, [keys[-1], *more[:-1]]):
        with raises("OutOfBlocks"):
            store.prepare_store(asked)
        equal(store.lookup(keys), len(keys), "number of keys that lookup finds after prepare_store raised OutOfBlocks")
        equal(store.num_free, 0, "num_free after prepare_store raised OutOfBlocks")
        equal(found(store, more), [], "new keys that lookup finds after prepare_store raised OutOfBlocks")


@check("MOVE-10d", "offload")
def nothing_is_evicted_that_the_call_names(subject: Subject) -> None:
    store, keys = full(subject, least=2)
    others = [FIRST - number for number in range(1, len(keys))]
    equal(
        [sorted(part) for part in store.prepare_store([keys[0], *others])],
        [sorted(others), keys[1:]],
        "keys to store and keys evicted",
    )
    equal(found(store, keys), keys[:1], "keys that lookup finds after all others were evicted")


@check("MOVE-11a", "offload")
def what_was_used_longest_ago_goes_first(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    equal(gone(store, [FIRST - 1]), keys[:1], "keys evicted, when the first stored key is the least recently used")
    store.complete_store([FIRST - 1])
    store.prepare_store([keys[1]])
    equal(gone(store, [FIRST - 2]), [keys[2]], "keys evicted after prepare_store of the least recently used key")


@check("MOVE-11ac", "offload")
def what_is_touched_goes_last(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    store.touch([FIRST - 9, keys[0]])
    equal((store.num_free, store.lookup(keys)), (0, len(keys)), "num_free and the number of keys that lookup finds after touch")
    equal(gone(store, [FIRST - 1]), [keys[1]], "keys evicted after touch of the least recently used key")


@check("MOVE-11a", "offload")
def what_is_loaded_goes_last(subject: Subject) -> None:
    in_order(subject)
    store, keys = full(subject, least=3)
    store.prepare_load(keys[:1])
    store.complete_load(keys[:1])
    equal(gone(store, [FIRST - 1]), [keys[1]], "keys evicted after a load of the least recently used key")


@check("MOVE-11b", "offload")
def the_end_of_a_prefix_goes_before_its_beginning(subject: Subject) -> None:
    in_order(subject)
    store = new(subject, "offload", capacity=4)
    at_least(store, capacity=3)
    keys = [FIRST + number for number in range(store.config["capacity"])]
    stored(store, keys)
    equal(gone(store, [1]), keys[-1:], "keys evicted of a prefix that was stored in one call")
    store.complete_store([1])
    store.touch([keys[1], keys[0]])
    store.touch([1, *keys[2:]])
    equal(gone(store, [2]), keys[:1], "keys evicted after touch of [second, first]: the last key in the call is used longest ago")
