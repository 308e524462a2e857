"""Tokens are written with one block size, and `slot_mapping` computes slots with another."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.PagedCache):
    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        size = self.config.block_size
        slots = super().slot_mapping(sequence, layer, start, count)
        return [slot // size * 16 + slot % size for slot in slots]


class Implementation(Right):
    clause = "PAGED-06"
    bug = "vllm-project/vllm#47056"

    def paged(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
