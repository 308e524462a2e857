"""The paged cache that finds what it has seen: automatic prefix caching.

A full block of tokens is known by a key: a hash of its own tokens, of everything before them, and of a salt. `commit` says which
tokens lie in a sequence's blocks and makes them findable; `begin` shares the longest run of blocks that it finds, so that a
prompt which begins like an earlier one need not be computed again. Blocks that nobody holds any more stay findable until they
are taken for something else.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvref import transfer
from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.blocks import BlockPool, Blocks
from kvref.errors import InUse, OutOfBlocks, PositionOutOfRange, TokenMismatch, TokenOutOfRange, in_range
from kvref.paged import PagedCache, PagedConfig
from kvref.sequences import Holders

TOKEN_BYTES = 8  # in a key
MOST_TOKEN = 2**63

Tokens = Sequence[int] | NDArray[np.int64]


def block_keys(tokens: Tokens, block_size: int, salt: str = "", known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The key of each full block of tokens, one after the other, behind those of the first blocks if they are known.

    key i = sha256(key i - 1, the block's tokens as little-endian int64), before the first comes sha256(sha256(salt in UTF-8)):
    the same in any process, for tokens of any integer type (PREFIX-15). No one can make SHA-256 collide (PREFIX-03). The salt is
    hashed twice so that no salt is hashed as a block is: one could else be chosen that goes on where another's block ends.
    """
    key = known[-1] if known else hashlib.sha256(hashlib.sha256(salt.encode()).digest()).digest()
    size = block_size * TOKEN_BYTES
    numbers = np.asarray(tokens[len(known) * block_size :], "<i8").tobytes()
    for start in range(0, len(numbers) - size + 1, size):
        key = hashlib.sha256(key + numbers[start : start + size]).digest()
        yield key


@dataclass(frozen=True, eq=False)
class Found:
    """One copy of the tokens that a key stands for: a block in each layer."""

    key: bytes
    blocks: NDArray[np.int32]


class FindablePool(BlockPool):
    """A pool that hands out last what could be found again.

    Free blocks that are part of a Found wait in the order of their release, and are taken from the oldest once no other is free
    (PREFIX-08). An OrderedDict puts in, takes out and takes the first in O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._found: dict[bytes, list[Found]] = {}
        self._parts: dict[int, list[Found]] = {}  # by block, what it is part of

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._waiting)

    def find(self, key: bytes) -> Found | None:
        """The copy that was made findable first, of those that there are."""
        found = self._found.get(key)
        return found[0] if found else None

    def findable(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Which of several blocks are part of what can be found."""
        found = [block in self._parts for block in np.ravel(blocks).tolist()]
        return np.array(found, np.bool_).reshape(np.shape(blocks))

    def make_findable(self, found: Found) -> None:
        """A copy that is held, unless it is findable already."""
        copies = self._found.setdefault(found.key, [])
        if any(np.array_equal(copy.blocks, found.blocks) for copy in copies):
            return
        copies.append(found)
        for block in found.blocks.tolist():
            self._parts.setdefault(block, []).append(found)

    def num_waiting(self, blocks: NDArray[np.int32]) -> int:
        """How many of these blocks no one holds."""
        return int((self._references[blocks] == 0).sum())

    def share_many(self, blocks: Blocks) -> None:
        """One reference more; a block that waits is taken out of the order."""
        for block in np.asarray(blocks).tolist():
            self._waiting.pop(block, None)
        super().share_many(blocks)

    def forget(self) -> None:
        """Nothing is findable any more."""
        self._found, self._parts = {}, {}
        waiting, self._waiting = np.array(list(self._waiting), np.int32), OrderedDict()
        super()._give_back(waiting)

    def _take(self, count: int) -> NDArray[np.int32]:
        taken = list[int]()
        while len(taken) < count:
            if plain := min(count - len(taken), super().num_free):
                taken += super()._take(plain).tolist()
            else:
                oldest, _ = self._waiting.popitem(last=False)
                self._lose(oldest)
                taken.append(oldest)
        return np.array(taken, np.int32)

    def _give_back(self, blocks: NDArray[np.int32]) -> None:
        findable = self.findable(blocks)
        super()._give_back(blocks[~findable])
        self._waiting.update(dict.fromkeys(blocks[findable].tolist()))

    def _lose(self, block: int) -> None:
        """What a block was part of is not to be found any more (PREFIX-07)."""
        for found in self._parts.pop(block):
            self._found[found.key].remove(found)
            if not self._found[found.key]:
                del self._found[found.key]
            for other in set(found.blocks.tolist()) - {block}:
                self._parts[other].remove(found)
                if not self._parts[other]:
                    del self._parts[other]
                    if other in self._waiting:  # a plain free block from now on
                        del self._waiting[other]
                        super()._give_back(np.array([other], np.int32))


