"""Bugs in saving and loading: parts or checks left out, formats, sequences in parts, and contents lost when a load fails."""

from dataclasses import replace

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref import LatentCache, PagedCache, QuantizedCache, paged, quantized, serialization, snapshot
from kvref.errors import FileDamaged
from kvref.partial_load import PendingLoad
from kvref.snapshot import TokenSpan


@bug("MOVE-01")
def no_scale_is_saved(patch):
    in_source(
        patch, "kvref.snapshot.TokenSpan.fields", "zip(self.store.fields, parts, strict=True)",
        "zip(self.store.fields[:1], parts[:1], strict=True)",
    )  # fmt: skip


@bug("MOVE-01")
def what_is_loaded_is_quantized_again(patch):
    receive = QuantizedCache.receive

    def again(self, file):
        receive(self, file)
        for layer, length in enumerate(self._lengths):
            if length:
                slots = [layer * self.config.capacity + position for position in range(length)]
                keys, values = self._store.read(slots)
                self._store.write(slots, keys * np.float32(1.0001), values)

    patch.setattr(QuantizedCache, "receive", again)


@bug("MOVE-01")
def values_are_loaded_as_keys(patch):
    def from_keys(name, store, *args):
        return [replace(each, store=store.keys) for each in snapshot.key_and_value_spans(name, store, *args)]

    for module in (paged, quantized):
        patch.setattr(module, "key_and_value_spans", from_keys)


@bug("MOVE-01")
def all_layers_are_as_long_as_the_first(patch):
    in_source(patch, "kvref.paged.PagedCache._allocate_table", "= extent.lengths", "= max(extent.lengths)")


@bug("MOVE-01", "MOVE-04")
def a_sequence_is_saved_by_its_first_blocks_alone(patch):
    in_source(
        patch, "kvref.paged.PagedCache._token_spans", "(table, layer, np.array(extent.tokens(part, layer), np.int64))",
        "(table, layer, np.array(extent.tokens(part, layer), np.int64) % self.config.block_size)",
    )  # fmt: skip


@bug("MOVE-01")
def positions_begin_at_zero(patch):
    in_source(
        patch, "kvref.windowed.WindowedCache._allocate_for", 'saved.number("length"), saved.number("first")',
        'saved.count("tokens.keys"), self.config.sinks',
    )  # fmt: skip


@bug("MOVE-01")
def tokens_that_were_evicted_are_not_counted(patch):
    in_source(
        patch, "kvref.tiered.TieredCache.contents", '"next": self._next, "moved_at": self._moved_at',
        '"next": self.total_tokens, "moved_at": 0',
    )  # fmt: skip


@bug("MOVE-01")
def what_moved_on_comes_back(patch):
    in_source(patch, "kvref.tiered.TieredCache.contents", '"moved_at": self._moved_at', '"moved_at": 0')


@bug("MOVE-01")
def a_store_has_one_format(patch):
    in_source(
        patch, "kvref.tiered.segments_from_json", "TierSegment(room, start, TokenStore(backend, FORMATS[name],",
        "TierSegment(room, start, TokenStore(backend, FORMATS[said[-1][0]],",
    )  # fmt: skip


@bug("MOVE-01")
def rope_parts_are_not_saved(patch):
    in_source(patch, "kvref.latent.LatentCache._token_spans", "enumerate(self._stores)", "enumerate(self._stores[:1])")


@bug("MOVE-02")
def a_file_goes_by_its_blocks(patch):
    in_source(patch, "kvref.paged.PagedCache._shape_to_match", '"num_blocks", "block_size"', '"num_blocks"')


@bug("MOVE-02")
def a_file_goes_by_the_room_there_was(patch):
    in_source(patch, "kvref.quantized.QuantizedCache.contents", 'self.config, "capacity"', "self.config")


@bug("MOVE-02")
def nobody_looks_at_the_shape(patch):
    in_source(patch, "kvref.serialization.SavedFile.__init__", "if theirs != dict(shape):", "if False:")


@bug("MOVE-02")
def the_format_is_no_part_of_the_shape(patch):
    in_source(patch, "kvref.quantized.QuantizedCache.contents", '"capacity"', '"capacity", "format"')


