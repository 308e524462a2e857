"""The reference model of the paged cache: per sequence and layer, a list of tokens."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families.paged.ownership_model import (
    RELEASED,
    Alternative,
    OwnershipState,
    TableEntry,
    Transition,
    cutting,
    forking,
    outcome,
    removing,
)
from kvref_conformance.families.paged.table_model import LayerTable, TableModel, Token, stacked, stored
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    UnjudgedReply,
    array_errors,
    count_tokens,
    exact_reads,
    range_errors,
)
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.rotary import expected_rotation
from kvref_conformance.oracle.saved_state import SerializableModel
from kvref_conformance.oracle.token_storage import storage_errors

# The clause that wrong tokens break, by the last operation on their sequence.
TOKENS = {
    "fork": "SHARE-03", "copied": "SHARE-05", "truncate": "EDIT-01", "remove": "EDIT-10", "load": "MOVE-01",
    "load of nothing": "MOVE-07",
}  # fmt: skip
ANY_TOKENS = {  # for any sequence
    "refused": "LAW-01", "no copy": "SHARE-07", "save": "MOVE-04", "not loaded": "MOVE-03", "released": "WIN-09",
}  # fmt: skip


@dataclass(frozen=True)
class NewOrRefused(AcceptedOrError):
    """The result of fork: an id that was never used, or OutOfBlocks if there was no room for copies."""

    says: str = ""
    used: Container[int] = ()

    def compare(self, ok: Any, op: str, level: Any) -> None:
        if ok in self.used:
            raise ClauseViolation(op, self.says, format_value(ok), "PAGED-01")


class Paged(TableModel, SerializableModel):
    family = "paged"
    room_errors = ("OutOfBlocks",)
    tables_alone = False  # whether the cache stores no tokens, so that it can release blocks that it only allocated

    def apply_limits(self, switch: Callable[[str], bool]) -> None:
        self.tables_alone = switch("tables_alone")

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {}), ("utilization", {})]
        for sequence in self.sequences:
            for layer in range(self.layers):
                found += [(name, {"sequence": sequence, "layer": layer}) for name in ("length", "block_table", "gather")]
        return found

    def create(self) -> Expectation:
        def change(sequence: int) -> None:
            self._open(sequence, sequence, [LayerTable([]) for _ in range(self.layers)])
            for held in self.ways:
                held.tables[sequence] = []

        used = set(self.ids)
        says = f"an id never used before, not among {sorted(used)}"
        return AnyOf("PAGED-01", self.on_success("create", change), range_text=says, accepts=lambda id: id not in used)

    def _open(self, sequence: int, kin: int, layers: list[LayerTable]) -> None:
        self.ids.add(sequence)
        self.sequences[sequence], self.kin[sequence] = layers, kin

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)
        shared, released = self._shares(sequence), self.first_position(sequence) > 0

        def change(ok: Any) -> None:
            del self.sequences[sequence]
            self.touched = {sequence}
            for held in self.ways:
                del held.tables[sequence]
                held.forget()
            self.settle(self.ways)

        clause, did = ("WIN-09", "released") if released else ("SHARE-06", "parted") if shared else ("PAGED-07", "drop")
        return Expectation(clause, self.on_success(did, change))

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)
        layers = [list(layer.tokens) for layer in self.sequences[sequence]]
        lengths, used = list(map(len, layers)), set(self.ids)
        child = -1 - len(self.ids)  # a placeholder until the id is known

        def ways(held: OwnershipState) -> Iterable[Alternative]:
            return forking(held, sequence, child, lengths, self.size)

        found = outcome(self.ways, self.total, ways)

        def change(new: int) -> None:
            self.settle(found.after)
            for held in self.ways:
                held.tables[new] = held.tables.pop(child)
            self._open(new, self.kin[sequence], [LayerTable(tokens) for tokens in layers])
            self.written, self.touched = (new, -1, range(0)), {new}

        then, says = self.on_success("fork", change), f"an id never used before, not among {sorted(used)}"
        if found.stays:
            return NewOrRefused("SHARE-03", then, kinds=("OutOfBlocks",), on_error=self.none_left(found), says=says, used=used)
        return AnyOf("SHARE-03", then, range_text=says, accepts=lambda id: id not in used)

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        wrong = self._unknown(sequence) + range_errors(length, self._shortest(sequence) + 1, "PositionOutOfRange", "EDIT-02")
        if not wrong and 0 < length < self.first_position(sequence):
            wrong = [("NotTruncatable", "WIN-09")]
        if wrong:
            return self.expect_error(wrong)
        filled = -(-length // self.size)

        def change(ok: Any) -> None:
            self.settle(outcome(self.ways, self.total, lambda held: cutting(held, sequence, filled)).after)
            for layer in self.sequences[sequence]:
                del layer.tokens[length:]
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        return Expectation("EDIT-01", self.on_success("truncate", change))

    def release_before(self, sequence: Any, position: Any) -> Expectation:
        most = self._shortest(sequence)
        if self.tables_alone and sequence in self.sequences:
            most = self.blocks[sequence] * self.size
        if wrong := self._unknown(sequence) + range_errors(position, most + 1, "PositionOutOfRange", "WIN-09"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            for held in self.ways:
                held.release(sequence, position // self.size)
            self.settle(self.ways)
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        return Expectation("WIN-09", self.on_success("released", change))

    def remove(self, sequence: Any, start: Any, stop: Any, frequencies: Any = None, layout: Any = "halves") -> Expectation:
        shortest = self._shortest(sequence)
        wrong = self._unknown(sequence) + range_errors(stop, shortest + 1, "PositionOutOfRange", "EDIT-10")
        wrong += range_errors(start, 1 + (shortest if wrong else stop), "PositionOutOfRange", "EDIT-10")
        if frequencies is not None and not (
            1 <= len(frequencies) <= self.row[1] // 2 and np.isfinite(np.array(frequencies, np.float64)).all()
        ):
            wrong.append(("ConfigError", "EDIT-10"))
        if wrong:
            return self.expect_error(wrong)
        if frequencies is not None and self.dtype not in PLAIN_FORMATS:
            raise ValueError("remove with frequencies is modeled for plain dtypes; checks judge the others")
        if start < (first := self.first_position(sequence)):
            raise ValueError("remove at a released position is not modeled, because it may raise or not")
        layers = [layer.tokens for layer in self.sequences[sequence]]
        lengths, gap = list(map(len, layers)), range(start, stop)
        rotates = frequencies is not None and bool(gap)
        found = outcome(self.ways, self.total, lambda held: removing(held, sequence, lengths, gap, self.size, rotates))
        moved = [tokens[stop:] for tokens in layers]
        if rotates:
            moved = [[self._rotated(token, -len(gap), frequencies, layout) for token in tokens] for tokens in moved]
        keys = [key for each in moved for key, _ in each]
        infinite = rotates and any(np.isinf(key.values).any() for key in keys)

        def change(ok: Any) -> None:
            self.settle(found.after if gap else self.ways)
            for tokens, rest in zip(layers, moved, strict=True):
                tokens[start:] = rest
            self.rotated |= rotates
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        then = self.on_success("remove", change)
        unsure = ["NonFinite"] * (rotates and any(np.isinf(key.slack).any() for key in keys))
        kinds = ["OutOfBlocks"] * bool(found.stays and gap) + ["PositionOutOfRange"] * bool(first) + unsure
        if infinite:
            return self.expect_error([(kind, "EDIT-10") for kind in dict.fromkeys(("NonFinite", *kinds))])
        if kinds:
            refused = self.none_left(Transition() if first or unsure else found)
            return AcceptedOrError("EDIT-10", then, kinds=tuple(kinds), on_error=refused)
        return Expectation("EDIT-10", then)

    def _rotated(self, token: Token, by: int, frequencies: Any, layout: Any) -> Token:
        return expected_rotation(token[0], by, frequencies, layout, self.dtype), token[1]

    def shape(self) -> Any:
        return self.layers, self.row, self.dtype, self.scales

    def save(self, sequence: Any, layers: Any = None, tokens: Any = None, heads: Any = None) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)
        if (layers, tokens, heads) != (None, None, None):
            raise ValueError("save of parts is not modeled; checks judge it")
        content = [list(layer.tokens) for layer in self.sequences[sequence]]
        return self.expect_save((self.first_position(sequence), content), empty=not any(content))

    def load(self, sequence: Any, data: Any) -> Expectation:
        wrong, found = self._unknown(sequence), self.saved_states.get(np.asarray(data).tobytes())
        if wrong or found is None or found.shape != self.shape():
            return self.expect_load(data, wrong, lambda content: None)
        first, layers = found.content
        if first % self.size:
            raise ValueError("load of a sequence whose first position is inside a block is not modeled")
        released = first // self.size
        entries = -(-max(map(len, layers)) // self.size) - released

        def ways(held: OwnershipState) -> Iterable[Alternative]:
            def change(after: OwnershipState) -> None:
                after.tables[sequence] = [[RELEASED] * self.layers for _ in range(released)]
                after.extend({sequence: entries})

            takes, without = self.layers * entries, held.copy()
            without.tables[sequence] = []
            yield Alternative(takes, change, least=max(0, takes - held.used() + without.used()))

        after = outcome(self.ways, self.total, ways)
        if not after.goes and not self.lost:
            return ExpectedError("MOVE-02", kinds=("OutOfBlocks",), on_error=lambda: self.note_unchanged("not loaded"))

        def change(content: Any) -> None:
            self.settle(after.after or self.ways)
            self.sequences[sequence] = [LayerTable(list(tokens)) for tokens in layers]
            self.kin[sequence], self.written, self.touched = sequence, (sequence, -1, range(0)), {sequence}

        loaded = self.expect_load(data, wrong, change)
        if after.stays or self.lost:
            return AcceptedOrError(loaded.clause, loaded.on_result, kinds=("OutOfBlocks",), on_error=self.none_left(after))
        return loaded

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expectation:
        given = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong = self._unknown(sequence, layer) + array_errors(*given)
        wrong += range_errors(start, self._longest(sequence, layer) + 1, "PositionOutOfRange", "PAGED-10")
        wrong += self._released(sequence, start)
        if wrong:
            end = count_tokens(*given) + (max(0, start) if isinstance(start, int) else 0)
            return self.expect_error(
                wrong + self.may_be_short({sequence: -(-end // self.size)}) + storage_errors(keys, values, self.dtype)
            )
        tokens, end = self.sequences[sequence][layer].tokens, start + len(keys)
        new, nan = stored(keys, values, self.dtype, self.scales)

        def change() -> None:
            self.overwrote = start < len(tokens)
            tokens[start:end] = new
            self.written, self.touched = (sequence, layer, range(start, end)), {sequence}

        places = [(sequence, layer, entry) for entry in range(start // self.size, -(-end // self.size))] if end > start else []
        needed = {sequence: -(-end // self.size)}
        return self.taking("PAGED-03", needed, places, "taken", change, nan)

    def append(self, sequences: Sequence[Any], layer: Any, keys: Any, values: Any) -> Expectation:
        shape = (len(sequences), *self.row)
        wrong = self._batch(sequences, layer)
        layers = [] if range_errors(layer, self.layers, "LayerOutOfRange") else [layer]
        if wrong := wrong + array_errors((keys, shape), (values, shape)):
            short = self.may_be_short(self._needed(sequences, layers))
            return self.expect_error(wrong + short + storage_errors(keys, values, self.dtype))
        return self._appending(sequences, layers, keys[None], values[None])

    def append_step(self, sequences: Sequence[Any], keys: Any, values: Any) -> Expectation:
        shape = (self.layers, len(sequences), *self.row)
        layers, wrong = list(range(self.layers)), self._batch(sequences, 0)
        if wrong := wrong + array_errors((keys, shape), (values, shape)):
            short = self.may_be_short(self._needed(sequences, layers))
            return self.expect_error(wrong + short + storage_errors(keys, values, self.dtype))
        return self._appending(sequences, layers, keys, values)

    def _needed(self, sequences: Sequence[Any], layers: list[int]) -> dict[int, int]:
        """Returns the number of entries that each live sequence of a batch needs after the append."""
        needed: dict[int, int] = {}
        for sequence, times in Counter(sequences).items():
            if sequence in self.sequences:
                tokens = times + max((len(self.sequences[sequence][layer].tokens) for layer in layers), default=0)
                needed[sequence] = -(-tokens // self.size)
        return needed

    def _appending(self, sequences: Sequence[int], layers: list[int], keys: NDArray, values: NDArray) -> Expectation:
        """Appends keys and values [layers, sequences, num_kv_heads, head_dim] to live sequences."""
        counts, places = Counter(sequences), list[TableEntry]()
        new = [stored(key, value, self.dtype, self.scales) for key, value in zip(keys, values, strict=True)]
        for sequence, layer in ((sequence, layer) for sequence in counts for layer in layers):
            length = len(self.sequences[sequence][layer].tokens)
            stop = -(-(length + counts[sequence]) // self.size)
            places += [(sequence, layer, entry) for entry in range(length // self.size, stop)]

        def change() -> None:
            self.overwrote = False
            for layer, (tokens, _) in zip(layers, new, strict=True):
                for sequence, token in zip(sequences, tokens, strict=True):
                    self.sequences[sequence][layer].tokens.append(token)
            self.written, self.touched = (-1, -1, range(0)), {*sequences}

        needed, nan = self._needed(sequences, layers), any(nan for _, nan in new)
        return self.taking("PAGED-16", needed, places, "append", change, nan, short="PAGED-16")

    def gather(self, sequence: Any, layer: Any) -> Expectation:
        wrong = self._unknown(sequence, layer)
        return self.expect_error(wrong) if wrong else self._tokens(sequence, layer, None)

    def read(self, sequence: Any, layer: Any, positions: Sequence[int]) -> Expectation:
        wrong, length = self._unknown(sequence, layer), self._longest(sequence, layer)
        wrong += [each for position in positions for each in range_errors(position, length, "PositionOutOfRange", "LAW-05")]
        wrong += [each for position in positions for each in self._released(sequence, position)]
        return self.expect_error(wrong) if wrong else self._tokens(sequence, layer, list(positions))

    def _tokens(self, sequence: int, layer: int, positions: list[int] | None) -> Expectation:
        tokens = self.sequences[sequence][layer].tokens
        positions = list(range(self.first_position(sequence), len(tokens))) if positions is None else positions
        parts, unsure = stacked([tokens[position] for position in positions], self.row, self.dtype, self.rotated)

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            if self.last_change in ANY_TOKENS:
                return ANY_TOKENS[self.last_change]
            if sequence not in self.touched and self._related(sequence):
                return "SHARE-04"
            if sequence in self.touched and self.last_change in TOKENS:
                return TOKENS[self.last_change]
            if self.last_change == "append":
                return "PAGED-16"
            if (sequence, layer) != self.written[:2]:
                return "LAW-02"
            return "PAGED-11" if self.overwrote and positions[index[0]] not in self.written[2] else "LAW-04"

        slack = self.rotated and bool(parts[0].slack.any())
        return ExpectedArrays(
            "PAGED-12", names=("keys", "values"), parts=parts, undetermined=unsure, clause_at=clause_at, always_slack=slack
        )

    def gather_batch(self, sequences: Sequence[Any], layer: Any) -> Expectation:
        if wrong := self._batch(sequences, layer):
            return self.expect_error(wrong)
        each = [self._covered(sequence, layer) for sequence in sequences]
        parts, unsure = stacked([token for part in each for token in part], self.row, self.dtype, self.rotated)
        if unsure is not None:
            return UnjudgedReply("LAW-14")
        offsets = exact_reads(np.cumsum([0, *map(len, each)]))
        slack = self.rotated and bool(parts[0].slack.any())
        return ExpectedArrays("PAGED-17", names=("keys", "values", "offsets"), parts=(*parts, offsets), always_slack=slack)

    def attend(self, sequence: Any, layer: Any, query: Any, scale: float) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong + query_errors(query, *self.row))
        parts, unsure = stacked(self._covered(sequence, layer), self.row, self.dtype, self.rotated)
        return expect_attend("ATTN-10", query, *parts, scale) if unsure is None else UnjudgedReply("ATTN-10")

    def _covered(self, sequence: int, layer: int) -> list[Token]:
        """Returns the tokens of a layer that are not released."""
        return self.sequences[sequence][layer].tokens[self.first_position(sequence) :]

    def _related(self, sequence: int) -> bool:
        """Returns whether the last call changed another sequence of the same family of forks."""
        return any(self.kin.get(each) == self.kin[sequence] for each in self.touched - {sequence})
