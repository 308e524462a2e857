"""A nondeterministic model of block ownership: which table entries list the same block.

Each allocated block has a name, and tables that share a block list the same name. Which block of the pool that is becomes known
when the implementation reports it. If the specification leaves a choice (fork can copy, truncate can keep blocks), the model is a
list of `OwnershipState` objects, one per state that is consistent with the replies so far. Later replies remove states from
the list.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvref_conformance.calls.messages import format_list

TableEntry = tuple[int, int, int]  # sequence, layer, entry
OTHER_BLOCK = "other"  # stands for a block with an unknown id, in messages
RELEASED = -1  # the name and the id in the place of a released block (WIN-09); names of blocks are positive


class OwnershipState:
    """One possible state. tables: per sequence, a list of entries with one block name per layer.

    blocks: the known block id per name. whole: whether all layers share one table, so that a copy copies all of them; None while
    this is unknown.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tables: dict[int, list[list[int]]] = {}
        self.blocks: dict[int, int] = {}  # block name -> block id
        self.whole: bool | None = None if layers > 1 else False
        self.named = 0

    def copy(self) -> "OwnershipState":
        new = type(self)(self.layers)
        new.__dict__ |= self.__dict__
        new.tables = {sequence: [list(entry) for entry in table] for sequence, table in self.tables.items()}
        new.blocks = dict(self.blocks)
        return new

    def references(self) -> Counter[int]:
        """Returns the number of table entries that list each block."""
        listed = Counter(chain.from_iterable(chain.from_iterable(self.tables.values())))
        del listed[RELEASED]
        return listed

    def used(self) -> int:
        return len(self.references())

    def others(self, listed: dict[int, int]) -> dict[int, int]:
        """Returns, per block, how many other owners need it unchanged when one owner writes. listed: entries per block."""
        return {name: times - 1 for name, times in listed.items()}

    def new_name(self) -> int:
        self.named += 1
        return self.named

    def extend(self, more: dict[int, int]) -> None:
        """Adds more[sequence] entries with new blocks to each sequence."""
        for sequence, count in more.items():
            self.tables[sequence] += [[self.new_name() for _ in range(self.layers)] for _ in range(count)]

    def to_copy(self, places: Iterable[TableEntry]) -> dict[int, tuple[list[TableEntry], int]]:
        """Returns, per block to be copied before a write: (the written places that list it, the number of other owners)."""
        writers: dict[int, list[TableEntry]] = {}
        for place in dict.fromkeys(places):
            if (name := self.at(place)) is not None:
                writers.setdefault(name, []).append(place)
        listed = self.references() if writers else {}
        others = self.others({name: listed[name] for name in writers})
        return {name: (writers[name], count) for name, count in others.items() if count > 0}

    def at(self, place: TableEntry) -> int | None:
        """Returns the block name at a place, or None if the entry is released or after the end of the table."""
        sequence, layer, entry = place
        table = self.tables[sequence]
        name = table[entry][layer] if entry < len(table) else RELEASED
        return None if name == RELEASED else name

    def num_released(self, sequence: int) -> int:
        """Returns the number of released entries, which are the first ones of the table."""
        return sum(entry[0] == RELEASED for entry in self.tables[sequence])

    def release(self, sequence: int, count: int) -> None:
        """Releases the first `count` entries."""
        for entry in self.tables[sequence][:count]:
            entry[:] = [RELEASED] * self.layers
        self.forget()

    def copies(self, places: Iterable[TableEntry]) -> int:
        """Returns how many blocks a write to these places has to copy (SHARE-05)."""
        return sum(min(len(places), others) for places, others in self.to_copy(places).values())

    def part(self, places: Iterable[TableEntry]) -> None:
        """Gives the written places blocks of their own. If all owners of a block write to it, any one of them keeps it."""
        for writers, _ in self.to_copy(places).values():
            for sequence, layer, entry in writers:
                self.tables[sequence][entry][layer] = self.new_name()
        self.forget()

    def every_layer(self, places: Iterable[TableEntry]) -> list[TableEntry]:
        return [(sequence, layer, entry) for sequence, _, entry in places for layer in range(self.layers)]

    def forget(self) -> None:
        """Forgets the ids of blocks that no table lists."""
        if self.blocks:
            listed = self.references()
            self.blocks = {name: block for name, block in self.blocks.items() if name in listed}

    def form(self) -> Any:
        """Returns a value that is equal for two states that differ in the names of blocks only."""
        renamed = self.renamed()
        tables = tuple(
            (sequence, tuple(tuple((renamed[name], self.blocks.get(name)) for name in entry) for entry in table))
            for sequence, table in sorted(self.tables.items())
        )
        return self.whole, tables

    def renamed(self) -> dict[int, int]:
        """Returns a number for each name, in the order in which the tables list the names."""
        listed = (name for _, table in sorted(self.tables.items()) for entry in table for name in entry)
        return {name: number for number, name in enumerate(dict.fromkeys(listed))}

    def outcomes(self) -> "Sequence[OwnershipState]":
        """Returns the possible states after a call that led to this one. Subclasses return several."""
        return [self]

    def hurried(self, takes: int) -> "Sequence[OwnershipState]":
        """Returns further possible states if a call allocates `takes` blocks before it frees others. Subclasses return some."""
        return []

    def table(self, sequence: int, layer: int) -> list[int] | None:
        """Returns the block ids of a layer, or None if not all are known."""
        known = {**self.blocks, RELEASED: RELEASED}
        found = [known.get(entry[layer]) for entry in self.tables[sequence]]
        return None if None in found else [block for block in found if block is not None]

    def describe_table(self, sequence: int, layer: int) -> str:
        """Returns the table of a layer as text: the known block ids, and OTHER_BLOCK for each block that is not known yet."""
        known = {**self.blocks, RELEASED: RELEASED}
        return f"[{format_list([known.get(entry[layer], OTHER_BLOCK) for entry in self.tables[sequence]], str)}]"

    def accepts(self, sequence: int, layer: int, blocks: list[int]) -> bool:
        """Returns whether the table of a layer can list these ids: known ids are unchanged, and each id has one name."""
        names, first = [entry[layer] for entry in self.tables[sequence]], self.num_released(sequence)
        if len(blocks) != len(names) or blocks[:first] != [RELEASED] * first:
            return False
        names, blocks = names[first:], blocks[first:]
        if len(set(blocks)) != len(blocks) or RELEASED in blocks:
            return False
        taken = self.blocks.values()
        return all(
            self.blocks[name] == block if name in self.blocks else block not in taken
            for name, block in zip(names, blocks, strict=True)
        )

    def see(self, sequence: int, layer: int, blocks: list[int]) -> None:
        self.blocks |= dict(zip((entry[layer] for entry in self.tables[sequence]), blocks, strict=True))
        self.blocks.pop(RELEASED, None)