@bug("MOVE-03")
def nobody_looks_at_the_checksum(patch):
    in_source(patch, "kvref.serialization.SavedFile.read_into", "if self._file.read() != wanted:", "if False:")


@bug("MOVE-03")
def the_checksum_is_of_the_tensors_alone(patch):
    class Checksum(serialization.Checksum):
        """A checksum without the first two parts, which are the header."""

        def __init__(self):
            super().__init__()
            self.parts = 0

        def update(self, part):
            self.parts += 1
            if self.parts > 2:
                super().update(part)

    patch.setattr(serialization, "Checksum", Checksum)
    in_source(patch, "kvref.serialization._read_header", "at + 8 + length != size or not entries", "not entries")
    in_source(patch, "kvref.serialization.SavedFile.read_into", "file.read() != wanted", "file.read()[:4] != wanted")


@bug("MOVE-03")
def what_is_missing_is_zeros(patch):
    in_source(patch, "kvref.serialization._read_header", "at + 8 + length != size or not entries", "not entries")
    in_source(
        patch, "kvref.serialization.SavedFile._take", "if self._file.readinto(part.data) != count:",
        "if self._file.readinto(part.data) < 0:",
    )  # fmt: skip
    in_source(
        patch, "kvref.serialization.SavedFile.read_into", "if self._file.read() != wanted:",
        "if self._file.read() not in (b'', wanted):",
    )  # fmt: skip


@bug("MOVE-03")
def the_old_sequence_goes_first(patch):
    receive = PagedCache.receive

    def first(self, file, sequence):
        self.truncate(sequence, 0)
        receive(self, file, sequence)

    patch.setattr(PagedCache, "receive", first)


@bug("MOVE-03")
def the_old_cache_goes_first(patch):
    receive = QuantizedCache.receive

    def first(self, file):
        self.clear()
        receive(self, file)

    patch.setattr(QuantizedCache, "receive", first)


@bug("MOVE-03")
def a_failed_load_keeps_its_blocks(patch):
    in_source(
        patch, "kvref.paged.PagedCache.receive", "self.pool.free_many(self._tables.close(load.room))", "pass",
    )  # fmt: skip


@bug("MOVE-03")
def it_is_written_over_what_is_there(patch):
    in_source(
        patch, "kvref.serialization.Serializable.receive", "new = self._new_cache()", "new = self",
    )  # fmt: skip


@bug("MOVE-04")
def every_save_is_in_the_same_memory(patch):
    shared, as_array = np.zeros(2**16, np.uint8), serialization.as_array

    def in_it(contents, backend):
        data = as_array(contents, backend)
        shared[: len(data)] = data
        return shared[: len(data)]

    patch.setattr(serialization, "as_array", in_it)


@bug("MOVE-04")
def saving_moves_out(patch):
    save = QuantizedCache.save

    def out(self):
        data = save(self)
        self.clear()
        return data

    patch.setattr(QuantizedCache, "save", out)


@bug("MOVE-07")
def nothing_changes_nothing(patch):
    load = QuantizedCache.load

    def unless_empty(self, data):
        if b"[0," not in bytes(data):
            load(self, data)

    patch.setattr(QuantizedCache, "load", unless_empty)


@bug("MOVE-07")
def a_layer_without_tokens_is_left_out(patch):
    in_source(
        patch,
        "kvref.serialization.as_array",
        "out = io.BytesIO()",
        "assert any(len(each.slots) for each in contents.spans); out = io.BytesIO()",
    )


@hidden("paged", "MOVE-03")
def a_sequence_with_tokens_is_cut_where_a_file_was_damaged(patch):
    receive = PagedCache.receive

    def losing(self, file, sequence):
        try:
            receive(self, file, sequence)
        except FileDamaged:
            self._tables.lengths[self._table(sequence)] = 0
            raise

    patch.setattr(PagedCache, "receive", losing)


@hidden("paged", "MOVE-01")
def only_the_first_block_comes(patch):
    in_source(
        patch, "kvref.paged.PagedCache._allocate_table", "= extent.lengths",
        "= [min(each, self.config.block_size) for each in extent.lengths]",
    )  # fmt: skip


