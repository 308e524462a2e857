"""A nondeterministic model of the prefix index: which blocks are cached, and which of them are evictable.

Cached blocks are identified by their tokens, not by a hash. A key has one copy or several, each with one block per layer. If the
specification leaves a choice (which copy is found, whether equal blocks are merged), there is one `PrefixIndexState` per possible
state, as in paged/ownership_model.py. If the order of eviction is not known, evictable blocks become unsure: they can be cached
or evicted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from kvref_conformance.calls.messages import format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families.paged.ownership_model import OwnershipState
from kvref_conformance.families.paged.table_model import Token
from kvref_conformance.oracle.expectations import AnyOf
from kvref_conformance.oracle.reference_model import TooManyStates


class Label(NamedTuple):
    """What identifies a prompt besides its tokens. media: (start, stop, content) of each item, in order."""

    salt: str
    adapter: str = ""
    media: tuple[tuple[int, int, str], ...] = ()

    def before(self, position: int) -> "Label":
        """The label of the tokens before a position."""
        return self._replace(media=tuple((a, min(b, position), content) for a, b, content in self.media if a < position))


Key = tuple[Label, tuple[int, ...]]  # the tokens up to the end of the block, and their label; also the tokens of a prompt
Names = tuple[int, ...]  # the block names of a copy, one per layer
Copy = tuple[Key, Names]
MANY = 64  # the largest number of ways of one call that are followed


class Found(NamedTuple):
    """A possible hit. path: the copies of its full blocks. rest: the number of its tokens after them (PREFIX-19).

    sources: the copies of the blocks that begin with these tokens. lost: copies that are known to be evicted if this is the hit.
    """

    path: Sequence[Names]
    lost: Sequence[Copy] = ()
    rest: int = 0
    sources: Sequence[Names] = ()


class PrefixIndexState(OwnershipState):
    """One possible state. index: key -> its copies. evictable: evictable block -> (time of its release, order within one call).

    unsure: evictable blocks that can have been evicted. orphans: whether blocks stay cached when a block before them is evicted;
    None while this is unknown.
    """

    total, size = 0, 1  # blocks of the pool, tokens per block
    any_order = False  # whether the declared order of eviction is not that of PREFIX-08
    token_hits = False  # whether hits contain tokens after their full blocks (PREFIX-19)

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.index: dict[Key, list[Names]] = {}
        self.evictable: dict[int, tuple[int, int]] = {}
        self.unsure: set[int] = set()
        self.hits: dict[int, int] = {}  # sequence -> its hit, while the hit was not observed
        self.orphans: bool | None = None
        self.time = self.settled = 0

    def copy(self) -> "PrefixIndexState":
        new = super().copy()
        assert isinstance(new, PrefixIndexState)
        new.index = {key: list(copies) for key, copies in self.index.items()}
        new.evictable, new.unsure, new.hits = dict(self.evictable), set(self.unsure), dict(self.hits)
        return new

    def form(self) -> Any:
        """Includes the index and the order of eviction."""
        renamed = self.renamed()
        found = tuple(
            (key, tuple(tuple((renamed[name], self.blocks.get(name)) for name in names) for names in copies))
            for key, copies in sorted(self.index.items())
        )
        order = tuple(sorted((when, renamed[name], name in self.unsure) for name, when in self.evictable.items()))
        return super().form(), found, order, tuple(sorted(self.hits.items())), self.orphans

    def renamed(self) -> dict[int, int]:
        renamed = super().renamed()
        for _, copies in sorted(self.index.items()):
            for name in chain.from_iterable(copies):
                renamed.setdefault(name, len(renamed))
        return renamed

    def parts(self) -> dict[int, list[Key]]:
        """Returns, per block, the keys of the copies that it is part of."""
        found: dict[int, list[Key]] = {}
        for key, copies in self.index.items():
            for names in copies:
                for name in names:
                    found.setdefault(name, []).append(key)
        return found

    def others(self, listed: dict[int, int]) -> dict[int, int]:
        parts = self.parts()  # cached blocks are never written to (PREFIX-14)
        return {name: times - (name not in parts) for name, times in listed.items()}

    def forget(self) -> None:
        """Updates which blocks are evictable, and forgets the ids of blocks that no table and no copy lists."""
        listed, parts = self.references(), self.parts()
        self.blocks = {name: block for name, block in self.blocks.items() if name in listed or name in parts}
        self.evictable = {name: self.evictable.get(name, (self.time, 0)) for name in parts if name not in listed}
        self.unsure &= self.evictable.keys()

    def order_released(self) -> None:
        """Orders the blocks that the last call released: later positions are evicted first (PREFIX-08)."""
        parts = self.parts()
        for name, (time, _) in self.evictable.items():
            if time == self.time:
                self.evictable[name] = time, -(len(parts[name][0][1]) // self.size)
        self.time += 1

    def outcomes(self) -> Sequence["PrefixIndexState"]:
        """Returns the possible states after a call that can have evicted blocks."""
        ways = self._after_evictions(0)
        for way in ways:
            way.time, way.settled = way.time + 1, way.named
        return ways

    def hurried(self, takes: int) -> Sequence["PrefixIndexState"]:
        """Returns further possible states if a call evicts blocks before it frees others."""
        return self.copy()._after_evictions(takes) if takes > self.total - self.used() - len(self.evictable) else []

    def _after_evictions(self, more: int) -> list["PrefixIndexState"]:
        taken = more or self.named > self.settled
        if taken and self.evictable and (self.any_order or self.unsure):
            self._make_unsure(more)
            return [self]
        while self.evictable and self.used() + len(self.evictable) + more > self.total:
            first = min(self.evictable.values())
            among, parts = [name for name, when in self.evictable.items() if when == first], self.parts()
            if any(parts[name] != parts[among[0]] for name in among):
                self._make_unsure(more)
                return [self]
            self.evict(among[0])
            if self.orphans is False:
                self.evict_orphans()
            elif self.orphans is None and self._orphaned():
                other = self.copy()
                self.orphans, other.orphans = True, False
                other.evict_orphans()
                return self._after_evictions(more) + other._after_evictions(more)
        return [self]

    def _make_unsure(self, more: int) -> None:
        self.unsure = set(self.evictable)
        if self.used() + more >= self.total:
            for name in sorted(self.unsure):
                self.evict(name)

    def evict(self, name: int) -> None:
        """Records that a block was evicted: its copies are not cached any more."""
        for key, copies in list(self.index.items()):
            self.index[key] = [names for names in copies if name not in names]
        self._tidy()

    def evict_copy(self, key: Key, names: Names) -> None:
        self.index[key].remove(names)
        self._tidy()

    def _tidy(self) -> None:
        self.index = {key: copies for key, copies in self.index.items() if copies}
        self.forget()

    def _orphaned(self) -> list[Key]:
        """Returns the keys that are cached without a block before them."""
        return [
            (label, tokens)
            for label, tokens in self.index
            if any((label.before(stop), tokens[:stop]) not in self.index for stop in range(self.size, len(tokens), self.size))
        ]

    def evict_orphans(self) -> None:
        """Records that blocks without a block before them are not cached any more."""
        for key in self._orphaned():
            del self.index[key]
        self._tidy()

    def chain(self, prompt: Key) -> list[Key]:
        """Returns the key of each full block of a prompt."""
        return [start_of(prompt, stop) for stop in range(self.size, len(prompt[1]) + 1, self.size)]

    def possible_hits(self, prompt: Key) -> list[Found]:
        """Returns the possible hits of a prompt, without its last token."""
        going: list[list[Names]] = [[]]
        ended: list[Found] = []
        for key in self.chain(prompt):
            copies = self.index.get(key, [])
            if all(self.unsure & {*names} for names in copies):
                ended += [Found(path, [(key, names) for names in copies]) for path in going]
            going = [[*path, names] for path in going for names in copies]
            if len(going) > MANY:
                raise TooManyStates("too many copies of a prefix")
            if not going:
                break
        ended += [Found(path) for path in going]
        return [longer for found in ended for longer in self._with_rest(found, prompt)] if self.token_hits else ended

    def _with_rest(self, found: Found, prompt: Key) -> list[Found]:
        """Returns a hit of full blocks with each possible number of tokens after them, the most tokens first."""
        start, lost, longer = len(found.path) * self.size, list(found.lost), list[Found]()
        copies: dict[int, list[Copy]] = {}  # by the number of tokens that the block and the prompt have in common
        for key, each in self.index.items():
            if len(key[1]) == start + self.size and (common := num_common(key, prompt)) > start:
                copies.setdefault(common - start, []).extend((key, names) for names in each if (key, names) not in lost)
        for rest, sources in sorted(copies.items(), reverse=True):
            if sources:
                longer.append(Found(found.path, list(lost), rest, [names for _, names in sources]))
            if any(not self.unsure & {*names} for _, names in sources):
                return longer
            lost += sources
        return [*longer, Found(found.path, lost)]

    def length_of(self, found: Found) -> int:
        return len(found.path) * self.size + found.rest

    def begin(self, sequence: int, found: Found, entries: int) -> None:
        """Creates a sequence that shares the blocks of its hit."""
        for key, names in found.lost:
            self.evict_copy(key, names)
        self.tables[sequence] = [list(names) for names in found.path]
        self.hits[sequence] = self.length_of(found)
        self.forget()
        self.extend({sequence: entries - len(found.path)})

    def observe_hit(self, prompt: Key, hit: int) -> bool:
        """Records that `hit` tokens were found. Returns False if this state does not allow it."""
        if (found := next((each for each in self.possible_hits(prompt) if self.length_of(each) == hit), None)) is None:
            return False
        for key, names in found.lost:
            self.evict_copy(key, names)
        for copies in (*(self.index[key] for key in self.chain(prompt)[: len(found.path)]), found.sources):
            if len(copies) == 1:
                self.unsure -= {*copies[0]}
        return True

    def commits(self, sequence: int, first: int, keys: Sequence[Key]) -> list[list[Names]]:
        """Returns the possible results of a commit: per key, the sequence's own blocks or those of a cached copy."""
        entries = self.tables[sequence][first:]
        options = [list(dict.fromkeys([tuple(own), *self.index.get(key, [])])) for key, own in zip(keys, entries, strict=False)]
        count = 1
        for each in options:
            count *= len(each)
        if count > MANY:  # merge all blocks or none
            return [[each[0] for each in options], [each[-1] for each in options]]
        return [list(each) for each in product(*options)]

    def commit(self, sequence: int, first: int, keys: Sequence[Key], chosen: list[Names]) -> None:
        for entry, (key, names) in enumerate(zip(keys, chosen, strict=True), first):
            self.tables[sequence][entry] = list(names)
            copies = self.index.setdefault(key, [])
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
            self.evict(name)
        super().see(sequence, layer, blocks)


