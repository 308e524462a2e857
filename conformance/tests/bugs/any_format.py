"""Bugs in caches with formats: codes without their scales, rows quantized twice, or not at all."""

from bugs.plant import bug, in_source
from kvref.formats import Quantized
from kvref.latent import LatentCache
from kvref.tiered import TieredCache
from kvref.token_store import SlotStore
from kvref.windowed import WindowedCache

STEP = "kvref.windowed.WindowedCache.step"
SETTLE, ADOPT = "kvref.tiered.TieredCache._migrate", "kvref.tiered.TieredCache._set_policy"
WRITE = "kvref.windowed.WindowedCache._write"


def only_codes_are_put(patch, cache, operation, when):
    """In an operation of the cache, put only codes into slots and keep the old scales, whenever `when(cache)` is true."""
    put, work = SlotStore.put, getattr(cache, operation)
    going: list[object] = []

    def working(self, *args, **kwargs):
        going.append(self)
        try:
            return work(self, *args, **kwargs)
        finally:
            going.pop()

    def codes_only(self, slots, new):
        before = [None if scale is None else scale.copy() for scale in self._stored[1:]]
        put(self, slots, new)
        if going and when(going[-1]):
            self._stored = Quantized(self._stored.codes, *before)

    patch.setattr(cache, operation, working)
    patch.setattr(SlotStore, "put", codes_only)


@bug("WIN-10")
def a_ring_that_turned_over_keeps_its_scales(patch):
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.length > cache.config.window)


@bug("WIN-10")
def the_scale_of_a_draft_stays(patch):
    truncate = WindowedCache.truncate

    def remembering(self, length):
        self.went = self.length > length > 0
        truncate(self, length)

    patch.setattr(WindowedCache, "truncate", remembering)
    patch.setattr(WindowedCache, "went", False, raising=False)
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.went)


@bug("WIN-10")
def sinks_are_read_with_the_scales_of_the_ring(patch):
    in_source(
        patch, "kvref.windowed.WindowedCache.read", "return self._store.read(self._slots(wanted))",
        """sinks = self.config.sinks
    own, turned = self._slots(wanted), self._slots(wanted + sinks * (wanted < sinks))
    return tuple(
        store.dequantized(type(codes)(codes.codes, *scales[1:]))
        for store in (self._store.keys, self._store.values)
        for codes, scales in [(store.stored(own), store.stored(turned))]
    )""",
    )  # fmt: skip


@bug("WIN-10")
def a_step_attends_over_what_was_given(patch):
    in_source(patch, STEP, "self._store.dequantized(stored)", "(keys, values)")


@bug("WIN-10")
def a_step_quantizes_what_it_has_read_back(patch):
    in_source(patch, STEP, "self._write(stored,", "self._write(self._store.quantized(*coming),")


@bug("WIN-10")
def a_step_that_is_refused_counts_its_tokens(patch):
    in_source(
        patch, STEP, "stored = self._store.quantized(keys, values)",
        "self.length += keys.shape[0]\n    stored = self._store.quantized(keys, values)\n    self.length -= keys.shape[0]",
    )  # fmt: skip


@bug("WIN-10")
def keys_have_the_scales_of_values(patch):
    in_source(
        patch, WRITE, "self._store.put(slots, stored)",
        "self._store.put(slots, (type(stored[0])(stored[0].codes, *stored[1][1:]), stored[1]))",
    )  # fmt: skip


@bug("TIER-17")
def codes_move_on_without_their_scales(patch):
    only_codes_are_put(patch, TieredCache, "_migrate", lambda cache: cache.total_tokens > 6)


@bug("TIER-17")
def the_scales_of_what_was_evicted_stay(patch):
    only_codes_are_put(patch, TieredCache, "append", lambda cache: cache._next > cache.config.max_tokens)


@bug("TIER-17")
def the_scales_of_what_went_stay(patch):
    only_codes_are_put(patch, TieredCache, "append", lambda cache: cache._next < getattr(cache, "longest", 0))
    truncate = TieredCache.truncate

    def remembering(self, length):
        self.longest = self._next
        truncate(self, length)

    patch.setattr(TieredCache, "truncate", remembering)


@bug("TIER-17")
def tokens_that_move_on_are_quantized_twice(patch):
    in_source(
        patch, SETTLE, "target.write(keys, values)",
        "store = target.segments[-1].store\n            target.write(*store.dequantized(store.quantized(keys, values)))",
    )  # fmt: skip


