"""A cache for a model of two layers, of which the first has a window."""

import numpy as np

from kvref.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound

WINDOWED, FULL = 0, 1  # the layers
RELEASED = -1  # the entry of a block table whose block was freed


class Cache:
    """tables: sequence -> layer -> blocks. lengths: sequence -> tokens, equal in both layers."""

    def __init__(self, num_blocks, block_size, num_layers, num_groups, window, num_kv_heads, head_dim, dtype):
        self.block_size, self.window = block_size, window
        self.free = list(reversed(range(num_blocks)))
        self.keys = np.zeros((num_blocks, block_size, num_kv_heads, head_dim), np.float32)
        self.values = np.zeros_like(self.keys)
        self.tables, self.lengths, self.next_id = {}, {}, 0

    @property
    def num_free_blocks(self):
        return len(self.free)

    def create(self):
        sequence, self.next_id = self.next_id, self.next_id + 1
        self.tables[sequence], self.lengths[sequence] = ([], []), 0
        return sequence

    def drop(self, sequence):
        self.require(sequence)
        for table in self.tables.pop(sequence):
            self.free += [block for block in table if block != RELEASED]
        del self.lengths[sequence]

    def first_seen(self, sequence):
        """Return the first position that the next query sees in the layer with the window."""
        return max(0, self.lengths[sequence] - self.window + 1)

    def step(self, sequence, keys, values):
        """Append tokens in both layers. Both arrays: float32 [2, tokens, num_kv_heads, head_dim]."""
        self.require(sequence)
        count = keys.shape[1]
        if count == 0:
            return
        tables, start = self.tables[sequence], self.lengths[sequence]
        unseen = self.unseen_entries(sequence)
        needed = 2 * (-(-(start + count) // self.block_size) - len(tables[FULL]))
        if needed > len(self.free) + len(unseen):
            raise OutOfBlocks(f"{needed} needed, {len(self.free) + len(unseen)} free")
        for index in unseen:
            self.free.append(tables[WINDOWED][index])
            tables[WINDOWED][index] = RELEASED
        for layer, table in enumerate(tables):
            table += [self.free.pop() for _ in range(needed // 2)]
            for row in range(count):
                block, offset = table[(start + row) // self.block_size], (start + row) % self.block_size
                self.keys[block, offset], self.values[block, offset] = keys[layer, row], values[layer, row]
        self.lengths[sequence] += count

    def unseen_entries(self, sequence):
        """Return the entries of the windowed layer's table all of whose positions are before the next query's window."""
        table = self.tables[sequence][WINDOWED]
        count = max(0, self.first_seen(sequence) - 1) // self.block_size
        return [index for index in range(count) if table[index] != RELEASED]

    def read(self, sequence, layer, positions):
        """Return the keys and values at these positions of a layer."""
        self.require(sequence, layer)
        table = self.tables[sequence][layer]
        for position in positions:
            if not 0 <= position < self.lengths[sequence] or table[position // self.block_size] == RELEASED:
                raise PositionOutOfRange(f"position {position} of {self.lengths[sequence]}: not appended, or released")
        places = np.array([(table[each // self.block_size], each % self.block_size) for each in positions], int).reshape(-1, 2)
        return self.keys[places[:, 0], places[:, 1]], self.values[places[:, 0], places[:, 1]]

    def length(self, sequence):
        self.require(sequence)
        return self.lengths[sequence]

    def block_table(self, sequence, layer):
        self.require(sequence, layer)
        return list(self.tables[sequence][layer])

    def require(self, sequence, layer=0):
        if sequence not in self.tables:
            raise SequenceNotFound(f"sequence {sequence}")
        if layer not in (WINDOWED, FULL):
            raise LayerOutOfRange(f"layer {layer}")
