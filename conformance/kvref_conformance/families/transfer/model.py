"""The reference model of the transfer cache: lists of tokens, and the block numbers that each owner lists."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    expect_error,
    finite_errors,
    id_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

Row = tuple[int, int, int]  # layer, position, head


@dataclass
class Owner:
    """An owner of blocks: a sequence, an export, or a transfer with its rows so far.

    rows: key and value [head_dim] each, as they are stored. blocks: made-up numbers, one per block_size positions, each of which
    stands for one block in every layer.
    """

    length: int
    rows: dict[Row, tuple[NDArray, NDArray]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    deadline: int | None = None


class Transfer(ReferenceModel):
    family = "transfer"
    clause_by_observation: ClassVar = {
        **{("create", seen): "TRANSFER-05" for seen in ("num_free_blocks", "num_sequences")},
        ("begin", "num_free_blocks"): "TRANSFER-01", ("begin", "num_sequences"): "TRANSFER-05",
        **{("begin", seen): "TRANSFER-05" for seen in ("length", "gather", "send")},
        **{("arrive", seen): "TRANSFER-02" for seen in ("length", "gather", "send", "num_free_blocks", "num_sequences")},
        **{("commit", seen): "TRANSFER-04" for seen in ("length", "num_free_blocks", "num_sequences")},
        ("commit", "gather"): "TRANSFER-02", ("commit", "send"): "TRANSFER-05",
        **{("abort", seen): "TRANSFER-05" for seen in ("length", "gather", "send", "num_sequences")},
        **{("expire", seen): "TRANSFER-08" for seen in ("length", "gather", "send", "num_sequences")},
        **{(did, "num_free_blocks"): "TRANSFER-07" for did in ("abort", "expire", "fence", "write_late")},
        **{("fence", seen): "TRANSFER-07" for seen in ("length", "gather", "send", "num_sequences")},
        **{("write_late", seen): "TRANSFER-07" for seen in ("length", "gather", "send", "num_sequences")},
        **{("export", seen): "TRANSFER-09" for seen in ("length", "gather", "num_free_blocks", "num_sequences")},
        **{("release", seen): "TRANSFER-10" for seen in ("length", "gather", "send", "num_free_blocks", "num_sequences")},
        **{(did, "send"): "TRANSFER-09" for did in ("append", "truncate", "drop", "export")},
        **{("truncate", seen): "EDIT-01" for seen in ("length", "gather")}, ("append", "num_free_blocks"): "TRANSFER-09",
        "num_free_blocks": "TRANSFER-10", "num_sequences": "TRANSFER-05", "send": "TRANSFER-11", "gather": "TRANSFER-12",
        "length": "TRANSFER-12",
    }  # fmt: skip

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, head_ranks: int, dtype: str
    ) -> None:
        super().__init__()
        self.total, self.size, self.layers, self.row, self.dtype = (
            num_blocks,
            block_size,
            num_layers,
            (num_kv_heads, head_dim),
            dtype,
        )
        self.sequences: dict[int, Owner] = {}
        self.open: dict[int, Owner] = {}
        self.aborted: dict[int, Owner] = {}
        self.exports: dict[int, Owner] = {}
        self.ids: dict[str, set[int]] = {"sequence": set(), "transfer": set(), "handle": set()}  # all that were ever returned
        self.new_block = count()

    # Blocks.

    def owners(self) -> Iterable[Owner]:
        for group in (self.sequences, self.open, self.aborted, self.exports):
            yield from group.values()

    @property
    def free(self) -> int:
        return self.total - self.layers * len({block for owner in self.owners() for block in owner.blocks})

    def is_shared(self, block: int) -> bool:
        return sum(block in owner.blocks for owner in self.owners()) > 1

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # Observations.

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {}), ("num_sequences", {})]
        for sequence in self.sequences:
            found.append(("length", {"sequence": sequence}))
            found += [("gather", {"sequence": sequence, "layer": layer}) for layer in range(self.layers)]
        for handle, held in self.exports.items():
            whole = {"tokens": [0, held.length], "heads": [0, self.row[0]]}
            found += [("send", {"handle": handle, "layer": layer} | whole) for layer in range(self.layers)]
        return found

    def num_free_blocks(self) -> Expectation:
        return ExactValue(self.clause_of("num_free_blocks"), value=self.free)

    def num_sequences(self) -> Expectation:
        return ExactValue(self.clause_of("num_sequences"), value=len(self.sequences))

    def length(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return expect_error(wrong, lambda: None)
        return ExactValue(self.clause_of("length"), value=self.sequences[sequence].length)

    def gather(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence) + self._layer_errors(layer):
            return expect_error(wrong, lambda: None)
        held = self.sequences[sequence]
        return self._reads("gather", held, layer, range(held.length), range(self.row[0]))

    def send(self, handle: Any, layer: Any, tokens: Any, heads: Any) -> Expectation:
        wrong = id_errors(handle, self.exports, "ExportNotFound", "TRANSFER-10")
        length = None if wrong else self.exports[handle].length
        wrong += self._layer_errors(layer, "TRANSFER-11") + _span_errors(heads, self.row[0], "HeadOutOfRange", "TRANSFER-11")
        if wrong := wrong + _span_errors(tokens, length, "PositionOutOfRange", "TRANSFER-11"):
            return expect_error(wrong, lambda: None)
        return self._reads("send", self.exports[handle], layer, range(*tokens), range(*heads))

    def _reads(self, name: str, held: Owner, layer: int, positions: range, heads: range) -> Expectation:
        shape = len(positions), len(heads), self.row[1]
        rows = [held.rows[layer, position, head] for position, head in product(positions, heads)]
        parts = (exact_reads(np.array([row[part] for row in rows], np.float32).reshape(shape)) for part in (0, 1))
        return ExpectedArrays(self.clause_of(name), names=("keys", "values"), parts=tuple(parts))

    # Sequences.

    def create(self) -> Expectation:
        return self._new_id("create", "sequence", "TRANSFER-12", lambda id: self.sequences.update({id: Owner(0)}))

    def append(self, sequence: Any, keys: Any, values: Any) -> Expectation:
        arrays = [(each, (self.layers, None, *self.row)) for each in (keys, values)]
        wrong, more = self._unknown(sequence) + array_errors(*arrays), count_tokens(*arrays)
        if sequence in self.sequences:
            held = self.sequences[sequence]
            end = held.length + more
            copied = [at for at in range(held.length // self.size, len(held.blocks)) if more and self.is_shared(held.blocks[at])]
            new = max(0, self.blocks_for(end) - len(held.blocks))
            wrong += [("OutOfBlocks", "TRANSFER-09")] if self.layers * (new + len(copied)) > self.free else []
        elif self.layers * self.blocks_for(more) > self.total:  # no sequence can be that long
            wrong.append(("OutOfBlocks", "TRANSFER-09"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))

        def change(ok: Any) -> None:
            for at in copied:
                held.blocks[at] = next(self.new_block)
            held.blocks += [next(self.new_block) for _ in range(new)]
            for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
                held.rows |= self._stored(layer, held.length, range(self.row[0]), key, value)
            held.length = end

        clause = "TRANSFER-12" if self.exports or self.ids["transfer"] else "LAW-04"
        then = self.on_success("append", change)
        return Expectation(clause, then) if all_finite(keys, values) else AcceptedOrError(clause, then)

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        wrong = self._unknown(sequence)
        held = None if wrong else self.sequences[sequence]
        if wrong := wrong + range_errors(length, held.length + 1 if held else None, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            assert held is not None
            held.length = length
            held.rows = {row: pair for row, pair in held.rows.items() if row[1] < length}
            del held.blocks[self.blocks_for(length) :]

        return Expectation("EDIT-01", self.on_success("truncate", change))

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)
        return Expectation("TRANSFER-12", self.on_success("drop", _remove(self.sequences, sequence)))

    # Receiver.

    def begin(self, length: Any, deadline: Any = None) -> Expectation:
        wrong = range_errors(length, None, "PositionOutOfRange", "TRANSFER-01")
        blocks = 0 if wrong else self.blocks_for(length)
        wrong += [] if deadline is None else range_errors(deadline, None, "ConfigError", "TRANSFER-08")
        if wrong := wrong + ([("OutOfBlocks", "TRANSFER-01")] if self.layers * blocks > self.free else []):
            return self.expect_error(wrong)

        def change(id: int) -> None:
            self.open[id] = Owner(length, blocks=[next(self.new_block) for _ in range(blocks)], deadline=deadline)

        return self._new_id("begin", "transfer", "TRANSFER-01", change)

    def arrive(self, transfer: Any, layer: Any, start: Any, heads: Any, keys: Any, values: Any) -> Expectation:
        wrong = self._part_errors("arrive", self.open, transfer, layer, start, heads, keys, values)
        held = None if id_errors(transfer, self.open) else self.open[transfer]
        tokens = max((len(each) for each in (keys, values) if np.ndim(each)), default=0)
        if held and any((layer, start + at, head) in held.rows for at in range(tokens) for head in range(*heads)):
            wrong.append(("AlreadyArrived", "TRANSFER-03"))
        if wrong or held is None:
            return self.expect_error(wrong + finite_errors(keys, values))
        new = self._stored(layer, start, range(*heads), keys, values)
        then = self.on_success("arrive", lambda ok: held.rows.update(new))
        return Expectation("TRANSFER-02", then) if all_finite(keys, values) else AcceptedOrError("TRANSFER-02", then)

    def commit(self, transfer: Any) -> Expectation:
        if wrong := self._absent("commit", self.open, transfer):
            return self.expect_error(wrong)
        held = self.open[transfer]
        if len(held.rows) < self.layers * held.length * self.row[0]:
            return self.expect_error([("TransferIncomplete", "TRANSFER-04")])

        def change(id: int) -> None:
            self.sequences[id] = self.open.pop(transfer)

        return self._new_id("commit", "sequence", "TRANSFER-04", change)

    def abort(self, transfer: Any) -> Expectation:
        if wrong := self._absent("abort", self.open, transfer):
            return self.expect_error(wrong)
        return Expectation("TRANSFER-06", self.on_success("abort", lambda ok: self._abort(transfer)))

    def _abort(self, transfer: int) -> None:
        self.aborted[transfer] = self.open.pop(transfer)

    def expire(self, now: Any) -> Expectation:
        if wrong := range_errors(now, None, "ConfigError", "TRANSFER-08"):
            return self.expect_error(wrong)
        late = sorted(id for id, held in self.open.items() if held.deadline is not None and held.deadline <= now)

        def change(ok: Any) -> None:
            for transfer in late:
                self._abort(transfer)

        return AnyOf(
            "TRANSFER-08", self.on_success("expire", change), range_text=str(late), accepts=lambda ok: list(map(int, ok)) == late
        )

    def fence(self, transfer: Any) -> Expectation:
        if wrong := self._absent("fence", self.aborted, transfer):
            return self.expect_error(wrong)
        return Expectation("TRANSFER-07", self.on_success("fence", _remove(self.aborted, transfer)))

    def write_late(self, transfer: Any, layer: Any, start: Any, heads: Any, keys: Any, values: Any) -> Expectation:
        if wrong := self._part_errors("write_late", self.aborted, transfer, layer, start, heads, keys, values):
            return self.expect_error(wrong + finite_errors(keys, values))
        then = self.on_success("write_late")
        return Expectation("TRANSFER-07", then) if all_finite(keys, values) else AcceptedOrError("TRANSFER-07", then)

    # Sender.

    def export(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)
        held = self.sequences[sequence]
        copy = Owner(held.length, dict(held.rows), list(held.blocks))
        return self._new_id("export", "handle", "TRANSFER-09", lambda id: self.exports.update({id: copy}))

    def release(self, handle: Any) -> Expectation:
        if wrong := id_errors(handle, self.exports, "ExportNotFound", "TRANSFER-10"):
            return self.expect_error(wrong)
        return Expectation("TRANSFER-10", self.on_success("release", _remove(self.exports, handle)))

    # Helpers.

    def _new_id(self, name: str, what: str, clause: str, change: Callable[[int], Any]) -> Expectation:
        """The expectation of an id that the cache has never returned for the same kind of object."""
        used = set(self.ids[what])

        def then(id: int) -> None:
            self.ids[what].add(id)
            change(id)

        says = f"an id never used before, not among {sorted(used)}"
        return AnyOf(clause, self.on_success(name, then), range_text=says, accepts=lambda id: id not in used)

    def _stored(self, layer: int, start: int, heads: range, keys: Any, values: Any) -> dict[Row, tuple[NDArray, NDArray]]:
        """The rows of keys and values [n, number of heads, head_dim], as they are stored."""
        stored = [round_to(to_float32(each), self.dtype) for each in (keys, values)]
        places = product(range(len(stored[0])), range(len(heads)))
        return {(layer, start + at, heads[head]): (stored[0][at, head], stored[1][at, head]) for at, head in places}

    def _unknown(self, sequence: Any) -> Errors:
        return id_errors(sequence, self.sequences)

    def _absent(self, op: str, among: dict[int, Owner], transfer: Any) -> Errors:
        clause = "TRANSFER-07" if op in ("fence", "write_late") else "TRANSFER-06"
        return id_errors(transfer, among, "TransferNotFound", clause)

    def _layer_errors(self, layer: Any, clause: str = "LAW-11") -> Errors:
        return range_errors(layer, self.layers, "LayerOutOfRange", clause)

    def _part_errors(
        self, op: str, among: dict[int, Owner], transfer: Any, layer: Any, start: Any, heads: Any, keys: Any, values: Any
    ) -> Errors:
        absent = self._absent(op, among, transfer)
        length = None if absent else among[transfer].length
        wrong = absent + self._layer_errors(layer, "TRANSFER-02")
        span = _span_errors(heads, self.row[0], "HeadOutOfRange", "TRANSFER-02")
        num_heads = max(0, heads[1] - heads[0])
        arrays = [(each, (None, num_heads, self.row[1])) for each in (keys, values)]
        position = range_errors(start, None if length is None else length + 1, "PositionOutOfRange", "TRANSFER-02")
        if not position and length is not None and start + count_tokens(*arrays) > length:
            position = [("PositionOutOfRange", "TRANSFER-02")]
        return wrong + span + position + array_errors(*arrays)


def _span_errors(span: Sequence[int], stop: int | None, kind: str, clause: str) -> Errors:
    """The error of this kind, unless `span` is [start, stop) within [0, stop)."""
    first, last = span
    return range_errors(last, None if stop is None else stop + 1, kind, clause) or range_errors(first, last + 1, kind, clause)


def _remove(group: dict[int, Owner], id: int) -> Callable[[Any], None]:
    """A change of the model that removes an owner."""

    def change(ok: Any) -> None:
        del group[id]

    return change
