"""Wrong tiered caches, host stores and host blocks."""

from typing import Any

import numpy as np
import pytest

from kvref import HostBlocks, HostStore, TieredCache, TieredConfig
from kvref.errors import KeyNotFound
from kvref.formats import FORMATS
from kvref.tier_queue import Tier
from kvref.token_store import TokenStore
from wrong_designs.design import NUMPY, around, design, noise, observe


def tiered(count: int, seed: int = 0, **changes: Any) -> Any:
    """A tiered cache with `count` random tokens."""
    sizes = {"num_kv_heads": 1, "head_dim": 4, "max_tokens": 8, "tail_length": 4, "migration_batch": 2}
    cache = TieredCache(TieredConfig(**(sizes | changes)), NUMPY)
    add(cache, count, seed)
    return cache


def add(cache: Any, count: int, seed: int = 0) -> None:
    """Append random tokens."""
    new = noise(count, dim=cache.config.head_dim, seed=seed)
    cache.append(new, new)


def _shorter_tail() -> Any:
    cache = tiered(4)
    cache.update_policy(tail_length=1)
    return observe(cache.truncate, 2), cache.total_tokens


@design("tiered", "EDIT-06", _shorter_tail)
def truncate_forgets_that_the_policy_moved_tokens(patch: pytest.MonkeyPatch) -> None:
    """`truncate` remembers what appends moved to another tier, and not what `update_policy` moved."""

    @around(patch, TieredCache, "update_policy")
    def update_policy(original: Any, self: Any, **changes: Any) -> None:
        moved = self._moved_at
        original(self, **changes)
        self._moved_at = moved


def _load_then_truncate() -> Any:
    cache, target = tiered(6), tiered(0)
    target.load(cache.save())
    return observe(target.truncate, 5), target.total_tokens


@design("tiered", "MOVE-01", _load_then_truncate)
def a_file_does_not_tell_when_tokens_moved(patch: pytest.MonkeyPatch) -> None:
    """After `load`, `truncate` accepts lengths that it has to refuse in the cache that was saved."""

    @around(patch, TieredCache, "receive")
    def receive(original: Any, self: Any, file: Any) -> None:
        original(self, file)
        self._moved_at = 0


def _there_and_back() -> Any:
    cache = tiered(2)
    cache.update_policy(tail_dtype="float32")
    add(cache, 1, 1)
    cache.update_policy(tail_dtype="float16")
    add(cache, 1, 2)
    return cache.read()[0]


@design("tiered", "TIER-03", _there_and_back)
def an_older_run_of_the_same_format_is_continued(patch: pytest.MonkeyPatch) -> None:
    """A policy that returns to an earlier format continues the earlier run of tokens: the order of tokens changes."""

    @around(patch, TieredCache, "_set_policy")
    def set_policy(original: Any, self: Any, config: Any) -> None:
        rooms = (config.tail_length, config.warm_length, config.max_tokens)
        formats = (config.tail_dtype, config.warm_format, config.store_format)
        for tier, room, name in zip(self._tiers, rooms, formats, strict=True):
            capacity = min(room + config.migration_batch, config.max_tokens)
            for segment in list(tier.segments)[:-1]:
                if room and segment.accepts(capacity, FORMATS[name]):
                    tier.segments.remove(segment)
                    tier.segments.append(segment)
        original(self, config)


def _longer_than_the_cache() -> Any:
    cache = tiered(11)
    return [observe(cache.tier_of, position) for position in range(12)]


@design("tiered", "TIER-07", _longer_than_the_cache)
def tokens_that_are_never_stored_have_no_position(patch: pytest.MonkeyPatch) -> None:
    """The first tokens of an append longer than the cache are skipped, and not counted in later positions."""

    @around(patch, TieredCache, "append")
    def append(original: Any, self: Any, new_keys: Any, new_values: Any) -> None:
        original(self, new_keys, new_values)
        self._next -= max(0, len(new_keys) - self.config.max_tokens)


def _two_formats() -> Any:
    cache = tiered(4)
    cache.update_policy(tail_dtype="float32")
    return cache.stats().tail_bytes


@design("tiered", "TIER-08", _two_formats)
def bytes_are_counted_in_the_newest_format(patch: pytest.MonkeyPatch) -> None:
    """The statistics multiply the tokens of a tier by the size of a token in its present format."""
    patch.setattr(Tier, "bytes", property(lambda self: len(self) and len(self) * self.segments[-1].store.token_bytes))


