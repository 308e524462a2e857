"""The reference model of the grouped cache: a dict of sequences, and the rows of each block."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.families.grouped.ownership_model import OwnershipState
from kvref_conformance.families.paged.table_model import stacked, stored
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    all_finite,
    array_errors,
    id_errors,
    range_errors,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.prompts import MAX_MATCHED, match_reads, token_errors
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel
from kvref_conformance.oracle.token_storage import storage_errors

SEEN = ("num_free_blocks", "length", "block_table", "read")


class Grouped(ReferenceModel):
    family = "grouped"
    clause_by_observation: ClassVar = {
        **{("step", seen): clause for seen, clause in zip(SEEN, ("GROUP-02", "LAW-04", "GROUP-02", "GROUP-04"), strict=True)},
        **{("begin", seen): clause for seen, clause in zip(SEEN, ("GROUP-06", "GROUP-05", "GROUP-05", "GROUP-05"), strict=True)},
        **{("commit", seen): "GROUP-06" for seen in SEEN},
        **{("truncate", seen): "EDIT-01" for seen in SEEN},
        **{("fork", seen): "SHARE-03" for seen in SEEN},
        **{("no blocks", seen): "GROUP-03" for seen in (*SEEN, "match")},
        **{("reset", seen): "PREFIX-11" for seen in (*SEEN, "match")},
        "num_free_blocks": "PAGED-07", "block_table": "GROUP-01", "read": "GROUP-04", "length": "LAW-04",
    }  # fmt: skip

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_groups: int, window: int, num_kv_heads: int,
        head_dim: int, dtype: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers, self.groups, self.size = num_layers, num_groups, block_size
        self.row, self.dtype = (num_kv_heads, head_dim), dtype
        self.held = OwnershipState(num_blocks, block_size, [*[window] * (num_groups - 1), None])
        self.lengths: dict[int, int] = {}
        self.told: dict[int, tuple[str, list[int]]] = {}  # per sequence its salt, and its known tokens (found or committed)
        self.ids: set[int] = set()
        self.seen: list[tuple[str, tuple[int, ...]]] = []  # committed prompts, the newest at the end
        self.written = -1  # the sequence of the last step

    def apply_limits(self, switch: Callable[[str], bool]) -> None:
        self.held.any_order = switch("other_eviction_order")

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {})]
        for sequence, length in self.lengths.items():
            found.append(("length", {"sequence": sequence}))
            for layer in range(self.layers):
                at: dict[str, Any] = {"sequence": sequence, "layer": layer}
                positions = list(range(self._first_held(sequence, layer), length))
                found += [("block_table", at), ("read", at | {"positions": positions})]
        return found + ([] if self.held.unsure else match_reads(self.seen[-MAX_MATCHED:]))

    def num_free_blocks(self) -> Expectation:
        return ExactValue(self.clause_of("num_free_blocks"), value=self.held.total - self.held.used())

    def create(self) -> Expectation:
        return self._new("PAGED-01", "create", lambda new: self._open(new, 0, "", []))

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)

        def change(new: int) -> None:
            self._open(new, self.lengths[sequence], *self.told[sequence])
            self.held.tables[new] = [list(entry) for entry in self.held.tables[sequence]]

        return self._new("SHARE-03", "fork", change)

    def begin(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        if wrong := token_errors(tokens, "PREFIX-15"):
            return self.expect_error(wrong)
        blocks = self._hit(tokens, salt)

        def change(new: int) -> None:
            self._open(new, blocks * self.size, salt, tokens[: blocks * self.size])
            self.held.begin(new, tokens, salt, blocks)

        return self._new("PAGED-01", "begin", change)

    def _new(self, clause: str, name: str, change: Callable[[int], None]) -> Expectation:
        used = set(self.ids)
        says = f"an id never used before, not among {sorted(used)}"
        return AnyOf(clause, self.on_success(name, change), range_text=says, accepts=lambda id: id not in used)

    def _open(self, new: int, length: int, salt: str, tokens: Sequence[int]) -> None:
        self.ids.add(new)
        self.lengths[new], self.told[new], self.held.tables[new] = length, (salt, list(tokens)), []

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.held.cut(sequence, 0)
            del self.lengths[sequence], self.told[sequence], self.held.tables[sequence]

        return Expectation("PAGED-07", self.on_success("drop", change))

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        longest = self.lengths.get(sequence, self.held.total * self.size)  # an unknown sequence can have any length
        wrong = self._unknown(sequence) + range_errors(length, longest + 1, "PositionOutOfRange", "EDIT-02")
        if wrong:
            return self.expect_error(wrong)
        table = self.held.tables[sequence]
        needed = [(self.held.first(group, length) // self.size, group) for group in range(self.groups)]
        if length and any(entry < len(table) and table[entry][group] is None for entry, group in needed):
            return self.expect_error([("NotTruncatable", "GROUP-07")])

        def change(ok: Any) -> None:
            self.held.cut(sequence, -(-length // self.size))
            self.lengths[sequence] = length
            del self.told[sequence][1][length:]

        return Expectation("GROUP-07", self.on_success("truncate", change))

    def step(self, sequence: Any, keys: Any, values: Any) -> Expectation:
        shape = (self.layers, None, *self.row)
        wrong = self._unknown(sequence) + array_errors((keys, shape), (values, shape))
        known, count = (
            sequence in self.lengths,
            max((np.shape(part)[1] for part in (keys, values) if np.ndim(part) > 1), default=0),
        )
        length = self.lengths[sequence] if known else 0
        short = known and count and self.held.needed(sequence, length, count) > self.held.free_for(sequence, length)
        if short or (not known and self.groups * -(-count // self.size) > self.held.total):
            wrong.append(("OutOfBlocks", "GROUP-03"))
        if wrong:
            refused = self.expect_error(wrong + storage_errors(keys, values, self.dtype))
            short = wrong[0][0] == "OutOfBlocks"
            return replace(refused, on_error=lambda: self.note_unchanged("no blocks")) if short else refused
        new = [stored(key, value, self.dtype) for key, value in zip(keys, values, strict=True)]

        def change(ok: Any) -> None:
            self.written = sequence
            if count == 0:
                return
            self.held.step(sequence, length, count)
            for layer, (tokens, _) in enumerate(new):
                for index, token in enumerate(tokens):
                    entry, offset = divmod(length + index, self.size)
                    name = self.held.tables[sequence][entry][layer % self.groups]
                    assert name is not None
                    self.held.rows[name][layer, offset] = token
            self.lengths[sequence] = length + count

        then = self.on_success("step", change)
        if not any(nan for _, nan in new) and all_finite(
            *(part.values for tokens, _ in new for token in tokens for part in token)
        ):
            return Expectation("GROUP-03", then)
        return AcceptedOrError("LAW-04", then, on_error=lambda: self.note_unchanged("refused"))

    def commit(self, sequence: Any, tokens: Sequence[Any]) -> Expectation:
        wrong = self._unknown(sequence) + token_errors(tokens, "PREFIX-15")
        salt, known = self.told.get(sequence, ("", []))
        wrong += range_errors(len(tokens), self.lengths.get(sequence, 0) + 1, "PositionOutOfRange", "PREFIX-02")
        if any(a != b for a, b in zip(tokens, known, strict=False)):
            wrong.append(("TokenMismatch", "PREFIX-02"))
        if wrong:
            return self.expect_error(wrong)
        told = [*tokens, *known[len(tokens) :]]

        def change(ok: Any) -> None:
            self.held.commit(sequence, told, salt, len(known) // self.size)
            self.told[sequence] = salt, told
            chain = salt, tuple(told)
            self.seen = [*(each for each in self.seen if each != chain), chain]

        return Expectation("PREFIX-02", self.on_success("commit", change))

    def match(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        if wrong := token_errors(tokens, "PREFIX-15"):
            return self.expect_error(wrong)
        hit = self._hit(tokens, salt)
        clause = {"no blocks": "GROUP-03", "refused": "LAW-01", "reset": "PREFIX-11"}.get(self.last_change, "GROUP-05")
        return ExactValue("GROUP-06" if self.last_change in ("step", "drop", "truncate") else clause, value=hit * self.size)

    def _hit(self, tokens: Sequence[int], salt: str) -> int:
        if self.held.unsure:
            raise ValueError("hits are not modeled while the evicted blocks are not known")
        return self.held.hit(tokens, salt)

    def reset(self) -> Expectation:
        if self.lengths:
            return self.expect_error([("InUse", "PREFIX-11")])
        return Expectation("PREFIX-11", self.on_success("reset", lambda ok: self.held.forget_found()))

    def length(self, sequence: Any) -> Expectation:
        wrong = self._unknown(sequence)
        return self.expect_error(wrong) if wrong else ExactValue(self.clause_of("length"), value=self.lengths[sequence])

    def block_table(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong)
        held, names = self.held, [entry[layer % self.groups] for entry in self.held.tables[sequence]]
        others = {id for name, id in held.ids.items() if name not in names}
        known = [-1 if name is None else held.ids.get(name) for name in names]

        def accepts(got: Any) -> bool:
            got = [int(block) for block in got]
            new = [block for block, id in zip(got, known, strict=True) if id is None]
            old = {id for id in known if id is not None}
            same = all(id is None or block == id for block, id in zip(got, known, strict=True))
            free = all(0 <= block < held.total and block not in others | old for block in new)
            return same and free and len(set(new)) == len(new)

        def then(got: Any) -> None:
            held.ids |= {name: int(block) for name, block in zip(names, got, strict=True) if name is not None}

        clause = self.clause_of("block_table")
        says = f"{known}; None is a block in [0, {held.total}) that no other table lists, not among {sorted(others)}"
        at_length = (len(names), clause)
        return AnyOf("GROUP-01" if clause == "LAW-04" else clause, then, range_text=says, accepts=accepts, length=at_length)

    def read(self, sequence: Any, layer: Any, positions: Sequence[Any]) -> Expectation:
        wrong, length = self._unknown(sequence, layer), self.lengths.get(sequence, max(self.lengths.values(), default=0))
        wrong += [each for position in positions for each in range_errors(position, length, "PositionOutOfRange")]
        first = 0 if wrong else self._first_held(sequence, layer)
        wrong += [("PositionOutOfRange", "GROUP-04") for position in positions if isinstance(position, int) and position < first]
        if wrong:
            return self.expect_error(wrong)
        clause = self.clause_of("read") if sequence == self.written or self.last_change != "step" else "GROUP-01"
        parts, unsure = self._parts(sequence, layer, positions)
        return ExpectedArrays(clause, names=("keys", "values"), parts=parts, undetermined=unsure)

    def attend(self, sequence: Any, layer: Any, query: Any, scale: float) -> Expectation:
        wrong = query_errors(query, *self.row)
        if unknown := self._unknown(sequence, layer):
            return self.expect_error(unknown + wrong)
        length, group = self.lengths[sequence], layer % self.groups
        start = length - len(query)
        if start < 0 or self.held.first(group, start) < self._first_held(sequence, layer):
            wrong.append(("PositionOutOfRange", "GROUP-04"))
        if wrong:
            return self.expect_error(wrong)
        parts, unsure = self._parts(sequence, layer, range(self.held.first(group, start), length))
        if unsure is not None:
            return UnjudgedReply("GROUP-04")  # the values it reads as are not known
        window, count = self.held.windows[group], len(parts[0].values)
        stops = range(count - len(query) + 1, count + 1)
        views = [np.arange(0 if window is None else max(0, stop - window), stop) for stop in stops]
        return expect_attend("GROUP-04", query, *parts, scale, views)

    def _first_held(self, sequence: int, layer: int) -> int:
        """Returns the first position whose block the layer's group has not freed."""
        return self.size * sum(entry[layer % self.groups] is None for entry in self.held.tables[sequence])

    def _parts(
        self, sequence: int, layer: int, positions: Sequence[int]
    ) -> tuple[tuple[ExpectedReads, ExpectedReads], NDArray | None]:
        tokens = []
        for position in positions:
            name = self.held.tables[sequence][position // self.size][layer % self.groups]
            assert name is not None
            tokens.append(self.held.rows[name][layer, position % self.size])
        return stacked(tokens, self.row, self.dtype)

    def _unknown(self, sequence: Any, layer: Any = 0) -> Errors:
        return id_errors(sequence, self.lengths) + range_errors(layer, self.layers, "LayerOutOfRange")
