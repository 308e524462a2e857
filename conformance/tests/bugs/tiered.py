"""Bugs in the tiered cache."""

import time
from contextlib import nullcontext

import numpy as np

from bugs.plant import bug, in_source
from kvref.tier_queue import TierSegment
from kvref.tiered import TieredCache


@bug("TIER-02")
def the_store_quantizes_what_was_given(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache._migrate",
        "target.write(keys, values)",
        "target.write(keys + np.float32(2**-9), values)",
    )


@bug("TIER-03")
def the_tail_is_read_first(patch):
    in_source(patch, "kvref.tiered.TieredCache._read", "reversed(self._tiers)", "self._tiers")


@bug("TIER-04", "TIER-01", "LAW-06")
def only_one_batch_migrates_an_append(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.append",
        "self._migrate()",
        "self._migrate() if start == 0 else None",
    )


@bug("TIER-05")
def an_append_evicts_one_token(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.append",
        "self._evict(past)",
        "self._evict(1)",
    )


@bug("TIER-05")
def the_newest_are_evicted(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.append",
        "range(forgotten, count, batch)",
        "range(0, min(count, room), batch)",
    )


@bug("TIER-06")
def the_total_counts_what_came(patch):
    patch.setattr(TieredCache, "total_tokens", property(lambda self: min(self._next, self.config.max_tokens + 1)))


@bug("TIER-07")
def positions_start_at_the_oldest(patch):
    in_source(
        patch, "kvref.tiered.TieredCache.tier_of", "age = self._next - 1 - position", "age = self.total_tokens - 1 - position"
    )


@bug("TIER-08")
def the_ratio_is_tail_to_store(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.stats",
        "float32 / sum(sizes) if float32 else 1.0",
        "sizes[0] / sizes[2] if sizes[2] else 1.0",
    )


@bug("TIER-10")
def a_new_policy_is_ignored(patch):
    patch.setattr(TieredCache, "update_policy", lambda self, **changes: None)


@bug("TIER-11")
def all_heads_are_one_vector(patch):
    def flat(self, query, scale=None, causal=False):
        keys, values = self.read()
        weights = np.exp(scale * np.einsum("qhd,nhd->qn", query, keys))
        return np.einsum("qn,nhd->qhd", weights / weights.sum(axis=1, keepdims=True), values)

    patch.setattr(TieredCache, "attend", flat)


@bug("TIER-13")
def overflow_is_found_at_migration(patch):
    patch.setattr(TieredCache, "_check_storable", lambda self, name, tokens: None)


@bug("TIER-13")
def the_range_is_looked_at_before_the_tail_rounds(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache._check_storable",
        "if self.config.tail_length:",
        "if False:",
        "if not float(largest[0]) < MAGNITUDES_BELOW:",
        "if not float(xp.max(tokens)) / 2 - float(xp.min(tokens)) / 2 < 2.0**127:",
    )


@bug("TIER-14")
def the_warm_tier_is_skipped(patch):
    in_source(patch, "kvref.tiered.TieredCache._migrate", "target.write(keys, values)", "self._tiers[-1].write(keys, values)")


@bug("TIER-15")
def a_store_only_cache_rounds_by_the_tails_dtype(patch):
    in_source(
        patch,
        "kvref.tiered.TieredCache.append",
        "newest = next(",
        "keys, values = (part.astype('float16').astype('float32') for part in (keys, values))\n        newest = next(",
    )


@bug("TIER-12")
def an_append_is_locked_token_by_token(patch):
    append = TieredCache.append

    def one_by_one(self, keys, values):
        for at in range(len(keys)):
            append(self, keys[at : at + 1], values[at : at + 1])
            time.sleep(0.0002)  # lets another thread append in between

    patch.setattr(TieredCache, "append", one_by_one)


@bug("TIER-12")
def nothing_is_locked(patch):
    patch.setattr("kvref.tiered.RLock", nullcontext)
    slots = TierSegment.slots

    def slow(self, start, stop):
        time.sleep(0.0002)  # between finding the slot and marking it as used: lets another thread run
        return slots(self, start, stop)

    patch.setattr(TierSegment, "slots", slow)


@bug("TIER-10")
def the_oldest_run_is_drained_past_its_end(patch):
    in_source(patch, "kvref.tier_queue.Tier.remove_oldest", "min(count, segment.stop - segment.start)", "count")