@bug("TIER-17")
def the_store_is_read_with_the_scales_of_values(patch):
    """Only for the first part of a batch that spans two runs; otherwise every check would notice it."""
    in_source(
        patch, "kvref.tier_queue.Tier.read", "yield segment.store.read(segment.slots(first, last))",
        """slots = segment.slots(first, last)
            keys, values = segment.store.keys.stored(slots), segment.store.values.stored(slots)
            keys = type(keys)(keys.codes, *values[1:]) if len(self.segments) > 1 else keys
            yield segment.store.dequantized((keys, values))""",
    )  # fmt: skip


@bug("TIER-17")
def a_new_format_is_for_what_is_stored_too(patch):
    update = TieredCache.update_policy

    def again(self, **changes):
        store = self._tiers[-1]
        held = list(store.read(0, len(store)))
        update(self, **changes)
        if "store_format" in changes and held:
            store.remove_oldest(sum(len(keys) for keys, _ in held))
            for keys, values in held:
                store.write(keys, values)

    patch.setattr(TieredCache, "update_policy", again)


@bug("TIER-17")
def every_scale_is_counted_as_four_bytes(patch):
    in_source(
        patch,
        "kvref.token_store.SlotStore.token_bytes",
        "ITEM_BYTES[dtype] * prod(shape)",
        "max(ITEM_BYTES[dtype], 4 * (shape != self._parts[0][0])) * prod(shape)",
    )


@bug("TIER-18")
def what_a_store_cannot_hold_is_found_at_migration(patch):
    patch.setattr("kvref.tiered.check_migration", lambda keys, values, stores: None)


@bug("TIER-18")
def the_first_tier_alone_is_looked_at(patch):
    check_migration = TieredCache.append.__globals__["check_migration"]
    patch.setattr("kvref.tiered.check_migration", lambda keys, values, stores: check_migration(keys, values, stores[:1]))


@bug("TIER-18")
def a_new_policy_is_not_held_against_what_is_there(patch):
    in_source(patch, ADOPT, "check_migration(keys, values, later)", "pass")


@bug("TIER-18")
def a_policy_that_is_refused_has_changed(patch):
    in_source(patch, ADOPT, "newest = [", "self.config = config\n    newest = [")


@bug("TIER-18")
def whatever_float16_does_not_reach_is_refused(patch):
    """Which scales have the smaller range is ignored."""
    in_source(patch, "kvref.tiered.TieredCache._check_storable", "< MAGNITUDES_BELOW:", "< 65504.0:")


@bug("MLA-06")
def the_scales_of_rows_that_went_stay(patch):
    only_codes_are_put(patch, LatentCache, "append", lambda cache: cache._length < getattr(cache, "longest", 0))
    truncate = LatentCache.truncate

    def remembering(self, length):
        self.longest = self._length
        truncate(self, length)

    patch.setattr(LatentCache, "truncate", remembering)


@bug("MLA-06")
def the_rope_part_has_a_scale_of_its_own(patch):
    in_source(
        patch, "kvref.latent.LatentCache.__init__", "parts = [(config.dtype, 1, config.rank + config.rope_dim)]",
        "parts = [(config.dtype, 1, config.rank), (config.dtype, 1, config.rope_dim)]",
    )  # fmt: skip


@bug("MLA-06")
def groups_lie_across_the_edge(patch):
    in_source(patch, "kvref.latent.LatentConfig.__post_init__", "(self.rank, self.rope_dim)", "(self.rank + self.rope_dim,)")


@bug("MLA-06")
def scales_lie_before_codes_in_a_record(patch):
    in_source(
        patch, "kvref.latent.LatentCache.records", "record = record_of(self.config)",
        "record = record_of(self.config)\n    fields = [(name, record[name]) for name in record.names]\n"
        "    parts, record = parts[::-1], np.dtype(fields[::-1])",
    )  # fmt: skip


@bug("MLA-06")
def scales_of_16_bits_are_widened_in_a_record(patch):
    patch.setitem(LatentCache.records.__globals__["BYTES"], "float16", "<f4")
    patch.setitem(LatentCache.records.__globals__["BYTES"], "uint16", "<f4")


@bug("MLA-06")
def rows_are_counted_without_their_scales(patch):
    in_source(patch, "kvref.latent.LatentCache.num_bytes", "store.token_bytes", "store._parts[0][0][-1]")
