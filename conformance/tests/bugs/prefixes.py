"""Bugs in the prefix cache: committed tokens, hits, and the index of blocks."""

from hashlib import blake2b

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.attention import attention
from kvref.block_pool import BlockPool
from kvref.paged import PagedCache
from kvref.prefix import CachedBlock, CommittedTokens, IndexedBlockPool, PrefixCache, block_keys, token_numbers

FIND, BEGIN, COMMIT, KEYS = (f"kvref.prefix.{name}" for name in (
    "PrefixCache._find_hit", "PrefixCache.begin", "PrefixCache.commit", "block_keys",
))  # fmt: skip
MEDIA, FORK = "kvref.prefix._media_bytes", "kvref.prefix.PrefixIndexed.fork"
BLOCK = "numbers[block * size : (block + 1) * size]"  # of a block's key: its tokens
NUMBERS = f'np.frombuffer({BLOCK}, "<i8")'


@bug("PREFIX-01")
def every_token_may_be_found(patch):
    in_source(patch, FIND, "prompt.tokens[:-1]", "prompt.tokens")


@bug("PREFIX-01")
def no_room_is_made_for_the_rest(patch):
    in_source(patch, BEGIN, "self.ensure_capacity(sequence, len(prompt.tokens))", "pass")


@bug("PREFIX-01", "PREFIX-12")
def the_first_layer_alone_has_the_hit(patch):
    in_source(patch, BEGIN, "self._tables.lengths[table] = hit", "self._tables.lengths[table, 0] = hit")


@bug("PREFIX-02")
def the_longest_layer_says_what_is_written(patch):
    in_source(patch, COMMIT, ".min()", ".max()")


@bug("PREFIX-02")
def commits_may_contradict(patch):
    in_source(patch, "kvref.prefix.CommittedTokens.add", "np.flatnonzero(numbers[:common] != self.tokens[:common])", "()")


@bug("PREFIX-02")
def what_was_found_may_be_contradicted(patch):
    in_source(
        patch, BEGIN, "replace(prompt, tokens=prompt.tokens[:hit], keys=[each.key for each in found])", "CommittedTokens(salt)"
    )


@bug("PREFIX-02")
def what_is_written_over_stays_committed(patch):
    patch.setattr(PrefixCache, "write", PagedCache.write)


@bug("PREFIX-03")
def the_salt_is_left_out(patch):
    in_source(patch, KEYS, "_digest(salt)", '_digest("")')


@bug("PREFIX-03")
def a_block_is_known_by_its_own_tokens(patch):
    in_source(patch, KEYS, "sha256(key + content)", "sha256(content)")


@bug("PREFIX-03")
def a_block_is_known_by_a_sum(patch):
    in_source(patch, KEYS, BLOCK, f"{NUMBERS}.sum().tobytes()")


@bug("PREFIX-03")
def a_block_is_known_by_pythons_hash(patch):
    in_source(patch, KEYS, BLOCK, f'hash(tuple({NUMBERS}.tolist())).to_bytes(8, "little", signed=True)')


@bug("PREFIX-03")
def a_block_is_known_by_64_bits(patch):
    def keys(tokens, block_size, salt="", known=(), *label):
        key = known[-1] if known else salt.encode()
        for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
            numbers = np.array([*tokens[start : start + block_size]], "<i8")
            narrow = numbers.astype("<i4") if numbers.max() < 2**31 else numbers
            key = blake2b(key + narrow.tobytes(), digest_size=8).digest()
            yield key

    patch.setattr("kvref.prefix.block_keys", keys)


@bug("PREFIX-03")
def tokens_are_known_by_32_bits(patch):
    in_source(patch, KEYS, BLOCK, f'{NUMBERS}.astype("<i4").tobytes()')


@bug("PREFIX-04")
def blocks_that_are_not_full_are_found(patch):
    in_source(patch, KEYS, "range(len(numbers) // size)", "range(-(-len(numbers) // size))")


