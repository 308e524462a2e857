"""Wrappers for caches and pools whose free blocks differ from the specification's in a way that they declare (see limits.py)."""

from collections.abc import Callable, Sequence
from typing import Any

COUNTS = ("num_free_blocks", "num_free", "num_used", "utilization")
NO_BLOCK = -1  # in a block table: a released entry


class SettlingAdapter:
    """For freed blocks that wait until `settle` (limits: settle). Counts are read after a settle. A call that raises OutOfBlocks
    is repeated once after a settle, as an engine does that waits for the steps in flight.
    """

    def __init__(self, made: Callable[..., Any], **sizes: Any) -> None:
        self._own = made(**sizes)

    def __getattr__(self, name: str) -> Any:
        if name in COUNTS:
            self._own.settle()
        own = getattr(self._own, name)
        if not callable(own):
            return own

        def call(*args: Any, **named: Any) -> Any:
            try:
                return own(*args, **named)
            except Exception as error:
                if "OutOfBlocks" not in {each.__name__ for each in type(error).__mro__}:
                    raise
            self._own.settle()
            return own(*args, **named)

        return call


class NullBlockAdapter:
    """For caches that reserve block 0 (limits: null_block), for released entries and padding: their block b is block b - 1."""

    def __init__(self, made: Callable[..., Any], **sizes: Any) -> None:
        self._own, self._size = made(**sizes), sizes["block_size"]

    def __getattr__(self, name: str) -> Any:
        if name == "block_tables":
            raise AttributeError(name)  # returns an array of the implementation's type; it is derived from block_table instead
        own = getattr(self._own, name)
        return {"block_table": self._table, "slot_mapping": self._slots}.get(name, own)

    def _table(self, sequence: int, layer: int) -> list[int]:
        return [max(int(block) - 1, NO_BLOCK) for block in self._own.block_table(sequence, layer)]

    def _slots(self, sequence: int, layer: int, start: int, count: int) -> Sequence[int]:
        return [int(slot) - int(self._size) for slot in self._own.slot_mapping(sequence, layer, start, count)]
