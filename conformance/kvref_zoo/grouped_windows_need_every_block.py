"""A window group finds a prompt only if every block of it is cached, also the blocks before the window.

These were released and evicted, so that there is no hit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.blocks import NO_BLOCK
from kvref.prefix import Tokens, block_keys
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    def _find(self, tokens: Tokens, salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        keys, rows = list[bytes](), list[list[int]]()
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(key + group.to_bytes(4, "little")) for group in range(self.config.num_groups)]
            blocks = [int(copy.blocks[0]) for copy in copies if copy is not None]
            if len(blocks) < len(copies):
                break
            keys.append(key)
            rows.append(blocks)
        entries = np.array(rows, np.int32).reshape(len(keys), self.config.num_groups)
        entries[np.arange(len(keys))[:, None] < self._unseen(len(keys) * self.config.block_size)] = NO_BLOCK
        return keys, entries


class Implementation(Right):
    clause = "GROUP-05"
    also = ("GROUP-06",)
    bug = "vllm-project/vllm#42948"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
