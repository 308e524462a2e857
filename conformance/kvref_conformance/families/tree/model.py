"""The reference model of the family `tree`: per sequence a list of committed tokens and a list of nodes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedOrError,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    id_errors,
    is_integer,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel
from kvref_conformance.oracle.shared_blocks import Used, count_used, expect_free_blocks

CHANGES = ("draft", "accept", "reject", "append", "truncate", "drop")
SEEN = ("length", "read", "positions", "ancestors", "num_free_blocks")


class Row(NamedTuple):
    """The key and the value of a token: [num_kv_heads, head_dim] each."""

    key: NDArray
    value: NDArray


@dataclass
class TreeSequence:
    """A sequence.

    relatives: a number that related sequences share. paths: for each node, the nodes from the root to itself. accepted: whether a
    path was accepted.
    """

    relatives: int
    tokens: list[Row] = field(default_factory=list)
    nodes: list[Row] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    accepted: bool = False

    def close(self) -> None:
        self.nodes, self.paths = [], []


class Tree(ReferenceModel):
    family = "tree"
    clause_by_observation: ClassVar = {
        **{(did, seen): clause for did, clause in (("accept", "TREE-07"), ("reject", "TREE-08")) for seen in SEEN},
        **{(did, seen): "TREE-12" for did in ("create", "append", "truncate", "drop") for seen in SEEN},
        **{
            (did, "num_free_blocks"): "TREE-10"
            for did in ("new", "create", "append", "truncate", "drop", "fork", "draft", "accept")
        },
        **{("fork", seen): "TREE-11" for seen in ("length", "read", "positions", "ancestors")},
        **{("draft", seen): "TREE-06" for seen in ("length", "read")},
        ("draft", "positions"): "TREE-03",
        ("draft", "ancestors"): "TREE-04",
    }

    def __init__(self, *, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        super().__init__()
        self.blocks, self.size, self.row = num_blocks, block_size, (num_kv_heads, head_dim)
        self.sequences: dict[int, TreeSequence] = {}
        self.ids: set[int] = set()  # all that were ever returned
        self.changed: Any = None  # the sequence that the last call changed
        self.groups = 0  # numbers of related sequences

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {})]
        for sequence, state in self.sequences.items():
            found += [(name, {"sequence": sequence}) for name in ("length", "positions", "read")]
            found += [("ancestors", {"sequence": sequence, "node": node}) for node in range(len(state.nodes))[-3:]]
        return found

    def changing(self, name: str, sequence: int, change: Callable[[Any], None]) -> Callable[[Any], None]:
        """A function to call after `name` changed a sequence."""

        def then(ok: Any) -> None:
            change(ok)
            self.changed = sequence

        return self.on_success(name, then)

    def clause_for(self, seen: str, sequence: int) -> str:
        """The clause that an unexpected observation of a sequence breaks."""
        other = self.last_change in CHANGES and sequence != self.changed
        return "TREE-11" if other else self.clause_of(seen)

    # Blocks.

    def filled(self, state: TreeSequence, more: int = 0) -> int:
        return -(-(len(state.tokens) + len(state.nodes) + more) // self.size)

    def used(self, changed: Any = None, more: int = 0) -> Used:
        """The fewest and the most blocks that can be in use. more: rows that are added to the sequence `changed`."""
        sequences = self.sequences.items()
        return count_used((state.relatives, self.filled(state, more if id == changed else 0)) for id, state in sequences)

    def num_free_blocks(self) -> Expectation:
        return expect_free_blocks(self.clause_of("num_free_blocks"), self.blocks, self.used())

    def may_lack_blocks(self, used: Used, expected: Expectation) -> Expectation:
        """The expectation of a valid call after which at least used[0], and at most used[1] blocks are in use."""
        if used[0] > self.blocks:
            return self.expect_error([("OutOfBlocks", "TREE-10")])
        return self.or_error(expected, "OutOfBlocks") if used[1] > self.blocks else expected

    def or_error(self, expected: Expectation, *kinds: str) -> Expectation:
        def refused() -> None:
            self.note_unchanged("refused")

        return ExpectedOrError(expected.clause, expected.on_result, kinds=kinds, on_error=refused, expected=expected)

    # Sequences.

    def unknown(self, sequence: Any) -> Errors:
        return id_errors(sequence, self.sequences, clause="TREE-12")

    def open_tree(self, sequence: int) -> Errors:
        return [("InUse", "TREE-09")] if self.sequences[sequence].nodes else []

    def create(self) -> Expectation:
        return self._new("TREE-12", "create", lambda: TreeSequence(self.groups))

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence) or self.open_tree(sequence):
            return self.expect_error(wrong)
        parent = self.sequences[sequence]
        expected = self._new("TREE-11", "fork", lambda: TreeSequence(parent.relatives, list(parent.tokens)))
        most = self.used()[1] + self.filled(parent)
        return self.or_error(expected, "OutOfBlocks") if most > self.blocks else expected

    def _new(self, clause: str, name: str, make: Callable[[], TreeSequence]) -> Expectation:
        used = set(self.ids)

        def change(id: int) -> None:
            self.ids.add(id)
            self.sequences[id] = make()
            self.groups += 1

        def accepts(id: Any) -> bool:
            return is_integer(id) and id >= 0 and id not in used

        says = f"an id never used before, not among {sorted(used)}"
        return AnyOf(clause, self.on_success(name, change), range_text=says, accepts=accepts)

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            del self.sequences[sequence]

        return Expectation("TREE-12", self.changing("drop", sequence, change))

    def length(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        return ExactValue(self.clause_for("length", sequence), value=len(self.sequences[sequence].tokens))

    def append(self, sequence: Any, keys: Any, values: Any) -> Expectation:
        wrong = self._pair_errors(keys, values)
        if missing := self.unknown(sequence):
            return self.expect_error(missing + wrong + finite_errors(keys, values))
        state = self.sequences[sequence]

        def change(ok: Any) -> None:
            state.tokens += _rows(keys, values)

        then = self.changing("append", sequence, change)
        return self._adding(sequence, keys, values, wrong + self.open_tree(sequence), Expectation("TREE-12", then))

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        state = self.sequences[sequence]
        if wrong := self.open_tree(sequence) + range_errors(length, len(state.tokens) + 1, "PositionOutOfRange", "TREE-12"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            del state.tokens[length:]

        return Expectation("TREE-12", self.changing("truncate", sequence, change))

    def read(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        parts = tuple(exact_reads(each) for each in self.arrays(self.sequences[sequence].tokens))
        return ExpectedArrays(self.clause_for("read", sequence), names=("keys", "values"), parts=parts)

    def arrays(self, rows: Iterable[Row]) -> tuple[NDArray, NDArray]:
        """Keys and values [n, num_kv_heads, head_dim]."""
        given = list(rows)
        keys, values = (np.array([row[part] for row in given], np.float32).reshape(-1, *self.row) for part in (0, 1))
        return keys, values

    # Trees.

    def draft(self, sequence: Any, keys: Any, values: Any, parents: Sequence[Any]) -> Expectation:
        wrong = self._pair_errors(keys, values)
        if not wrong and len(parents) != len(keys):
            wrong.append(("ShapeMismatch", "TREE-02"))
        if missing := self.unknown(sequence):
            return self.expect_error(missing + wrong + _node_errors(parents, None) + finite_errors(keys, values))
        state = self.sequences[sequence]
        first = len(state.nodes)

        def change(ok: Any) -> None:
            for parent, row in zip(parents, _rows(keys, values), strict=True):
                state.paths.append([*(state.paths[parent] if parent >= 0 else []), len(state.nodes)])
                state.nodes.append(row)

        expected = ExactValue("TREE-01", self.changing("draft", sequence, change), value=[*range(first, first + len(parents))])
        return self._adding(sequence, keys, values, wrong + _node_errors(parents, first), expected)

    def positions(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        state = self.sequences[sequence]
        return ExactValue(
            self.clause_for("positions", sequence), value=[len(state.tokens) + len(path) - 1 for path in state.paths]
        )

    def ancestors(self, sequence: Any, node: Any) -> Expectation:
        if wrong := self._path_errors(sequence, node, "TREE-04"):
            return self.expect_error(wrong)
        return ExactValue(self.clause_for("ancestors", sequence), value=self.sequences[sequence].paths[node])

    def attend(self, sequence: Any, nodes: Sequence[Any], query: Any, scale: float | None = None) -> Expectation:
        wrong = query_errors(query, *self.row)
        if not wrong and len(nodes) != len(query):
            wrong.append(("ShapeMismatch", "TREE-05"))
        if missing := self.unknown(sequence):
            return self.expect_error(missing + wrong + _node_errors(nodes, None) + finite_errors(query))
        state = self.sequences[sequence]
        wrong += _node_errors(nodes, len(state.nodes), "TREE-05", grows=False)
        if wrong:
            return self.expect_error(wrong + finite_errors(query))
        count = len(state.tokens)
        paths = [state.paths[node] if node >= 0 else [] for node in nodes]
        views = [np.array([*range(count), *(count + node for node in path)], np.int64) for path in paths]
        keys, values = self.arrays([*state.tokens, *state.nodes])
        scale = self.row[1] ** -0.5 if scale is None else scale
        return expect_attend("TREE-05", query, exact_reads(keys), exact_reads(values), scale, views)

    def accept(self, sequence: Any, node: Any) -> Expectation:
        if wrong := self._path_errors(sequence, node, "TREE-07"):
            return self.expect_error(wrong)
        state = self.sequences[sequence]

        def change(ok: Any) -> None:
            state.tokens += [state.nodes[each] for each in state.paths[node]]
            state.close()
            state.accepted = True

        return Expectation("TREE-07", self.changing("accept", sequence, change))

    def reject(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        state = self.sequences[sequence]
        return Expectation("TREE-08", self.changing("reject", sequence, lambda ok: state.close()))

    # Errors.

    def _pair_errors(self, keys: Any, values: Any) -> Errors:
        return array_errors((keys, (None, *self.row)), (values, (None, *self.row)))

    def _adding(self, sequence: int, keys: Any, values: Any, wrong: Errors, expected: Expectation) -> Expectation:
        """The expectation of a call that adds rows to a sequence. wrong: its errors, besides those of its size and numbers."""
        used = self.used(sequence, count_tokens((keys, (None, *self.row)), (values, (None, *self.row))))
        not_finite = finite_errors(keys, values)
        if wrong:
            short: Errors = [("OutOfBlocks", "TREE-10")] if used[1] > self.blocks else []
            return self.expect_error(wrong + short + not_finite)
        if not not_finite:
            return self.may_lack_blocks(used, expected)
        if used[0] > self.blocks:
            return self.expect_error([("OutOfBlocks", "TREE-10"), *not_finite])
        return self.or_error(expected, "NonFinite", *(["OutOfBlocks"] if used[1] > self.blocks else []))

    def _path_errors(self, sequence: Any, node: Any, clause: str) -> Errors:
        if wrong := self.unknown(sequence):
            return wrong
        return range_errors(node, len(self.sequences[sequence].nodes), "PositionOutOfRange", clause)


def _node_errors(nodes: Sequence[Any], stop: int | None, clause: str = "TREE-02", grows: bool = True) -> Errors:
    """The error unless each node is an integer in [-1, stop). grows: whether node i is in [-1, stop + i)."""
    for place, node in enumerate(nodes):
        good = is_integer(node) and node >= -1
        if not good or (stop is not None and node >= stop + place * grows):
            return [("PositionOutOfRange", clause)]
    return []


def _rows(keys: Any, values: Any) -> list[Row]:
    return [Row(*each) for each in zip(to_float32(keys), to_float32(values), strict=True)]
