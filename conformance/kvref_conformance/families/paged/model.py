"""The paged cache as a dict of sequences, each a list of tokens a layer."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import show
from kvref_conformance.oracle.attention import attended, wrong_query
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
    not_finite,
    not_in_range,
    tokens_of,
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
        negative = not_in_range(num_tokens, None, "PositionOutOfRange")
        wrong = self._unknown(sequence) + negative + ([] if negative else self._short(sequence, num_tokens))
        return self.refuse(wrong) if wrong else Expected("PAGED-04", self._taking(sequence, num_tokens))

    def _short(self, sequence: Any, num_tokens: int) -> Wrong:
        """Whether the sequence, or any there could be, lacks blocks for so many tokens."""
        there = sequence in self.sequences
        within_reach = self.blocks[sequence] + self.free // self.layers if there else self.total // self.layers
        return [("OutOfBlocks", "PAGED-05")] if -(-num_tokens // self.size) > within_reach else []

    def _taking(self, sequence: int, num_tokens: int) -> Callable[[Any], None]:
        needed = -(-num_tokens // self.size)
        more = needed > self.blocks[sequence]

        def change(ok: Any) -> None:
            self.blocks[sequence] = max(self.blocks[sequence], needed)

        return self.did("taken" if more else "ensured", change)

    def refuse(self, wrong: Wrong) -> Refused:
        if {kind for kind, _ in wrong} == {"OutOfBlocks"}:
            return Refused(wrong[0][1], kinds=("OutOfBlocks",), refused=lambda: self.did("short")(None))
        return super().refuse(wrong)

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expected:
        given = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong = self._unknown(sequence, layer) + wrong_arrays(*given)
        wrong += not_in_range(start, self._longest(sequence, layer) + 1, "PositionOutOfRange", "PAGED-10")
        if count := tokens_of(*given):
            wrong += self._short(sequence, count + (max(0, start) if isinstance(start, int) else 0))
        if wrong:
            return self.refuse(wrong + not_finite(keys, values))
        tokens, took = self.sequences[sequence][layer].tokens, self._taking(sequence, start + len(keys))

        def change(ok: Any) -> None:
            rows = zip(*(round_to(float32(part), self.dtype) for part in (keys, values)), strict=True)
            self.overwrote = start < len(tokens)
            tokens[start : start + len(keys)] = list(rows)
            self.written = sequence, layer, range(start, start + len(keys))
            took(ok)

        return Expected("PAGED-03", change) if finite(keys, values) else TakenOrRefused("PAGED-03", change)

    def append(self, sequences: Sequence[Any], layer: Any, keys: Any, values: Any) -> Expected:
        shape = (len(sequences), *self.row)
        wrong = self._batch(sequences, layer)
        layers = [] if not_in_range(layer, self.layers, "LayerOutOfRange") else [layer]
        if wrong := wrong + wrong_arrays((keys, shape), (values, shape)) + self._short_batch(sequences, layers):
            return self.refuse(wrong + not_finite(keys, values))
        return self._appending(sequences, layers, keys[None], values[None])

    def append_step(self, sequences: Sequence[Any], keys: Any, values: Any) -> Expected:
        shape = (self.layers, len(sequences), *self.row)
        layers, wrong = list(range(self.layers)), self._batch(sequences, 0)
        if wrong := wrong + wrong_arrays((keys, shape), (values, shape)) + self._short_batch(sequences, layers):
            return self.refuse(wrong + not_finite(keys, values))
        return self._appending(sequences, layers, keys, values)

    def _needed(self, sequences: Sequence[Any], layers: list[int]) -> dict[int, int]:
        """The blocks that each sequence holds once those of a batch that there are have a token more."""
        needed = dict(self.blocks)
        for sequence, times in Counter(sequences).items():
            if sequence in needed:
                tokens = times + max((len(self.sequences[sequence][layer].tokens) for layer in layers), default=0)
                needed[sequence] = max(needed[sequence], -(-tokens // self.size))
        return needed

    def _short_batch(self, sequences: Sequence[Any], layers: list[int]) -> Wrong:
        more = sum(self._needed(sequences, layers).values()) - sum(self.blocks.values())
        return [("OutOfBlocks", "PAGED-16")] if self.layers * more > self.free else []

    def _appending(self, sequences: Sequence[int], layers: list[int], keys: NDArray, values: NDArray) -> Expected:
        """keys, values: [layers, sequences, kv heads, head_dim], of known sequences."""
        needed = self._needed(sequences, layers)

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
        wrong, length = self._unknown(sequence, layer), self._longest(sequence, layer)
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
        room = self.blocks.get(sequence, self.total // self.layers) * self.size
        negative = not_in_range(count, None, "PositionOutOfRange") + not_in_range(start, None, "PositionOutOfRange")
        past_the_end = [] if negative else not_in_range(start + count, room + 1, "PositionOutOfRange")
        if wrong := self._unknown(sequence, layer) + negative + past_the_end:
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
        return wrong or not_in_range(layer, self.layers, "LayerOutOfRange")  # of no sequences, the layer

    def attend(self, sequence: Any, layer: Any, query: Any, scale: float) -> Expected:
        if wrong := self._unknown(sequence, layer):
            return self.refuse(wrong + wrong_query(query, *self.row))
        tokens = self.sequences[sequence][layer].tokens
        parts = [np.array([token[which] for token in tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        return attended("ATTN-10", query, exactly(parts[0]), exactly(parts[1]), scale)

    def _unknown(self, sequence: Any, layer: Any = 0) -> Wrong:
        if sequence not in self.sequences:
            return [("SequenceNotFound", "PAGED-08"), *not_in_range(layer, self.layers, "LayerOutOfRange")]
        return not_in_range(layer, self.layers, "LayerOutOfRange")

    def _longest(self, sequence: Any, layer: Any) -> int:
        """The layer's length; of a layer or a sequence that is not there, the longest there could be."""
        if sequence not in self.sequences:
            return self.total // self.layers * self.size
        layers = self.sequences[sequence]
        known = layers if not_in_range(layer, self.layers, "LayerOutOfRange") else [layers[layer]]
        return max(len(each.tokens) for each in known)