@hidden("quantized", "MOVE-01")
def a_full_layer_is_loaded_one_short(patch):
    make_room = QuantizedCache._allocate_for

    def short(self, saved):
        stretches = make_room(self, saved)
        self._lengths = [each - (each == self.config.capacity) for each in self._lengths]
        return stretches

    patch.setattr(QuantizedCache, "_allocate_for", short)


# Formats with scales: in some formats only, or in given scales.

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


# Sequences in parts: which parts belong together, leftovers of a load, codes and scales of parts.


@bug("MOVE-05")
def the_first_part_is_all(patch):
    patch.setattr(PendingLoad, "is_complete", lambda self, everything: True)


@bug("MOVE-05")
def any_part_will_do(patch):
    patch.setattr(PendingLoad, "check", lambda self, whole, part: None)


@bug("MOVE-05")
def a_part_comes_twice(patch):
    in_source(patch, "kvref.partial_load.PendingLoad.check", "self.overlaps(part)", "False")


@bug("MOVE-05")
def parts_are_never_given_back(patch):
    patch.setattr(PagedCache, "_discard_pending_load", lambda self, sequence: self._pending_loads.pop(int(sequence), None))


@bug("MOVE-05")
def a_write_gives_up_the_parts(patch):
    in_source(
        patch, "kvref.paged.PagedCache.write", "new = self._store.quantized(keys, values)",
        "self._discard_pending_load(sequence)\n    new = self._store.quantized(keys, values)",
    )  # fmt: skip


@bug("MOVE-05")
def a_fork_takes_the_parts_along(patch):
    fork = PagedCache.fork

    def along(self, sequence):
        child = fork(self, sequence)
        if sequence in self._pending_loads:
            self._pending_loads[child] = self._pending_loads.pop(sequence)
        return child

    patch.setattr(PagedCache, "fork", along)


@bug("MOVE-05")
def a_damaged_part_has_come(patch):
    in_source(
        patch, "kvref.paged.PagedCache.receive", "except BaseException:",
        "except BaseException:\n        if load is begun: load.add(part)",
    )  # fmt: skip


@bug("MOVE-05")
def some_heads_are_all_heads(patch):
    in_source(
        patch, "kvref.snapshot.TokenSpan.put", "whole[:, : heads.start, ...]", "0 * whole[:, : heads.start, ...]",
        "whole[:, heads.stop :, ...]", "0 * whole[:, heads.stop :, ...]",
    )  # fmt: skip


@bug("MOVE-05")
def parts_of_heads_have_no_scales(patch):
    put = TokenSpan.put

    def codes_alone(self, name, slots, new, backend):
        if self.heads is None or name == "codes":
            put(self, name, slots, new, backend)

    patch.setattr(TokenSpan, "put", codes_alone)


@bug("MOVE-05")
def later_parts_have_no_scales(patch):
    receive, put, later = PagedCache.receive, TokenSpan.put, [False]

    def noted(self, file, sequence):
        later[0] = int(sequence) in self._pending_loads
        receive(self, file, sequence)
        later[0] = False

    def codes_alone(self, name, slots, new, backend):
        if not later[0] or name == "codes":
            put(self, name, slots, new, backend)

    patch.setattr(PagedCache, "receive", noted)
    patch.setattr(TokenSpan, "put", codes_alone)


@bug("MOVE-05")
def parts_stay_when_the_whole_has_come(patch):
    in_source(patch, "kvref.paged.PagedCache._replace_table", "self._discard_pending_load(sequence)", "pass")


@bug("MOVE-05")
def the_longest_layer_tells_sequences_apart(patch):
    in_source(
        patch, "kvref.partial_load.PendingLoad.check", "extent != self.extent", "max(extent.lengths) != max(self.extent.lengths)",
    )  # fmt: skip


@bug("MOVE-05")
def other_heads_never_meet(patch):
    for method in ("overlaps", "add"):
        in_source(patch, f"kvref.partial_load.PendingLoad.{method}", "part.layers, part.heads", "part.layers, [part.heads]")
