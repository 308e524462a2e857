"""Bugs in the committed tokens of a sequence, and in the index of their blocks."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.attention import attention
from kvref.paged import PagedCache
from kvref.prefix import CommittedTokens, PrefixCache

REMOVE = "kvref.paged.PagedCache.remove"


@bug("PREFIX-02")
def a_cut_where_a_block_ends_keeps_the_keys_behind_it(patch):
    def cut(self, length, block_size):
        self.tokens = self.tokens[:length]
        if length % block_size:
            self.keys = self.keys[: length // block_size]

    patch.setattr(CommittedTokens, "truncate", cut)


@bug("PREFIX-02")
def tokens_of_a_block_that_is_not_full_may_be_contradicted(patch):
    commit = PrefixCache.commit

    def of_full_blocks(self, sequence, tokens):
        told = self._committed.get(int(sequence))
        if told is not None:
            told.tokens = told.tokens[: len(told.keys) * self.config.block_size]
        commit(self, sequence, tokens)

    patch.setattr(PrefixCache, "commit", of_full_blocks)


@bug("PREFIX-02")
def what_one_layer_has_otherwise_stays_committed(patch):
    write = PrefixCache.write

    def of_the_first(self, sequence, layer, *args):
        (PagedCache.write if layer == 1 else write)(self, sequence, layer, *args)

    patch.setattr(PrefixCache, "write", of_the_first)


@bug("PREFIX-03")
def eight_letters_of_a_salt_count(patch):
    in_source(patch, "kvref.prefix.block_keys", "salt.encode()", "salt[:8].encode()")


@bug("PREFIX-03")
def the_latest_salt_is_everyones(patch):
    begin = PrefixCache.begin

    def remembering(self, tokens, salt=""):
        sequence = begin(self, tokens, salt)
        for told in self._committed.values():
            told.salt = salt
        return sequence

    patch.setattr(PrefixCache, "begin", remembering)


@bug("PREFIX-03")
def a_fork_has_no_salt(patch):
    fork = PrefixCache.fork

    def without(self, sequence):
        child = fork(self, sequence)
        self._committed[child] = CommittedTokens("", self._committed[child].tokens)
        return child

    patch.setattr(PrefixCache, "fork", without)


@bug("PREFIX-11")
def forks_do_not_count_as_sequences(patch):
    fork, reset = PrefixCache.fork, PrefixCache.reset

    def noted(self, sequence):
        child = fork(self, sequence)
        self.__dict__.setdefault("forked", set()).add(child)
        return child

    def in_spite_of_them(self):
        if {*self._committed} - self.__dict__.get("forked", set()):
            reset(self)
        self.pool.clear_index()

    patch.setattr(PrefixCache, "fork", noted)
    patch.setattr(PrefixCache, "reset", in_spite_of_them)


@bug("EDIT-10")
def the_last_layer_alone_is_turned(patch):
    put, last = "self._store.keys.put(new, keys)", "layers == layers.max()"
    own = f"type(keys)(*(None if each is None else each[{last}] for each in keys))"
    in_source(patch, REMOVE, put, f"self._store.keys.put(new[{last}], {own})")


@bug("SHARE-05")
def slots_are_remembered_past_a_copy(patch):
    slot_mapping, drop, truncate = PagedCache.slot_mapping, PagedCache.drop, PagedCache.truncate

    def remembered(self, sequence, layer, start, count):
        known = self.__dict__.setdefault("known", {})
        slots = slot_mapping(self, sequence, layer, start, count)
        return [known.setdefault((int(sequence), int(layer), int(start) + i), slot) for i, slot in enumerate(slots)]

    def forgetting(change):
        def changed(self, sequence, *args):
            change(self, sequence, *args)
            known = self.__dict__.get("known", {})
            self.known = {place: slot for place, slot in known.items() if place[0] != int(sequence)}

        return changed

    patch.setattr(PagedCache, "slot_mapping", remembered)
    patch.setattr(PagedCache, "drop", forgetting(drop))
    patch.setattr(PagedCache, "truncate", forgetting(truncate))


@bug("SHARE-05")
def attention_uses_the_table_from_before_a_copy(patch):
    def attend(self, sequence, layer, query, scale=None, causal=False):
        table, size = self.block_table(sequence, layer), self.config.block_size
        known = self.__dict__.setdefault("known", {})
        if len(known.get((int(sequence), int(layer)), ())) != len(table):
            known[int(sequence), int(layer)] = table
        table = known[int(sequence), int(layer)]
        slots = [table[at // size] * size + at % size for at in range(self.length(sequence, layer))]
        keys, values = self._store.read(np.array(slots, np.int64))
        return attention(query, keys, values, scale=scale, causal=causal, backend=self._backend)

    patch.setattr(PagedCache, "attend", attend)