@dataclass
class Told:
    """The tokens that a sequence was said to hold, and the keys of its full blocks, which are findable."""

    salt: str
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: list[bytes] = field(default_factory=list)

    def cut(self, length: int, block_size: int) -> None:
        """Of what lies behind so many tokens nothing is known."""
        self.tokens = self.tokens[:length]
        del self.keys[length // block_size :]

    def add(self, numbers: NDArray[np.int64], written: int) -> None:
        """Raises PositionOutOfRange for more tokens than are written, TokenMismatch where they are not those told before."""
        in_range(len(numbers), written + 1, PositionOutOfRange, "tokens committed")
        common = min(len(numbers), len(self.tokens))
        for at in np.flatnonzero(numbers[:common] != self.tokens[:common]):
            raise TokenMismatch(f"token at position {at}: {numbers[at]} differs from the committed token {self.tokens[at]}")
        self.tokens = numbers if len(numbers) > common else self.tokens


class Finder(Holders):
    """Holders of blocks that can be found, and what each was said to hold. Of those nothing is written to (PREFIX-14)."""

    pool: FindablePool
    _told: dict[int, Told]

    def reset(self) -> None:
        """Forget everything. Raises InUse while there is a sequence (PREFIX-11)."""
        if self._told:
            raise InUse(f"cannot reset: live sequences: {len(self._told)}")
        self.pool.forget()

    def create(self) -> int:
        sequence = super().create()
        self._told[sequence] = Told("")
        return sequence

    def drop(self, sequence: int) -> None:
        super().drop(sequence)
        del self._told[int(sequence)]

    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        told = self._told[int(sequence)]
        self._told[child] = Told(told.salt, told.tokens, list(told.keys))
        return child

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self._told[int(sequence)].cut(int(length), self._tables.block_size)

    def _kept(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return super()._kept(blocks) | self.pool.findable(blocks)

    def _others(self, block: int) -> int:
        return self.pool.references(block) - (not self.pool.findable([block])[0])


class PrefixCache(Finder, PagedCache):
    """Everything the paged cache does, and `begin`, `commit`, `match` and `reset`."""

    def __init__(self, config: PagedConfig, backend: Backend = reference) -> None:
        super().__init__(config, backend)
        self.pool, self._told = FindablePool(config.num_blocks), {}

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens `begin` would find. Changes nothing (PREFIX-05). Raises TokenOutOfRange."""
        return len(self._find(token_numbers(tokens), salt)) * self.config.block_size

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """A new sequence with room for these tokens, that holds as many of them as are found: its length says how many.

        Those are whole blocks, and never all tokens: of the last one somebody wants the logits (PREFIX-01). salt: whatever else
        keys and values hang on, such as an adapter, an image, a tenant. Raises TokenOutOfRange, and OutOfBlocks, with nothing
        changed (PREFIX-13).
        """
        numbers = token_numbers(tokens)
        found = self._find(numbers, salt)
        entries = np.array([each.blocks for each in found], np.int32).reshape(-1, self.config.num_layers)
        more = self._tables.entries_for(len(numbers)) - len(found)
        needed = more * self.config.num_layers + self.pool.num_waiting(entries)
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"out of blocks: {needed} needed, {self.pool.num_free} free")
        sequence = self.create()
        table, hit = self._table(sequence), len(found) * self.config.block_size
        self.pool.share_many(entries.reshape(-1))
        self._tables.append(table, entries)
        self._tables.lengths[table] = hit
        self.ensure_capacity(sequence, len(numbers))
        self._told[sequence] = Told(salt, numbers[:hit], [each.key for each in found])
        return sequence

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Say that a sequence's first positions hold these tokens, from the first on: every full block is findable from now on.

        Raises SequenceNotFound, TokenOutOfRange, PositionOutOfRange for more tokens than are written in every layer, and
        TokenMismatch where they are not those committed before (PREFIX-02).
        """
        table, numbers = self._table(sequence), token_numbers(tokens)
        told = self._told[int(sequence)]
        told.add(numbers, int(self._tables.lengths[table].min()))
        keys, first = list(self._keys(told.tokens, told.salt, told.keys)), len(told.keys)
        entries = np.arange(first, first + len(keys))[:, None]
        blocks = self._tables.at(table, np.arange(self.config.num_layers), entries)
        gone = max(0, int(self._tables.released[table].max()) - first)
        for key, held in zip(keys[gone:], blocks[gone:], strict=True):
            self.pool.make_findable(Found(key, held))
        told.keys += keys

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        length = self.length(sequence, layer)
        super().write(sequence, layer, start, keys, values)
        count = len(keys) if isinstance(keys, Sequence) else keys.shape[0]  # a list is taken too
        if start < length and count:
            self._told[int(sequence)].cut(int(start), self.config.block_size)

    def remove(self, sequence: int, start: int, stop: int, theta: float | None = None, layout: str = "halves") -> None:
        super().remove(sequence, start, stop, theta, layout)
        if start < stop:
            self._told[int(sequence)].cut(int(start), self.config.block_size)

    def receive(self, file: BinaryIO, sequence: int) -> None:
        table = self._table(sequence)
        transfer.verify(file)  # first, for the room that it takes may be what somebody finds
        super().receive(file, sequence)
        if self._table(sequence) != table:
            self._told[int(sequence)].cut(0, self.config.block_size)  # the file does not say of which tokens it is

    def _keys(self, tokens: Tokens, salt: str, known: Sequence[bytes] = ()) -> Iterator[bytes]:
        return block_keys(tokens, self.config.block_size, salt, known)

    def _find(self, tokens: Tokens, salt: str) -> list[Found]:
        """The blocks of the longest beginning that is there, from the first on (PREFIX-09): never of all tokens."""
        found = list[Found]()
        for key in self._keys(tokens[: max(0, len(tokens) - 1)], salt):
            copy = self.pool.find(key)
            if copy is None:
                break
            found.append(copy)
        return found


def token_numbers(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Tokens as an array of one axis. Raises TokenOutOfRange."""
    if set(map(type, tokens)) <= {int}:  # NumPy would take True for 1
        with suppress(OverflowError):
            numbers = np.array(tokens, np.int64)
            if numbers.min(initial=0) >= 0:
                return numbers
    return np.array([in_range(token, MOST_TOKEN, TokenOutOfRange, "token") for token in tokens], np.int64)