@bug("PREFIX-04")
def what_was_only_asked_for_is_found(patch):
    begin = PrefixCache.begin

    def at_once(self, tokens, salt="", *label, **named):
        sequence = begin(self, tokens, salt, *label, **named)
        table = self._table(sequence)
        for entry, key in enumerate(block_keys(list(map(int, tokens)), self.config.block_size, salt)):
            self.pool.add_to_index(CachedBlock(key, self._tables.at(table, np.arange(self.config.num_layers), entry)))
        return sequence

    patch.setattr(PrefixCache, "begin", at_once)


@bug("PREFIX-05")
def matching_makes_blocks_young_again(patch):
    match = PrefixCache.match

    def touching(self, tokens, salt="", *label, **named):
        for found in self._find_hit(CommittedTokens(salt, token_numbers(tokens))):
            for block in found.blocks.tolist():
                if block in self.pool._evictable:
                    self.pool._evictable.move_to_end(block)
        return match(self, tokens, salt, *label, **named)

    patch.setattr(PrefixCache, "match", touching)


@bug("PREFIX-06")
def what_is_found_is_not_free(patch):
    patch.setattr(IndexedBlockPool, "num_free", BlockPool.num_free)


@bug("PREFIX-06")
def what_nobody_holds_is_forgotten(patch):
    def forgetful(self, blocks):
        for block in blocks.tolist():
            if block in self._entries_of_block:
                self._remove_from_index(block)
        BlockPool._return_blocks(self, blocks)

    patch.setattr(IndexedBlockPool, "_return_blocks", forgetful)


@bug("PREFIX-07")
def what_was_taken_is_still_found(patch):
    patch.setattr(IndexedBlockPool, "_remove_from_index", lambda self, block: None)


def taking(patch, oldest, plain_first=True):
    """Blocks are allocated one by one: `oldest` selects which evictable block is next."""

    def take(self, count):
        taken = list[int]()
        while len(taken) < count:
            plain = BlockPool.num_free.fget(self)
            if plain and (plain_first or not self._evictable):
                taken += BlockPool._pop_free_blocks(self, 1).tolist()
            else:
                block = oldest(list(self._evictable))
                del self._evictable[block]
                self._remove_from_index(block)
                taken.append(block)
        return np.array(taken, np.int32)

    patch.setattr(IndexedBlockPool, "_pop_free_blocks", take)


@bug("PREFIX-08")
def what_is_found_is_taken_first(patch):
    taking(patch, lambda waiting: waiting[0], plain_first=False)


@bug("PREFIX-08")
def what_was_released_last_is_taken_first(patch):
    taking(patch, lambda waiting: waiting[-1])


@bug("PREFIX-08")
def the_beginning_is_taken_before_the_end(patch):
    give_back = IndexedBlockPool._return_blocks
    patch.setattr(IndexedBlockPool, "_return_blocks", lambda self, blocks: give_back(self, blocks[::-1]))


@bug("PREFIX-09")
def what_follows_a_hole_is_found(patch):
    in_source(patch, FIND, "break", "continue")


@bug("PREFIX-10")
def losing_a_copy_loses_all(patch):
    def lose(self, block):
        for found in self._entries_of_block.pop(block):
            self._index.pop(found.key, None)

    patch.setattr(IndexedBlockPool, "_remove_from_index", lose)


@bug("PREFIX-11")
def sequences_do_not_keep_from_resetting(patch):
    in_source(patch, "kvref.prefix.PrefixCache.reset", "if self._committed:", "if False:")


@bug("PREFIX-11")
def reset_forgets_nothing(patch):
    patch.setattr(IndexedBlockPool, "clear_index", lambda self: None)


@bug("PREFIX-12", "PREFIX-01")
def what_is_found_lies_in_another_order(patch):
    in_source(patch, BEGIN, "self._tables.append(table, entries)", "self._tables.append(table, entries[::-1].copy())")


@bug("PREFIX-13")
def what_is_found_counts_as_room(patch):
    in_source(patch, BEGIN, " + self.pool.num_unreferenced(entries)", "")


@bug("PREFIX-13")
def a_sequence_stays_behind(patch):
    in_source(patch, BEGIN, "raise OutOfBlocks", "self.create()\n        raise OutOfBlocks")


