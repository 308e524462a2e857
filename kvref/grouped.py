"""The grouped cache: a prefix cache for models in which some layers see all tokens and others a sliding window.

Layer i is in group i % num_groups. The layers of the last group see all tokens. The other groups are window groups, whose layers
see the last `window` tokens. All groups have the same number of layers. A block is room for block_size tokens in all layers of
one group, so that every group can use every block, and all groups allocate from one pool. A sequence has one block table per
group. A window group frees the blocks that its layers do not see any more; their table entries keep their index and list
NO_BLOCK.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import Sight, attention_as_read
from kvref.backend import Backend, reference
from kvref.block_tables import NO_BLOCK
from kvref.errors import ConfigError, LayerOutOfRange, NotTruncatable, OutOfBlocks, PositionOutOfRange, in_range, whole_fields
from kvref.formats import get_format
from kvref.prefix import CachedBlock, CommittedTokens, IndexedBlockPool, PrefixIndexed, Tokens, block_keys, token_numbers
from kvref.token_store import TokenStore
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class GroupedConfig:
    """Sizes and format of a GroupedCache. Raises ConfigError (LAW-12).

    - `num_blocks`: blocks in the pool, each for one group. n tokens, if no group has released any, have
      num_groups * ceil(n / block_size) blocks.
    - `num_layers`: a multiple of num_groups.
    - `num_groups`: 6 for Gemma 3, in which every sixth layer sees all tokens; 2 for gpt-oss; 1 if all layers see all tokens.
    - `window`: tokens that the layers of window groups see, the query's own included (WIN-01).
    - `dtype`: the name of any format. If it has groups of numbers, `head_dim` must be a multiple of the group. Static formats
      have the scale 1.0.
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
        # code_width raises ConfigError unless head_dim is a multiple of the group
        get_format(self.dtype, argument="dtype").code_width(self.head_dim)


