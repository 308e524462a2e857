"""A paged cache whose sequences can share blocks."""

import numpy as np

from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound


class Cache:
    """tables: sequence -> layer -> blocks. lengths: sequence -> layer -> tokens. references: block -> number of entries."""

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        self.block_size, self.num_layers = block_size, num_layers
        self.free = list(reversed(range(num_blocks)))
        self.references = [0] * num_blocks
        self.memory = np.zeros((2, num_blocks, block_size, num_kv_heads, head_dim), np.float32)  # keys and values
        self.tables, self.lengths, self.next_id = {}, {}, 0

    @property
    def num_free_blocks(self):
        return len(self.free)

    # Sequences

    def create(self):
        return self.add_sequence([[] for _ in range(self.num_layers)], [0] * self.num_layers)

    def fork(self, sequence):
        """Return a new sequence with the same tokens. It copies no block."""
        self.require(sequence)
        tables = [list(table) for table in self.tables[sequence]]
        for block in (block for table in tables for block in table):
            self.references[block] += 1
        return self.add_sequence(tables, list(self.lengths[sequence]))

    def add_sequence(self, tables, lengths):
        sequence, self.next_id = self.next_id, self.next_id + 1
        self.tables[sequence], self.lengths[sequence] = tables, lengths
        return sequence

    def drop(self, sequence):
        self.require(sequence)
        for block in (block for table in self.tables.pop(sequence) for block in table):
            self.release(block)
        del self.lengths[sequence]

    # Blocks

    def allocate(self):
        block = self.free.pop()
        self.references[block] = 1
        return block

    def release(self, block):
        self.references[block] -= 1
        if self.references[block] == 0:
            self.free.append(block)

    def make_private(self, table, index, start, stop):
        """Replace a shared block by a copy, before the positions from `start` to `stop` are written."""
        shared = table[index]
        table[index] = own = self.allocate()
        self.memory[:, own] = self.memory[:, shared]
        self.release(shared)

    # Tokens

    def write(self, sequence, layer, start, keys, values):
        self.require(sequence, layer)
        tables, length, stop = self.tables[sequence], self.lengths[sequence][layer], start + len(keys)
        if not 0 <= start <= length:
            raise PositionOutOfRange(f"start: {start}, but the length is {length}")
        if start == stop:
            return
        table = tables[layer]
        touched = range(start // self.block_size, min(-(-stop // self.block_size), len(table)))
        copies = [index for index in touched if self.references[table[index]] > 1]
        more = max(0, -(-stop // self.block_size) - len(table))
        if more * self.num_layers + len(copies) > len(self.free):
            raise OutOfBlocks(f"{more * self.num_layers + len(copies)} needed, {len(self.free)} free")
        for index in copies:
            self.make_private(table, index, start, stop)
        for each in tables:
            each += [self.allocate() for _ in range(more)]
        for position, key, value in zip(range(start, stop), keys, values, strict=True):
            block, offset = table[position // self.block_size], position % self.block_size
            self.memory[0, block, offset], self.memory[1, block, offset] = key, value
        self.lengths[sequence][layer] = max(length, stop)

    def gather(self, sequence, layer):
        self.require(sequence, layer)
        rows = self.memory[:, self.tables[sequence][layer]]
        keys, values = rows.reshape(2, -1, *rows.shape[3:])[:, : self.lengths[sequence][layer]]
        return keys, values

    def length(self, sequence, layer):
        self.require(sequence, layer)
        return self.lengths[sequence][layer]

    def block_table(self, sequence, layer):
        self.require(sequence, layer)
        return list(self.tables[sequence][layer])

    def require(self, sequence, layer=0):
        if sequence not in self.tables:
            raise SequenceNotFound(f"sequence {sequence}")
        if not 0 <= layer < self.num_layers:
            raise LayerOutOfRange(f"layer {layer}")
