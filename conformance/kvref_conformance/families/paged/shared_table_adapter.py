"""A wrapper for caches whose layers share one block table (limits: one_block_table): it counts as the specification does.

Each block of the implementation is one block per layer here: its block b is block b * num_layers + layer. The implementation is
created with num_blocks // num_layers blocks. The remaining blocks could never be allocated by a sequence.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

NO_BLOCK = -1  # in a block table: a released entry, in every layer


class SharedTableAdapter:
    """The implementation's cache, except for ids and counts of blocks."""

    def __init__(self, made: Callable[..., Any], *, num_blocks: int, num_layers: int, **sizes: Any) -> None:
        sizes |= {"num_layers": num_layers, "num_blocks": num_blocks}
        if _size(num_blocks) and _size(num_layers) and num_layers:  # invalid sizes are passed on, to be rejected
            sizes["num_blocks"] = num_blocks // num_layers
        self._own = made(**sizes)
        self._blocks, self._layers, self._size = int(num_blocks), int(num_layers), int(sizes["block_size"])

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._own, name)
        if name == "num_free_blocks":
            return self._blocks - self._layers * (self._blocks // self._layers - own)
        if name == "utilization":
            return own * (self._blocks // self._layers * self._layers) / self._blocks if self._blocks else own
        if name == "block_table":
            return self._table
        if name == "slot_mapping":
            return self._slots
        if name == "block_tables":
            raise AttributeError(name)  # returns an array of the implementation's type; it is derived from block_table instead
        return own

    def _table(self, sequence: int, layer: int) -> list[int]:
        return [self._of_layer(block, layer) for block in self._own.block_table(sequence, layer)]

    def _slots(self, sequence: int, layer: int, start: int, count: int) -> Sequence[int]:
        slots = (divmod(int(slot), self._size) for slot in self._own.slot_mapping(sequence, layer, start, count))
        return [self._of_layer(block, layer) * self._size + offset for block, offset in slots]

    def _of_layer(self, block: Any, layer: int) -> int:
        return int(block) * self._layers + int(layer) if block != NO_BLOCK else NO_BLOCK


def _size(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
