"""Which blocks the tables of a paged cache list, as far as can be known from outside.

Each block that is held has a name; tables that share it list the same name. Which block of the pool that is, only the
implementation knows, and may show. Where the specification leaves a choice (a fork may copy, a truncation may keep blocks), there
are several ways that things may be, each a Held, until what is seen leaves one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Place = tuple[int, int, int]  # sequence, layer, entry


class Held:
    """One way that it may be. tables: of each sequence the entries, a name for each layer. whole: whether layers share a table,
    so that what is copied is copied in all of them; None as long as both may be.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.tables: dict[int, list[list[int]]] = {}
        self.blocks: dict[int, int] = {}  # by name, as seen
        self.whole: bool | None = None if layers > 1 else False
        self.named = 0

    def copy(self) -> "Held":
        new = type(self)(self.layers)
        new.__dict__ |= self.__dict__
        new.tables = {sequence: [list(entry) for entry in table] for sequence, table in self.tables.items()}
        new.blocks = dict(self.blocks)
        return new

    def references(self) -> Counter[int]:
        """How often each block is listed."""
        return Counter(chain.from_iterable(chain.from_iterable(self.tables.values())))

    def used(self) -> int:
        return len(self.references())

    def others(self, listed: dict[int, int]) -> dict[int, int]:
        """How many have to find each of some blocks as it is, besides one that holds it. listed: how often each is."""
        return {name: times - 1 for name, times in listed.items()}

    def new_name(self) -> int:
        self.named += 1
        return self.named

    def extend(self, more: dict[int, int]) -> None:
        """So many more entries of each sequence."""
        for sequence, count in more.items():
            self.tables[sequence] += [[self.new_name() for _ in range(self.layers)] for _ in range(count)]

    def to_copy(self, places: Iterable[Place]) -> dict[int, tuple[list[Place], int]]:
        """By block that others have to find as it is: the places, of some that are written to, that list it; how many others."""
        writers: dict[int, list[Place]] = {}
        for place in dict.fromkeys(places):
            if (name := self.at(place)) is not None:
                writers.setdefault(name, []).append(place)
        listed = self.references() if writers else {}
        others = self.others({name: listed[name] for name in writers})
        return {name: (writers[name], count) for name, count in others.items() if count > 0}

    def at(self, place: Place) -> int | None:
        """What an entry lists; None past the end."""
        sequence, layer, entry = place
        table = self.tables[sequence]
        return table[entry][layer] if entry < len(table) else None

    def copies(self, places: Iterable[Place]) -> int:
        """How many blocks have to be copied, so that each of those places may be written to (SHARE-05)."""
        return sum(min(len(places), others) for places, others in self.to_copy(places).values())

    def part(self, places: Iterable[Place]) -> None:
        """Let those places list blocks of their own. Where all who list a block write to it, one of them keeps it: any one."""
        for writers, _ in self.to_copy(places).values():
            for sequence, layer, entry in writers:
                self.tables[sequence][entry][layer] = self.new_name()
        self.forget()

    def every_layer(self, places: Iterable[Place]) -> list[Place]:
        return [(sequence, layer, entry) for sequence, _, entry in places for layer in range(self.layers)]

    def forget(self) -> None:
        """Blocks that no table lists are no one's."""
        if self.blocks:
            listed = self.references()
            self.blocks = {name: block for name, block in self.blocks.items() if name in listed}

    def form(self) -> Any:
        """The same for two in which the same tables share the same blocks, whatever the names."""
        renamed = self.renamed()
        tables = tuple(
            (sequence, tuple(tuple((renamed[name], self.blocks.get(name)) for name in entry) for entry in table))
            for sequence, table in sorted(self.tables.items())
        )
        return self.whole, tables

    def renamed(self) -> dict[int, int]:
        """Numbers for the names, in the order in which the tables list them."""
        listed = (name for _, table in sorted(self.tables.items()) for entry in table for name in entry)
        return {name: number for number, name in enumerate(dict.fromkeys(listed))}

    def outcomes(self) -> "Sequence[Held]":
        """How things may be after a call that this one is after."""
        return [self]

    def hurried(self, takes: int) -> "Sequence[Held]":
        """How they may be besides, where a call takes blocks before it gives others back."""
        return []

    def table(self, sequence: int, layer: int) -> list[int] | None:
        """The blocks of a layer, where all were seen."""
        found = [self.blocks.get(entry[layer]) for entry in self.tables[sequence]]
        return None if None in found else [block for block in found if block is not None]

    def accepts(self, sequence: int, layer: int, blocks: list[int]) -> bool:
        """Whether a table may list these: what was seen stays where it is, and a block has one name."""
        names = [entry[layer] for entry in self.tables[sequence]]
        if len(blocks) != len(names) or len(set(blocks)) != len(blocks):
            return False
        taken = self.blocks.values()
        return all(
            self.blocks[name] == block if name in self.blocks else block not in taken
            for name, block in zip(names, blocks, strict=True)
        )

    def see(self, sequence: int, layer: int, blocks: list[int]) -> None:
        self.blocks |= dict(zip((entry[layer] for entry in self.tables[sequence]), blocks, strict=True))