@dataclass
class Alternative:
    """One way in which an operation can proceed. takes: the free blocks that it needs. change: applies it to a copy of a state.

    least: the number that is enough if it frees other blocks first; None if it frees none.
    """

    takes: int
    change: Callable[[OwnershipState], None]
    least: int | None = None


@dataclass
class Transition:
    """goes: makers of the possible states after success. stays: the states before that allow OutOfBlocks."""

    goes: list[Callable[[], OwnershipState]] = field(default_factory=list)
    stays: list[OwnershipState] = field(default_factory=list)

    @property
    def after(self) -> list[OwnershipState]:
        return [each for made in self.goes for each in made().outcomes()]


def outcome(before: list[OwnershipState], total: int, ways: Callable[[OwnershipState], Iterable[Alternative]]) -> Transition:
    """Returns the outcome of an operation with these possible ways, in a pool of `total` blocks."""
    found = Transition()
    for held in before:
        free = total - held.used()
        for way in ways(held):
            if way.takes > free and held not in found.stays:
                found.stays.append(held)
            if (way.takes if way.least is None else way.least) <= free:
                hurried = held.hurried(way.takes) if way.least is not None and way.takes <= free else []
                for each in (held, *hurried):
                    found.goes.append(lambda held=each, way=way: _changed(held, way))  # type: ignore[misc]
    return found


