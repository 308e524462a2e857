"""The reference model of the quantized cache: a list of tokens per layer, each with the values that it reads as."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    array_errors,
    count_tokens,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, STATIC_FORMATS, inner_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.saved_state import CLAUSE_BY_OBSERVATION, WholeCacheModel
from kvref_conformance.oracle.token_storage import row_bytes, storage_errors


class Quantized(WholeCacheModel):
    family = "quantized"
    room_errors = ("CapacityExceeded",)
    content_attributes = ("tokens", "unknown")
    clause_by_observation: ClassVar = CLAUSE_BY_OBSERVATION | {
        ("clear", "length"): "QUANT-08", ("clear", "read"): "QUANT-08", ("truncate", "length"): "EDIT-01",
        ("truncate", "read"): "EDIT-01", "length": "QUANT-01", "bytes": "QUANT-07",
    }  # fmt: skip

    def __init__(
        self, *, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, format: str,
        key_scale: float | None = None, value_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_layers, self.room, self.row, self.format = num_layers, capacity, (num_kv_heads, head_dim), format
        self.scales = key_scale, value_scale  # None if not passed
        self.tokens: list[list[tuple[ExpectedReads, ExpectedReads]]] = [[] for _ in range(num_layers)]
        self.written: set[tuple[int, int]] = set()  # (layer, position) of the tokens of the last append
        self.unknown = False  # a NaN or an infinity was accepted: no clause says how such a row reads

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [(name, {}) for name in ("memory_bytes", "fp32_bytes", "compression_ratio")]
        for layer, tokens in enumerate(self.tokens):
            found += [("length", {"layer": layer}), ("read_tokens", {"layer": layer, "positions": list(range(len(tokens)))})]
        return found

    def memory_bytes(self) -> Expectation:
        return ExactValue(
            self._counted, value=2 * self.num_layers * self.room * self.row[0] * row_bytes(self.row[1], self.format)
        )

    def fp32_bytes(self) -> Expectation:
        return ExactValue("QUANT-07", value=8 * self.num_layers * self.room * self.row[0] * self.row[1])

    def compression_ratio(self) -> Expectation:
        return ExactValue(self._counted, value=4 * self.row[1] / row_bytes(self.row[1], self.format))

    @property
    def _counted(self) -> str:
        if self.format in STATIC_FORMATS:
            return "FMT-STATIC-08"
        return "QUANT-10" if inner_of(self.format) in FORMATS_IN_GROUPS else "QUANT-07"

    def length(self, layer: Any) -> Expectation:
        if wrong := range_errors(layer, self.num_layers, "LayerOutOfRange"):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("length"), value=len(self.tokens[layer]))

    def append(self, layer: Any, keys: Any, values: Any) -> Expectation:
        arguments = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong, count = range_errors(layer, self.num_layers, "LayerOutOfRange"), count_tokens(*arguments)
        lacks_room = self._lacks_room(min(map(len, self.tokens if wrong else [self.tokens[layer]])) + count)  # in any layer
        if wrong := wrong + array_errors(*arguments) + lacks_room:
            return self.expect_error(wrong + storage_errors(keys, values, self.format))
        return self._append([layer] * count, keys, values)

    def append_step(self, keys: Any, values: Any) -> Expectation:
        shape = (self.num_layers, *self.row)
        if wrong := array_errors((keys, shape), (values, shape)) + self._lacks_room(1 + max(map(len, self.tokens))):
            return self.expect_error(wrong + storage_errors(keys, values, self.format))
        return self._append(list(range(self.num_layers)), keys, values)

    def _stored(self, rows: Any, scale: float | None) -> ExpectedReads:
        return read_as(np.where(np.isfinite(to_float32(rows)), to_float32(rows), 0), self.format, scale)

    def _lacks_room(self, tokens: int) -> Errors:
        return [("CapacityExceeded", "QUANT-02")] if tokens > self.room else []

    def _append(self, layers: list[int], keys: NDArray, values: NDArray) -> Expectation:
        """Appends token i to layers[i], which has room for it."""

        def change(ok: Any) -> None:
            self.written = set()
            for key, value, layer in zip(keys, values, layers, strict=True):
                self.written.add((layer, len(self.tokens[layer])))
                self.tokens[layer].append((self._stored(key, self.scales[0]), self._stored(value, self.scales[1])))

        def change_unknown(ok: Any) -> None:
            self.unknown = True
            change(ok)

        if storage_errors(keys, values, self.format):
            return AcceptedOrError(
                "QUANT-01", self.on_success("append", change_unknown), on_error=lambda: self.note_unchanged("refused")
            )
        return Expectation("QUANT-01", self.on_success("append", change))

    def read_tokens(self, layer: Any, positions: Sequence[int]) -> Expectation:
        wrong = self._out_of_range(layer, positions)
        return self.expect_error(wrong) if wrong else self._read(layer, list(positions), (...,), self.row)

    def read_token(self, layer: Any, position: Any) -> Expectation:
        wrong = self._out_of_range(layer, [position])
        return self.expect_error(wrong) if wrong else self._read(layer, [position], (0,), self.row)

    def read_head(self, layer: Any, position: Any, head: Any) -> Expectation:
        wrong = self._out_of_range(layer, [position]) + range_errors(head, self.row[0], "HeadOutOfRange")
        return self.expect_error(wrong) if wrong else self._read(layer, [position], (0, head), self.row)

    def _out_of_range(self, layer: Any, positions: Sequence[Any]) -> Errors:
        wrong = range_errors(layer, self.num_layers, "LayerOutOfRange")
        length = max(map(len, self.tokens if wrong else [self.tokens[layer]]))  # of the longest layer if the layer does not exist
        return wrong + [each for p in positions for each in range_errors(p, length, "PositionOutOfRange", "LAW-05")]

    def _read(self, layer: int, positions: list[int], index: tuple[Any, ...], row: tuple[int, int]) -> Expectation:
        if self.unknown:
            return UnjudgedReply("LAW-14")

        def clause_at(where: tuple[int, ...], got: NDArray) -> str:
            position = positions[where[0]] if index == (...,) else positions[0]
            written = (layer, position) in self.written
            if self.last_change in ("refused", "truncate") or (self.last_change, "read") in CLAUSE_BY_OBSERVATION:
                return self.clause_of("read")
            return "LAW-04" if written else "QUANT-05"

        parts = [_stacked([self.tokens[layer][p][which] for p in positions], row, index) for which in (0, 1)]
        return ExpectedArrays("QUANT-04", names=("keys", "values"), parts=(parts[0], parts[1]), clause_at=clause_at)

    def truncate(self, length: Any) -> Expectation:
        shortest = min(map(len, self.tokens))
        if wrong := range_errors(length, shortest + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.tokens = [tokens[:length] for tokens in self.tokens]

        return Expectation("EDIT-02" if length == shortest else "EDIT-01", self.on_success("truncate", change))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.tokens = [[] for _ in self.tokens]
            self.unknown = False

        return Expectation("QUANT-08", self.on_success("clear", change))

    def shape(self) -> Any:
        return self.num_layers, self.row, self.format

    def is_empty(self) -> bool:
        return not any(self.tokens)

    def missing_room(self, content: dict[str, Any]) -> Errors:
        return self._lacks_room(max(map(len, content["tokens"])))

    def attend(self, layer: Any, query: Any, scale: float) -> Expectation:
        if wrong := range_errors(layer, self.num_layers, "LayerOutOfRange"):
            return self.expect_error(wrong + query_errors(query, *self.row))
        if self.unknown:
            return UnjudgedReply("ATTN-10")
        keys, values = (_stacked([token[which] for token in self.tokens[layer]], self.row, (...,)) for which in (0, 1))
        return expect_attend("ATTN-10", query, keys, values, scale)


def _stacked(tokens: list[ExpectedReads], row: tuple[int, ...], index: tuple[Any, ...]) -> ExpectedReads:
    values = np.array([token.values for token in tokens], np.float32).reshape(-1, *row)
    slack = np.array([token.slack for token in tokens], np.float64).reshape(-1, *row)
    return ExpectedReads(values[index], slack[index])