# Helpers of the prefix model: the order of blocks, and the expected hit.


@dataclass(frozen=True)
class Hit(AnyOf):
    """An expected number of tokens. clause_of: returns the clause that a wrong number breaks."""

    clause_of: Callable[[Any], str] = lambda got: ""

    def compare(self, ok: Any, op: str, level: Any) -> None:
        if not self.accepts(ok):
            raise ClauseViolation(op, self.range_text, format_value(ok), self.clause_of(ok))


def start_of(key: Key, length: int) -> Key:
    """Returns the first tokens of a prompt, with their label."""
    return key[0].before(length), key[1][:length]


def num_common(key: Key, other: Key) -> int:
    """Returns the number of leading tokens that two prompts have in common, in the sense of PREFIX-18 (a)."""
    longest = min(len(key[1]), len(other[1]))
    return next(length for length in range(longest, -1, -1) if not length or start_of(key, length) == start_of(other, length))


def follows(key: Key, other: Key) -> bool:
    length = len(other[1])
    return len(key[1]) > length and start_of(key, length) == other


def same_bits(tokens: list[list[Token]], other: list[list[Token]]) -> bool:
    """Returns whether tokens read back as the same bits in every layer."""
    pairs = (pair for a, b in zip(tokens, other, strict=True) for pair in zip(a, b, strict=True))
    return all(
        np.array_equal(x.values.view(np.uint32), y.values.view(np.uint32)) for (a, b) in pairs for x, y in zip(a, b, strict=True)
    )
