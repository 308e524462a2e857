"""Expected replies of a hosted block store, computed from the dequantized rows of each block and each host block."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.expected import (
    Arrays,
    Expected,
    Unjudged,
    Wrong,
    not_in_range,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.model import Look, Model
from kvref_conformance.oracle.rows import Reads, read_as
from kvref_conformance.oracle.tokens import unstorable

Block = tuple[Reads, Reads]  # keys and values


class Hosted(Model):
    family = "hosted"
    blamed: ClassVar = {("write", "read"): "LAW-04", "read": "MOVE-12"}

    def __init__(self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: str, capacity: int) -> None:
        super().__init__()
        self.shape, self.format = (block_size, num_kv_heads, head_dim), format
        self.blocks: list[Block | None] = [None] * num_blocks  # None: never written
        self.places: list[Block | None] = [None] * capacity

    def looks(self) -> list[Look]:
        return [("read", {"block": block}) for block, held in enumerate(self.blocks) if held]

    def write(self, block: Any, keys: Any, values: Any) -> Expected:
        wrong = not_in_range(block, len(self.blocks), "SlotOutOfRange")
        if wrong := wrong + wrong_arrays((keys, self.shape), (values, self.shape)):
            return self.refuse(wrong + unstorable(keys, values, self.format))
        if unstorable(keys, values, self.format):
            raise ValueError("write of numbers that the format may reject is not modeled")
        held = _read_as(keys, self.format), _read_as(values, self.format)
        return Expected("LAW-04", self.did("write", lambda ok: self._set(self.blocks, [block], [held])))

    def read(self, block: Any) -> Expected:
        if wrong := not_in_range(block, len(self.blocks), "SlotOutOfRange"):
            return self.refuse(wrong)
        held = self.blocks[block]
        if held is None:
            return Unjudged("MOVE-12")
        return Arrays(self.blame("read"), names=("keys", "values"), parts=held)

    def to_host(self, blocks: Sequence[Any], places: Sequence[Any]) -> Expected:
        return self._copied("to_host", (blocks, places), (self.blocks, self.places))

    def to_device(self, places: Sequence[Any], blocks: Sequence[Any]) -> Expected:
        return self._copied("to_device", (places, blocks), (self.places, self.blocks))

    def _copied(self, name: str, numbers: tuple[Sequence[Any], Sequence[Any]], lists: tuple[list[Any], list[Any]]) -> Expected:
        (sources, targets), (read, written) = numbers, lists
        wrong: Wrong = [] if len(sources) == len(targets) else [("ShapeMismatch", "MOVE-12")]
        for each, of in zip(numbers, lists, strict=True):
            wrong += [found for number in each for found in not_in_range(number, len(of), "SlotOutOfRange")]
        if wrong:
            return self.refuse(wrong)
        if len(set(targets)) < len(targets):
            raise ValueError("a copy that lists a target twice is not modeled")
        return Expected("MOVE-12", self.did(name, lambda ok: self._set(written, targets, [read[number] for number in sources])))

    def _set(self, of: list[Any], numbers: Sequence[int], what: list[Any]) -> None:
        for number, each in zip(numbers, what, strict=True):
            of[number] = each


def _read_as(rows: NDArray, format: str) -> Reads:
    return read_as(np.asarray(rows), format)
