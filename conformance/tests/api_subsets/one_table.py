"""A paged cache with vLLM's layout: a sequence has one table, and each block id stands for one block in every layer."""

from typing import Any, ClassVar

import numpy as np

from api_subsets import Host
from api_subsets.errors import ConfigError, LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound
from api_subsets.given import index, size, tokens


class Cache:
    def __init__(self, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        if dtype != "float32":
            raise ConfigError(f"dtype: {dtype!r}")
        self.block_size, self.num_layers = size("block_size", block_size), size("num_layers", num_layers)
        self.row = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        self.num_blocks = size("num_blocks", num_blocks, least=0)
        self.memory = np.zeros((2, self.num_layers, self.num_blocks, self.block_size, *self.row), np.float32)
        self.free = list(range(self.num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.filled: dict[int, list[int]] = {}
        self.created = 0

    def create(self) -> int:
        self.created += 1
        self.tables[self.created], self.filled[self.created] = [], [0] * self.num_layers
        return self.created

    def drop(self, sequence: int) -> None:
        self.free += self.table(sequence)
        del self.tables[sequence], self.filled[sequence]

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        """keys, values: [n, num_kv_heads, head_dim]."""
        table, layer = self.table(sequence), index(layer, self.num_layers, LayerOutOfRange)
        filled = self.filled[sequence]
        start = index(start, filled[layer] + 1, PositionOutOfRange)
        tokens((keys, values), (None, *self.row))
        end = start + len(keys)
        missing = max(0, -(-end // self.block_size) - len(table))
        if missing > len(self.free):
            raise OutOfBlocks(f"out of blocks: {missing} needed, {len(self.free)} free")
        table += [self.free.pop() for _ in range(missing)]
        blocks, offsets = self.places(table, np.arange(start, end))
        self.memory[0, layer, blocks, offsets], self.memory[1, layer, blocks, offsets] = keys, values
        filled[layer] = max(filled[layer], end)

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        length = self.length(sequence, layer)
        blocks, offsets = self.places(self.table(sequence), np.arange(length))
        return self.memory[0, layer, blocks, offsets], self.memory[1, layer, blocks, offsets]

    def length(self, sequence: int, layer: int) -> int:
        self.table(sequence)
        return self.filled[sequence][index(layer, self.num_layers, LayerOutOfRange)]

    def block_table(self, sequence: int, layer: int) -> list[int]:
        index(layer, self.num_layers, LayerOutOfRange)
        return list(self.table(sequence))

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def table(self, sequence: int) -> list[int]:
        if sequence not in self.tables:
            raise SequenceNotFound(f"{sequence}")
        return self.tables[sequence]

    def places(self, table: list[int], positions: Any) -> tuple[Any, Any]:
        """The block and the offset of each position."""
        return np.array(table, dtype=int)[positions // self.block_size], positions % self.block_size


class OneTable(Host):
    name = "one-table surface"
    formats = ("float32",)
    limits: ClassVar = {"one_block_table": True}
    paged = Cache
