"""Prefix caches with a dictionary of chained hashes, and with a radix tree."""

import hashlib
from collections import OrderedDict
from itertools import pairwise

import numpy as np

from .simple_paged import BLOCKS, POSITION, RELEASED, Paged

IN_USE, MISMATCH, TOKEN = (type(name, (Exception,), {}) for name in ("InUse", "TokenMismatch", "TokenOutOfRange"))


class Entry:
    """One full block of committed tokens in the index. blocks: its block in each layer. copies: the list that contains it."""

    def __init__(self, blocks, copies):
        self.blocks, self.copies = blocks, copies
        copies.append(self)


class ChainedHashes(Paged):
    """Equal blocks are all cached. The hash of a block is that of its tokens and the hash of the block before it."""

    bookkeeping = (*Paged.bookkeeping, "evictable", "entries", "index", "replaced")
    merges = False

    def make_free_list(self):
        self.evictable = OrderedDict()  # cached blocks without references, in the order of their release
        self.entries = {}  # block -> its entries
        self.replaced = []  # blocks that the current call has copied, which become free at its end
        self.index = self.make_index()
        self.labels, self.media, self.committed = {}, {}, {}
        return list(range(self.total))

    def make_index(self):
        return {}

    def walk(self, tokens, label, count):
        """The list of copies of each of the first `count` full blocks."""
        found, digest = [], hashlib.sha256(repr(label).encode()).digest()
        for start, stop in pairwise(range(0, count * self.size + 1, self.size)):
            digest = hashlib.sha256(digest + repr(tokens[start:stop]).encode()).digest()
            found.append(self.index.setdefault(digest, []))
        return found

    # The free list.

    num_free_blocks = property(lambda self: len(self.free) + len(self.evictable))

    def allocate(self):
        if self.free:
            return self.free.pop()
        if not self.evictable:
            raise BLOCKS("none")
        block, _ = self.evictable.popitem(last=False)
        for entry in self.entries.pop(block):
            entry.copies.remove(entry)
            for other in set(entry.blocks) - {block}:
                self.entries[other].remove(entry)
                if not self.entries[other]:
                    del self.entries[other]
                    if self.evictable.pop(other, None):
                        self.free.append(other)
        return block

    def give_back(self, block):
        if block in self.entries:
            self.evictable[block] = True
        else:
            self.free.append(block)

    def unlist(self, entries):
        super().unlist(entries[::-1])  # later positions are evicted first

    def list_blocks(self, blocks):
        self.references.update(blocks)
        for block in blocks:
            self.evictable.pop(block, None)

    def prepare(self, sequence, layer, positions):
        last = min(len(self.tables[sequence]), -(-positions.stop // self.size))
        for entry in self.tables[sequence][positions.start // self.size : last] if positions else ():
            if self.references[entry[layer]] > 1 or entry[layer] in self.entries:
                before = entry[layer]
                self.separate(entry, layer)
                if not self.references[before]:
                    del self.references[before]
                    self.replaced.append(before)

    def free_replaced(self):
        while self.replaced:
            self.give_back(self.replaced.pop())

    # Committed tokens.

    def create(self):
        sequence = super().create()
        self.labels[sequence], self.media[sequence], self.committed[sequence] = ("", ""), {}, []
        return sequence

    def fork(self, sequence):
        child = super().fork(sequence)
        self.labels[child], self.media[child] = self.labels[sequence], dict(self.media[sequence])
        self.committed[child] = list(self.committed[sequence])
        return child

    def store(self, places, rows):
        before = {place: self.counts[place[0]][place[1]] for place in places}
        super().store(places, rows)
        self.free_replaced()
        for (sequence, layer), (start, which) in places.items():
            if len(which) and start < before[sequence, layer]:
                self.forget(sequence, start)

    def truncate(self, sequence, length):
        super().truncate(sequence, length)
        self.forget(sequence, int(length))

    def remove(self, sequence, start, stop, frequencies=None, layout="halves"):
        super().remove(sequence, start, stop, frequencies, layout)
        self.free_replaced()
        if stop > start:
            self.forget(sequence, int(start))

    def forget(self, sequence, position):
        del self.committed[sequence][position:]
        self.media[sequence] = {at: part for at, part in self.media[sequence].items() if at < position}

    def match(self, tokens, salt="", adapter="", media=()):
        tokens = self.tokens(tokens)
        return self.size * len(self.hit(tokens, (salt, adapter), self.parts(media, len(tokens))))

    def parts(self, media, count):
        """What each placeholder stands for, by position."""
        found, last = {}, 0
        for start, stop, content in media:
            if not last <= start < stop <= count:
                raise POSITION(f"media [{start}, {stop})")
            found |= {at: (content, at - start) for at in range(start, stop)}
            last = stop
        return found

    def marked(self, tokens, parts):
        return [(token, parts.get(at)) for at, token in enumerate(tokens)]

    def hit(self, tokens, label, parts):
        found = []
        for copies in self.walk(self.marked(tokens, parts), label, max(0, len(tokens) - 1) // self.size):
            if not copies:
                break
            found.append(copies[-1].blocks)
        return found

    def begin(self, tokens, salt="", adapter="", media=()):
        tokens = self.tokens(tokens)
        parts = self.parts(media, len(tokens))
        found, sequence = self.hit(tokens, (salt, adapter), parts), self.create()
        try:
            with self.undo():
                for blocks in found:
                    self.list_blocks(blocks)
                    self.tables[sequence].append(list(blocks))
                self.enlarge({sequence: len(tokens)})
        except BLOCKS:
            del self.tables[sequence]
            raise
        self.counts[sequence] = [len(found) * self.size] * self.layers
        self.labels[sequence], self.media[sequence] = (salt, adapter), parts
        self.committed[sequence] = tokens[: len(found) * self.size]
        return sequence

    def commit(self, sequence, tokens):
        self.require(sequence)
        tokens = self.tokens(tokens)
        if len(tokens) > min(self.counts[sequence]):
            raise POSITION(len(tokens))
        known = self.committed[sequence]
        if any(a != b for a, b in zip(tokens, known, strict=False)):
            raise MISMATCH("other tokens are committed")
        self.committed[sequence] = tokens + known[len(tokens) :]
        for number, copies in enumerate(
            self.walk(self.marked(tokens, self.media[sequence]), self.labels[sequence], len(tokens) // self.size)
        ):
            blocks = self.tables[sequence][number]
            if RELEASED in blocks or any(entry.blocks == blocks for entry in copies):
                continue
            if copies and self.merges:
                self.list_blocks(copies[0].blocks)
                self.tables[sequence][number] = list(copies[0].blocks)
                self.unlist([blocks])
            else:
                entry = Entry(list(blocks), copies)
                for block in blocks:
                    self.entries.setdefault(block, []).append(entry)

    def reset(self):
        if self.tables:
            raise IN_USE(f"{len(self.tables)} live sequences")
        self.free += self.evictable
        self.evictable, self.entries, self.index = OrderedDict(), {}, self.make_index()

    def tokens(self, tokens):
        for token in tokens:
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)) or not 0 <= token < 2**63:
                raise TOKEN(f"{token!r}")
        return [int(token) for token in tokens]


class RadixTree(ChainedHashes):
    """A node per block, with a child for each next block of tokens. `commit` replaces equal blocks by the cached ones."""

    merges = True

    def walk(self, tokens, label, count):
        found, node = [], self.index.setdefault(label, {})
        for start, stop in pairwise(range(0, count * self.size + 1, self.size)):
            copies, node = node.setdefault(tuple(tokens[start:stop]), ([], {}))
            found.append(copies)
        return found


class Nodes:
    """A tree with a node per token. children: of each node, by token. copies: of each node, entries of the block that ends there.

    Nodes are numbers, because `undo` copies the index, and a copy of nested objects would be a deep recursion.
    """

    def __init__(self):
        self.roots, self.children, self.copies = {}, [], []

    def after(self, node, token):
        """The node of a token after another node. It is created if it does not exist."""
        return self.find(self.children[node], token)

    def root(self, label):
        return self.find(self.roots, label)

    def find(self, nodes, name):
        if name not in nodes:
            nodes[name] = len(self.children)
            self.children.append({})
            self.copies.append([])
        return nodes[name]

    def cached_block(self, node, depth):
        """A cached block that ends `depth` tokens below a node, or None."""
        below = [node]
        for _ in range(depth):
            below = [child for each in below for child in self.children[each].values()]
        return next((self.copies[each][-1].blocks for each in below if self.copies[each]), None)


class TokenTree(ChainedHashes):
    """A tree with a node per token, whose hits end at any node. Copied tokens are read before a block is allocated."""

    def make_index(self):
        return Nodes()

    def walk(self, tokens, label, count):
        node, found = self.index.root(label), []
        for at, token in enumerate(tokens[: count * self.size], 1):
            node = self.index.after(node, token)
            if at % self.size == 0:
                found.append(self.index.copies[node])
        return found

    def rest(self, tokens, label, parts):
        """The full blocks of a hit, the number of tokens after them, and the blocks that contain these."""
        found, marked = self.hit(tokens, label, parts), self.marked(tokens, parts)[:-1]
        node, longest = self.index.root(label), (0, None)
        for at, token in enumerate(marked[: (len(found) + 1) * self.size], 1):
            node = self.index.after(node, token)
            count = at - len(found) * self.size
            if count > 0 and (source := self.index.cached_block(node, self.size - count)):
                longest = count, source
        return found, *longest

    def match(self, tokens, salt="", adapter="", media=()):
        tokens = self.tokens(tokens)
        found, count, _ = self.rest(tokens, (salt, adapter), self.parts(media, len(tokens)))
        return len(found) * self.size + count

    def begin(self, tokens, salt="", adapter="", media=()):
        numbers = self.tokens(tokens)
        found, count, source = self.rest(numbers, (salt, adapter), self.parts(media, len(numbers)))
        rows = [self.get(layer, block * self.size + np.arange(count)) for layer, block in enumerate(source or ())]
        sequence = super().begin(tokens, salt, adapter, media)
        hit = len(found) * self.size
        self.counts[sequence] = [hit + count] * self.layers
        for layer, (keys, values) in enumerate(rows):
            self.put(layer, self.slots(sequence, layer, range(hit, hit + count)), keys, values)
        self.committed[sequence] = numbers[: hit + count]
        return sequence


class AnyCopyFirst(ChainedHashes):
    """Evicts the block that was released last, which it declares."""

    def allocate(self):
        if self.evictable and not self.free:
            self.evictable.move_to_end(next(reversed(self.evictable)), last=False)
        return super().allocate()


LIMITS = {"AnyCopyFirst": {"other_eviction_order": True}, "TokenTree": {"token_hits": True}}
DESIGNS = (ChainedHashes, RadixTree, TokenTree, AnyCopyFirst)