class GroupedCache(PrefixIndexed):
    """A cache of many sequences for models with different layers, with prefix caching (chapter GROUP).

    `begin` creates a sequence, with the cached tokens at its beginning; `step` appends tokens to all layers; `commit` adds full
    blocks to the prefix index. All layers of a sequence have the same length. `sequence` is an id that `create`, `begin` or
    `fork` returned, and `layer` is in `[0, num_layers)`; otherwise a method raises SequenceNotFound or LayerOutOfRange.
    """

    def __init__(self, config: GroupedConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks on the device of `backend`."""
        # In the tables of the base classes a group takes the place of a layer.
        super().__init__(config.num_blocks, config.num_groups, config.block_size, backend)
        self.pool, self._committed, self.config = IndexedBlockPool(config.num_blocks), {}, config
        self._sights = [Sight(config.window)] * (config.num_groups - 1) + [Sight()]
        self._layers = config.num_layers // config.num_groups  # per group
        slots = config.num_blocks * self._layers * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), slots, config.num_kv_heads, config.head_dim)

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the hit: how many of the first tokens `begin(tokens, salt)` would find (GROUP-05). It changes nothing.

        Raises TokenOutOfRange.
        """
        keys, _ = self._find_hit(token_numbers(tokens), salt)
        return len(keys) * self.config.block_size

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """Create a sequence with the cached tokens at the beginning of a prompt, and return its id (GROUP-05).

        Its length is the hit, which `match` returns. A window group shares only the blocks that the next query sees. No block is
        allocated for the other tokens: `step` allocates them. tokens, salt: as in `PrefixCache.begin`. Raises TokenOutOfRange.
        """
        numbers = token_numbers(tokens)
        keys, entries = self._find_hit(numbers, salt)
        sequence, hit = self.create(), len(keys) * self.config.block_size
        table = self._table(sequence)
        self.pool.share_many(entries[entries != NO_BLOCK])
        self._tables.append(table, entries)
        self._tables.released[table] = self._unseen_entries(hit)
        self._tables.lengths[table] = hit
        self._committed[sequence] = CommittedTokens(salt, numbers[:hit], keys)
        return sequence

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the first positions of a sequence contain `tokens`, and add full blocks to the prefix index.

        Each full block that a group stores is cached for this group. Raises SequenceNotFound, TokenOutOfRange, PositionOutOfRange
        if there are more tokens than the sequence has, and TokenMismatch if a token differs from the committed one (PREFIX-02).
        """
        table, numbers = self._table(sequence), token_numbers(tokens)
        committed = self._committed[int(sequence)]
        committed.add(numbers, self.length(sequence))
        keys = block_keys(committed.tokens, self.config.block_size, committed.salt, committed.keys)
        for entry, key in enumerate(keys, len(committed.keys)):
            for group in range(self.config.num_groups):
                block = self._tables.at(table, group, np.array([entry]))
                if block[0] != NO_BLOCK:
                    self.pool.add_to_index(CachedBlock(_group_key(key, group), block))
            committed.keys.append(key)

    def step(self, sequence: int, keys: Array, values: Array) -> None:
        """Append n tokens in every layer. keys, values: [num_layers, n, num_kv_heads, head_dim].

        First, each window group frees the blocks that a query at the present length does not see. Then blocks are allocated for
        the new tokens. The blocks that any query of this step sees stay allocated until the next step (GROUP-02).

        Raises ShapeMismatch, DtypeMismatch, NonFinite, SequenceNotFound, or OutOfBlocks. If it raises, nothing has changed
        (GROUP-03).
        """
        table, config = self._table(sequence), self.config
        shape = (config.num_layers, "n", config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        length, count = self.length(sequence), keys.shape[1]
        if count == 0:
            return
        rows = (config.num_layers * count, config.num_kv_heads, config.head_dim)
        keys, values = (self._backend.xp.reshape(each, rows) for each in (keys, values))
        new = self._store.quantized(keys, values)  # can raise: before blocks are freed or allocated
        positions, unseen = np.arange(length, length + count), self._unseen_entries(length)
        groups, more = np.arange(config.num_groups)[:, None], self._missing_entries(table, length + count)
        free = self.pool.num_free + sum(self.pool.references(block) == 1 for block in self._tables.before(table, unseen))
        copies = self._places_to_copy(table, groups, positions // config.block_size)
        if (needed := config.num_groups * more[table] + len(copies)) > free:
            raise OutOfBlocks(f"out of blocks: {needed} needed, {free} free")
        self.pool.free_many(self._tables.release(table, unseen))
        self._make_writable(more, table, groups, positions)
        self._store.put(self._slots(table, np.arange(config.num_layers)[:, None], positions).reshape(-1), new)
        self._tables.lengths[table] = length + count

    def read(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values at `positions`, in their order: float32 [n, num_kv_heads, head_dim] each (GROUP-04).

        Raises PositionOutOfRange unless each is in `[0, length)` and stored in the layer's group, SequenceNotFound or
        LayerOutOfRange.
        """
        table, layer = self._table(sequence), self._layer(layer)
        length, what = self.length(sequence), f"position in sequence {sequence}, layer {layer}"
        wanted = [in_range(position, length, PositionOutOfRange, what) for position in positions]
        self._check_not_released(table, layer, min(wanted, default=length), what)
        return self._store.read(self._slots(table, layer, np.array(wanted, np.int64)))

    def attend(self, sequence: int, layer: int, query: Array, scale: float | None = None) -> Array:
        """Return the attention of the last tokens' queries: float32 [num_queries, num_query_heads, head_dim] (GROUP-04).

        query: [num_queries, num_query_heads, head_dim], the queries of the last tokens. scale:
        1 / sqrt(head_dim) by default. Each query sees the tokens up to its own, in window groups the last `window` of them.

        Raises PositionOutOfRange if a query sees a position that is released or if there are more queries than tokens;
        ShapeMismatch, DtypeMismatch, SequenceNotFound or LayerOutOfRange.
        """
        table, layer, length = self._table(sequence), self._layer(layer), self.length(sequence)
        row = self.config.num_kv_heads, self.config.head_dim
        query = accept("query", query, ("num_queries", "num_query_heads", row[1]), self._backend)
        in_range(query.shape[0], length + 1, PositionOutOfRange, "queries")
        sight = self._sights[layer % self.config.num_groups]
        self._check_not_released(
            table, layer, max(0, int(sight.first(length - query.shape[0]))), "the first position that a query sees"
        )
        first = self._first(table, layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(self._slots(table, layer, np.arange(first + start, first + stop)))

        return attention_as_read(query, read, length - first, row, scale=scale, causal=True, sight=sight, backend=self._backend)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence. Raises SequenceNotFound."""
        return int(self._tables.lengths[self._table(sequence), 0])

    def block_table(self, sequence: int, layer: int) -> list[int]:
        """Return the block table of a layer's group, -1 for released entries. Raises SequenceNotFound or LayerOutOfRange."""
        table = self._table(sequence)
        return self._tables.blocks(table, self._layer(layer) % self.config.num_groups)

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length` (EDIT-01).

        It works for any tokens of the last step, and for `length` 0. Raises PositionOutOfRange unless `length` is in
        `[0, n + 1)`, where n is the present length; NotTruncatable if a query at `length` sees a released position;
        SequenceNotFound.
        """
        table = self._table(sequence)
        length = in_range(length, self.length(sequence) + 1, PositionOutOfRange, "length")
        if length and (self._unseen_entries(length) < self._tables.released[table]).any():
            raise NotTruncatable(f"cannot truncate to {length}: blocks of its window were freed")
        super().truncate(sequence, length)

    def _layer(self, layer: int) -> int:
        """`layer` as a Python int. Raises LayerOutOfRange."""
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")

    def _first(self, table: int, layer: int) -> int:
        """The first position that is stored in the layer's group."""
        return int(self._tables.first(table)[layer % self.config.num_groups])

    def _check_not_released(self, table: int, layer: int, position: int, what: str) -> None:
        """Raise PositionOutOfRange if a position is released in the layer's group."""
        first = self._first(table, layer)
        if position < first:
            raise PositionOutOfRange(f"{what}: {position} was released: positions from {first} on remain")

    def _unseen_entries(self, length: int) -> NDArray[np.int64]:
        """Per group, how many entries are before all positions that a query at `length` sees."""
        return np.array([max(0, int(sight.first(length))) // self.config.block_size for sight in self._sights])

    def _find_hit(self, tokens: Tokens, salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        """The keys of the hit's blocks, and the blocks themselves, int32 [entries, num_groups] (GROUP-05).

        A group serves a length h if each of its blocks that a query at h sees is cached. The hit is the largest h, less than the
        number of tokens, that every group serves.
        """
        keys, rows, hit = list[bytes](), list[list[int]](), 0
        runs = np.zeros(self.config.num_groups, np.int64)  # per group, the number of consecutive cached blocks up to here
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(_group_key(key, group)) for group in range(self.config.num_groups)]
            if copies[-1] is None:
                break  # the last group, which sees all tokens, serves no longer hit
            keys.append(key)
            rows.append([NO_BLOCK if copy is None else int(copy.blocks[0]) for copy in copies])
            runs = np.where(np.array(rows[-1]) == NO_BLOCK, 0, runs + 1)
            if (runs >= len(keys) - self._unseen_entries(len(keys) * self.config.block_size)).all():
                hit = len(keys)
        blocks = np.array(rows[:hit], np.int32).reshape(hit, self.config.num_groups)
        blocks[np.arange(hit)[:, None] < self._unseen_entries(hit * self.config.block_size)] = NO_BLOCK
        return keys[:hit], blocks

    def _slots(self, table: int, layers: NDArray[np.int64] | int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of tokens. A block contains block_size slots of each layer of its group, layer by layer."""
        groups, size = self.config.num_groups, self.config.block_size
        blocks = self._tables.at(table, layers % groups, positions // size).astype(np.int64)
        slots: NDArray[np.int64] = (blocks * self._layers + layers // groups) * size + positions % size
        return slots

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self._store.copy(sources, targets, self._layers * self.config.block_size)


def _group_key(key: bytes, group: int) -> bytes:
    """The key of a group's block in the prefix index."""
    return key + group.to_bytes(4, "little")
