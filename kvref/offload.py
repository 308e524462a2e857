"""Blocks that move to the host and back: found by key, never half stored, never taken away while somebody loads them.

`HostStore` keeps the books: which keys are there, where each one's block lies, and what goes when there is no room. `HostBlocks`
is the memory, and copies. They know nothing of each other: a scheduler has the one and a worker the other, and what goes between
them is a list of places. To store is to prepare, to copy, and to say that it is done, or that it failed; to load is the same.
Between the two calls a copy may be under way, so a block that is being stored is not found and not evicted, and one that is being
loaded is not evicted.

A key stands for one block, in one layer or in whatever else a block is of; `kvref.prefix.block_keys` makes keys of tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend, Slots, reference, slots_to_gather
from kvref.errors import KeyNotFound, OutOfBlocks, ShapeMismatch, whole
from kvref.formats import Quantized
from kvref.paged import PagedCache
from kvref.slots import SlotStore, TokenStore

Key = Hashable
Keys = Sequence[Key]


@dataclass
class _Block:
    """What is known of one key. loads: how many are under way."""

    place: int
    ready: bool = False
    loads: int = 0


class HostStore:
    """The books of a store of `capacity` blocks on the host. Several threads may use it (MOVE-13).

    Keys are used when they are stored, loaded or touched, and of those of one call the last counts as used first: of a prefix the
    end goes before the beginning, without which it is of no use (MOVE-11).
    """

    def __init__(self, capacity: int) -> None:
        """Raises ConfigError."""
        self.capacity = whole("capacity", capacity, minimum=0)
        self._free = list(reversed(range(self.capacity)))  # places
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()  # the one used longest ago first
        self._lock = Lock()

    @property
    def num_free(self) -> int:
        """Places that hold nothing, and are kept for nothing."""
        with self._lock:  # for others are half way through a call
            return len(self._free)

    def lookup(self, keys: Keys) -> int:
        """How many keys, from the first on, can be loaded now. Changes nothing (MOVE-06)."""
        with self._lock:
            missing = (count for count, key in enumerate(keys) if not self._is_ready(key))
            return next(missing, len(keys))

    def places(self, keys: Keys) -> list[int]:
        """Where the blocks of keys lie, or will lie that are being stored, in [0, capacity). Raises KeyNotFound."""
        with self._lock:
            return [self._known("places", key).place for key in keys]

    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        """Make room for those of `keys` that are neither there nor on their way: which they are, and which were evicted for them.

        Raises OutOfBlocks, with nothing changed, where there is no room for all of them: what is being stored or loaded, and what
        these keys name themselves, is not evicted (MOVE-09, MOVE-10).
        """
        keys = list(keys)
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._blocks]
            evicted = self._to_evict(len(new) - len(self._free), keys)
            for key in evicted:
                self._forget(key)
            for key in new:
                self._blocks[key] = _Block(self._free.pop())
            self._use(keys)
            return new, evicted

    def complete_store(self, keys: Keys, success: bool = True) -> None:
        """The blocks of `keys` have arrived, and can be loaded; or did not, and are not there (MOVE-08).

        Raises KeyNotFound for a key that is not being stored, with nothing changed.
        """
        with self._lock:
            for key in keys:
                if self._known("complete_store", key).ready:
                    raise KeyNotFound(f"complete_store: key {key!r} is already stored")
            for key in dict.fromkeys(keys):
                if success:
                    self._blocks[key].ready = True
                else:
                    self._forget(key)

    def prepare_load(self, keys: Keys) -> None:
        """Keep the blocks of `keys` in place until `complete_load`. Raises KeyNotFound for one that cannot be loaded now."""
        with self._lock:
            for key in keys:
                if not self._known("prepare_load", key).ready:
                    raise KeyNotFound(f"prepare_load: key {key!r} is still being stored")
            for key in keys:
                self._blocks[key].loads += 1
            self._use(keys)

    def complete_load(self, keys: Keys) -> None:
        """One load of each of `keys` is over. Raises KeyNotFound where none was under way, with nothing changed."""
        with self._lock:
            for key, count in Counter(keys).items():
                if self._known("complete_load", key).loads < count:
                    raise KeyNotFound(f"complete_load: key {key!r} is not being loaded")
            for key in keys:
                self._blocks[key].loads -= 1

    def touch(self, keys: Keys) -> None:
        """Those of `keys` that are there were used just now."""
        with self._lock:
            self._use(keys)

    def _is_ready(self, key: Key) -> bool:
        return key in self._blocks and self._blocks[key].ready

    def _known(self, operation: str, key: Key) -> _Block:
        if key not in self._blocks:
            raise KeyNotFound(f"{operation}: unknown key {key!r} (never stored, or evicted)")
        return self._blocks[key]

    def _to_evict(self, count: int, kept: Keys) -> list[Key]:
        """The keys used longest ago, of those that may go. Raises OutOfBlocks."""
        keep, found = set(kept), list[Key]()
        for key, block in self._blocks.items():
            if len(found) >= count:
                break
            if block.ready and not block.loads and key not in keep:
                found.append(key)
        if len(found) < count:
            raise OutOfBlocks(
                f"out of blocks: {count} must be evicted, {len(found)} of {self.capacity} can be"
            )
        return found

    def _forget(self, key: Key) -> None:
        self._free.append(self._blocks.pop(key).place)

    def _use(self, keys: Keys) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)


class HostBlocks:
    """Memory on the host for `capacity` blocks of a store, keys and values: codes and scales as they lie there (MOVE-12)."""

    def __init__(self, store: TokenStore, block_size: int, capacity: int, backend: Backend = reference) -> None:
        """backend: the store's. Raises ConfigError."""
        self.block_size = whole("block_size", block_size)
        self.capacity = whole("capacity", capacity, minimum=0)
        self._store, self._backend = store, backend
        self._memory = [self._room(store.keys), self._room(store.values)]

    @classmethod
    def of(cls, cache: PagedCache, capacity: int) -> "HostBlocks":
        """For the blocks of a paged cache, of whichever layer: those that its tables list."""
        return cls(cache._store, cache.config.block_size, capacity, cache._backend)

    def to_host(self, blocks: Slots, places: Slots) -> None:
        """Place places[i] becomes what block blocks[i] is now. Several blocks go to several places.

        Raises ShapeMismatch, DtypeMismatch, or SlotOutOfRange for a block or a place that there is not, with nothing copied.
        """
        device, host = self._slots(blocks, places)
        for memory, store in zip(self._memory, (self._store.keys, self._store.values), strict=True):
            for room, part in zip(memory, store.stored(device), strict=True):
                if room is not None:
                    room[host] = self._as_numpy(part)

    def to_device(self, places: Slots, blocks: Slots) -> None:
        """Block blocks[i] becomes what place places[i] is. Raises as `to_host` does."""
        device, host = self._slots(blocks, places)
        for memory, store in zip(self._memory, (self._store.keys, self._store.values), strict=True):
            pairs = zip(memory, store.stored([]), strict=True)
            parts = (None if room is None else self._as_stored(room[host], like) for room, like in pairs)
            store.put(device, Quantized(*parts))

    def _slots(self, blocks: Slots, places: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slots of blocks in the store, and of places in this memory."""
        ends = self._store.num_slots // self.block_size, self.capacity
        numbers = [slots_to_gather(each, end, self._backend.to_numpy) for each, end in zip((blocks, places), ends, strict=True)]
        ShapeMismatch.check("places", numbers[1].shape, numbers[0].shape)
        device, host = ((each[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1) for each in numbers)
        return device, host

    def _room(self, store: SlotStore) -> list[NDArray[Any] | None]:
        """Zeros for what each part of a store holds: codes, scale and zero, as many of them as the format has."""
        parts = [None if part is None else self._as_numpy(part) for part in store.stored([])]
        slots = self.capacity * self.block_size
        return [None if part is None else np.zeros((slots, *part.shape[1:]), part.dtype) for part in parts]

    def _as_numpy(self, part: Array) -> NDArray[Any]:
        """NumPy has no bfloat16: its bits are kept as integers."""
        numbers: NDArray[Any] = self._backend.to_numpy(part.view(self._backend.xp.int16) if self._is_bfloat16(part) else part)
        return numbers

    def _as_stored(self, part: NDArray[Any], like: Array) -> Array:
        array = self._backend.asarray(part)
        return array.view(like.dtype) if self._is_bfloat16(like) else array

    def _is_bfloat16(self, part: Array) -> bool:
        return hasattr(self._backend.xp, "bfloat16") and part.dtype == self._backend.xp.bfloat16
