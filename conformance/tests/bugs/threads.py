"""Bugs that show only if several threads make calls: scratch memory that they share."""

import time
from contextlib import nullcontext

import numpy as np

from bugs.plant import bug
from kvref.backend import ReferenceBackend
from kvref.tiered import TieredCache
from kvref.token_store import SlotStore

SCRATCH: dict[str, np.ndarray] = {}  # by name and dtype: as large as the largest array so far


def copied_through_scratch(name, array):
    """A copy of an array that is made in scratch memory of all threads."""
    array, key = np.asarray(array), f"{name} {np.asarray(array).dtype}"
    if array.size > len(SCRATCH.get(key, ())):
        SCRATCH[key] = np.empty(array.size, array.dtype)
    scratch = SCRATCH[key]
    scratch[: array.size] = array.reshape(-1)
    time.sleep(0.0002)  # lets another thread run, as can happen at any time
    return scratch[: array.size].reshape(array.shape).copy()


def results_in_scratch(patch, holder, name):
    function = getattr(holder, name)

    def shared(self, *args, **named):
        result = function(self, *args, **named)
        if not isinstance(result, tuple):
            return copied_through_scratch(name, result)
        parts = (None if part is None else copied_through_scratch(f"{name} {at}", part) for at, part in enumerate(result))
        return type(result)(*parts)

    patch.setattr(holder, name, shared)


@bug("LAW-21")
def threads_share_the_memory_in_which_rows_are_quantized(patch):
    results_in_scratch(patch, ReferenceBackend, "quantize")


@bug("LAW-21")
def threads_share_the_memory_in_which_codes_are_decoded(patch):
    results_in_scratch(patch, ReferenceBackend, "decode")


@bug("LAW-21")
def threads_share_the_memory_of_attention(patch):
    results_in_scratch(patch, ReferenceBackend, "attend")


@bug("LAW-21")
def threads_share_the_memory_of_tokens_on_their_way_to_slots(patch):
    scatter = ReferenceBackend.scatter
    patch.setattr(
        ReferenceBackend,
        "scatter",
        lambda self, store, slots, new: scatter(self, store, slots, copied_through_scratch("new", new)),
    )


@bug("LAW-21")
def caches_share_the_memory_of_dequantized_tokens(patch):
    results_in_scratch(patch, SlotStore, "dequantized")


@bug("TIER-12")
def reads_collect_the_parts_of_tiers_in_a_list_of_the_cache(patch):
    """They hold no lock, because they change no token."""

    def reading(self, start, stop):
        empty = self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")
        self.parts = [(empty, empty)]
        for tier in reversed(self._tiers):
            self.parts += tier.read(start, stop)
            time.sleep(0.0002)
            start, stop = start - len(tier), stop - len(tier)
        keys, values = (self._backend.xp.concat(list(each), axis=0) for each in zip(*self.parts, strict=True))
        return keys, values

    append = TieredCache.append

    def appending(self, keys, values):
        append(self, keys, values)
        self._lock = nullcontext()

    patch.setattr(TieredCache, "_read", reading)
    patch.setattr(TieredCache, "append", appending)