def _warm_misfit() -> Any:
    cache = tiered(0, head_dim=32, tail_length=0, warm_length=4, warm_format="q8", store_format="q8")
    new = np.full((2, 1, 32), 1e30, np.float32)
    cache.append(new, new)
    return observe(cache.update_policy, store_format="uint8_g32_float16")


@design("tiered", "TIER-18", _warm_misfit)
def a_new_policy_is_tried_on_the_tail_only(patch: pytest.MonkeyPatch) -> None:
    """`update_policy` does not try whether the tokens of the warm tier fit the new format of the store."""
    trying = []

    @around(patch, TieredCache, "_set_policy")
    def set_policy(original: Any, self: Any, config: Any) -> None:
        trying.append(True)
        try:
            original(self, config)
        finally:
            trying.pop()

    @around(patch, Tier, "read")
    def read(original: Any, self: Any, start: int, stop: int) -> Any:
        return iter(()) if trying and self.name == "warm" else original(self, start, stop)


def _batched_migration() -> Any:
    cache = tiered(3, migration_batch=8)
    add(cache, 5, 1)
    return cache.read()[0]


@design("tiered", "TIER-02", _batched_migration)
def a_prompt_longer_than_the_tail_skips_it(patch: pytest.MonkeyPatch) -> None:
    """Tokens of an append that do not stay in the tail are quantized as they were passed, not as the float16 tail rounds them."""

    @around(patch, Tier, "write")
    def write(original: Any, self: Any, new_keys: Any, new_values: Any) -> None:
        original(self, new_keys, new_values)
        if self.name == "tail":
            self._exact = new_keys, new_values

    @around(patch, Tier, "read")
    def read(original: Any, self: Any, start: int, stop: int) -> Any:
        for found, values in original(self, start, stop):
            exact = self.__dict__.get("_exact")
            migrating = self.name == "tail" and start == 0 and exact and len(self) > self.room
            old = len(self) - len(exact[0]) if migrating else 0
            if migrating and stop > old and len(self.segments) == 1:
                yield tuple(np.concatenate([a[:old], b[: stop - old]]) for a, b in zip((found, values), exact, strict=True))
            else:
                yield found, values


def store_of(*keys: str, capacity: int = 3) -> Any:
    """A host store in which these keys are stored."""
    store = HostStore(capacity)
    for key in keys:
        store.prepare_store([key])
        store.complete_store([key])
    return store


def _pins() -> Any:
    store = store_of("a", "b", "c")
    store.prepare_load(["a"])
    return observe(store.complete_load, ["a", "a"]), store.prepare_store(["d"])[1]


@design("offload", "MOVE-09", _pins)
def complete_load_counts_a_key_once(patch: pytest.MonkeyPatch) -> None:
    """A call that names a key twice is checked as if it named it once: the number of pins becomes negative."""

    def complete_load(self: Any, keys: Any) -> None:
        with self._lock:
            for key in set(keys):
                if not self._known("complete_load", key).loads:
                    raise KeyNotFound(f"complete_load: key {key!r} is not being loaded")
            for key in keys:
                self._blocks[key].loads -= 1

    patch.setattr(HostStore, "complete_load", complete_load)


def _failed_load() -> Any:
    store = store_of("a", "b", "c")
    return observe(store.prepare_load, ["a", "z"]), store.prepare_store(["d"])[1]


@design("offload", "MOVE-11", _failed_load)
def a_failed_load_is_a_use(patch: pytest.MonkeyPatch) -> None:
    """A `prepare_load` that raises KeyNotFound has moved its other keys to the end of the order of eviction."""

    @around(patch, HostStore, "prepare_load")
    def prepare_load(original: Any, self: Any, keys: Any) -> None:
        try:
            original(self, keys)
        except KeyNotFound:
            self.touch(keys)
            raise


def _old_and_new() -> Any:
    store = store_of("a", "b", capacity=3)
    store.prepare_store(["a", "b", "c"])
    store.complete_store(["c"])
    return [store.prepare_store([key])[1] for key in ("d", "e")]


