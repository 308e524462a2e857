"""Bugs in scatter and gather."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.backend import ReferenceBackend


@bug("KERN-01")
def slots_run_along_the_heads(patch):
    scatter = ReferenceBackend.scatter
    patch.setattr(ReferenceBackend, "scatter", lambda self, store, slots, new: scatter(self, store, slots, new[..., ::-1, :]))


@bug("KERN-02")
def minus_one_is_the_last_slot(patch):
    in_source(patch, "kvref.backend._runs", "if slots[start] >= 0:", "if True:")


@bug("KERN-03")
def tokens_before_the_bad_slot_are_written(patch):
    scatter = ReferenceBackend.scatter

    def eager(self, store, slots, new):
        for slot, token in zip(slots, new, strict=False):
            scatter(self, store, [slot], token[None])
        return store

    patch.setattr(ReferenceBackend, "scatter", eager)


@bug("KERN-04")
def a_write_quiets_every_nan(patch):
    scatter = ReferenceBackend.scatter

    def quieting(self, store, slots, new):
        store[np.isnan(store)] = np.nan
        return scatter(self, store, slots, new)

    patch.setattr(ReferenceBackend, "scatter", quieting)


@bug("KERN-05")
def gather_sorts_its_slots(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.gather", "self.asarray(slots,", "self.asarray(sorted(slots),")


@bug("KERN-07")
def a_repeated_slot_adds_up(patch):
    in_source(
        patch,
        "kvref.backend.ReferenceBackend.scatter",
        "= new[start:stop, ...]",
        "= new[start:stop, ...] + (store[slot, ...] if slot in slots[:start] else 0)",
    )


@bug("KERN-03")
def tokens_are_cast_to_the_stores_dtype(patch):
    checked = "check_new(store, len(slots), new)"
    cast = f"new = new.astype(store.dtype)\n    {checked}"
    in_source(patch, "kvref.backend.ReferenceBackend.scatter", checked, cast)


ON_HOST = "_on_host(slots, to_numpy)"


@bug("KERN-08")
def slots_are_cast_to_integers(patch):
    in_source(patch, "kvref.backend.host_slots", ON_HOST, f"{ON_HOST}.astype(np.int64)")


@bug("KERN-08")
def slots_of_any_shape_are_taken_one_by_one(patch):
    in_source(patch, "kvref.backend.host_slots", ON_HOST, f"{ON_HOST}.reshape(-1)")


@bug("KERN-08")
def slots_are_read_as_64_bits_each(patch):
    as_int64 = f"np.frombuffer({ON_HOST}.tobytes().ljust(8 * len(slots), b'0')[: 8 * len(slots)], np.int64)"
    in_source(patch, "kvref.backend.host_slots", ON_HOST, as_int64)


@bug("KERN-08")
def slots_of_32_bits_are_signed(patch):
    signed = f"(lambda slots: slots.astype(np.int32) if slots.dtype == np.uint32 else slots)({ON_HOST})"
    in_source(patch, "kvref.backend.host_slots", ON_HOST, signed)