@dataclass
class Way:
    """What an operation may do. takes: blocks that it needs free. least: where it gives others back first, as few will do.

    change: of a copy of what was.
    """

    takes: int
    change: Callable[[Held], None]
    least: int | None = None


@dataclass
class Outcome:
    """goes: what may be afterwards. stays: what must have been before, where it is refused. copied: whether blocks had to be."""

    goes: list[Callable[[], Held]] = field(default_factory=list)
    stays: list[Held] = field(default_factory=list)

    @property
    def after(self) -> list[Held]:
        return [each for made in self.goes for each in made().outcomes()]


def outcome(before: list[Held], total: int, ways: Callable[[Held], Iterable[Way]]) -> Outcome:
    """Of an operation that may go each of these ways, in a pool of so many blocks."""
    found = Outcome()
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


def _changed(held: Held, way: Way) -> Held:
    after = held.copy()
    way.change(after)
    after.forget()
    return after


def writing(held: Held, more: dict[int, int], places: list[Place]) -> Iterable[Way]:
    """So many entries more, and blocks of their own for what is written to."""
    taken = held.layers * sum(more.values())

    def way(places: list[Place], whole: bool | None) -> Way:
        def change(after: Held) -> None:
            after.whole = whole
            after.part(places)
            after.extend(more)

        return Way(taken + held.copies(places), change)

    everywhere = held.every_layer(places) if held.whole is not False else []
    if held.whole is None and held.copies(places) == held.copies(everywhere):
        yield way(places, None)
        return
    if not held.whole:
        yield way(places, False)
    if held.whole is not False:
        yield way(everywhere, True)


def forking(held: Held, sequence: int, child: int, lengths: list[int], size: int) -> Iterable[Way]:
    """The child's table: as long as the parent's or as its tokens take, with the partly filled blocks shared or copied."""
    table, filled = held.tables[sequence], -(-max(lengths) // size)
    partly = [(layer, length // size) for layer, length in enumerate(lengths) if length % size]
    if held.whole:
        partly = [(layer, entry) for _, entry in dict.fromkeys(partly) for layer in range(held.layers)]
    for count in dict.fromkeys((len(table), filled)):
        for copied in [[], partly] if partly else [[]]:

            def change(after: Held, count: int = count, copied: list[tuple[int, int]] = copied) -> None:
                after.tables[child] = [list(entry) for entry in table[:count]]
                for layer, entry in copied:
                    after.tables[child][entry][layer] = after.new_name()

            yield Way(len(copied), change)


def cutting(held: Held, sequence: int, filled: int) -> Iterable[Way]:
    """What lies past so many entries is given back, or kept."""
    yield Way(0, lambda after: after.tables.update({sequence: after.tables[sequence][:filled]}))
    if filled < len(held.tables[sequence]):
        yield Way(0, lambda after: None)


def removing(held: Held, sequence: int, lengths: list[int], gap: range, size: int) -> Iterable[Way]:
    """Tokens move up: each block they come to lie in is written to, or, where whole blocks go, the others move up in the table.

    lengths: of the layers, before.
    """
    filled = -(-(max(lengths) - len(gap)) // size)
    first, last = gap.start // size, gap.stop // size
    written = [
        (sequence, layer, entry)
        for layer, length in enumerate(lengths)
        if length > gap.stop
        for entry in range(first, -(-(length - len(gap)) // size))
    ]
    for write in writing(held, {}, written):
        for cut in cutting(held, sequence, filled):

            def change(after: Held, write: Way = write, cut: Way = cut) -> None:
                write.change(after)
                cut.change(after)

            yield Way(write.takes, change, least=0)
    if not gap.start % size and not gap.stop % size:
        yield Way(
            0, lambda after: after.tables.update({sequence: after.tables[sequence][:first] + after.tables[sequence][last:]})
        )
