"""The values that tokens read back as, in the format of a paged cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.calls.messages import format_value
from kvref_conformance.families.paged.ownership_model import (
    OTHER_BLOCK,
    RELEASED,
    Alternative,
    OwnershipState,
    TableEntry,
    Transition,
    outcome,
    writing,
)
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedError,
    UnjudgedReply,
    all_finite,
    exact_reads,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReferenceModel
from kvref_conformance.oracle.saved_state import CLAUSE_BY_OBSERVATION
from kvref_conformance.oracle.token_storage import expected_tokens

Token = tuple[ExpectedReads, ExpectedReads]  # key and value, [heads, dim] each; infinite slack: unknown values


Scales = tuple[float | None, float | None]  # of keys and values, None if not given (FMT-STATIC)


def stored(keys: NDArray, values: NDArray, format: str, scales: Scales = (None, None)) -> tuple[list[Token], bool]:
    """Returns what tokens [n, heads, dim] read back as, and whether they can be rejected.

    They can if they are not finite, or would not read back finite (FMT-LEVEL-05). If such a token is accepted in a format with
    scales, the values that it reads back as are unknown.
    """
    rows = [to_float32(part) for part in (keys, values)]
    if format in PLAIN_FORMATS:
        both = [round_to(part, format) for part in rows]
        return [(exact_reads(key), exact_reads(value)) for key, value in zip(*both, strict=True)], not all_finite(*rows)
    read = [
        expected_tokens(np.where(np.isfinite(part), part, 0), format, scale) for part, scale in zip(rows, scales, strict=True)
    ]
    finite_in = [np.isfinite(part).all(axis=(1, 2)) for part in (*rows, *(each.values for each in read))]
    known: NDArray = np.logical_and.reduce(finite_in)
    for part in read:
        part.slack[~known] = np.inf
    keys_of, values_of = ([ExpectedReads(*token) for token in zip(*part, strict=True)] for part in read)
    return list(zip(keys_of, values_of, strict=True)), not known.all()


def stacked(
    tokens: Sequence[Token], row: tuple[int, int], format: str, rotated: bool = False
) -> tuple[tuple[ExpectedReads, ExpectedReads], NDArray | None]:
    """Returns keys and values [n, heads, dim] of tokens, and a mask of unknown values, or None if all are known.

    rotated: whether some keys in a plain dtype were rotated, so that they have a slack.
    """
    parts = [[token[which] for token in tokens] for which in (0, 1)]
    values = [np.array([part.values for part in each], np.float32).reshape(-1, *row) for each in parts]
    if format in PLAIN_FORMATS and not rotated:
        return (exact_reads(values[0]), exact_reads(values[1])), None
    slack = [np.array([part.slack for part in each], np.float64).reshape(-1, *row) for each in parts]
    unsure = np.isinf(slack[0])
    both = [ExpectedReads(value, np.where(unsure, 0, each)) for value, each in zip(values, slack, strict=True)]
    return (both[0], both[1]), unsure if unsure.any() else None


# The reference model of the block tables of a paged cache, as far as they can be known from the replies (see ownership_model.py).

MOST_WAYS = 64  # usually there is one, because the number of free blocks is observed after each call


@dataclass
class LayerTable:
    tokens: list[Token]


class TableModel(ReferenceModel):
    """ways: the possible states of the block tables. sequences: id -> the tokens of each layer."""

    clause_by_observation: ClassVar = {
        **CLAUSE_BY_OBSERVATION,
        ("new", "num_free_blocks"): "LAW-03", ("create", "num_free_blocks"): "PAGED-02",
        ("drop", "num_free_blocks"): "PAGED-07", ("ensured", "num_free_blocks"): "PAGED-04",
        ("short", "num_free_blocks"): "PAGED-05", ("short", "block_table"): "PAGED-05",
        **{("append", seen): "PAGED-16" for seen in ("num_free_blocks", "length", "block_table")},
        **{
            (on_success, seen): clause
            for on_success, clause in (
                ("fork", "SHARE-03"), ("copied", "SHARE-05"), ("parted", "SHARE-06"), ("no copy", "SHARE-07"),
                ("truncate", "EDIT-04"), ("remove", "EDIT-04"), ("released", "WIN-09"),
            )
            for seen in ("num_free_blocks", "length", "block_table")
        },
        "num_free_blocks": "PAGED-03", "utilization": "PAGED-15", "length": "PAGED-09", "block_table": "PAGED-03",
    }  # fmt: skip

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str,
        key_scale: float | None = None, value_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.total, self.size, self.layers, self.dtype = num_blocks, block_size, num_layers, dtype
        self.row, self.scales = (num_kv_heads, head_dim), (key_scale, value_scale)
        self.ways = [OwnershipState(num_layers)]
        self.lost = False  # whether there were more than MOST_WAYS possible states
        self.kin: dict[int, int] = {}  # sequence -> the ancestor that it descends from by forks
        self.sequences: dict[int, list[LayerTable]] = {}
        self.ids: set[int] = set()
        self.written: tuple[int, int, range] = (-1, -1, range(0))  # (sequence, layer, positions) of the last write
        self.touched: set[int] = set()  # the sequences that the last operation changed
        self.overwrote = False
        self.rotated = False  # whether `remove` rotated keys, which are then known within a slack

    @property
    def blocks(self) -> dict[int, int]:
        """The number of entries of each sequence, in one of the possible states."""
        return {sequence: len(table) for sequence, table in self.ways[0].tables.items()}

    @property
    def free(self) -> int:
        """The number of free blocks, in one of the possible states."""
        return self.total - self.ways[0].used()

    def first_position(self, sequence: Any) -> int:
        """Returns the first position that is not released, 0 for an unknown sequence."""
        return self.ways[0].num_released(sequence) * self.size if sequence in self.sequences else 0

    def table(self, sequence: int, layer: int) -> list[int] | None:
        """Returns the block ids of a layer as the implementation last reported them, or None if not all are known."""
        return self.ways[0].table(sequence, layer)

    def num_free_blocks(self) -> Expectation:
        return self._counted("num_free_blocks", lambda held: self.total - held.used())

    def utilization(self) -> Expectation:
        return self._counted("utilization", lambda held: held.used() / self.total if self.total else 0.0)

    def _counted(self, name: str, count: Callable[[OwnershipState], float]) -> Expectation:
        """Expects the count of one of the possible states; afterwards the states with other counts are removed."""
        counts = [count(held) for held in self.ways]
        if self.lost:
            return UnjudgedReply(self.clause_of(name))
        if len({*counts}) == 1:
            return ExactValue(self.clause_of(name), value=counts[0])

        def close(got: Any) -> list[OwnershipState]:
            return [held for held, want in zip(self.ways, counts, strict=True) if abs(got - want) <= 2.0**-22 * want]

        def then(got: Any) -> None:
            self.ways = close(got)

        says = " or ".join(map(str, sorted({*counts})))
        return AnyOf(self.clause_of(name), then, range_text=says, accepts=lambda got: bool(close(got)))

    def ensure_capacity(self, sequence: Any, num_tokens: Any) -> Expectation:
        negative = range_errors(num_tokens, None, "PositionOutOfRange")
        wrong = self._unknown(sequence) + negative
        if not negative and sequence not in self.sequences and -(-num_tokens // self.size) > self.total // self.layers:
            wrong.append(("OutOfBlocks", "PAGED-05"))
        if wrong:
            return self.expect_error(wrong)
        needed = -(-num_tokens // self.size)
        more = any(needed > len(held.tables[sequence]) for held in self.ways)
        return self.taking("PAGED-04", {sequence: needed}, [], "taken" if more else "ensured")

    def taking(
        self, clause: str, needed: dict[int, int], places: list[TableEntry], did: str, change: Callable[[], None] = lambda: None,
        nan: bool = False, short: str = "PAGED-05",
    ) -> Expectation:  # fmt: skip
        """Expects an operation that gives sequences at least `needed` entries and copies shared blocks at `places`.

        did: the name of the operation for `clause_of`. change: applied on success. nan: NonFinite is permitted. short: the clause
        of OutOfBlocks.
        """

        def ways(held: OwnershipState) -> Iterable[Alternative]:
            more = {each: max(0, count - len(held.tables[each])) for each, count in needed.items()}
            return writing(held, more, places)

        found = outcome(self.ways, self.total, ways)
        copied = any(held.copies(places) for held in self.ways)
        refused = [("OutOfBlocks", "SHARE-07" if copied else short)] if found.stays or self.lost else []
        if not found.goes and not self.lost:
            return self.expect_error(refused + ([("NonFinite", "LAW-14")] if nan else []))

        def then(ok: Any) -> None:
            self.settle(found.after or self.ways)
            change()

        done = self.on_success("copied" if copied else did, then)
        kinds = [kind for kind, _ in refused] + (["NonFinite"] if nan else [])
        refusing = self.none_left(Transition() if nan else found)  # it can have been rejected because of the numbers
        return AcceptedOrError(clause, done, kinds=tuple(kinds), on_error=refusing) if kinds else Expectation(clause, done)

    def none_left(self, found: Transition) -> Callable[[], None]:
        """Returns what to do after OutOfBlocks: only states in which blocks were missing remain possible."""

        def refused() -> None:
            self.ways = found.stays or self.ways
            self.note_unchanged("refused")

        return refused

    def settle(self, ways: list[OwnershipState]) -> None:
        """Sets the possible states. If there are more than MOST_WAYS, block counts are not judged from then on."""
        self.ways = list({held.form(): held for held in ways}.values()) if len(ways) > 1 else ways
        self.lost |= len(self.ways) > MOST_WAYS
        del self.ways[MOST_WAYS:]

    def _shares(self, sequence: int) -> bool:
        """Returns whether another sequence can share a block with this one."""
        for held in self.ways:
            listed = held.references()
            if any(listed[name] > 1 for entry in held.tables[sequence] for name in entry):
                return True
        return False

    def expect_error(self, wrong: Errors) -> ExpectedError:
        if {kind for kind, _ in wrong} == {"OutOfBlocks"}:
            short = "no copy" if wrong[0][1] == "SHARE-07" else "short"
            return ExpectedError(wrong[0][1], kinds=("OutOfBlocks",), on_error=lambda: self.note_unchanged(short))
        return super().expect_error(wrong)

    def may_be_short(self, needed: dict[Any, int]) -> Errors:
        """Returns OutOfBlocks if an otherwise invalid call can also lack blocks. An unknown sequence can have any length."""
        if any(count > self.total // self.layers for sequence, count in needed.items() if sequence not in self.sequences):
            return [("OutOfBlocks", "PAGED-05")]
        for held in self.ways:
            tables = {sequence: held.tables[sequence] for sequence in needed if sequence in self.sequences}
            entries = [(each, 0, entry) for each, table in tables.items() for entry in range(len(table))]
            more = sum(max(0, needed[sequence] - len(table)) for sequence, table in tables.items())
            if self.layers * more + held.copies(held.every_layer(entries)) > self.total - held.used():
                return [("OutOfBlocks", "PAGED-05")]
        return []

    def block_table(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong)
        if self.lost:
            return UnjudgedReply("PAGED-13")
        counts = {len(held.tables[sequence]) for held in self.ways}
        fitting: list[OwnershipState] = []

        def accepts(table: list[int]) -> bool:
            fitting[:] = [held for held in self.ways if held.accepts(sequence, layer, table)]
            return all(RELEASED <= block < self.total for block in table) and bool(fitting)

        def note(table: list[int]) -> None:
            self.ways = fitting
            for held in self.ways:
                held.see(sequence, layer, table)

        def tables() -> str:
            """Returns the tables that are possible, for example "[3, other]"."""
            found = " or ".join(dict.fromkeys(held.describe_table(sequence, layer) for held in self.ways))
            others = f"; {OTHER_BLOCK}: different blocks of [0, {self.total}) that no table listed before"
            return found + others if OTHER_BLOCK in found else found

        length = (min(counts), self.clause_of("block_table")) if len(counts) == 1 else None
        clause = self.clause_by_observation.get((self.last_change, "block_table"), "PAGED-13")
        return AnyOf(clause, note, details=tables, accepts=accepts, length=length)

    def block_tables(self, sequences: Sequence[Any], layer: Any) -> Expectation:
        if wrong := self._batch(sequences, layer):
            return self.expect_error(wrong)
        if self.lost:
            return UnjudgedReply("PAGED-17")
        seen = [self.table(sequence, layer) for sequence in sequences]

        def fits(held: OwnershipState, got: NDArray) -> bool:
            counts = [len(held.tables[sequence]) for sequence in sequences]
            if got.shape != (len(sequences), max(counts, default=0)):
                return False
            rows = zip(got.tolist(), sequences, counts, strict=True)
            return all(held.accepts(each, layer, row[:count]) and not {*row[count:]} - {-1} for row, each, count in rows)

        says = f"[{len(sequences)}, blocks of the longest table] with the rows {seen}, each padded with -1"
        return AnyOf("PAGED-17", range_text=says, accepts=lambda got: any(fits(held, got) for held in self.ways))

    def slot_mapping(self, sequence: Any, layer: Any, start: Any, count: Any) -> Expectation:
        rooms = [len(held.tables[sequence]) if sequence in held.tables else self.total // self.layers for held in self.ways]
        room = max(rooms) * self.size
        negative = range_errors(count, None, "PositionOutOfRange") + range_errors(start, None, "PositionOutOfRange")
        past_the_end = [] if negative else range_errors(start + count, room + 1, "PositionOutOfRange")
        if wrong := self._unknown(sequence, layer) + negative + past_the_end + self._released(sequence, start):
            return self.expect_error(wrong)
        if self.lost or start + count > min(rooms) * self.size:
            return AcceptedOrError("PAGED-06", kinds=("PositionOutOfRange",))
        table, positions = self.table(sequence, layer), range(start, start + count)
        if table is not None and len(table) * self.size >= start + count:
            want = [table[p // self.size] * self.size + p % self.size for p in positions]
            return AnyOf("PAGED-06", range_text=format_value(want), accepts=lambda slots: slots == want)  # the ids are known

        def accepts(slots: list[int]) -> bool:
            offsets = [slot % self.size for slot in slots] == [p % self.size for p in positions]
            return offsets and all(0 <= slot < self.total * self.size for slot in slots) and len(set(slots)) == count

        return AnyOf(
            "PAGED-06", range_text=f"{count} slots; position p is at offset p % {self.size} of its block", accepts=accepts
        )

    def lengths(self, sequences: Sequence[Any], layer: Any) -> Expectation:
        if wrong := self._batch(sequences, layer):
            return self.expect_error(wrong)
        return ExactValue("PAGED-17", value=[len(self.sequences[sequence][layer].tokens) for sequence in sequences])

    def length(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("length"), value=len(self.sequences[sequence][layer].tokens))

    def _batch(self, sequences: Sequence[Any], layer: Any) -> Errors:
        wrong = [each for sequence in sequences for each in self._unknown(sequence, layer)]
        return wrong or range_errors(layer, self.layers, "LayerOutOfRange")  # for an empty batch, check the layer

    def _unknown(self, sequence: Any, layer: Any = 0) -> Errors:
        if sequence not in self.sequences:
            return [("SequenceNotFound", "PAGED-08"), *range_errors(layer, self.layers, "LayerOutOfRange")]
        return range_errors(layer, self.layers, "LayerOutOfRange")

    def _released(self, sequence: Any, position: Any) -> Errors:
        before = isinstance(position, int) and 0 <= position < self.first_position(sequence)
        return [("PositionOutOfRange", "WIN-09")] if before else []

    def _shortest(self, sequence: Any) -> int:
        """Returns the length of the shortest layer, or the largest possible length for an unknown sequence."""
        layers = self.sequences.get(sequence)
        return min(len(each.tokens) for each in layers) if layers else self.total // self.layers * self.size

    def _longest(self, sequence: Any, layer: Any) -> int:
        """Returns the length of a layer, or the largest possible length for an unknown layer or sequence."""
        if sequence not in self.sequences:
            return self.total // self.layers * self.size
        layers = self.sequences[sequence]
        known = layers if range_errors(layer, self.layers, "LayerOutOfRange") else [layers[layer]]
        return max(len(each.tokens) for each in known)
