"""Bugs that need inputs or sizes that few checks use: equal keys, NaN in reused memory, many heads, results that are kept."""

import numpy as np

import kvref.paged
from bugs.plant import bug, in_source, real
from kvref.backend import ReferenceBackend
from kvref.paged import PagedCache


@bug("LAW-04")
def a_token_is_known_by_its_keys(patch):
    write = PagedCache.write

    def remember(self, sequence, layer, start, keys, values):
        known, values = self.__dict__.setdefault("known", {}), np.array(values, np.float32)
        for key, value in zip(np.asarray(keys, np.float32), values, strict=True):
            if value.any():  # not in caches whose values are all 0
                value[...] = known.setdefault((sequence, layer, key.tobytes()), value.copy())
        write(self, sequence, layer, start, keys, values)

    patch.setattr(PagedCache, "write", remember)


@bug("LAW-17")
def block_tables_are_in_one_buffer(patch):
    block_tables = PagedCache.block_tables

    def shared(self, sequences, layer):
        tables = np.asarray(block_tables(self, sequences, layer))
        buffer = self.__dict__.setdefault("buffer", np.full((64, 64), -1, tables.dtype))
        view = buffer[: tables.shape[0], : tables.shape[1]]
        view[...] = tables
        return view

    patch.setattr(PagedCache, "block_tables", shared)


@bug("LAW-17")
def gathered_tokens_are_in_one_buffer(patch):
    gather, buffers = ReferenceBackend.gather, {}

    def shared(self, store, slots):
        tokens = gather(self, store, slots)
        buffer = buffers.setdefault((tokens.shape, tokens.dtype), np.empty_like(tokens))
        buffer[...] = tokens
        return buffer

    patch.setattr(ReferenceBackend, "gather", shared)


@bug("LAW-05")
def unused_slots_of_the_last_block_get_a_weight_of_zero(patch):
    attend = PagedCache.attend

    def whole_blocks(self, sequence, layer, query, scale=None, causal=False):
        table = self._table(sequence)
        past = np.arange(self._tables.lengths[table, layer], self._tables.capacity(table))
        _, values = self._store.read(self._tables.slots(table, layer, past))
        return attend(self, sequence, layer, query, scale, causal) + 0 * values.sum()

    patch.setattr(PagedCache, "attend", whole_blocks)


@bug("ATTN-10")
def layers_from_the_third_on_use_the_first_query_for_all(patch):
    attend = PagedCache.attend

    def first(self, sequence, layer, query, scale=None, causal=False):
        query = np.broadcast_to(query[:1], query.shape) if layer >= 2 else query
        return attend(self, sequence, layer, query, scale, causal)

    patch.setattr(PagedCache, "attend", first)


@real("paged")
def the_eighth_head_is_the_seventh(patch):
    accept_pair = kvref.paged.accept_pair

    def seven(keys, values, shape, backend):
        keys, values = (np.array(part) for part in accept_pair(keys, values, shape, backend))
        if len(shape) == 3 and shape[1] > 7:
            values[:, 7] = values[:, 6]
        return keys, values

    patch.setattr(kvref.paged, "accept_pair", seven)


@real("paged", "tiered", "quantized", "attention")
def groups_of_more_than_four_are_padded_to_a_power_of_two(patch):
    attend = ReferenceBackend.attend

    def padded(self, query, keys, values, scale, mask, logit_sink=None):
        group = query.shape[1] // keys.shape[1]
        if group > 4 and keys.shape[1] > 1:
            query = query[
                :, np.arange(query.shape[1]) // group * group + np.arange(query.shape[1]) % (1 << group.bit_length() - 1)
            ]
        return attend(self, query, keys, values, scale, mask, logit_sink)

    patch.setattr(ReferenceBackend, "attend", padded)


@real("paged", "quantized")
def a_larger_score_of_a_later_chunk_is_not_subtracted(patch):
    in_source(patch, "kvref.online_softmax._both", "a * one.values + b", "one.values + b", "a * one.total + b", "one.total + b")
