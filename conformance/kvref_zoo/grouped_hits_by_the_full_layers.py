"""The layers that see all tokens alone determine the hit.

If blocks inside a window were evicted, window layers attend to the tokens that are left, and the same prompt gets another
answer.
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
        found, groups, keys, rows = super()._find, self.config.num_groups, list[bytes](), list[list[int]]()
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(key + group.to_bytes(4, "little")) for group in range(groups)]
            if copies[-1] is None:
                break
            keys.append(key)
            rows.append([NO_BLOCK if copy is None else int(copy.blocks[0]) for copy in copies])
        blocks = np.array(rows, np.int32).reshape(len(keys), groups)
        blocks[np.arange(len(keys))[:, None] < self._unseen(len(keys) * self.config.block_size)] = NO_BLOCK
        return (keys, blocks) if keys else found(tokens, salt)


class Implementation(Right):
    clause = "GROUP-05"
    also = ("GROUP-06",)
    bug = "ovg-project/kvcached#446"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