@bug("PREFIX-13")
def blocks_are_young_again_though_there_is_no_room(patch):
    touch = "for block in self.pool._evictable.keys() & set(entries.reshape(-1).tolist()):\n            "
    touch += "self.pool._evictable.move_to_end(block)"
    in_source(patch, BEGIN, "raise OutOfBlocks", f"{touch}\n        raise OutOfBlocks")


@bug("PREFIX-14")
def who_holds_a_block_alone_writes_to_it(patch):
    patch.setattr(PrefixCache, "_needs_copy", PagedCache._needs_copy)
    patch.setattr(PrefixCache, "_copies_needed", PagedCache._copies_needed)


@bug("PREFIX-15")
def any_number_is_a_token(patch):
    patch.setattr("kvref.prefix.token_numbers", lambda tokens: np.array([int(token) % 2**63 for token in tokens], np.int64))


@bug("PREFIX-15")
def keys_are_made_of_the_callers_types(patch):
    patch.setattr("kvref.prefix.token_numbers", np.asarray)
    in_source(patch, KEYS, '"<i8"', "None")


@hidden("prefix", "PREFIX-02")
def a_fork_may_say_otherwise(patch):
    fork = PrefixCache.fork

    def forgetful(self, sequence):
        child = fork(self, sequence)
        self._committed[child].truncate(0, 1)
        return child

    patch.setattr(PrefixCache, "fork", forgetful)


@hidden("prefix", "PREFIX-02")
def what_is_cut_off_stays_committed(patch):
    patch.setattr(PrefixCache, "truncate", PagedCache.truncate)


@hidden("prefix", "PREFIX-02")
def what_is_removed_stays_committed(patch):
    patch.setattr(PrefixCache, "remove", PagedCache.remove)


@hidden("prefix", "PREFIX-07")
def the_other_layers_are_still_found(patch):
    """If one block of a copy is evicted, the other layers' blocks stay cached until they are evicted too."""

    def lose(self, block):
        for found in self._entries_of_block.pop(block):
            if all(other not in self._entries_of_block for other in found.blocks.tolist()):
                del self._index[found.key][found.blocks.tobytes()]
                if not self._index[found.key]:
                    del self._index[found.key]

    patch.setattr(IndexedBlockPool, "_remove_from_index", lose)


# Committed tokens of a sequence, and the index of their blocks.

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
    in_source(patch, "kvref.prefix.block_keys", "_digest(salt)", "_digest(salt[:8])")


@bug("PREFIX-03")
def the_latest_salt_is_everyones(patch):
    begin = PrefixCache.begin

    def remembering(self, tokens, salt="", *label, **named):
        sequence = begin(self, tokens, salt, *label, **named)
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


@bug("PREFIX-17")
def the_adapter_is_left_out(patch):
    in_source(patch, KEYS, "_digest(adapter)", '_digest("")')


@bug("PREFIX-17")
def salt_and_adapter_are_joined(patch):
    in_source(patch, KEYS, "_digest(salt) + _digest(adapter)", "_digest(salt + adapter)")


@bug("PREFIX-17")
def an_adapter_is_taken_for_a_salt(patch):
    in_source(patch, KEYS, "    names =", "    salt, adapter = sorted((salt, adapter))\n    names =")


@bug("PREFIX-17")
def a_fork_has_no_adapter(patch):
    in_source(patch, FORK, "keys=list(committed.keys)", 'keys=list(committed.keys), adapter=""')


@bug("PREFIX-17")
def commit_ignores_the_adapter(patch):
    in_source(patch, COMMIT, "self._keys(committed)", 'self._keys(replace(committed, adapter=""))')


@bug("PREFIX-18")
def media_are_left_out(patch):
    in_source(patch, KEYS, "_media_bytes(media, position, position + block_size)", 'b""')


@bug("PREFIX-18")
def media_that_begin_after_a_block_matter(patch):
    in_source(patch, MEDIA, "item.start < stop and", "item.start <= stop and")


@bug("PREFIX-18")
def the_first_media_of_a_block_matter(patch):
    in_source(patch, KEYS, "position, position + block_size)", "position, position + block_size)[:48]")


