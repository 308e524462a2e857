"""A paged cache of one layer that finds blocks of earlier prompts."""

import hashlib

import numpy as np

from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound


class Cache:
    """tables, lengths, salts: by sequence. references: block -> number of sequences that list it.

    free: the blocks that no sequence lists, in the order in which they are allocated: those that are not cached first, then the
    others by the time of their release. blocks_by_key, keys_by_block: the prefix index.
    """

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.memory = np.zeros((2, num_blocks, block_size, num_kv_heads, head_dim), np.float32)  # keys and values
        self.tables, self.lengths, self.salts, self.next_id = {}, {}, {}, 0
        self.blocks_by_key, self.keys_by_block = {}, {}

    # The prefix index

    def block_keys(self, tokens, salt):
        """Return the key of each full block of `tokens`."""
        key, keys = hashlib.sha256(salt.encode()).digest(), []
        for stop in range(self.block_size, len(tokens) + 1, self.block_size):
            own = np.array(tokens[stop - self.block_size : stop], np.int64).tobytes()
            key = hashlib.sha256(key + own).digest()
            keys.append(key)
        return keys

    def find(self, tokens, salt):
        """Return the blocks of the hit: those of the longest cached beginning that is shorter than `tokens`."""
        found = []
        for key in self.block_keys(tokens[:-1], salt):
            if key not in self.blocks_by_key:
                break
            found.append(self.blocks_by_key[key])
        return found

    def match(self, tokens, salt=""):
        """Return the number of tokens of the hit."""
        return len(self.find(tokens, salt)) * self.block_size

    def begin(self, tokens, salt=""):
        """Return a new sequence that begins with the hit, and has blocks for all `tokens`. Raises OutOfBlocks."""
        found = self.find(tokens, salt)
        more = -(-len(tokens) // self.block_size) - len(found)
        needed = more + sum(self.references[block] == 0 for block in found)
        if needed > len(self.free):
            raise OutOfBlocks(f"{needed} needed, {len(self.free)} free")
        for block in found:
            self.add_reference(block)
        return self.add_sequence(found + self.allocate(more), len(found) * self.block_size, salt)

    def commit(self, sequence, tokens):
        """Add the full blocks of `tokens`, which are the first tokens of the sequence, to the index."""
        self.require(sequence)
        if len(tokens) > self.lengths[sequence]:
            raise PositionOutOfRange(f"{len(tokens)} tokens, but the length is {self.lengths[sequence]}")
        table = self.tables[sequence]
        for index, key in enumerate(self.block_keys(tokens, self.salts[sequence])):
            own = table[index]
            cached = self.blocks_by_key.setdefault(key, own)
            self.keys_by_block[cached] = key
            if cached != own:  # another sequence committed the same tokens: list its block, and free the own one
                self.add_reference(cached)
                table[index] = cached
                self.release(own)

    def forget(self, block):
        """Remove a block from the index, if it is there. The allocator is about to use it for other tokens."""
        if block in self.keys_by_block:
            del self.blocks_by_key[self.keys_by_block.pop(block)]

    # The allocator, which is complete

    @property
    def num_free_blocks(self):
        return len(self.free)

    def allocate(self, count):
        """Return `count` free blocks. Raises OutOfBlocks."""
        if count > len(self.free):
            raise OutOfBlocks(f"{count} needed, {len(self.free)} free")
        blocks = self.free[:count]
        for block in blocks:
            self.forget(block)
            self.add_reference(block)
        return blocks

    def add_reference(self, block):
        if self.references[block] == 0:
            self.free.remove(block)
        self.references[block] += 1

    def release(self, block):
        self.references[block] -= 1
        if self.references[block] == 0 and block in self.keys_by_block:
            self.free.append(block)
        elif self.references[block] == 0:
            self.free.insert(0, block)

    # The paged cache, which is complete

    def create(self):
        return self.add_sequence([], 0, "")

    def add_sequence(self, table, length, salt):
        sequence, self.next_id = self.next_id, self.next_id + 1
        self.tables[sequence], self.lengths[sequence], self.salts[sequence] = table, length, salt
        return sequence

    def drop(self, sequence):
        self.require(sequence)
        for block in reversed(self.tables.pop(sequence)):  # the last block is evicted first
            self.release(block)
        del self.lengths[sequence], self.salts[sequence]

    def ensure_capacity(self, sequence, num_tokens):
        self.require(sequence)
        if num_tokens < 0:
            raise PositionOutOfRange(f"num_tokens: {num_tokens}")
        table = self.tables[sequence]
        table += self.allocate(max(0, -(-num_tokens // self.block_size) - len(table)))

    def write(self, sequence, layer, start, keys, values):
        """Write tokens after the last one."""
        self.require(sequence, layer)
        if start != self.lengths[sequence]:
            raise NotOffered("a write to an earlier position")
        self.ensure_capacity(sequence, start + len(keys))
        for position, key, value in zip(range(start, start + len(keys)), keys, values, strict=True):
            place = self.tables[sequence][position // self.block_size], position % self.block_size
            self.memory[0][place], self.memory[1][place] = key, value
        self.lengths[sequence] = start + len(keys)

    def gather(self, sequence, layer):
        self.require(sequence, layer)
        rows = self.memory[:, self.tables[sequence]]
        keys, values = rows.reshape(2, -1, *rows.shape[3:])[:, : self.lengths[sequence]]
        return keys, values

    def length(self, sequence, layer):
        self.require(sequence, layer)
        return self.lengths[sequence]

    def block_table(self, sequence, layer):
        self.require(sequence, layer)
        return list(self.tables[sequence])

    def require(self, sequence, layer=0):
        if sequence not in self.tables:
            raise SequenceNotFound(f"sequence {sequence}")
        if layer != 0:
            raise LayerOutOfRange(f"layer {layer}")


class NotOffered(Exception):
    """The cache does not have this operation. kvref then checks the clause without it."""
