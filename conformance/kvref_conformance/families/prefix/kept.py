"""Which blocks of a prefix cache can be found, and which of those are free, as far as can be known from outside.

What can be found is known by its tokens themselves, no hash. It has a copy or several, a block in each layer. Where the
specification leaves a choice (which copy is found, whether equal ones become one), there are several ways that things may be, as
for tables; where it leaves the order of eviction open, free copies become unsure, which may be there or not.
"""

from collections.abc import Sequence
from itertools import chain, product
from typing import Any

from kvref_conformance.families.paged.held import Held

Key = tuple[str, tuple[int, ...]]  # the salt, and the tokens of a block with all before them
Names = tuple[int, ...]  # of the blocks of a copy, one a layer
MANY = 64  # ways that one call may go: more are not told apart


class TooMany(ValueError):
    """Ways that things may be."""


class Kept(Held):
    """One way that it may be. released: when each free block that is part of a copy was, and in which order then.

    orphans: whether copies are kept when what comes before them is lost; None as long as both may be.
    """

    total, size = 0, 1  # blocks of the pool, and tokens of each
    any_order = False  # of eviction: the declared one is not that of PREFIX-08

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.found: dict[Key, list[Names]] = {}
        self.released: dict[int, tuple[int, int]] = {}
        self.unsure: set[int] = set()
        self.hits: dict[int, int] = {}  # of sequences whose hit was not seen yet, in blocks
        self.orphans: bool | None = None
        self.time = self.settled = 0

    def copy(self) -> "Kept":
        new = super().copy()
        assert isinstance(new, Kept)
        new.found = {key: list(copies) for key, copies in self.found.items()}
        new.released, new.unsure, new.hits = dict(self.released), set(self.unsure), dict(self.hits)
        return new

    def form(self) -> Any:
        """And the same can be found, and is taken in the same order."""
        renamed = self.renamed()
        found = tuple(
            (key, tuple(tuple((renamed[name], self.blocks.get(name)) for name in names) for names in copies))
            for key, copies in sorted(self.found.items())
        )
        order = tuple(sorted((when, renamed[name], name in self.unsure) for name, when in self.released.items()))
        return super().form(), found, order, tuple(sorted(self.hits.items())), self.orphans

    def renamed(self) -> dict[int, int]:
        renamed = super().renamed()
        for _, copies in sorted(self.found.items()):
            for name in chain.from_iterable(copies):
                renamed.setdefault(name, len(renamed))
        return renamed

    def parts(self) -> dict[int, list[Key]]:
        """By block, what it is part of."""
        found: dict[int, list[Key]] = {}
        for key, copies in self.found.items():
            for names in copies:
                for name in names:
                    found.setdefault(name, []).append(key)
        return found

    def others(self, listed: dict[int, int]) -> dict[int, int]:
        parts = self.parts()  # what can be found is never written to
        return {name: times - (name not in parts) for name, times in listed.items()}

    def forget(self) -> None:
        """Blocks that no table lists are free: those that are part of a copy wait, and the others are no one's."""
        listed, parts = self.references(), self.parts()
        self.blocks = {name: block for name, block in self.blocks.items() if name in listed or name in parts}
        self.released = {name: self.released.get(name, (self.time, 0)) for name in parts if name not in listed}
        self.unsure &= self.released.keys()

    def in_order(self) -> None:
        """What the last call released goes from the end."""
        parts = self.parts()
        for name, (time, _) in self.released.items():
            if time == self.time:
                self.released[name] = time, -(len(parts[name][0][1]) // self.size)
        self.time += 1

    def outcomes(self) -> Sequence["Kept"]:
        """After a call that may have taken blocks: what was taken cannot be found any more."""
        ways = self._evicted(0)
        for way in ways:
            way.time, way.settled = way.time + 1, way.named
        return ways

    def hurried(self, takes: int) -> Sequence["Kept"]:
        """Where a call takes blocks before it gives others back."""
        return self.copy()._evicted(takes) if takes > self.total - self.used() - len(self.released) else []

    def _evicted(self, more: int) -> list["Kept"]:
        taken = more or self.named > self.settled
        if taken and self.released and (self.any_order or self.unsure):
            self._any_may_be_taken(more)
            return [self]
        while self.released and self.used() + len(self.released) + more > self.total:
            first = min(self.released.values())
            among, parts = [name for name, when in self.released.items() if when == first], self.parts()
            if any(parts[name] != parts[among[0]] for name in among):
                self._any_may_be_taken(more)
                return [self]
            self.lose(among[0])
            if self.orphans is False:
                self._lose_orphans()
            elif self.orphans is None and self._orphaned():
                other = self.copy()
                self.orphans, other.orphans = True, False
                other._lose_orphans()
                return self._evicted(more) + other._evicted(more)
        return [self]

    def _any_may_be_taken(self, more: int) -> None:
        self.unsure = set(self.released)
        if self.used() + more >= self.total:
            for name in sorted(self.unsure):
                self.lose(name)

    def lose(self, name: int) -> None:
        """A block was taken: what it was part of is not found any more."""
        for key, copies in list(self.found.items()):
            self.found[key] = [names for names in copies if name not in names]
        self._tidy()

    def lose_copy(self, key: Key, names: Names) -> None:
        self.found[key].remove(names)
        self._tidy()

    def _tidy(self) -> None:
        self.found = {key: copies for key, copies in self.found.items() if copies}
        self.forget()

    def _orphaned(self) -> list[Key]:
        """What is there without what comes before it."""
        return [
            (salt, tokens)
            for salt, tokens in self.found
            if any((salt, tokens[:length]) not in self.found for length in range(self.size, len(tokens), self.size))
        ]

    def _lose_orphans(self) -> None:
        for key in self._orphaned():
            del self.found[key]
        self._tidy()

    def paths(self, keys: Sequence[Key]) -> list[tuple[list[Names], list[Names]]]:
        """What may be found: the copies that a beginning lies in, and of what follows it those that are then known to be lost."""
        going: list[list[Names]] = [[]]
        ended: list[tuple[list[Names], list[Names]]] = []
        for key in keys:
            copies = self.found.get(key, [])
            if all(self.unsure & {*names} for names in copies):
                ended += [(path, copies) for path in going]
            going = [[*path, names] for path in going for names in copies]
            if len(going) > MANY:
                raise TooMany("prefixes in too many copies")
            if not going:
                return ended
        return ended + [(path, []) for path in going]

    def begin(self, sequence: int, keys: Sequence[Key], path: list[Names], lost: list[Names], entries: int) -> None:
        """A sequence that shares what it found."""
        for names in lost:
            self.lose_copy(keys[len(path)], names)
        self.tables[sequence] = [list(names) for names in path]
        self.hits[sequence] = len(path)
        self.forget()
        self.extend({sequence: entries - len(path)})

    def known(self, keys: Sequence[Key], hit: int) -> bool:
        """Take note that so many blocks are found. False where that cannot be."""
        if (found := next(((path, lost) for path, lost in self.paths(keys) if len(path) == hit), None)) is None:
            return False
        for names in found[1]:
            self.lose_copy(keys[hit], names)
        for key in keys[:hit]:
            if len(self.found[key]) == 1:
                self.unsure -= {*self.found[key][0]}
        return True

    def commits(self, sequence: int, first: int, keys: Sequence[Key]) -> list[list[Names]]:
        """For each key from an entry on, the blocks that may be the sequence's afterwards: its own, or a copy's that is there."""
        entries = self.tables[sequence][first:]
        options = [list(dict.fromkeys([tuple(own), *self.found.get(key, [])])) for key, own in zip(keys, entries, strict=False)]
        count = 1
        for each in options:
            count *= len(each)
        if count > MANY:  # all or none
            return [[each[0] for each in options], [each[-1] for each in options]]
        return [list(each) for each in product(*options)]

    def commit(self, sequence: int, first: int, keys: Sequence[Key], chosen: list[Names]) -> None:
        for entry, (key, names) in enumerate(zip(keys, chosen, strict=True), first):
            self.tables[sequence][entry] = list(names)
            copies = self.found.setdefault(key, [])
            if names not in copies:
                copies.append(names)

    def accepts(self, sequence: int, layer: int, blocks: list[int]) -> bool:
        gone = {name: block for name, block in self.blocks.items() if name in self.unsure and block in blocks}
        self.blocks = {name: block for name, block in self.blocks.items() if name not in gone}
        good = super().accepts(sequence, layer, blocks)
        self.blocks |= gone
        return good

    def see(self, sequence: int, layer: int, blocks: list[int]) -> None:
        for name in [name for name in self.unsure if self.blocks.get(name) in blocks]:
            self.lose(name)
        super().see(sequence, layer, blocks)
