"""The places of blocks in host memory, by key."""

from collections import Counter

from kvref.errors import KeyNotFound, OutOfBlocks


class Store:
    """places_by_key: the keys that are stored or being stored, the least recently used first. ready: the keys that are stored.

    pins: key -> how many loads are in progress.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.free = list(range(capacity))
        self.places_by_key, self.ready, self.pins = {}, set(), Counter()

    @property
    def num_free(self):
        return len(self.free)

    def lookup(self, keys):
        """Return how many of the first keys are stored."""
        for count, key in enumerate(keys):
            if key not in self.ready:
                return count
        return len(keys)

    def places(self, keys):
        for key in keys:
            if key not in self.places_by_key:
                raise KeyNotFound(f"key {key}")
        return [self.places_by_key[key] for key in keys]

    def prepare_store(self, keys):
        """Give a place to each key that has none. Return these keys, and the keys that were evicted for them."""
        new = [key for key in dict.fromkeys(keys) if key not in self.places_by_key]
        evictable = [key for key in self.places_by_key if key in self.ready and not self.pins[key] and key not in keys]
        needed = max(0, len(new) - len(self.free))
        if needed > len(evictable):
            raise OutOfBlocks(f"{needed} must be evicted, {len(evictable)} can be")
        evicted = evictable[:needed]
        for key in evicted:
            self.forget(key)
        for key in new:
            self.places_by_key[key] = self.free.pop()
        self.touch(keys)
        return new, evicted

    def complete_store(self, keys, success=True):
        for key in keys:
            if key not in self.places_by_key or key in self.ready:
                raise KeyNotFound(f"key {key} is not being stored")
        for key in dict.fromkeys(keys):
            if success:
                self.ready.add(key)
            else:
                self.forget(key)

    def forget(self, key):
        self.free.append(self.places_by_key.pop(key))
        self.ready.discard(key)

    def prepare_load(self, keys):
        """Pin the blocks of the keys: they are not evicted until `complete_load`."""
        for key in keys:
            if key not in self.ready:
                raise KeyNotFound(f"key {key} is not stored")
        for key in keys:
            self.pins[key] += 1
        self.touch(keys)

    def complete_load(self, keys):
        for key, count in Counter(keys).items():
            if self.pins[key] < count:
                raise KeyNotFound(f"key {key} is not being loaded")
        for key in keys:
            self.pins[key] -= 1

    def touch(self, keys):
        """Mark the keys as used, the last key first, so that it is evicted first."""
        for key in reversed(list(keys)):
            if key in self.places_by_key:
                self.places_by_key[key] = self.places_by_key.pop(key)