@design("offload", "MOVE-11", _old_and_new)
def keys_that_are_stored_already_are_used_in_order(patch: pytest.MonkeyPatch) -> None:
    """`prepare_store` marks new keys as used in reverse order, and the others in the order of the call, before the new ones."""

    @around(patch, HostStore, "prepare_store")
    def prepare_store(original: Any, self: Any, keys: Any) -> Any:
        new, evicted = original(self, keys)
        self.touch([key for key in reversed(list(keys)) if key not in new])
        self.touch(new)
        return new, evicted


def _failed_and_stored() -> Any:
    store = HostStore(3)
    store.prepare_store(["a"])
    store.complete_store(["a"], success=False)
    for key in ("b", "a", "c"):
        store.prepare_store([key])
        store.complete_store([key])
    return store.places(["a", "b", "c"]), store.num_free


@design("offload", "MOVE-10", _failed_and_stored)
def a_failed_store_is_rolled_back_again_later(patch: pytest.MonkeyPatch) -> None:
    """The place of a failed store is freed at once, and again when its key is stored at another place: it then has two owners."""

    @around(patch, HostStore, "complete_store")
    def complete_store(original: Any, self: Any, keys: Any, success: bool = True) -> None:
        places = {} if success else {key: self._blocks[key].place for key in keys if key in self._blocks}
        original(self, keys, success)
        failed = self.__dict__.setdefault("_failed", {})
        failed.update(places)
        for key in keys if success else ():
            place = failed.pop(key, None)
            if place is not None and self._blocks[key].place != place:
                self._free.append(place)


def _copied_back_late() -> Any:
    store = TokenStore(NUMPY, FORMATS["float32"], 4, 1, 1)
    host = HostBlocks(store, 1, 2, NUMPY)
    for slot in range(4):
        store.write([slot], *[np.full((1, 1, 1), slot, np.float32)] * 2)
    host.to_host([0], [0])
    host.to_device([0], [1])
    host.to_host([2], [0])
    return store.read([1])[0]


@design("hosted", "MOVE-12", _copied_back_late)
def copies_to_the_device_wait_for_a_read(patch: pytest.MonkeyPatch) -> None:
    """Copies to the device are made at the next read: a place that gets another block before that is copied in its new state."""

    def flush(store: Any) -> None:
        for run in store.__dict__.pop("_waiting", []):
            run()

    @around(patch, HostBlocks, "to_device")
    def to_device(original: Any, self: Any, places: Any, blocks: Any) -> None:
        self._slots(blocks, places)
        places, blocks = list(places), list(blocks)
        self._store.__dict__.setdefault("_waiting", []).append(lambda: original(self, places, blocks))
        self._store.__dict__.setdefault("_targets", set()).update(blocks)

    @around(patch, HostBlocks, "to_host")
    def to_host(original: Any, self: Any, blocks: Any, places: Any) -> None:
        if self._store.__dict__.get("_targets", set()) & set(blocks):
            flush(self._store)
            self._store._targets = set()
        original(self, blocks, places)

    for name in ("read", "write"):

        @around(patch, TokenStore, name)
        def access(original: Any, self: Any, *arguments: Any) -> Any:
            flush(self)
            return original(self, *arguments)


def _a_place_twice() -> Any:
    store = TokenStore(NUMPY, FORMATS["uint8_g32_float16"], 3, 1, 32)
    host = HostBlocks(store, 1, 3, NUMPY)
    for slot in range(2):
        store.write([slot], noise(1, dim=32, seed=slot), noise(1, dim=32, seed=slot))
    host.to_host([0, 1], [1, 0])
    host.to_device([1, 0], [0, 1])
    return store.read([0, 1])


@design("hosted", "MOVE-12", _a_place_twice)
def scales_are_copied_in_the_order_of_places(patch: pytest.MonkeyPatch) -> None:
    """Codes are copied pair by pair; scales and zeros with one strided copy, which sorts the places."""

    @around(patch, HostBlocks, "to_host")
    def to_host(original: Any, self: Any, blocks: Any, places: Any) -> None:
        original(self, blocks, places)
        device, host = self._slots(blocks, sorted(places) if len(set(places)) == len(places) else places)
        for memory, store in zip(self._memory, (self._store.keys, self._store.values), strict=True):
            for room, part in list(zip(memory, store.stored(device), strict=True))[1:]:
                if room is not None:
                    room[host] = self._as_numpy(part)