def _changed(held: OwnershipState, way: Alternative) -> OwnershipState:
    after = held.copy()
    way.change(after)
    after.forget()
    return after


def writing(held: OwnershipState, more: dict[int, int], places: list[TableEntry]) -> Iterable[Alternative]:
    """Yields the ways of a write: `more` new entries per sequence, and copies of shared blocks at `places`."""
    taken = held.layers * sum(more.values())

    def way(places: list[TableEntry], whole: bool | None) -> Alternative:
        def change(after: OwnershipState) -> None:
            after.whole = whole
            after.part(places)
            after.extend(more)

        return Alternative(taken + held.copies(places), change)

    everywhere = held.every_layer(places) if held.whole is not False else []
    if held.whole is None and held.copies(places) == held.copies(everywhere):
        yield way(places, None)
        return
    if not held.whole:
        yield way(places, False)
    if held.whole is not False:
        yield way(everywhere, True)


def forking(held: OwnershipState, sequence: int, child: int, lengths: list[int], size: int) -> Iterable[Alternative]:
    """Yields the ways of a fork: a table as long as the parent's or as the tokens need, partly filled blocks shared or copied."""
    table, filled = held.tables[sequence], -(-max(lengths) // size)
    partly = [(layer, length // size) for layer, length in enumerate(lengths) if length % size]
    if held.whole:
        partly = [(layer, entry) for _, entry in dict.fromkeys(partly) for layer in range(held.layers)]
    for count in reversed(range(min(filled, len(table)), len(table) + 1)):
        for copied in [[], partly] if partly else [[]]:

            def change(after: OwnershipState, count: int = count, copied: list[tuple[int, int]] = copied) -> None:
                after.tables[child] = [list(entry) for entry in table[:count]]
                for layer, entry in copied:
                    after.tables[child][entry][layer] = after.new_name()

            yield Alternative(len(copied), change)


def cutting(held: OwnershipState, sequence: int, filled: int) -> Iterable[Alternative]:
    """Yields the ways of a truncation: of the entries from `filled` on, the last ones are freed and the others kept.

    Released entries are not kept: the caller checks that they are before the new end, or that it is 0.
    """
    entries = 0 if held.num_released(sequence) > filled else len(held.tables[sequence])
    for kept in range(filled, max(filled, entries) + 1):

        def change(after: OwnershipState, kept: int = kept) -> None:
            after.tables[sequence] = after.tables[sequence][:kept]

        yield Alternative(0, change)


def removing(
    held: OwnershipState, sequence: int, lengths: list[int], gap: range, size: int, rotates: bool = False
) -> Iterable[Alternative]:
    """Yields the ways of a remove: tokens are written to new positions, or, if whole blocks are removed, later entries move up.

    lengths: the length of each layer before the call. rotates: whether the keys that move are rotated. Shared blocks whose
    entries move up are then copied, unless the cache rotates the keys later.
    """
    filled = -(-(max(lengths) - len(gap)) // size)
    first, last = gap.start // size, gap.stop // size

    def moved(entry: int, by: int) -> list[TableEntry]:
        """Returns the places from this entry on that contain moved tokens, whose blocks moved up by `by` entries."""
        return [
            (sequence, layer, each)
            for layer, length in enumerate(lengths)
            if length > gap.stop
            for each in range(entry, -(-(length - len(gap)) // size) + by)
        ]

    for write in writing(held, {}, moved(first, 0)):
        for cut in cutting(held, sequence, filled):

            def change(after: OwnershipState, write: Alternative = write, cut: Alternative = cut) -> None:
                write.change(after)
                cut.change(after)

            yield Alternative(write.takes, change, least=0)
    if not gap.start % size and not gap.stop % size:
        for write in [Alternative(0, lambda after: None), *(writing(held, {}, moved(last, last - first)) if rotates else ())]:
            for cut in cutting(held, sequence, last - first + filled):

                def splice(after: OwnershipState, write: Alternative = write, cut: Alternative = cut) -> None:
                    write.change(after)
                    cut.change(after)
                    after.tables[sequence] = after.tables[sequence][:first] + after.tables[sequence][last:]

                yield Alternative(write.takes, splice, least=0 if rotates else None)
