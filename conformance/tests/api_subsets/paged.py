"""A paged cache of seven operations: no gather, no block table, no count of free blocks."""

from typing import Any

import numpy as np

from api_subsets import Host
from api_subsets.errors import ConfigError, LayerOutOfRange, OutOfBlocks, PositionOutOfRange, SequenceNotFound
from api_subsets.given import index, size, tokens


class Sequence:
    """tables: the blocks of each layer, the same number in all. lengths: the tokens of each layer."""

    def __init__(self, num_layers: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_layers)]
        self.lengths = [0] * num_layers


class Cache:
    dtype = "float32"
    dtypes: tuple[type, ...] = (np.float16, np.float32)  # of argument arrays

    def __init__(self, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> None:
        if dtype != self.dtype:
            raise ConfigError(f"dtype: {dtype!r}")
        self.num_blocks, self.block_size = size("num_blocks", num_blocks, least=0), size("block_size", block_size)
        self.num_layers = size("num_layers", num_layers)
        self.row = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        self.keys = np.zeros((self.num_blocks, self.block_size, *self.row), dtype)
        self.values = np.zeros_like(self.keys)
        self.free = list(range(self.num_blocks))
        self.sequences: dict[int, Sequence] = {}
        self.created = 0

    def create(self) -> int:
        self.sequences[self.created] = Sequence(self.num_layers)
        self.created += 1
        return self.created - 1

    def drop(self, sequence: int) -> None:
        for table in self.found(sequence).tables:
            self.free += table
        del self.sequences[sequence]

    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        self.take({sequence: self.missing(self.found(sequence), index(num_tokens, None, PositionOutOfRange))})

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        """keys, values: [n, num_kv_heads, head_dim]."""
        found, layer = self.found(sequence), self.layer(layer)
        start = index(start, found.lengths[layer] + 1, PositionOutOfRange)
        tokens((keys, values), (None, *self.row), self.dtypes)
        end = start + len(keys)
        self.ensure_capacity(sequence, end)
        self.store(found, layer, np.arange(start, end), keys, values)
        found.lengths[layer] = max(found.lengths[layer], end)

    def read(self, sequence: int, layer: int, positions: Any) -> tuple[Any, Any]:
        found, layer = self.found(sequence), self.layer(layer)
        here = [index(position, found.lengths[layer], PositionOutOfRange) for position in positions]
        at = self.places(found.tables[layer], np.array(here, dtype=int))
        return self.keys[at], self.values[at]

    def length(self, sequence: int, layer: int) -> int:
        return self.found(sequence).lengths[self.layer(layer)]

    @property
    def utilization(self) -> float:
        return (self.num_blocks - len(self.free)) / self.num_blocks if self.num_blocks else 0.0

    def found(self, sequence: int) -> Sequence:
        if sequence not in self.sequences:
            raise SequenceNotFound(f"{sequence}")
        return self.sequences[sequence]

    def layer(self, layer: int) -> int:
        return index(layer, self.num_layers, LayerOutOfRange)

    def missing(self, found: Sequence, num_tokens: int) -> int:
        """The number of blocks that each layer lacks for `tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(found.tables[0]))

    def take(self, missing: dict[int, int]) -> None:
        """Allocate `count` blocks per layer for each sequence, or none."""
        needed = self.num_layers * sum(missing.values())
        if needed > len(self.free):
            raise OutOfBlocks(f"out of blocks: {needed} needed, {len(self.free)} free")
        for sequence, count in missing.items():
            for table in self.sequences[sequence].tables:
                table += [self.free.pop(0) for _ in range(count)]

    def places(self, table: list[int], positions: Any) -> tuple[Any, Any]:
        """The block and the offset of each position."""
        return np.array(table, dtype=int)[positions // self.block_size], positions % self.block_size

    def store(self, found: Sequence, layer: int, positions: Any, keys: Any, values: Any) -> None:
        at = self.places(found.tables[layer], positions)
        self.keys[at], self.values[at] = keys, values


class Paged(Host):
    name = "paged surface"
    formats = ("float32",)
    paged = Cache
