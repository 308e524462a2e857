"""A paged cache: sequences in blocks of one pool."""

import numpy as np

from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound


class Cache:
    """Blocks are numbered from 0 to num_blocks - 1, and layers from 0 to num_layers - 1.

    free: the blocks that no sequence has. keys, values: the memory, one row per slot. tables: sequence -> layer -> blocks.
    lengths: sequence -> layer -> number of tokens.
    """

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        self.num_blocks, self.block_size, self.num_layers = num_blocks, block_size, num_layers
        self.free = list(reversed(range(num_blocks)))
        self.keys = np.zeros((num_blocks * block_size, num_kv_heads, head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.tables, self.lengths, self.created = {}, {}, 0

    @property
    def num_free_blocks(self):
        return len(self.free)

    def create(self):
        """Return the id of a new sequence, an integer that was never used before."""
        sequence, self.created = self.created, self.created + 1
        self.tables[sequence] = [[] for _ in range(self.num_layers)]
        self.lengths[sequence] = [0] * self.num_layers
        return sequence

    def drop(self, sequence):
        """Remove a sequence, and free its blocks."""
        self.require(sequence)
        for table in self.tables.pop(sequence):
            self.free += table
        del self.lengths[sequence]

    def ensure_capacity(self, sequence, num_tokens):
        """Allocate blocks until `num_tokens` tokens fit into every layer."""
        self.require(sequence)
        if num_tokens < 0:
            raise PositionOutOfRange(f"num_tokens: {num_tokens}")
        tables = self.tables[sequence]
        missing = max(0, -(-num_tokens // self.block_size) - len(tables[0]))
        if missing * self.num_layers > len(self.free):
            raise OutOfBlocks(f"{missing * self.num_layers} needed, {len(self.free)} free")
        for table in tables:
            table += [self.free.pop() for _ in range(missing)]

    def write(self, sequence, layer, start, keys, values):
        """Write tokens to one layer, at the positions from `start` on. Both arrays: [tokens, num_kv_heads, head_dim]."""
        self.require(sequence, layer)
        length, stop = self.lengths[sequence][layer], start + len(keys)
        if not 0 <= start <= length:
            raise PositionOutOfRange(f"start: {start}, but the length is {length}")
        self.ensure_capacity(sequence, stop)
        slots = self.slots(sequence, layer, start, stop)
        self.keys[slots], self.values[slots] = keys, values
        self.lengths[sequence][layer] = max(length, stop)

    def gather(self, sequence, layer):
        """Return the keys and the values of all tokens of a layer, in the order of their positions."""
        slots = self.slots(sequence, layer, 0, self.length(sequence, layer))
        return self.keys[slots], self.values[slots]

    def length(self, sequence, layer):
        """Return the number of tokens in a layer."""
        self.require(sequence, layer)
        return self.lengths[sequence][layer]

    def block_table(self, sequence, layer):
        """Return the list of blocks of a layer, in the order of their tokens."""
        self.require(sequence, layer)
        return list(self.tables[sequence][layer])

    def slot_mapping(self, sequence, layer, start, count):
        """Return the slots of `count` positions from `start` on, for which the sequence has blocks."""
        room = len(self.block_table(sequence, layer)) * self.block_size
        if start < 0 or count < 0 or start + count > room:
            raise PositionOutOfRange(f"{count} positions from {start} on, but there are {room}")
        return self.slots(sequence, layer, start, start + count)

    def slots(self, sequence, layer, start, stop):
        table, size = self.tables[sequence][layer], self.block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def require(self, sequence, layer=0):
        if sequence not in self.tables:
            raise SequenceNotFound(f"sequence {sequence}")
        if not 0 <= layer < self.num_layers:
            raise LayerOutOfRange(f"layer {layer}")
