"""The blocks that `begin` finds for window groups get their reference at the end of the first step.

The step itself can evict them.
"""

from collections.abc import Sequence
from typing import Any

import kvref
from kvref.blocks import NO_BLOCK
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    def __init__(self, config: kvref.GroupedConfig) -> None:
        super().__init__(config)
        self.late: dict[int, list[int]] = {}

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        windows = [self.block_table(sequence, layer) for layer in range(self.config.num_groups - 1)]
        self.late[sequence] = [block for table in windows for block in table if block != NO_BLOCK]
        self.pool.free_many(self.late[sequence])
        return sequence

    def step(self, sequence: int, keys: Any, values: Any) -> None:
        super().step(sequence, keys, values)
        self.hold(sequence)

    def drop(self, sequence: int) -> None:
        self.hold(sequence)
        super().drop(sequence)

    def hold(self, sequence: int) -> None:
        self.pool.share_many(self.late.pop(sequence, []))


class Implementation(Right):
    clause = "GROUP-06"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
