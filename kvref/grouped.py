"""The paged cache of a model whose layers differ: some see all tokens, the others a window of the last.

Layer i is of group i % num_groups: the last group's layers see everything, the others' the last `window` tokens. Groups are of
one size, so that a block, block_size tokens of one group's layers, serves any of them, and all take theirs from one pool. A
sequence has a table for each group. A group gives back what its layers see no more, and its entries keep their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Sight, attention_as_read
from kvref.backend import Backend, reference
from kvref.blocks import NO_BLOCK
from kvref.errors import ConfigError, LayerOutOfRange, NotTruncatable, OutOfBlocks, PositionOutOfRange, in_range, whole_fields
from kvref.formats import get_format
from kvref.inputs import accept, accept_pair
from kvref.prefix import FindablePool, Finder, Found, Tokens, Told, block_keys, token_numbers
from kvref.slots import TokenStore


@dataclass(frozen=True)
class GroupedConfig:
    """num_blocks counts blocks of one group: n tokens that are all held take num_groups * ceil(n / block_size) of them.

    Gemma 3, whose every sixth layer sees everything, has num_groups 6; gpt-oss has 2; 1 is a model whose layers are alike.
    dtype: any format, as in PagedConfig; a scale that would be given is 1.0.
    """

    num_blocks: int
    num_layers: int
    num_groups: int
    window: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_layers", "num_groups", "window", "num_kv_heads", "head_dim", "block_size")
        if self.num_layers % self.num_groups:
            raise ConfigError(f"num_layers: expected a multiple of num_groups {self.num_groups}, got {self.num_layers}")
        get_format(self.dtype).code_width(self.head_dim)  # which says whether its groups go into it


class GroupedCache(Finder):
    """In its tables a group takes the place of a layer."""

    def __init__(self, config: GroupedConfig, backend: Backend = reference) -> None:
        super().__init__(config.num_blocks, config.num_groups, config.block_size, backend)
        self.pool, self._told, self.config = FindablePool(config.num_blocks), {}, config
        self._sights = [Sight(config.window)] * (config.num_groups - 1) + [Sight()]
        self._layers = config.num_layers // config.num_groups  # of each group
        slots = config.num_blocks * self._layers * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens `begin` would find. Changes nothing (PREFIX-05). Raises TokenOutOfRange."""
        keys, _ = self._find(token_numbers(tokens), salt)
        return len(keys) * self.config.block_size

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """A new sequence that holds as many of these tokens as every group finds: its length says how many (GROUP-05).

        Of these a group of windows holds the blocks that the next query sees. Takes no block for the others. Raises
        TokenOutOfRange.
        """
        numbers = token_numbers(tokens)
        keys, entries = self._find(numbers, salt)
        sequence, hit = self.create(), len(keys) * self.config.block_size
        table = self._table(sequence)
        self.pool.share_many(entries[entries != NO_BLOCK])
        self._tables.append(table, entries)
        self._tables.released[table] = self._unseen(hit)
        self._tables.lengths[table] = hit
        self._told[sequence] = Told(salt, numbers[:hit], keys)
        return sequence

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Say that a sequence's first positions hold these tokens, from the first on.

        Each full block that a group holds is findable from now on, for that group. Raises SequenceNotFound, TokenOutOfRange,
        PositionOutOfRange for more tokens than are written, and TokenMismatch where they are not those committed before.
        """
        table, numbers = self._table(sequence), token_numbers(tokens)
        told = self._told[int(sequence)]
        told.add(numbers, self.length(sequence))
        keys = block_keys(told.tokens, self.config.block_size, told.salt, told.keys)
        for entry, key in enumerate(keys, len(told.keys)):
            for group in range(self.config.num_groups):
                block = self._tables.at(table, group, np.array([entry]))
                if block[0] != NO_BLOCK:
                    self.pool.make_findable(Found(_of_group(key, group), block))
            told.keys.append(key)

    def step(self, sequence: int, keys: Array, values: Array) -> None:
        """Append n tokens in every layer, keys and values [num_layers, n, num_kv_heads, head_dim]: in all groups or none.

        First each group gives back what the query at the present length sees no more, then all take blocks for the new tokens;
        so every one of these can attend (GROUP-02). Raises OutOfBlocks, and then nothing has changed (GROUP-03).
        """
        table, config = self._table(sequence), self.config
        shape = (config.num_layers, "n", config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        length, count = self.length(sequence), keys.shape[1]
        if count == 0:
            return
        rows = (config.num_layers * count, config.num_kv_heads, config.head_dim)
        keys, values = (self._backend.xp.reshape(each, rows) for each in (keys, values))
        new = self._store.quantized(keys, values)  # may raise, so that it comes before blocks go or are taken
        positions, unseen = np.arange(length, length + count), self._unseen(length)
        groups, more = np.arange(config.num_groups)[:, None], self._missing(table, length + count)
        free = self.pool.num_free + sum(self.pool.references(block) == 1 for block in self._tables.before(table, unseen))
        copies = self._shared(table, groups, positions // config.block_size)
        if (needed := config.num_groups * more[table] + len(copies)) > free:
            raise OutOfBlocks(f"out of blocks: {needed} needed, {free} free")
        self.pool.free_many(self._tables.release(table, unseen))
        self._prepare(more, table, groups, positions)
        self._store.put(self._slots(table, np.arange(config.num_layers)[:, None], positions).reshape(-1), new)
        self._tables.lengths[table] = length + count

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]. Raises PositionOutOfRange for what is not held."""
        table, layer = self._table(sequence), self._layer(layer)
        length, what = self.length(sequence), f"position in sequence {sequence}, layer {layer}"
        wanted = [in_range(position, length, PositionOutOfRange, what) for position in positions]
        self._look_held(table, layer, min(wanted, default=length), what)
        return self._store.read(self._slots(table, layer, np.array(wanted, np.int64)))

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None) -> Array:
        """Attention of the last tokens' queries [num_queries, num_query_heads, head_dim], each over what it sees (GROUP-04).

        Raises PositionOutOfRange where one sees what is no longer held: there are as many as the last step had tokens, or fewer.
        """
        table, layer, length = self._table(sequence), self._layer(layer), self.length(sequence)
        row = self.config.num_kv_heads, self.config.head_dim
        query = accept("query", query, ("num_queries", "num_query_heads", row[1]), self._backend)
        in_range(query.shape[0], length + 1, PositionOutOfRange, "queries")
        sight = self._sights[layer % self.config.num_groups]
        self._look_held(table, layer, max(0, int(sight.first(length - query.shape[0]))), "the first position that a query sees")
        first = self._first(table, layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(self._slots(table, layer, np.arange(first + start, first + stop)))

        return attention_as_read(query, read, length - first, row, scale=scale, causal=True, sight=sight, backend=self._backend)

    def length(self, sequence: int) -> int:
        """Tokens of every layer."""
        return int(self._tables.lengths[self._table(sequence), 0])

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """The blocks that hold the tokens of the layer, and of all of its group, in order; -1 where they were given back."""
        table = self._table(sequence)
        return self._tables.blocks(table, self._layer(layer) % self.config.num_groups)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens. Raises PositionOutOfRange for more than there are.

        And NotTruncatable where the next query would see what a group gave back: all tokens of the last step can go, and all
        that there are.
        """
        table = self._table(sequence)
        length = in_range(length, self.length(sequence) + 1, PositionOutOfRange, "length")
        if length and (self._unseen(length) < self._tables.released[table]).any():
            raise NotTruncatable(f"cannot truncate to {length}: blocks of its window were freed")
        super().truncate(sequence, length)

    def _layer(self, layer: int) -> int:
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")

    def _first(self, table: int, layer: int) -> int:
        """The first position that the layer's group holds."""
        return int(self._tables.first(table)[layer % self.config.num_groups])

    def _look_held(self, table: int, layer: int, position: int, what: str) -> None:
        first = self._first(table, layer)
        if position < first:
            raise PositionOutOfRange(f"{what}: {position} cannot be read, blocks before position {first} were freed")

    def _unseen(self, length: int) -> NDArray[np.int64]:
        """How many entries of each group lie wholly before what a query at `length` sees."""
        return np.array([max(0, int(sight.first(length))) // self.config.block_size for sight in self._sights])

    def _find(self, tokens: Tokens, salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        """The longest beginning that every group can serve, never all tokens: its keys, and the blocks [entries, num_groups].

        A group can serve what it finds every block of that a query behind it sees.
        """
        keys, rows, hit = list[bytes](), list[list[int]](), 0
        runs = np.zeros(self.config.num_groups, np.int64)  # blocks that each group finds one after the other, up to here
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(_of_group(key, group)) for group in range(self.config.num_groups)]
            if copies[-1] is None:
                break  # behind a hole, layers that see everything serve nothing
            keys.append(key)
            rows.append([NO_BLOCK if copy is None else int(copy.blocks[0]) for copy in copies])
            runs = np.where(np.array(rows[-1]) == NO_BLOCK, 0, runs + 1)
            if (runs >= len(keys) - self._unseen(len(keys) * self.config.block_size)).all():
                hit = len(keys)
        blocks = np.array(rows[:hit], np.int32).reshape(hit, self.config.num_groups)
        blocks[np.arange(hit)[:, None] < self._unseen(hit * self.config.block_size)] = NO_BLOCK
        return keys[:hit], blocks

    def _slots(self, table: int, layers: NDArray[np.int64] | int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where tokens lie: in a block the layers of the group lie one after the other."""
        groups, size = self.config.num_groups, self.config.block_size
        blocks = self._tables.at(table, layers % groups, positions // size).astype(np.int64)
        slots: NDArray[np.int64] = (blocks * self._layers + layers // groups) * size + positions % size
        return slots

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        self._store.copy(sources, targets, self._layers * self.config.block_size)


def _of_group(key: bytes, group: int) -> bytes:
    """What a block of one group is found by."""
    return key + group.to_bytes(4, "little")