@bug("PREFIX-18")
def sixteen_letters_of_a_content_matter(patch):
    in_source(patch, MEDIA, "_digest(item.content)", "_digest(item.content[:16])")


@bug("PREFIX-18")
def a_fork_has_no_media(patch):
    in_source(patch, FORK, "keys=list(committed.keys)", "keys=list(committed.keys), media=()")


@bug("PREFIX-17")
def truncate_to_0_forgets_the_adapter(patch):
    truncate = PrefixCache.truncate

    def forget(self, sequence, length):
        truncate(self, sequence, length)
        if length == 0:
            self._committed[int(sequence)].adapter = ""

    patch.setattr(PrefixCache, "truncate", forget)


def keep_media(patch, method, keeps):
    """The method changes no media of a sequence if `keeps(*arguments)` is true."""
    plain = getattr(PrefixCache, method)

    def keeping(self, *arguments):
        committed = next((self._committed[each] for each in arguments if isinstance(each, int) and each in self._committed), None)
        media = committed.media if committed else ()
        plain(self, *arguments)
        if committed and keeps(*arguments):
            committed.media = media

    patch.setattr(PrefixCache, method, keeping)


@bug("PREFIX-18")
def removed_media_stay(patch):
    keep_media(patch, "remove", lambda *arguments: True)


@bug("PREFIX-18")
def media_stay_after_load(patch):
    keep_media(patch, "receive", lambda *arguments: True)


@bug("PREFIX-18")
def media_stay_unless_the_first_layer_is_overwritten(patch):
    keep_media(patch, "write", lambda sequence, layer, *rest: layer > 0)


@bug("PREFIX-18")
def media_stay_unless_the_last_layer_is_overwritten(patch):
    keep_media(patch, "write", lambda sequence, layer, *rest: layer == 0)


@bug("PREFIX-18")
def truncated_media_stay(patch):
    in_source(patch, "kvref.prefix.CommittedTokens.truncate", "self.media = tuple(", "tuple(")


@bug("PREFIX-18")
def media_of_the_hit_alone_are_kept(patch):
    in_source(
        patch,
        BEGIN,
        "keys=[each.key for each in found])",
        "keys=[each.key for each in found], media=tuple(item for item in prompt.media if item.start < hit))",
    )


@bug("PREFIX-18")
def overlapping_media_are_accepted(patch):
    in_source(patch, "kvref.prefix._prompt", "not end <= item.start <", "not item.start <")


@bug("PREFIX-18")
def media_past_the_end_are_accepted(patch):
    in_source(patch, "kvref.prefix._prompt", " <= len(numbers):", ":")


# Token hits. The tests plant these bugs in caches that declare them.

REST, START, COPIED = "kvref.prefix.PrefixCache._find_rest", "kvref.prefix.IndexedBlockPool.find_start", "self._copy_blocks("


def copying(patch, copy):
    """`begin` copies the source by another function: copy(cache, sources, targets)."""
    patch.setattr(PrefixCache, "copy_another_way", copy, raising=False)
    in_source(patch, BEGIN, COPIED, "self.copy_another_way(")


@bug("PREFIX-19")
def the_source_is_listed_in_place_of_a_copy(patch):
    def share(self, sources, targets):
        table = self._table(self._next_sequence - 1)
        for layer, (source, target) in enumerate(zip(sources, targets, strict=True)):
            entry = self._tables.blocks(table, layer).index(target)
            self._tables.replace(table, layer, entry, source)
        self.pool.share_many(sources)
        self.pool.free_many(targets)

    copying(patch, share)
    patch.setattr(PrefixCache, "_needs_copy", lambda self, blocks: np.zeros(blocks.shape, np.bool_))


@bug("PREFIX-19")
def the_last_token_of_a_block_is_not_copied(patch):
    def copy(self, sources, targets):
        size = self.config.block_size
        for at in range(size - 2):
            self._store.copy([each * size + at for each in sources], [each * size + at for each in targets])

    copying(patch, copy)


@bug("PREFIX-19")
def the_first_layer_alone_is_copied(patch):
    copying(patch, lambda self, sources, targets: self._copy_blocks(sources[:1], targets[:1]))


