"""Bugs in scatter and gather."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.backend import ReferenceBackend


@bug("KERN-01")
def slots_run_along_the_heads(patch):
    scatter = ReferenceBackend.scatter
    patch.setattr(ReferenceBackend, "scatter", lambda self, store, slots, rows: scatter(self, store, slots, rows[..., ::-1, :]))


@bug("KERN-02")
def minus_one_is_the_last_slot(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.scatter", "if slot >= 0:", "if True:")


@bug("KERN-03")
def rows_before_the_bad_slot_are_written(patch):
    scatter = ReferenceBackend.scatter

    def eager(self, store, slots, rows):
        for slot, row in zip(slots, rows, strict=False):
            scatter(self, store, [slot], row[None])
        return store

    patch.setattr(ReferenceBackend, "scatter", eager)


@bug("KERN-04")
def a_write_quiets_every_nan(patch):
    scatter = ReferenceBackend.scatter

    def quieting(self, store, slots, rows):
        store[np.isnan(store)] = np.nan
        return scatter(self, store, slots, rows)

    patch.setattr(ReferenceBackend, "scatter", quieting)


@bug("KERN-05")
def gather_sorts_its_slots(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.gather", "self.asarray(slots,", "self.asarray(sorted(slots),")


@bug("KERN-07")
def a_repeated_slot_adds_up(patch):
    in_source(
        patch,
        "kvref.backend.ReferenceBackend.scatter",
        "store[slot, ...] = rows[row, ...]",
        "store[slot, ...] = rows[row, ...] if slot not in slots[:row] else store[slot, ...] + rows[row, ...]",
    )
