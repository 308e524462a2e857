"""Expected replies of a hosted block store, computed from the dequantized rows of each block and each host block."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import Errors, Expectation, ExpectedArrays, UnjudgedReply, array_errors, range_errors
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel
from kvref_conformance.oracle.token_storage import storage_errors

Block = tuple[ExpectedReads, ExpectedReads]  # keys and values


class Hosted(ReferenceModel):
    family = "hosted"
    clause_by_observation: ClassVar = {("write", "read"): "LAW-04", "read": "MOVE-12"}

    def __init__(self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, format: str, capacity: int) -> None:
        super().__init__()
        self.shape, self.format = (block_size, num_kv_heads, head_dim), format
        self.blocks: list[Block | None] = [None] * num_blocks  # None: never written
        self.places: list[Block | None] = [None] * capacity

    def observations(self) -> list[ReadCall]:
        return [("read", {"block": block}) for block, rows in enumerate(self.blocks) if rows]

    def write(self, block: Any, keys: Any, values: Any) -> Expectation:
        wrong = range_errors(block, len(self.blocks), "SlotOutOfRange")
        if wrong := wrong + array_errors((keys, self.shape), (values, self.shape)):
            return self.expect_error(wrong + storage_errors(keys, values, self.format))
        if storage_errors(keys, values, self.format):
            raise ValueError("write of numbers that the format may reject is not modeled")
        rows = _read_as(keys, self.format), _read_as(values, self.format)
        return Expectation("LAW-04", self.on_success("write", lambda ok: self._set(self.blocks, [block], [rows])))

    def read(self, block: Any) -> Expectation:
        if wrong := range_errors(block, len(self.blocks), "SlotOutOfRange"):
            return self.expect_error(wrong)
        rows = self.blocks[block]
        if rows is None:
            return UnjudgedReply("MOVE-12")
        return ExpectedArrays(self.clause_of("read"), names=("keys", "values"), parts=rows)

    def to_host(self, blocks: Sequence[Any], places: Sequence[Any]) -> Expectation:
        return self._copy("to_host", (blocks, places), (self.blocks, self.places))

    def to_device(self, places: Sequence[Any], blocks: Sequence[Any]) -> Expectation:
        return self._copy("to_device", (places, blocks), (self.places, self.blocks))

    def _copy(self, name: str, numbers: tuple[Sequence[Any], Sequence[Any]], lists: tuple[list[Any], list[Any]]) -> Expectation:
        (sources, targets), (read, written) = numbers, lists
        wrong: Errors = [] if len(sources) == len(targets) else [("ShapeMismatch", "MOVE-12")]
        for each, of in zip(numbers, lists, strict=True):
            wrong += [found for number in each for found in range_errors(number, len(of), "SlotOutOfRange")]
        if wrong:
            return self.expect_error(wrong)
        if len(set(targets)) < len(targets):
            raise ValueError("a copy that lists a target twice is not modeled")
        return Expectation(
            "MOVE-12", self.on_success(name, lambda ok: self._set(written, targets, [read[number] for number in sources]))
        )

    def _set(self, blocks: list[Any], numbers: Sequence[int], rows: list[Any]) -> None:
        for number, each in zip(numbers, rows, strict=True):
            blocks[number] = each


def _read_as(rows: NDArray, format: str) -> ExpectedReads:
    return read_as(np.asarray(rows), format)
