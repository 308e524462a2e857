"""A model of the blocks of a grouped cache: which tables list them, and their rows.

A block of the model has a name. The implementation's id for it is unknown until a table returns it (`ids`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvref_conformance.families.paged.table_model import Token

Key = tuple[int, str, tuple[int, ...]]  # the group, the salt, and all tokens up to the end of the block
Entry = list[int | None]  # per group the name of a block; None after it was freed


@dataclass
class OwnershipState:
    """total: number of blocks in the pool. size: tokens per block. windows: one per group, None if it sees every token.

    any_order: the implementation declares another order of eviction. unsure: cached blocks may have been evicted in that order.
    """

    total: int
    size: int
    windows: list[int | None]
    any_order: bool = False
    unsure: bool = False
    tables: dict[int, list[Entry]] = field(default_factory=dict)
    found: dict[Key, list[int]] = field(default_factory=dict)  # in the order of their commits
    waiting: list[int] = field(default_factory=list)  # cached-free blocks, in the order of eviction
    rows: dict[int, dict[tuple[int, int], Token]] = field(default_factory=dict)  # per block, by layer and offset
    ids: dict[int, int] = field(default_factory=dict)  # the implementation's id of each block, as far as known
    named: int = 0

    def listed(self, name: int) -> int:
        """Returns the number of tables that list a block."""
        return sum(entry.count(name) for table in self.tables.values() for entry in table)

    def used(self) -> int:
        names = {name for table in self.tables.values() for entry in table for name in entry if name is not None}
        return len(names)

    def findable(self, name: int) -> bool:
        return any(name in names for names in self.found.values())

    def first(self, group: int, length: int) -> int:
        """Returns the first position that a query at `length` sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, length - window + 1)

    def unseen(self, sequence: int, length: int) -> list[int]:
        """Returns the blocks that queries at `length` and later do not see, later positions before earlier ones."""
        table, found = self.tables[sequence], list[int]()
        for entry in reversed(range(len(table))):
            for group, name in enumerate(table[entry]):
                if name is not None and (entry + 1) * self.size <= self.first(group, length):
                    found.append(name)
        return found

    def copied(self, sequence: int, length: int) -> list[int]:
        """Returns the groups whose last block is partly filled and shared or cached. It is copied before the next write."""
        if length % self.size == 0:
            return []
        last = self.tables[sequence][length // self.size]
        return [
            group for group, name in enumerate(last) if name is not None and self.listed(name) + self.findable(name) > 1
        ]  # fmt: skip

    def needed(self, sequence: int, length: int, count: int) -> int:
        """Returns the number of blocks that a step of `count` tokens allocates."""
        entries = -(-(length + count) // self.size) - len(self.tables[sequence])
        return entries * len(self.windows) + (len(self.copied(sequence, length)) if count else 0)

    def free_for(self, sequence: int, length: int) -> int:
        """Returns the number of free blocks after the sequence has freed the blocks that it no longer sees."""
        return self.total - self.used() + sum(self.listed(name) == 1 for name in self.unseen(sequence, length))

    def step(self, sequence: int, length: int, count: int) -> None:
        """Frees the blocks that the sequence no longer sees, and allocates those that `count` tokens need."""
        table, gone = self.tables[sequence], self.unseen(sequence, length)
        copied, needed = self.copied(sequence, length), self.needed(sequence, length, count)
        for entry in table:
            entry[:] = [None if name in gone else name for name in entry]
        self.give_back(gone)
        taken = iter(self._take(needed))
        while len(table) * self.size < length + count:
            table.append([next(taken) for _ in self.windows])
        for group in copied:
            last = table[length // self.size]
            before, last[group] = last[group], next(taken)
            assert before is not None
            self.rows[last[group] or 0] = dict(self.rows[before])
            self.give_back([before])

    def give_back(self, names: Iterable[int]) -> None:
        """Frees the blocks that no table lists any more. Those in the prefix index stay cached until they are evicted."""
        for name in names:
            if not self.listed(name):
                if self.findable(name):
                    self.waiting.append(name)
                else:
                    self._forget(name)

    def cut(self, sequence: int, entries: int) -> None:
        table = self.tables[sequence]
        gone = [name for entry in reversed(table[entries:]) for name in entry if name is not None]
        del table[entries:]
        self.give_back(gone)

    def _take(self, count: int) -> list[int]:
        plain = self.total - self.used() - len(self.waiting)
        self.unsure |= self.any_order and bool(count and self.waiting)
        self._lose(self.waiting if self.unsure else self.waiting[: max(0, count - plain)])
        self.named += count
        names = list(range(self.named - count, self.named))
        self.rows |= {name: {} for name in names}
        return names

    def _lose(self, names: Sequence[int]) -> None:
        lost, self.waiting = set(names), [name for name in self.waiting if name not in names]
        self.found = {key: left for key, copies in self.found.items() if (left := [name for name in copies if name not in lost])}
        for name in lost:
            self._forget(name)

    def _forget(self, name: int) -> None:
        del self.rows[name]
        self.ids.pop(name, None)

    def forget_found(self) -> None:
        self.found, self.unsure = {}, False
        names, self.waiting = self.waiting, []
        for name in names:
            self._forget(name)

    def chain(self, tokens: Sequence[int], salt: str, group: int) -> list[Key]:
        """Returns the keys of all full blocks."""
        return [(group, salt, tuple(tokens[:stop])) for stop in range(self.size, len(tokens) + 1, self.size)]

    def hit(self, tokens: Sequence[int], salt: str) -> int:
        """Returns the largest number of leading blocks that every group can serve, without the last token of `tokens`."""
        chains = [self.chain(tokens, salt, group) for group in range(len(self.windows))]
        for blocks in range((len(tokens) - 1) // self.size, 0, -1):
            if all(
                key in self.found
                for group, keys in enumerate(chains)
                for entry, key in enumerate(keys[:blocks])
                if (entry + 1) * self.size > self.first(group, blocks * self.size)
            ):
                return blocks
        return 0

    def begin(self, sequence: int, tokens: Sequence[int], salt: str, blocks: int) -> None:
        table = self.tables[sequence] = []
        for entry in range(blocks):
            names: Entry = []
            for group in range(len(self.windows)):
                seen = (entry + 1) * self.size > self.first(group, blocks * self.size)
                names.append(self.found[self.chain(tokens, salt, group)[entry]][0] if seen else None)
            table.append(names)
            self.waiting = [name for name in self.waiting if name not in names]

    def commit(self, sequence: int, tokens: Sequence[int], salt: str, known: int) -> None:
        """Adds the blocks of `tokens` to the prefix index. known: number of blocks that were committed before."""
        for entry, names in enumerate(self.tables[sequence][: len(tokens) // self.size]):
            for group, name in enumerate(names):
                copies = self.found.get(key := self.chain(tokens, salt, group)[entry], [])
                if entry >= known and name is not None and name not in copies:
                    self.found[key] = [*copies, name]
