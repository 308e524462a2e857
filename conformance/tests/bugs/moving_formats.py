"""Bugs in saving and loading formats with scales: in some formats only, or in given scales."""

import numpy as np

from bugs.plant import bug, in_source
from kvref import LatentCache, PagedCache
from kvref.snapshot import TokenSpan

USUAL = ("float32", "float16", "bfloat16", "int8", "q4", "packed")


@bug("MOVE-01")
def pages_are_quantized_again_as_they_are_loaded(patch):
    receive = PagedCache.receive

    def again(self, file, sequence):
        receive(self, file, sequence)
        for layer in range(self.config.num_layers if self.config.dtype not in USUAL else 0):
            table, _, positions = self._layer_positions(sequence, layer)
            if len(positions):
                slots = self._tables.slots(table, layer, positions)
                keys, values = self._store.read(slots)
                self._store.write(slots, keys * np.float32(1.5), values)

    patch.setattr(PagedCache, "receive", again)


@bug("MOVE-01")
def latents_of_few_formats_are_loaded(patch):
    receive = LatentCache.receive

    def of_few(self, file):
        receive(self, file)
        if self.config.dtype not in USUAL:
            for store in self._stores:
                store._stored = store._stored._replace(codes=np.zeros_like(store._stored.codes))

    patch.setattr(LatentCache, "receive", of_few)


@bug("MOVE-01")
def zeros_of_groups_are_not_saved(patch):
    fields = TokenSpan.fields

    def without(self):
        in_groups = self.store.format.granularity == "group"
        yield from (each for each in fields(self) if not in_groups or each[0] != "zero")

    patch.setattr(TokenSpan, "fields", without)


@bug("MOVE-02")
def a_given_scale_goes_by_no_file(patch):
    in_source(patch, "kvref.paged.shape_of", "return found | ", "return found or ")


@bug("MOVE-02")
def a_scale_is_compared_as_it_was_given(patch):
    in_source(
        patch, "kvref.paged.shape_of", "if name not in (*room, *SCALES)", "if name not in room and size is not None",
        "return found | ", "return found or ",
    )  # fmt: skip
