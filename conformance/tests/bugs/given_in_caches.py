"""Bugs in caches with a given scale or with rotated rows: one operation omits a step."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.formats.hadamard import HadamardFormat, hadamard
from kvref.formats.static_scales import StaticFloat8
from kvref.grouped import GroupedCache
from kvref.latent import LatentCache
from kvref.paged import PagedCache
from kvref.prefix import PrefixCache
from kvref.quantized import QuantizedCache
from kvref.tiered import TieredCache
from kvref.token_store import SlotStore, TokenStore
from kvref.windowed import WindowedCache

MADE = "kvref.paged.PagedCache.__init__"


def during(patch, cache, operation, method, instead):
    """During an operation of the cache, replace a method of its store: instead(self, right, *args)."""
    right, work, going = getattr(SlotStore, method), getattr(cache, operation), []

    def working(self, *args, **kwargs):
        going.append(self)
        try:
            return work(self, *args, **kwargs)
        finally:
            going.pop()

    patch.setattr(cache, operation, working)
    patch.setattr(SlotStore, method, lambda self, *args: instead(self, right, *args) if going else right(self, *args))


def as_it_lies(store, right, stored):
    """Return rows in rotated form, without the inverse rotation."""
    values = right(store, stored)
    return hadamard(values) if isinstance(store.format, HadamardFormat) else values


@bug("PAGED-18")
def positions_of_pages_are_read_as_they_lie(patch):
    during(patch, PagedCache, "read", "dequantized", as_it_lies)


@bug("ATTN-10")
def pages_are_attended_to_as_they_lie(patch):
    during(patch, PagedCache, "attend", "dequantized", as_it_lies)


@bug("WIN-10")
def a_step_sees_what_is_rotated_still(patch):
    during(patch, WindowedCache, "step", "dequantized", as_it_lies)


@bug("GROUP-08")
def groups_are_attended_to_as_they_lie(patch):
    during(patch, GroupedCache, "attend", "dequantized", as_it_lies)


@bug("TIER-17")
@hidden("tiered", "TIER-10")
def tokens_move_on_as_they_lie(patch):
    during(patch, TieredCache, "_migrate", "dequantized", as_it_lies)


@bug("MLA-06")
def latent_and_rope_part_are_rotated_each_by_itself(patch):
    quantized, dequantized = SlotStore.quantized, SlotStore.dequantized
    latent = []  # stores of latent caches: the row's store, and the start of its rope part
    made = LatentCache.__init__

    def making(self, config, *args, **kwargs):
        made(self, config, *args, **kwargs)
        latent.append((self._stores[0], config.rank))

    def of_halves(store):
        """Rotate both parts separately in these stores."""
        rank = next((rank for each, rank in latent if each is store), None)
        if rank is None or not isinstance(store.format, HadamardFormat):
            return None
        return lambda rows: np.concatenate([hadamard(rows[..., :rank]), hadamard(rows[..., rank:])], axis=-1)

    def writing(self, rows):  # first undoes the rotation of the whole row
        return quantized(self, hadamard(turn(rows)) if (turn := of_halves(self)) else rows)

    def reading(self, stored):
        values = dequantized(self, stored)
        return turn(hadamard(values)) if (turn := of_halves(self)) else values

    patch.setattr(LatentCache, "__init__", making)
    patch.setattr(SlotStore, "quantized", writing)
    patch.setattr(SlotStore, "dequantized", reading)


@bug("FMT-STATIC-06")
def the_scales_of_pages_are_taken_for_each_other(patch):
    in_source(patch, MADE, "of_keys, of_values = config.formats", "of_values, of_keys = config.formats")


@bug("FMT-STATIC-06")
def the_scale_of_keys_is_for_values_too(patch):
    in_source(patch, MADE, "of_keys, of_values = config.formats", "of_keys = of_values = config.formats[0]")


def by_the_scale_of_keys(patch, cache, operation):
    """An operation of the cache reads values with the scale of keys, if scales are given."""
    work = getattr(cache, operation)

    def working(self, *args, **kwargs):
        values = self._store.values
        right = values.format
        if isinstance(right, StaticFloat8):
            values.format = self._store.keys.format
        try:
            return work(self, *args, **kwargs)
        finally:
            values.format = right

    patch.setattr(cache, operation, working)


@bug("ATTN-10")
def values_are_attended_to_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, QuantizedCache, "attend")


@bug("ATTN-10")
def values_of_pages_are_attended_to_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, PagedCache, "attend")


@bug("PAGED-17")
def values_of_a_batch_are_gathered_by_the_scale_of_keys(patch):
    by_the_scale_of_keys(patch, PagedCache, "gather_batch")


@bug("PAGED-17")
def a_batch_of_pages_is_gathered_as_it_lies(patch):
    during(patch, PagedCache, "gather_batch", "dequantized", as_it_lies)


@bug("PAGED-18")
def a_batch_is_quantized_by_one_scale(patch):
    batch = TokenStore.quantized

    def by_the_keys(self, keys, values):
        return (self.keys.quantized(keys), self.keys.quantized(values)) if batched else batch(self, keys, values)

    batched: list[object] = []
    for operation in ("append", "append_step"):
        work = getattr(PagedCache, operation)

        def working(self, *args, work=work):
            batched.append(self)
            try:
                return work(self, *args)
            finally:
                batched.pop()

        patch.setattr(PagedCache, operation, working)
    patch.setattr(TokenStore, "quantized", by_the_keys)


@bug("FMT-STATIC-06")
def pages_learn_their_scale_from_what_comes_first(patch):
    write = PagedCache.write

    def learning(self, sequence, layer, start, keys, values):
        if isinstance(self._store.format, StaticFloat8) and not hasattr(self, "learned"):
            self.learned = True
            for store, rows in ((self._store.keys, keys), (self._store.values, values)):
                if np.size(rows):
                    store.format = store.format.with_scale(float(np.abs(np.asarray(rows)).max() / store.format.small.max) or 1.0)
        write(self, sequence, layer, start, keys, values)

    patch.setattr(PagedCache, "write", learning)


@bug("PREFIX-16")
def what_was_found_is_read_as_it_lies(patch):
    begin = PrefixCache.begin

    def remembering(self, tokens, *args):
        sequence = begin(self, tokens, *args)
        self.found = getattr(self, "found", set()) | ({sequence} if self.length(sequence, 0) else set())
        return sequence

    gather = PrefixCache.gather

    def gathered(self, sequence, layer):
        keys, values = gather(self, sequence, layer)
        rotated = isinstance(self._store.format, HadamardFormat) and sequence in getattr(self, "found", ())
        return (hadamard(keys), hadamard(values)) if rotated else (keys, values)

    patch.setattr(PrefixCache, "begin", remembering)
    patch.setattr(PrefixCache, "gather", gathered)
