"""Offloading blocks to host memory: HostStore manages places by key, and HostBlocks is the memory (chapter MOVE).

HostStore records which keys are stored, at which place the block of each key is, and which block is evicted next. It copies
nothing. HostBlocks copies blocks of a cache to places and back. The two are independent, because in an engine a scheduler has the
first and a worker the second; the scheduler sends lists of places to the worker.

Storing and loading take two calls each, with the copy in between: prepare and complete. A block that is being stored is not found
and not evicted, and a block that is being loaded is not evicted.

A key identifies one block, for example of one layer. `kvref.prefix.block_keys` computes keys from tokens.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend, Slots, reference, slots_to_gather
from kvref.errors import KeyNotFound, OutOfBlocks, ShapeMismatch, whole
from kvref.formats import Quantized
from kvref.paged import PagedCache
from kvref.token_store import SlotStore, TokenStore

Key = Hashable
Keys = Sequence[Key]


@dataclass
class _Block:
    """The state of a key: `place` of its block, `ready` once it is stored, `loads` the number of pins (MOVE-09).

    used: the number of the last use of the key; all uses are numbered in order.
    """

    place: int
    used: int = 0
    ready: bool = False
    loads: int = 0


class HostStore:
    """A host store: manages `capacity` places for blocks in host memory (MOVE-06 to MOVE-13). Threads can share it.

    Places are the integers in `[0, capacity)`. Keys are hashable objects. The least recently used block is evicted first; a key
    is used when `prepare_store`, `prepare_load` or `touch` names it. Within one call keys count as used in reverse order, so that
    the end of a prefix is evicted before its beginning, without which it could not be used (MOVE-11).
    """

    def __init__(self, capacity: int) -> None:
        """capacity: the number of places, 0 or more. Raises ConfigError."""
        self.capacity = whole("capacity", capacity, minimum=0)
        self._free = list(reversed(range(self.capacity)))  # free places, the last one is allocated first
        self._blocks: dict[Key, _Block] = {}
        # A heap of (number of a use, key) that contains the last use of every block that can be evicted. Other entries are
        # outdated: the key was used again, evicted or pinned. They are removed when they are popped.
        self._uses: list[tuple[int, Key]] = []
        self._next_use = count(1)
        self._lock = Lock()

    @property
    def num_free(self) -> int:
        """The number of places that no key has."""
        with self._lock:  # another thread can be in the middle of a call
            return len(self._free)

    def lookup(self, keys: Keys) -> int:
        """Return the largest h such that the first h keys are all stored. It changes nothing (MOVE-06)."""
        with self._lock:
            missing = (count for count, key in enumerate(keys) if not self._is_ready(key))
            return next(missing, len(keys))

    def places(self, keys: Keys) -> list[int]:
        """Return the place of each key that is stored or being stored (MOVE-10). Raises KeyNotFound for another key."""
        with self._lock:
            return [self._known("places", key).place for key in keys]

    def prepare_store(self, keys: Keys) -> tuple[list[Key], list[Key]]:
        """Allocate a place for each of `keys` that is neither stored nor being stored, and evict blocks if necessary (MOVE-10).

        Returns the keys that got a place, which the caller has to copy and complete, and the keys whose blocks were evicted.
        Blocks that are being stored or loaded, and blocks of `keys` themselves, are not evicted (MOVE-09).

        Raises OutOfBlocks if there is no room for all of them, and then changes nothing.
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
        """Complete storing `keys` after the copy: they are stored, or if `success` is false their places are free (MOVE-08).

        Raises KeyNotFound if a key is not being stored, and then changes nothing.
        """
        with self._lock:
            for key in keys:
                if self._known("complete_store", key).ready:
                    raise KeyNotFound(f"complete_store: key {key!r} is already stored")
            for key in dict.fromkeys(keys):
                if success:
                    self._blocks[key].ready = True
                    self._add_use(key)
                else:
                    self._forget(key)

    def prepare_load(self, keys: Keys) -> None:
        """Add a pin to the block of each of `keys`, one per occurrence: it is not evicted until `complete_load` (MOVE-09).

        Raises KeyNotFound if a key is not stored, and then changes nothing (MOVE-06).
        """
        with self._lock:
            for key in keys:
                if not self._known("prepare_load", key).ready:
                    raise KeyNotFound(f"prepare_load: key {key!r} is still being stored")
            for key in keys:
                self._blocks[key].loads += 1
            self._use(keys)

    def complete_load(self, keys: Keys) -> None:
        """Remove a pin from the block of each of `keys`, one per occurrence (MOVE-09).

        Raises KeyNotFound if a key occurs more often than its block has pins, and then changes nothing.
        """
        with self._lock:
            for key, count in Counter(keys).items():
                if self._known("complete_load", key).loads < count:
                    raise KeyNotFound(f"complete_load: key {key!r} is not being loaded")
            for key in keys:
                self._blocks[key].loads -= 1
            for key in dict.fromkeys(keys):
                self._add_use(key)

    def touch(self, keys: Keys) -> None:
        """Mark keys as used just now. Unknown keys are ignored (MOVE-11)."""
        with self._lock:
            self._use(keys)

    def _is_ready(self, key: Key) -> bool:
        """Whether a key is stored."""
        return key in self._blocks and self._blocks[key].ready

    def _known(self, operation: str, key: Key) -> _Block:
        """The state of a key. Raises KeyNotFound."""
        if key not in self._blocks:
            raise KeyNotFound(f"{operation}: unknown key {key!r} (never stored, or evicted)")
        return self._blocks[key]

    def _to_evict(self, count: int, kept: Keys) -> list[Key]:
        """The `count` least recently used keys whose blocks can be evicted, `kept` excluded. Raises OutOfBlocks."""
        keep, found, popped = set(kept), list[Key](), list[tuple[int, Key]]()
        while len(found) < count and self._uses:
            used, key = heappop(self._uses)
            block = self._blocks.get(key)
            if block is None or block.used != used:
                continue
            popped.append((used, key))
            if block.ready and not block.loads and key not in keep:
                found.append(key)
                keep.add(key)  # an entry can occur twice
        if len(found) < count:
            for entry in popped:
                heappush(self._uses, entry)
            raise OutOfBlocks(f"out of blocks: {count} must be evicted, {len(found)} of {self.capacity} can be evicted")
        return found

    def _forget(self, key: Key) -> None:
        """Remove a key and free its place."""
        self._free.append(self._blocks.pop(key).place)

    def _use(self, keys: Keys) -> None:
        """Mark keys as used, in reverse order (MOVE-11)."""
        for key in reversed(keys):
            if (block := self._blocks.get(key)) is not None:
                block.used = next(self._next_use)
                self._add_use(key)

    def _add_use(self, key: Key) -> None:
        """Add the last use of a key to the heap. Removes outdated uses when there are as many of them as blocks."""
        heappush(self._uses, (self._blocks[key].used, key))
        if len(self._uses) > 2 * len(self._blocks) + 64:
            self._uses = sorted((block.used, key) for key, block in self._blocks.items())


