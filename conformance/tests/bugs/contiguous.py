"""Bugs in the contiguous cache."""

from bugs.plant import bug, in_source
from kvref.backend import ReferenceBackend
from kvref.contiguous import ContiguousCache


@bug("CONTIG-01")
def initial_capacity_is_not_cut(patch):
    in_source(
        patch,
        "kvref.contiguous.ContiguousCache.__init__",
        "min(config.initial_capacity, config.max_seq_len)",
        "config.initial_capacity",
    )


@bug("CONTIG-02")
def tokens_are_written_one_early(patch):
    in_source(patch, "kvref.contiguous.ContiguousCache.append", "new_keys, self.seq_len", "new_keys, max(0, self.seq_len - 1)")


@bug("CONTIG-03", "CONTIG-11")
def an_empty_cache_reads_as_its_first_slot(patch):
    in_source(patch, "kvref.contiguous.ContiguousCache._read", ": self.seq_len", ": max(1, self.seq_len)")


@bug("CONTIG-04")
def growth_is_to_the_token(patch):
    in_source(patch, "kvref.contiguous.ContiguousCache._grow", "capacity *= 2", "capacity += 1")


@bug("CONTIG-05")
def growth_forgets_the_last_token(patch):
    in_source(
        patch,
        "kvref.contiguous.ContiguousCache._grow",
        "self._values[:, :, : self.seq_len, :]",
        "self._values[:, :, : self.seq_len - 1, :]",
    )


@bug("CONTIG-06")
def the_last_token_does_not_fit(patch):
    in_source(patch, "kvref.contiguous.ContiguousCache.append", "needed > config.max_seq_len", "needed >= config.max_seq_len")


@bug("CONTIG-06", "LAW-01")
def a_refused_append_has_grown_already(patch):
    in_source(
        patch,
        "kvref.contiguous.ContiguousCache.append",
        "if needed > config.max_seq_len:",
        "self._grow(needed)\n    if needed > config.max_seq_len:",
    )


@bug("CONTIG-07", "CONTIG-08")
def raw_buffers_are_copies_of_the_used_part(patch):
    patch.setattr(
        ContiguousCache, "raw", lambda self: (self._keys[:, :, : self.seq_len].copy(), self._values[:, :, : self.seq_len].copy())
    )


@bug("CONTIG-08")
def every_append_makes_new_buffers(patch):
    update = ReferenceBackend.update
    patch.setattr(ReferenceBackend, "update", lambda self, buffer, new, position: update(self, buffer.copy(), new, position))


@bug("CONTIG-09")
def fused_keys_and_values_are_swapped(patch):
    in_source(
        patch,
        "kvref.contiguous.ContiguousCache.append_fused",
        "key_values[0, ...], key_values[1, ...]",
        "key_values[1, ...], key_values[0, ...]",
    )


@bug("CONTIG-10")
def advancing_is_checked_against_the_maximum(patch):
    in_source(patch, "kvref.contiguous.ContiguousCache.advance", "count > self.capacity", "count > self.config.max_seq_len")


@bug("CONTIG-11")
def a_reset_gives_memory_back(patch):
    patch.setattr(ContiguousCache, "reset", lambda self: self.__init__(self.config, self._backend))


@bug("CONTIG-13")
def one_sequence_is_broadcast(patch):
    update = ReferenceBackend.update
    patch.setattr(ReferenceBackend, "update", lambda self, buffer, new, position: update(self, buffer, new[:1], position))
