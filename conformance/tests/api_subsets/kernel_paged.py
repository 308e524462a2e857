"""Every operation of a paged cache, with the limits of GPU kernels: float16 arrays, heads of 64 or 128, blocks of 16."""

from collections import Counter
from typing import Any, ClassVar

import numpy as np

from api_subsets import Host, paged
from api_subsets.errors import ConfigError, PositionOutOfRange
from api_subsets.given import index, tokens
from api_subsets.kernel_attention import WIDTHS, Attention


class Cache(paged.Cache):
    dtype = "float16"
    dtypes = (np.float16,)

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        if self.block_size != 16 or self.row[1] not in WIDTHS:
            raise ConfigError(f"expected blocks of 16 and heads of 64 or 128, got {self.block_size} and {self.row[1]}")

    @property
    def num_free_blocks(self) -> int:
        return len(self.free)

    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        """keys, values: [sequences, num_kv_heads, head_dim], one token per sequence."""
        layer = self.layer(layer)
        tokens((keys, values), (len(sequences), *self.row), self.dtypes)
        self.append_to(sequences, [layer], keys[None], values[None])

    def append_step(self, sequences: Any, keys: Any, values: Any) -> None:
        """keys, values: [num_layers, sequences, num_kv_heads, head_dim]."""
        tokens((keys, values), (self.num_layers, len(sequences), *self.row), self.dtypes)
        self.append_to(sequences, list(range(self.num_layers)), keys, values)

    def append_to(self, sequences: Any, layers: list[int], keys: Any, values: Any) -> None:
        found = {sequence: self.found(sequence) for sequence in sequences}
        missing = {}
        for sequence, times in Counter(sequences).items():
            longest = max(found[sequence].lengths[layer] for layer in layers)
            missing[sequence] = self.missing(found[sequence], longest + times)
        self.take(missing)
        for row, layer in enumerate(layers):
            for column, sequence in enumerate(sequences):
                one = found[sequence]
                at = np.array([one.lengths[layer]])
                self.store(one, layer, at, keys[row, column], values[row, column])
                one.lengths[layer] += 1

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        return self.read(sequence, layer, range(self.length(sequence, layer)))

    def gather_batch(self, sequences: Any, layer: int) -> tuple[Any, Any, Any]:
        layer = self.layer(layer)
        each = [self.gather(sequence, layer) for sequence in sequences]
        nothing = np.zeros((0, *self.row), self.dtype)
        keys, values = (np.concatenate([nothing, *(pair[which] for pair in each)]) for which in (0, 1))
        return keys, values, np.cumsum([0, *self.lengths(sequences, layer)])

    def lengths(self, sequences: Any, layer: int) -> list[int]:
        layer = self.layer(layer)
        return [self.length(sequence, layer) for sequence in sequences]

    def block_table(self, sequence: int, layer: int) -> list[int]:
        return list(self.found(sequence).tables[self.layer(layer)])

    def block_tables(self, sequences: Any, layer: int) -> Any:
        layer = self.layer(layer)
        tables = [self.block_table(sequence, layer) for sequence in sequences]
        most = max(map(len, tables), default=0)
        return np.array([table + [-1] * (most - len(table)) for table in tables], int).reshape(len(tables), most)

    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        table = self.found(sequence).tables[self.layer(layer)]
        start, count = index(start, None, PositionOutOfRange), index(count, None, PositionOutOfRange)
        index(start + count, len(table) * self.block_size + 1, PositionOutOfRange)
        blocks, offsets = self.places(table, np.arange(start, start + count))
        return (blocks * self.block_size + offsets).tolist()

    def attend(self, sequence: int, layer: int, query: Any, scale: float) -> Any:
        keys, values = self.gather(sequence, layer)
        return Attention().attention(query, keys, values, scale=scale, causal=False, length=len(keys))


class KernelPaged(Host):
    name = "paged kernels"
    formats = ("float16",)
    limits: ClassVar = {"dtype": ["float16"], "head_dim": list(WIDTHS), "block_size": [16]}
    paged = Cache