class HostBlocks:
    """Host memory for `capacity` blocks, to which blocks of a cache are copied and from which they are copied back (MOVE-12).

    The copies contain codes, scales and zeros, bit for bit.
    """

    def __init__(self, store: TokenStore, block_size: int, capacity: int, backend: Backend = reference) -> None:
        """store: the store of the cache. backend: that of the store. block_size: slots per block. Raises ConfigError."""
        self.block_size = whole("block_size", block_size)
        self.capacity = whole("capacity", capacity, minimum=0)
        self._store, self._backend = store, backend
        self._memory = [self._room(store.keys), self._room(store.values)]

    @classmethod
    def of(cls, cache: PagedCache, capacity: int) -> "HostBlocks":
        """Create host memory for blocks of a paged cache. The block ids of all layers' tables are valid."""
        return cls(cache._store, cache.config.block_size, capacity, cache._backend)

    def to_host(self, blocks: Slots, places: Slots) -> None:
        """Copy block `blocks[i]` of the cache to place `places[i]`, for every i. Both are integers [n].

        Raises ShapeMismatch, DtypeMismatch, or SlotOutOfRange for a block or a place that does not exist, and then copies
        nothing.
        """
        device, host = self._slots(blocks, places)
        for memory, store in zip(self._memory, (self._store.keys, self._store.values), strict=True):
            for room, part in zip(memory, store.stored(device), strict=True):
                if room is not None:
                    room[host] = self._as_numpy(part)

    def to_device(self, places: Slots, blocks: Slots) -> None:
        """Copy place `places[i]` to block `blocks[i]` of the cache, for every i. Raises as `to_host` does."""
        device, host = self._slots(blocks, places)
        for memory, store in zip(self._memory, (self._store.keys, self._store.values), strict=True):
            pairs = zip(memory, store.stored([]), strict=True)
            parts = (None if room is None else self._as_stored(room[host], like) for room, like in pairs)
            store.put(device, Quantized(*parts))

    def _slots(self, blocks: Slots, places: Slots) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slots of blocks in the store, and of places in the host memory. Raises as `to_host` does."""
        ends = self._store.num_slots // self.block_size, self.capacity
        numbers = [slots_to_gather(each, end, self._backend.to_numpy) for each, end in zip((blocks, places), ends, strict=True)]
        ShapeMismatch.check("places", numbers[1].shape, numbers[0].shape)
        device, host = ((each[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1) for each in numbers)
        return device, host

    def _room(self, store: SlotStore) -> list[NDArray[Any] | None]:
        """Arrays of zeros for the codes of all places, and for scales and zeros if the format has them."""
        parts = [None if part is None else self._as_numpy(part) for part in store.stored([])]
        slots = self.capacity * self.block_size
        return [None if part is None else np.zeros((slots, *part.shape[1:]), part.dtype) for part in parts]

    def _as_numpy(self, part: Array) -> NDArray[Any]:
        """An array of the store in NumPy; bfloat16, which NumPy lacks, as integers with the same bits."""
        numbers: NDArray[Any] = self._backend.to_numpy(part.view(self._backend.xp.int16) if self._is_bfloat16(part) else part)
        return numbers

    def _as_stored(self, part: NDArray[Any], like: Array) -> Array:
        """The inverse of `_as_numpy`. like: an array of the store."""
        array = self._backend.asarray(part)
        return array.view(like.dtype) if self._is_bfloat16(like) else array

    def _is_bfloat16(self, part: Array) -> bool:
        return hasattr(self._backend.xp, "bfloat16") and part.dtype == self._backend.xp.bfloat16
