"""Bugs that need inputs or sizes that few checks use: equal keys, NaN in reused memory, many heads, results that are kept."""

import hashlib

import numpy as np

import kvref.paged
import kvref.prefix
from bugs.plant import bug, in_source, real
from kvref.backend import ReferenceBackend
from kvref.contiguous import ContiguousCache
from kvref.paged import PagedCache
from kvref.partial_load import PendingLoad


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


@bug("MOVE-05")
def a_load_is_complete_once_its_parts_span_the_sequence(patch):
    def spans(self, everything):
        def extent(parts, name):
            return min(getattr(part, name).start for part in parts), max(getattr(part, name).stop for part in parts)

        names = ("layers", "tokens", "heads")
        return all(extent(self.parts, name) == extent([everything], name) for name in names)

    patch.setattr(PendingLoad, "is_complete", spans)


@bug("MOVE-01")
def truncate_after_load_shortens_the_first_layer_only(patch):
    load, truncate = PagedCache.load, PagedCache.truncate

    def loading(self, sequence, data):
        load(self, sequence, data)
        self.__dict__.setdefault("loaded", set()).add(sequence)

    def first_layer(self, sequence, length):
        table = self._table(sequence)
        before = self._tables.lengths[table].copy()
        truncate(self, sequence, length)
        if sequence in self.__dict__.get("loaded", ()):
            self._tables.lengths[table, 1:] = np.minimum(before[1:], self._tables.capacity(table))

    patch.setattr(PagedCache, "load", loading)
    patch.setattr(PagedCache, "truncate", first_layer)


@bug("LAW-08")
def an_append_that_fills_the_buffer_keeps_the_array(patch):
    append, read = ContiguousCache.append, ContiguousCache.read

    def keeping(self, keys, values):
        append(self, keys, values)
        self.kept = (keys, values) if keys.shape[2] == self.seq_len == self.capacity else None

    def kept_or_read(self):
        kept = getattr(self, "kept", None)
        return kept if kept and kept[0].shape[2] == self.seq_len else read(self)

    patch.setattr(ContiguousCache, "append", keeping)
    patch.setattr(ContiguousCache, "read", kept_or_read)


@bug("LAW-14")
def nan_with_all_bits_set_is_rounded_to_zero(patch):
    quantize = ReferenceBackend.quantize

    def rounded(self, rows, format, out=None):
        rows = np.array(rows)
        if rows.dtype == np.float32 and format.name == "bfloat16":
            rows[rows.view(np.uint32) & 0x7FFFFFFF > 0x7FFF7FFF] = 0  # adding half a unit overflows into the sign
        return quantize(self, rows, format, out)

    patch.setattr(ReferenceBackend, "quantize", rounded)


@real("contiguous")
def rows_from_the_ninth_on_are_the_eighth(patch):
    update = ReferenceBackend.update

    def eight(self, buffer, new, position):
        new = np.array(new)
        new[8:] = new[7:8]
        return update(self, buffer, new, position)

    patch.setattr(ReferenceBackend, "update", eight)


@real("prefix")
def salts_are_known_by_twelve_bits(patch):
    keys = kvref.prefix.block_keys

    def few(tokens, block_size, salt="", *rest):
        number = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:4], "big") % 4096 if len(salt) > 8 else salt
        return keys(tokens, block_size, str(number), *rest)

    patch.setattr(kvref.prefix, "block_keys", few)


@bug("EDIT-05")
def truncate_to_nothing_drops_two_references(patch):
    truncate = PagedCache.truncate

    def twice(self, sequence, length):
        table = self._table(sequence)
        first = [int(self._tables.at(table, layer, 0)) for layer in range(self.config.num_layers) if self._tables.count(table)]
        truncate(self, sequence, length)
        if length == 0:
            for block in (block for block in first if self.pool.references(block) > 1):
                self.pool.free(block)

    patch.setattr(PagedCache, "truncate", twice)


@bug("PAGED-15")
def a_shared_block_counts_as_often_as_it_is_listed(patch):
    def counted(self):
        return float(self.pool._references.sum()) / self.pool.num_blocks if self.pool.num_blocks else 0.0

    patch.setattr(PagedCache, "utilization", property(counted))


@bug("WIN-03")
def only_the_first_position_of_a_read_is_looked_up(patch):
    new = "[each for each in wanted[:1] if self.config.sinks <= each < self._first]"
    old = "wanted[(wanted >= self.config.sinks) & (wanted < self._first)]"
    in_source(patch, "kvref.windowed.WindowedCache.read", old, new)


@bug("LAW-03")
def a_load_frees_all_but_the_last_block_of_the_former_contents(patch):
    old = "self.pool.free_many(self._tables.close(old))"
    in_source(patch, "kvref.paged.PagedCache._replace_table", old, "self.pool.free_many(self._tables.close(old)[:-1])")


@bug("ATTN-08")
def queries_before_the_first_token_see_it(patch):
    old = "np.arange(num_tokens - num_queries, num_tokens)"
    in_source(patch, "kvref.attention._standing", old, f"np.maximum({old}, 0)")


@bug("EDIT-10")
def a_frequency_of_nan_is_accepted(patch):
    in_source(patch, "kvref.rope._is_finite", "math.isfinite(number)", "not math.isinf(number)")


@bug("EDIT-10")
def more_frequencies_than_pairs_are_accepted(patch):
    in_source(patch, "kvref.rope.Rotary.__post_init__", "1 <= len(given) <= most", "1 <= len(given)")


@bug("PAGED-17")
def block_tables_of_no_sequences_have_one_axis(patch):
    in_source(patch, "kvref.block_tables.BlockTables.padded", ".reshape(len(rows), most)", "")


@bug("LAW-15")
def gathers_ignore_strides(patch):
    gather = ReferenceBackend.gather
    contiguous = np.ascontiguousarray

    def flat(self, store, slots):
        if isinstance(store, np.ndarray) and not store.flags.c_contiguous and store.base is not None:
            store = np.lib.stride_tricks.as_strided(store, store.shape, contiguous(store).strides)
        return gather(self, store, slots)

    patch.setattr(ReferenceBackend, "gather", flat)


@bug("LAW-15")
def single_codes_are_decoded_without_their_stride(patch):
    decode = ReferenceBackend.decode

    def flat(self, codes, element, out=None):
        if isinstance(codes, np.ndarray) and codes.ndim == 1 and not codes.flags.c_contiguous:
            codes = np.lib.stride_tricks.as_strided(codes, codes.shape, (codes.itemsize,))
        return decode(self, codes, element, out)

    patch.setattr(ReferenceBackend, "decode", flat)
