"""The paged cache as a dict of sequences, each a list of tokens a layer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.exchange import show
from kvref_conformance.oracle.attention import attended
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.expected import (
    Arrays,
    Choice,
    Expected,
    Refused,
    TakenOrRefused,
    Value,
    Wrong,
    exactly,
    finite,
    float32,
    not_in_range,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.model import Look, Model


@dataclass
class Layer:
    tokens: list[tuple[NDArray, NDArray]]
    table: list[int] | None = None  # as last seen: only the implementation knows which blocks it took


class Paged(Model):
    family = "paged"
    blamed: ClassVar = {
        ("new", "num_free_blocks"): "LAW-03", ("create", "num_free_blocks"): "PAGED-02",
        ("drop", "num_free_blocks"): "PAGED-07", ("ensured", "num_free_blocks"): "PAGED-04",
        ("short", "num_free_blocks"): "PAGED-05", ("short", "block_table"): "PAGED-05",
        **{("append", seen): "PAGED-16" for seen in ("num_free_blocks", "length", "block_table")},
        "num_free_blocks": "PAGED-03", "utilization": "PAGED-15", "length": "PAGED-09", "block_table": "PAGED-03",
    }  # fmt: skip

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        super().__init__()
        self.total, self.size, self.layers, self.dtype = num_blocks, block_size, num_layers, dtype
        self.row = num_kv_heads, head_dim
        self.blocks: dict[int, int] = {}  # of each sequence, in every layer
        self.sequences: dict[int, list[Layer]] = {}
        self.ids: set[int] = set()
        self.written: tuple[int, int, range] = (-1, -1, range(0))  # sequence, layer and positions of the last write
        self.overwrote = False

    @property
    def free(self) -> int:
        return self.total - self.layers * sum(self.blocks.values())

    def looks(self) -> list[Look]:
        found: list[Look] = [("num_free_blocks", {}), ("utilization", {})]
        for sequence in self.sequences:
            for layer in range(self.layers):
                found += [(name, {"sequence": sequence, "layer": layer}) for name in ("length", "block_table", "gather")]
        return found

    def num_free_blocks(self) -> Expected:
        return Value(self.blame("num_free_blocks"), value=self.free)

    def utilization(self) -> Expected:
        return Value(self.blame("utilization"), value=(self.total - self.free) / self.total if self.total else 0.0)

    def create(self) -> Expected:
        def change(sequence: int) -> None:
            self.ids.add(sequence)
            self.blocks[sequence] = 0
            self.sequences[sequence] = [Layer([]) for _ in range(self.layers)]

        used = set(self.ids)
        says = f"an id never used before, not among {sorted(used)}"
        return Choice("PAGED-01", self.did("create", change), says=says, accepts=lambda id: id not in used)

    def drop(self, sequence: Any) -> Expected:
        if wrong := self._unknown(sequence):
            return self.refuse(wrong)

        def change(ok: Any) -> None:
            del self.blocks[sequence], self.sequences[sequence]

        return Expected("PAGED-07", self.did("drop", change))

    def ensure_capacity(self, sequence: Any, num_tokens: Any) -> Expected:
        if wrong := self._unknown(sequence) + not_in_range(num_tokens, None, "PositionOutOfRange"):
            return self.refuse(wrong)
        return self._needing(sequence, num_tokens, "PAGED-04")

    def _needing(self, sequence: int, num_tokens: int, clause: str) -> Expected:
        needed = -(-num_tokens // self.size)
        if self.layers * (needed - self.blocks[sequence]) > self.free:
            return Refused("PAGED-05", kinds=("OutOfBlocks",), refused=lambda: self.did("short")(None))
        more = needed > self.blocks[sequence]

        def change(ok: Any) -> None:
            self.blocks[sequence] = max(self.blocks[sequence], needed)

        return Expected(clause, self.did("taken" if more else "ensured", change))

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expected:
        shape = (None, *self.row)
        wrong = self._unknown(sequence, layer) + wrong_arrays((keys, shape), (values, shape))
        tokens = [] if wrong else self.sequences[sequence][layer].tokens
        wrong += [] if wrong else not_in_range(start, len(tokens) + 1, "PositionOutOfRange", "PAGED-10")
        if wrong:
            return self.refuse(wrong)
        room = self._needing(sequence, start + len(keys), "PAGED-03")
        if isinstance(room, Refused):
            return room

        def change(ok: Any) -> None:
            rows = zip(*(round_to(float32(part), self.dtype) for part in (keys, values)), strict=True)
            self.overwrote = start < len(tokens)
            tokens[start : start + len(keys)] = list(rows)
            self.written = sequence, layer, range(start, start + len(keys))
            room.then(ok)

        return Expected("PAGED-03", change) if finite(keys, values) else TakenOrRefused("PAGED-03", change)

    def append(self, sequences: Sequence[Any], layer: Any, keys: Any, values: Any) -> Expected:
        shape = (len(sequences), *self.row)
        wrong = [each for sequence in sequences for each in self._unknown(sequence, layer)]
        wrong += wrong_arrays((keys, shape), (values, shape)) or not_in_range(layer, self.layers, "LayerOutOfRange")
        return self.refuse(wrong) if wrong else self._appending(sequences, range(layer, layer + 1), keys[None], values[None])

    def append_step(self, sequences: Sequence[Any], keys: Any, values: Any) -> Expected:
        shape = (self.layers, len(sequences), *self.row)
        wrong = [each for sequence in sequences for each in self._unknown(sequence)]
        wrong += wrong_arrays((keys, shape), (values, shape))
        return self.refuse(wrong) if wrong else self._appending(sequences, range(self.layers), keys, values)

    def _appending(self, sequences: Sequence[int], layers: range, keys: NDArray, values: NDArray) -> Expected:
        """keys, values: [layers, sequences, kv heads, head_dim], of known sequences."""
        needed = dict(self.blocks)
        for sequence, times in Counter(sequences).items():
            tokens = max(len(self.sequences[sequence][layer].tokens) for layer in layers) + times
            needed[sequence] = max(needed[sequence], -(-tokens // self.size))
        if self.layers * (sum(needed.values()) - sum(self.blocks.values())) > self.free:
            return Refused("PAGED-16", kinds=("OutOfBlocks",), refused=lambda: self.did("short")(None))

        def change(ok: Any) -> None:
            self.blocks, self.overwrote = needed, False
            rounded = [round_to(float32(part), self.dtype) for part in (keys, values)]
            for row, layer in enumerate(layers):
                for column, sequence in enumerate(sequences):
                    self.sequences[sequence][layer].tokens.append((rounded[0][row, column], rounded[1][row, column]))

        then = self.did("append", change)
        return Expected("PAGED-16", then) if finite(keys, values) else TakenOrRefused("PAGED-16", then)

    def gather(self, sequence: Any, layer: Any) -> Expected:
        wrong = self._unknown(sequence, layer)
        return self.refuse(wrong) if wrong else self._tokens(sequence, layer, None)

    def read(self, sequence: Any, layer: Any, positions: Sequence[int]) -> Expected:
        wrong = self._unknown(sequence, layer)
        length = 0 if wrong else len(self.sequences[sequence][layer].tokens)
        wrong += [each for position in positions for each in not_in_range(position, length, "PositionOutOfRange", "LAW-05")]
        return self.refuse(wrong) if wrong else self._tokens(sequence, layer, list(positions))

    def _tokens(self, sequence: int, layer: int, positions: list[int] | None) -> Expected:
        tokens = self.sequences[sequence][layer].tokens
        positions = list(range(len(tokens))) if positions is None else positions
        parts = [np.array([tokens[p][which] for p in positions], np.float32).reshape(-1, *self.row) for which in (0, 1)]

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            if self.last == "refused":
                return "LAW-01"
            if self.last == "append":
                return "PAGED-16"
            if (sequence, layer) != self.written[:2]:
                return "LAW-02"
            return "PAGED-11" if self.overwrote and positions[index[0]] not in self.written[2] else "LAW-04"

        both = exactly(parts[0]), exactly(parts[1])
        return Arrays("PAGED-12", names=("keys", "values"), parts=both, clause_at=clause_at)

    def length(self, sequence: Any, layer: Any) -> Expected:
        if wrong := self._unknown(sequence, layer):
            return self.refuse(wrong)
        return Value(self.blame("length"), value=len(self.sequences[sequence][layer].tokens))

    def block_table(self, sequence: Any, layer: Any) -> Expected:
        if wrong := self._unknown(sequence, layer):
            return self.refuse(wrong)
        here, count = self.sequences[sequence][layer], self.blocks[sequence]
        others = {
            block for layers in self.sequences.values() for each in layers if each is not here for block in each.table or []
        }
        before = (here.table or [])[:count]

        def accepts(table: list[int]) -> bool:
            apart = len(set(table)) == len(table) and not set(table) & others
            return apart and all(0 <= block < self.total for block in table) and table[: len(before)] == before

        says = f"{count} blocks of [0, {self.total}), beginning with {before}, none of them in another table: {sorted(others)}"

        def note(table: list[int]) -> None:
            here.table = list(table)

        return Choice("PAGED-13", note, says=says, accepts=accepts, length=(count, self.blame("block_table")))

    def slot_mapping(self, sequence: Any, layer: Any, start: Any, count: Any) -> Expected:
        wrong = self._unknown(sequence, layer)
        room = 0 if wrong else self.blocks[sequence] * self.size
        wrong += not_in_range(count, None, "PositionOutOfRange") + not_in_range(start, None, "PositionOutOfRange")
        if not wrong:
            wrong = not_in_range(start + count, room + 1, "PositionOutOfRange")
        if wrong:
            return self.refuse(wrong)
        table, positions = self.sequences[sequence][layer].table, range(start, start + count)
        if table is not None and len(table) * self.size >= start + count:
            want = [table[p // self.size] * self.size + p % self.size for p in positions]
            return Choice("PAGED-06", says=show(want), accepts=lambda slots: slots == want)  # it chose the blocks

        def accepts(slots: list[int]) -> bool:
            offsets = [slot % self.size for slot in slots] == [p % self.size for p in positions]
            return offsets and all(0 <= slot < self.total * self.size for slot in slots) and len(set(slots)) == count

        return Choice("PAGED-06", says=f"{count} slots, position p at offset p % {self.size} of a block", accepts=accepts)

    def gather_batch(self, sequences: Sequence[Any], layer: Any) -> Expected:
        if wrong := self._batch(sequences, layer):
            return self.refuse(wrong)
        each = [self.sequences[sequence][layer].tokens for sequence in sequences]
        tokens = [token for part in each for token in part]
        parts = [np.array([token[which] for token in tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        offsets = np.cumsum([0, *map(len, each)])
        both = exactly(parts[0]), exactly(parts[1]), exactly(offsets)
        return Arrays("PAGED-17", names=("keys", "values", "offsets"), parts=both)

    def lengths(self, sequences: Sequence[Any], layer: Any) -> Expected:
        if wrong := self._batch(sequences, layer):
            return self.refuse(wrong)
        return Value("PAGED-17", value=[len(self.sequences[sequence][layer].tokens) for sequence in sequences])

    def block_tables(self, sequences: Sequence[Any], layer: Any) -> Expected:
        if wrong := self._batch(sequences, layer):
            return self.refuse(wrong)
        tables = [(self.sequences[sequence][layer].table or [])[: self.blocks[sequence]] for sequence in sequences]
        counts = [self.blocks[sequence] for sequence in sequences]
        most = max(counts, default=0)

        def accepts(got: NDArray) -> bool:
            if got.shape != (len(sequences), most):
                return False
            rows = zip(got.tolist(), tables, counts, strict=True)
            return all(row[: len(table)] == table and row[count:] == [-1] * (most - count) for row, table, count in rows)

        says = f"[{len(sequences)}, {most}] with the rows {tables}, each filled up with -1"
        return Choice("PAGED-17", says=says, accepts=accepts)

    def _batch(self, sequences: Sequence[Any], layer: Any) -> Wrong:
        wrong = [each for sequence in sequences for each in self._unknown(sequence, layer)]
        return wrong or not_in_range(layer, self.layers, "LayerOutOfRange")

    def attend(self, sequence: Any, layer: Any, query: Any, scale: float) -> Expected:
        if wrong := self._unknown(sequence, layer):
            return self.refuse(wrong)
        tokens = self.sequences[sequence][layer].tokens
        parts = [np.array([token[which] for token in tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        return attended("ATTN-10", query, exactly(parts[0]), exactly(parts[1]), scale)

    def _unknown(self, sequence: Any, layer: Any = 0) -> Wrong:
        if sequence not in self.sequences:
            return [("SequenceNotFound", "PAGED-08"), *not_in_range(layer, self.layers, "LayerOutOfRange")]
        return not_in_range(layer, self.layers, "LayerOutOfRange")
