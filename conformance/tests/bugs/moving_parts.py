"""Bugs in loading sequences in parts: which parts belong together, leftovers of a load, and the codes and scales of parts."""

from bugs.plant import bug, in_source
from kvref import PagedCache
from kvref.partial_load import Part, PendingLoad
from kvref.snapshot import TokenSpan


@bug("MOVE-05")
def the_first_part_is_all(patch):
    patch.setattr(PendingLoad, "is_complete", lambda self, everything: True)


@bug("MOVE-05")
def any_part_will_do(patch):
    patch.setattr(PendingLoad, "check", lambda self, whole, part: None)


@bug("MOVE-05")
def a_part_comes_twice(patch):
    in_source(patch, "kvref.partial_load.PendingLoad.check", "any(part.overlaps(other) for other in self.parts)", "False")


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
        "except BaseException:\n        if load is begun: load.parts.append(part)",
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
    overlaps = Part.overlaps
    patch.setattr(Part, "overlaps", lambda self, other: self.heads == other.heads and overlaps(self, other))
