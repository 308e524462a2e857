"""The paged cache as a dict of sequences, each a list of tokens a layer."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import show
from kvref_conformance.families.paged.held import Held, Outcome, Place, Way, cutting, forking, outcome, removing, writing
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
from kvref_conformance.outcome import Broken


@dataclass
class Layer:
    tokens: list[tuple[NDArray, NDArray]]


# Whose demand it is what a sequence reads as, once this was done to it.
TOKENS = {"fork": "SHARE-03", "copied": "SHARE-05", "truncate": "EDIT-01", "remove": "EDIT-10"}


@dataclass(frozen=True)
class NewOrRefused(TakenOrRefused):
    """A number that was no one's before, or that there was no room for the copies."""

    says: str = ""
    used: Container[int] = ()

    def look(self, ok: Any, op: str, level: Any) -> None:
        if ok in self.used:
            raise Broken(op, self.says, show(ok), "PAGED-01")


class Paged(Model):
    family = "paged"
    blamed: ClassVar = {
        ("new", "num_free_blocks"): "LAW-03", ("create", "num_free_blocks"): "PAGED-02",
        ("drop", "num_free_blocks"): "PAGED-07", ("ensured", "num_free_blocks"): "PAGED-04",
        ("short", "num_free_blocks"): "PAGED-05", ("short", "block_table"): "PAGED-05",
        **{("append", seen): "PAGED-16" for seen in ("num_free_blocks", "length", "block_table")},
        **{
            (did, seen): clause
            for did, clause in (
                ("fork", "SHARE-03"), ("copied", "SHARE-05"), ("parted", "SHARE-06"), ("no copy", "SHARE-07"),
                ("truncate", "EDIT-04"), ("remove", "EDIT-04"),
            )
            for seen in ("num_free_blocks", "length", "block_table")
        },
        "num_free_blocks": "PAGED-03", "utilization": "PAGED-15", "length": "PAGED-09", "block_table": "PAGED-03",
    }  # fmt: skip

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        super().__init__()
        self.total, self.size, self.layers, self.dtype = num_blocks, block_size, num_layers, dtype
        self.row = num_kv_heads, head_dim
        self.ways = [Held(num_layers)]  # that the blocks may be held
        self.kin: dict[int, int] = {}  # of each sequence, the one that it comes from by forks
        self.sequences: dict[int, list[Layer]] = {}
        self.ids: set[int] = set()
        self.written: tuple[int, int, range] = (-1, -1, range(0))  # sequence, layer and positions of the last write
        self.touched: set[int] = set()  # sequences that the last change was made to
        self.overwrote = False

    @property
    def blocks(self) -> dict[int, int]:
        """Entries of each sequence, in every layer; where that is open, in one of the ways that there are."""
        return {sequence: len(table) for sequence, table in self.ways[0].tables.items()}

    @property
    def free(self) -> int:
        """Blocks; where that is open, in one of the ways that there are."""
        return self.total - self.ways[0].used()

    def table(self, sequence: int, layer: int) -> list[int] | None:
        """The blocks of a layer as last seen: only the implementation knows which it took. None where not all were."""
        return self.ways[0].table(sequence, layer)

    def looks(self) -> list[Look]:
        found: list[Look] = [("num_free_blocks", {}), ("utilization", {})]
        for sequence in self.sequences:
            for layer in range(self.layers):
                found += [(name, {"sequence": sequence, "layer": layer}) for name in ("length", "block_table", "gather")]
        return found

    def num_free_blocks(self) -> Expected:
        return self._counted("num_free_blocks", lambda held: self.total - held.used())

    def utilization(self) -> Expected:
        return self._counted("utilization", lambda held: held.used() / self.total if self.total else 0.0)

    def _counted(self, name: str, count: Callable[[Held], float]) -> Expected:
        """One number, and where things may be in several ways, one of several, after which fewer are left."""
        counts = [count(held) for held in self.ways]
        if len({*counts}) == 1:
            return Value(self.blame(name), value=counts[0])

        def close(got: Any) -> list[Held]:
            return [held for held, want in zip(self.ways, counts, strict=True) if abs(got - want) <= 2.0**-22 * want]

        def then(got: Any) -> None:
            self.ways = close(got)

        says = " or ".join(map(str, sorted({*counts})))
        return Choice(self.blame(name), then, says=says, accepts=lambda got: bool(close(got)))

    def create(self) -> Expected:
        def change(sequence: int) -> None:
            self._open(sequence, sequence, [Layer([]) for _ in range(self.layers)])
            for held in self.ways:
                held.tables[sequence] = []

        used = set(self.ids)
        says = f"an id never used before, not among {sorted(used)}"
        return Choice("PAGED-01", self.did("create", change), says=says, accepts=lambda id: id not in used)

    def _open(self, sequence: int, kin: int, layers: list[Layer]) -> None:
        self.ids.add(sequence)
        self.sequences[sequence], self.kin[sequence] = layers, kin

    def drop(self, sequence: Any) -> Expected:
        if wrong := self._unknown(sequence):
            return self.refuse(wrong)
        shared = self._shares(sequence)

        def change(ok: Any) -> None:
            del self.sequences[sequence]
            self.touched = {sequence}
            for held in self.ways:
                del held.tables[sequence]
                held.forget()

        return Expected("SHARE-06" if shared else "PAGED-07", self.did("parted" if shared else "drop", change))

    def fork(self, sequence: Any) -> Expected:
        if wrong := self._unknown(sequence):
            return self.refuse(wrong)
        layers = [list(layer.tokens) for layer in self.sequences[sequence]]
        lengths, used = list(map(len, layers)), set(self.ids)
        child = -1 - len(self.ids)  # until it has a number

        def ways(held: Held) -> Iterable[Way]:
            return forking(held, sequence, child, lengths, self.size)

        found = outcome(self.ways, self.total, ways)

        def change(new: int) -> None:
            self.ways = found.after
            for held in self.ways:
                held.tables[new] = held.tables.pop(child)
            self._open(new, self.kin[sequence], [Layer(tokens) for tokens in layers])
            self.written, self.touched = (new, -1, range(0)), {new}

        then, says = self.did("fork", change), f"an id never used before, not among {sorted(used)}"
        if found.stays:
            return NewOrRefused("SHARE-03", then, kinds=("OutOfBlocks",), refused=self._none(found), says=says, used=used)
        return Choice("SHARE-03", then, says=says, accepts=lambda id: id not in used)

    def truncate(self, sequence: Any, length: Any) -> Expected:
        wrong = self._unknown(sequence) + not_in_range(length, self._shortest(sequence) + 1, "PositionOutOfRange", "EDIT-02")
        if wrong:
            return self.refuse(wrong)
        filled = -(-length // self.size)

        def change(ok: Any) -> None:
            self.ways = outcome(self.ways, self.total, lambda held: cutting(held, sequence, filled)).after
            for layer in self.sequences[sequence]:
                del layer.tokens[length:]
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        return Expected("EDIT-01", self.did("truncate", change))

    def remove(self, sequence: Any, start: Any, stop: Any, theta: Any = None, layout: Any = "halves") -> Expected:
        shortest = self._shortest(sequence)
        wrong = self._unknown(sequence) + not_in_range(stop, shortest + 1, "PositionOutOfRange", "EDIT-10")
        wrong += not_in_range(start, 1 + (shortest if wrong else stop), "PositionOutOfRange", "EDIT-10")
        if theta is not None:
            raise ValueError("keys that are turned are for the checks to judge")
        if wrong:
            return self.refuse(wrong)
        layers = [layer.tokens for layer in self.sequences[sequence]]
        lengths, gap = list(map(len, layers)), range(start, stop)
        found = outcome(self.ways, self.total, lambda held: removing(held, sequence, lengths, gap, self.size))

        def change(ok: Any) -> None:
            self.ways = found.after if gap else self.ways
            for tokens in layers:
                del tokens[start:stop]
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        then = self.did("remove", change)
        if found.stays and gap:
            return TakenOrRefused("EDIT-10", then, kinds=("OutOfBlocks",), refused=self._none(found))
        return Expected("EDIT-10", then)

    def ensure_capacity(self, sequence: Any, num_tokens: Any) -> Expected:
        negative = not_in_range(num_tokens, None, "PositionOutOfRange")
        wrong = self._unknown(sequence) + negative
        if not negative and sequence not in self.sequences and -(-num_tokens // self.size) > self.total // self.layers:
            wrong.append(("OutOfBlocks", "PAGED-05"))
        if wrong:
            return self.refuse(wrong)
        needed = -(-num_tokens // self.size)
        more = any(needed > len(held.tables[sequence]) for held in self.ways)
        return self._taking("PAGED-04", {sequence: needed}, [], "taken" if more else "ensured")

    def _taking(
        self, clause: str, needed: dict[int, int], places: list[Place], did: str, change: Callable[[], None] = lambda: None,
        nan: bool = False, short: str = "PAGED-05",
    ) -> Expected:  # fmt: skip
        """Entries that sequences hold at least, and blocks of their own at places; then a change. nan: that may be refused."""

        def ways(held: Held) -> Iterable[Way]:
            more = {each: max(0, count - len(held.tables[each])) for each, count in needed.items()}
            return writing(held, more, places)

        found = outcome(self.ways, self.total, ways)
        copied = any(held.copies(places) for held in self.ways)
        refused = [("OutOfBlocks", "SHARE-07" if copied else short)] if found.stays else []
        if not found.goes:
            return self.refuse(refused)

        def then(ok: Any) -> None:
            self.ways = found.after
            change()

        done = self.did("copied" if copied else did, then)
        kinds = [kind for kind, _ in refused] + (["NonFinite"] if nan else [])
        return TakenOrRefused(clause, done, kinds=tuple(kinds), refused=self._none(found)) if kinds else Expected(clause, done)

    def _none(self, found: Outcome) -> Callable[[], None]:
        """What is known once it was refused for want of blocks."""

        def refused() -> None:
            self.ways = found.stays or self.ways
            self.last = "refused"

        return refused

    def _shares(self, sequence: int) -> bool:
        """Whether another sequence lists a block of this one's."""
        for held in self.ways:
            listed = held.references()
            if any(listed[name] > 1 for entry in held.tables[sequence] for name in entry):
                return True
        return False

    def refuse(self, wrong: Wrong) -> Refused:
        if {kind for kind, _ in wrong} == {"OutOfBlocks"}:
            short = "no copy" if wrong[0][1] == "SHARE-07" else "short"
            return Refused(wrong[0][1], kinds=("OutOfBlocks",), refused=lambda: self.did(short)(None))
        return super().refuse(wrong)

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expected:
        given = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong = self._unknown(sequence, layer) + wrong_arrays(*given)
        wrong += not_in_range(start, self._longest(sequence, layer) + 1, "PositionOutOfRange", "PAGED-10")
        if wrong:
            end = tokens_of(*given) + (max(0, start) if isinstance(start, int) else 0)
            return self.refuse(wrong + self._may_be_short({sequence: -(-end // self.size)}) + not_finite(keys, values))
        tokens, end = self.sequences[sequence][layer].tokens, start + len(keys)

        def change() -> None:
            rows = zip(*(round_to(float32(part), self.dtype) for part in (keys, values)), strict=True)
            self.overwrote = start < len(tokens)
            tokens[start:end] = list(rows)
            self.written, self.touched = (sequence, layer, range(start, end)), {sequence}

        places = [(sequence, layer, entry) for entry in range(start // self.size, -(-end // self.size))] if end > start else []
        needed = {sequence: -(-end // self.size)}
        return self._taking("PAGED-03", needed, places, "taken", change, not finite(keys, values))

    def append(self, sequences: Sequence[Any], layer: Any, keys: Any, values: Any) -> Expected:
        shape = (len(sequences), *self.row)
        wrong = self._batch(sequences, layer)
        layers = [] if not_in_range(layer, self.layers, "LayerOutOfRange") else [layer]
        if wrong := wrong + wrong_arrays((keys, shape), (values, shape)):
            return self.refuse(wrong + self._may_be_short(self._needed(sequences, layers)) + not_finite(keys, values))
        return self._appending(sequences, layers, keys[None], values[None])

    def append_step(self, sequences: Sequence[Any], keys: Any, values: Any) -> Expected:
        shape = (self.layers, len(sequences), *self.row)
        layers, wrong = list(range(self.layers)), self._batch(sequences, 0)
        if wrong := wrong + wrong_arrays((keys, shape), (values, shape)):
            return self.refuse(wrong + self._may_be_short(self._needed(sequences, layers)) + not_finite(keys, values))
        return self._appending(sequences, layers, keys, values)

    def _needed(self, sequences: Sequence[Any], layers: list[int]) -> dict[int, int]:
        """The entries that each sequence holds at least once those of a batch that there are have a token more."""
        needed: dict[int, int] = {}
        for sequence, times in Counter(sequences).items():
            if sequence in self.sequences:
                tokens = times + max((len(self.sequences[sequence][layer].tokens) for layer in layers), default=0)
                needed[sequence] = -(-tokens // self.size)
        return needed

    def _may_be_short(self, needed: dict[Any, int]) -> Wrong:
        """Whether blocks lack for a call that is wrong in another way too. An unknown sequence could be any."""
        if any(count > self.total // self.layers for sequence, count in needed.items() if sequence not in self.sequences):
            return [("OutOfBlocks", "PAGED-05")]
        for held in self.ways:
            tables = {sequence: held.tables[sequence] for sequence in needed if sequence in self.sequences}
            entries = [(each, 0, entry) for each, table in tables.items() for entry in range(len(table))]
            more = sum(max(0, needed[sequence] - len(table)) for sequence, table in tables.items())
            if self.layers * more + held.copies(held.every_layer(entries)) > self.total - held.used():
                return [("OutOfBlocks", "PAGED-05")]
        return []

    def _appending(self, sequences: Sequence[int], layers: list[int], keys: NDArray, values: NDArray) -> Expected:
        """keys, values: [layers, sequences, kv heads, head_dim], of known sequences."""
        counts, places = Counter(sequences), list[Place]()
        for sequence, layer in ((sequence, layer) for sequence in counts for layer in layers):
            length = len(self.sequences[sequence][layer].tokens)
            stop = -(-(length + counts[sequence]) // self.size)
            places += [(sequence, layer, entry) for entry in range(length // self.size, stop)]

        def change() -> None:
            self.overwrote = False
            rounded = [round_to(float32(part), self.dtype) for part in (keys, values)]
            for row, layer in enumerate(layers):
                for column, sequence in enumerate(sequences):
                    self.sequences[sequence][layer].tokens.append((rounded[0][row, column], rounded[1][row, column]))
            self.written, self.touched = (-1, -1, range(0)), {*sequences}

        needed, nan = self._needed(sequences, layers), not finite(keys, values)
        return self._taking("PAGED-16", needed, places, "append", change, nan, short="PAGED-16")

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
            if sequence not in self.touched and self._related(sequence):
                return "SHARE-04"
            if sequence in self.touched and self.last in TOKENS:
                return TOKENS[self.last]
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
        counts = {len(held.tables[sequence]) for held in self.ways}
        tables = {(each, at): self.table(each, at) for each in self.sequences for at in range(self.layers)}
        seen = ", ".join(f"{table} of {each}, layer {at}" for (each, at), table in tables.items() if table)

        def fitting(table: list[int]) -> list[Held]:
            return [held for held in self.ways if held.accepts(sequence, layer, table)]

        def accepts(table: list[int]) -> bool:
            return all(0 <= block < self.total for block in table) and bool(fitting(table))

        def note(table: list[int]) -> None:
            self.ways = fitting(table)
            for held in self.ways:
                held.see(sequence, layer, table)

        count = " or ".join(map(str, sorted(counts)))
        says = f"{count} blocks of [0, {self.total}), that others list as far as they are shared; seen: {seen}"
        length = (min(counts), self.blame("block_table")) if len(counts) == 1 else None
        clause = self.blamed.get((self.last, "block_table"), "PAGED-13")
        return Choice(clause, note, says=says, accepts=accepts, length=length)

    def slot_mapping(self, sequence: Any, layer: Any, start: Any, count: Any) -> Expected:
        rooms = [len(held.tables[sequence]) if sequence in held.tables else self.total // self.layers for held in self.ways]
        room = max(rooms) * self.size
        negative = not_in_range(count, None, "PositionOutOfRange") + not_in_range(start, None, "PositionOutOfRange")
        past_the_end = [] if negative else not_in_range(start + count, room + 1, "PositionOutOfRange")
        if wrong := self._unknown(sequence, layer) + negative + past_the_end:
            return self.refuse(wrong)
        if start + count > min(rooms) * self.size:
            return TakenOrRefused("PAGED-06", kinds=("PositionOutOfRange",))
        table, positions = self.table(sequence, layer), range(start, start + count)
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
        seen = [self.table(sequence, layer) for sequence in sequences]

        def fits(held: Held, got: NDArray) -> bool:
            counts = [len(held.tables[sequence]) for sequence in sequences]
            if got.shape != (len(sequences), max(counts, default=0)):
                return False
            rows = zip(got.tolist(), sequences, counts, strict=True)
            return all(held.accepts(each, layer, row[:count]) and not {*row[count:]} - {-1} for row, each, count in rows)

        says = f"[{len(sequences)}, most blocks of any] with the rows {seen}, each filled up with -1"
        return Choice("PAGED-17", says=says, accepts=lambda got: any(fits(held, got) for held in self.ways))

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

    def _related(self, sequence: int) -> bool:
        """Whether the last call changed another sequence that comes from where this one does."""
        return any(self.kin.get(each) == self.kin[sequence] for each in self.touched - {sequence})

    def _shortest(self, sequence: Any) -> int:
        """The length of the shortest layer; of a sequence that is not there, the longest there could be."""
        layers = self.sequences.get(sequence)
        return min(len(each.tokens) for each in layers) if layers else self.total // self.layers * self.size

    def _longest(self, sequence: Any, layer: Any) -> int:
        """The layer's length; of a layer or a sequence that is not there, the longest there could be."""
        if sequence not in self.sequences:
            return self.total // self.layers * self.size
        layers = self.sequences[sequence]
        known = layers if not_in_range(layer, self.layers, "LayerOutOfRange") else [layers[layer]]
        return max(len(each.tokens) for each in known)
