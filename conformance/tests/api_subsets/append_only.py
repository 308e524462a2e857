"""A paged cache that can only append one token per sequence of a batch."""

from collections import Counter
from typing import Any

import numpy as np

from api_subsets import Host
from api_subsets.errors import ConfigError, LayerOutOfRange, OutOfBlocks, SequenceNotFound
from api_subsets.given import index, size, tokens


class Cache:
    """blocks: by sequence, one list per layer, of arrays [2, block_size, num_kv_heads, head_dim] that are popped from a stack."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        if dtype != "float32":
            raise ConfigError(f"dtype: {dtype!r}")
        self.block_size, self.num_layers = size("block_size", block_size), size("num_layers", num_layers)
        self.row = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        memory = np.zeros((size("num_blocks", num_blocks, least=0), 2, self.block_size, *self.row), np.float32)
        self.free = list(memory)
        self.blocks: dict[int, list[list[Any]]] = {}
        self.filled: dict[int, list[int]] = {}
        self.created = 0

    def create(self) -> int:
        self.created += 1
        self.blocks[self.created] = [[] for _ in range(self.num_layers)]
        self.filled[self.created] = [0] * self.num_layers
        return self.created

    def drop(self, sequence: int) -> None:
        self.known(sequence)
        for blocks in self.blocks.pop(sequence):
            self.free += blocks
        del self.filled[sequence]

    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        """keys, values: [sequences, num_kv_heads, head_dim], one token per sequence."""
        layer = index(layer, self.num_layers, LayerOutOfRange)
        for sequence in sequences:
            self.known(sequence)
        tokens((keys, values), (len(sequences), *self.row))
        self.room(sequences, layer)
        for sequence, key, value in zip(sequences, keys, values, strict=True):
            block, offset = divmod(self.filled[sequence][layer], self.block_size)
            self.blocks[sequence][layer][block][:, offset] = key, value
            self.filled[sequence][layer] += 1

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        length = self.length(sequence, layer)
        blocks = self.blocks[sequence][layer]
        both = np.concatenate([np.zeros((2, 0, *self.row), np.float32), *blocks], axis=1)[:, :length]
        return both[0], both[1]

    def length(self, sequence: int, layer: int) -> int:
        self.known(sequence)
        return self.filled[sequence][index(layer, self.num_layers, LayerOutOfRange)]

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def known(self, sequence: int) -> None:
        if sequence not in self.blocks:
            raise SequenceNotFound(f"{sequence}")

    def room(self, sequences: Any, layer: int) -> None:
        """Allocate blocks for one more token of each sequence in the layer, for all layers at once, or none."""
        missing = {}
        for sequence, times in Counter(sequences).items():
            needed = -(-(self.filled[sequence][layer] + times) // self.block_size)
            missing[sequence] = max(0, needed - len(self.blocks[sequence][layer]))
        if self.num_layers * sum(missing.values()) > len(self.free):
            raise OutOfBlocks(f"out of blocks: {self.num_layers * sum(missing.values())} needed, {len(self.free)} free")
        for sequence, count in missing.items():
            for blocks in self.blocks[sequence]:
                blocks += [self.free.pop() for _ in range(count)]


class AppendOnly(Host):
    name = "append-only surface"
    formats = ("float32",)
    paged = Cache