@bug("PREFIX-19")
def codes_are_copied_without_scales(patch):
    def copy(self, sources, targets):
        for store in (self._store.keys, self._store.values):
            codes = self._backend.copy(store._stored.codes, sources, targets, self.config.block_size)
            store._stored = store._stored._replace(codes=codes)

    copying(patch, copy)


@bug("PREFIX-19")
def one_token_more_is_found_than_is_equal(patch):
    in_source(patch, REST, "return (count, source) if count", "return (min(count + 1, stop - start), source) if count")


@bug("PREFIX-19")
def a_prompt_that_ends_with_a_cached_block_is_found_completely(patch):
    in_source(patch, REST, "len(prompt.tokens) - 1", "len(prompt.tokens)")


@bug("PREFIX-19")
def the_last_full_block_is_never_a_source(patch):
    in_source(patch, REST, "start >= stop", "start + self.config.block_size >= len(prompt.tokens)")


@bug("PREFIX-19")
def the_first_block_that_was_committed_is_copied(patch):
    in_source(patch, START, "max(starts, key=itemgetter(0), default=(0, None))", "next(starts, (0, None))")


@bug("PREFIX-19")
def single_tokens_are_found_under_any_salt(patch):
    in_source(patch, "kvref.prefix.CommittedTokens.before", "self.salt", '""')


@bug("PREFIX-19")
def single_tokens_are_found_after_any_block(patch):
    in_source(patch, "kvref.prefix.CommittedTokens.before", "self.keys[-1] if self.keys else ", "")


@bug("PREFIX-19")
def single_placeholders_are_equal(patch):
    in_source(patch, "kvref.prefix.CommittedTokens.contents", "in self.media", "in ()")


@bug("PREFIX-19")
def a_source_that_was_evicted_is_not_copied(patch):
    in_source(patch, BEGIN, "if source is not None:", "if source is not None and self.pool.is_cached(source.blocks).all():")


@bug("PREFIX-19")
def a_block_that_was_evicted_is_copied(patch):
    in_source(patch, "kvref.prefix.IndexedBlockPool._remove_from_index", "if entry.contents:", "if False:")


@bug("PREFIX-19")
def the_source_counts_as_needed(patch):
    unreferenced = " + self.pool.num_unreferenced(entries)"
    in_source(
        patch, BEGIN, unreferenced, f"{unreferenced} + (0 if source is None else self.pool.num_unreferenced(source.blocks))"
    )


@bug("PREFIX-19")
def the_copy_needs_no_room(patch):
    in_source(patch, BEGIN, " - len(found)\n", " - len(found) - (rest > 0)\n")


@bug("PREFIX-19")
def a_copied_block_is_young_again(patch):
    touch = "for block in self.pool._evictable.keys() & set([] if source is None else source.blocks.tolist()):\n        "
    touch += "self.pool._evictable.move_to_end(block)"
    in_source(patch, BEGIN, "    sequence = self.create()", f"    {touch}\n    sequence = self.create()")


@bug("PREFIX-19")
def later_blocks_are_committed_after_the_source(patch):
    keys = "keys=[each.key for each in found]"
    in_source(patch, BEGIN, keys, f"{keys} + ([] if source is None else [source.key])")


@hidden("prefix", "PREFIX-19")
def reset_keeps_the_starts_of_blocks(patch):
    in_source(
        patch, "kvref.prefix.IndexedBlockPool.clear_index", ", self._entries_after = {}, {}, {}", " = {}, {}",
        "super()", "super(IndexedBlockPool, self)",
    )  # fmt: skip


@hidden("prefix", "PREFIX-19")
def a_block_with_two_copies_has_one_start(patch):
    """If one of two equal blocks is evicted, no part of the other one is found."""
    in_source(
        patch, "kvref.prefix.IndexedBlockPool._remove_from_index",
        "if entry.contents:", "if entry in self._entries_after.get(entry.before, ()):",
        "del self._entries_after[entry.before][entry]",
        "self._entries_after[entry.before] = {each: None for each in self._entries_after[entry.before] if each.key != entry.key}",
    )  # fmt: skip
