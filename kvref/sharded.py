"""The sharded cache: the tokens of one sequence and layer, distributed over several ranks, each with memory of its own.

The ranks form a grid of head_ranks rows and token_ranks columns: rank r is in row r // token_ranks and column r % token_ranks. A
row has a share of the kv heads (tensor parallelism); if there are more rows than heads, several rows have copies of one head. A
column has every token_ranks-th block of tokens (context parallelism, interleaved). A rank thus stores the tokens of its column
for the heads of its row. The position of a token determines its column, so that every rank computes the same block table without
messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import TOKENS, accept_query
from kvref.backend import Backend, reference
from kvref.block_pool import BlockPool
from kvref.errors import CapacityExceeded, ConfigError, PositionOutOfRange, RankLost, RankOutOfRange, in_range, whole_fields
from kvref.formats import PLAIN_DTYPES, Quantized, get_format
from kvref.online_softmax import Partial, merged, partial
from kvref.token_store import TokenStore
from kvref.validation import accept_pair


@dataclass(frozen=True)
class ShardedConfig:
    """Sizes, grid and dtype of a ShardedCache. Raises ConfigError (LAW-12).

    - `num_blocks`: blocks per rank, of `block_size` tokens each.
    - `head_ranks`: rows of the grid; a divisor or a multiple of num_kv_heads (SHARD-01).
    - `token_ranks`: columns of the grid.
    - `dtype`: float32, float16 or bfloat16.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    head_ranks: int = 1
    token_ranks: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "block_size", "num_blocks", "head_ranks", "token_ranks")
        get_format(self.dtype, among=PLAIN_DTYPES, argument="dtype")
        if self.num_kv_heads % self.head_ranks and self.head_ranks % self.num_kv_heads:
            raise ConfigError(f"head_ranks: expected a divisor or a multiple of {self.num_kv_heads}, got {self.head_ranks}")

    @property
    def num_ranks(self) -> int:
        """head_ranks * token_ranks."""
        return self.head_ranks * self.token_ranks

    @property
    def copies(self) -> int:
        """The number of rows that have the same head; 1 if each head is in one row."""
        return max(1, self.head_ranks // self.num_kv_heads)

    @property
    def max_tokens(self) -> int:
        """The number of tokens for which all ranks together have room (SHARD-03)."""
        return self.num_blocks * self.block_size * self.token_ranks

    def heads(self, row: int) -> range:
        """Return the kv heads of a row (SHARD-01)."""
        each = max(1, self.num_kv_heads // self.head_ranks)
        first = row // self.copies * each
        return range(first, first + each)

    def query_heads(self, row: int, group: int) -> range:
        """Return the query heads that a row computes. group: query heads per kv head, which rows with copies of a head divide."""
        heads, copy = self.heads(row), row % self.copies
        if self.copies == 1:
            return range(heads.start * group, heads.stop * group)
        return range(heads.start * group + copy * group // self.copies, heads.start * group + (copy + 1) * group // self.copies)


class _Rank:
    """The memory and the block table of one rank. It receives every call, and has no access to other ranks."""

    def __init__(self, config: ShardedConfig, number: int, backend: Backend) -> None:
        row, self._column = divmod(number, config.token_ranks)
        self.heads = config.heads(row)
        self.table: list[int] = []  # the blocks with tokens, in order
        self.length = 0  # tokens of the cache, on all ranks together
        self._config, self._backend = config, backend
        self._pool = BlockPool(config.num_blocks)
        num_slots = config.num_blocks * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), num_slots, len(self.heads), config.head_dim)

    def positions(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """The positions in [start, stop), by default all, whose tokens are in this rank's column, in order (SHARD-02)."""
        every: NDArray[np.int64] = np.arange(start, self.length if stop is None else stop)
        return np.asarray(every[every // self._config.block_size % self._config.token_ranks == self._column])

    def prepared(self, keys: Array, values: Array) -> tuple[Quantized, Quantized]:
        """The rank's share of new tokens [n, num_kv_heads, head_dim] in the cache's dtype. First phase: nothing is written."""
        come = self.positions(self.length, self.length + keys.shape[0]) - self.length
        heads = slice(self.heads.start, self.heads.stop)
        share = (self._backend.gather(each, come)[:, heads, :] for each in (keys, values))
        return self._store.quantized(*share)

    def keep(self, count: int, share: tuple[Quantized, Quantized]) -> None:
        """Write the share that was prepared of `count` new tokens. The second phase: there must be room."""
        come = self.positions(self.length, self.length + count)
        self.be(self.length + count)
        self._store.put(self._slots(come), share)

    def be(self, length: int) -> None:
        """Set the length, and allocate or free blocks: the same number on every rank, (SHARD-03)."""
        self.length = length
        needed = -(-length // (self._config.block_size * self._config.token_ranks))
        self._pool.free_many(self.table[needed:])
        del self.table[needed:]
        self.table += self._pool.allocate_many(needed - len(self.table)).tolist()

    def read(self) -> tuple[Array, Array]:
        """The keys and values of the rank's positions and heads, float32."""
        return self._store.read(self._slots(self.positions()))

    def partials(self, query: Array, at: NDArray[np.int64], scale: float) -> Iterator[Partial]:
        """Partial attention of queries at the positions `at` over the rank's tokens, in tiles; nothing if it has no tokens."""
        positions = self.positions()
        for start in range(0, len(positions), TOKENS):
            piece = positions[start : start + TOKENS]
            mask = self._backend.asarray(piece <= at[:, None])
            yield partial(query, *self._store.read(self._slots(piece)), scale, mask, self._backend.xp)

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks in the table (SHARD-03)."""
        return len(self.table) * self._config.block_size * self._store.token_bytes

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of positions of this rank."""
        block, offset = np.divmod(positions, self._config.block_size)
        entries = block // self._config.token_ranks
        first = int(entries.min(initial=len(self.table)))
        listed = np.array(self.table[first : int(entries.max(initial=0)) + 1], np.int64)  # the part of the table that is needed
        found: NDArray[np.int64] = listed[entries - first]
        return found * self._config.block_size + offset


class ShardedCache:
    """A cache of one sequence and layer on several ranks (chapter SHARD). `length` is the number of tokens.

    All ranks are objects in this process, and each has memory of its own. `lose` and `lose_in_append` simulate the failure of a
    rank. `append`, `read`, `attend`, `truncate` and `clear` need every rank and raise RankLost if one is lost. A call that names
    a rank needs that rank, and `length` needs none (SHARD-04).
    """

    def __init__(self, config: ShardedConfig, backend: Backend = reference) -> None:
        """Create the ranks, with their memory on the device of `backend`."""
        self.config = config
        self.length = 0
        self._backend = backend
        self._ranks: list[_Rank | None] = [_Rank(config, number, backend) for number in range(config.num_ranks)]  # None: lost
        self._failing: set[int] = set()  # the ranks that will fail in the next append

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, on all ranks or on none: a two-phase commit (SHARD-04). keys, values: [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, CapacityExceeded if there would be more than max_tokens tokens, or RankLost.
        """
        config = self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        count = keys.shape[0]
        if self.length + count > config.max_tokens:
            raise CapacityExceeded(f"cache full: {self.length + count} tokens needed, max_tokens is {config.max_tokens}")
        ranks = self._every("append")
        shares = [rank.prepared(keys, values) for rank in ranks]
        if count and self._failing:  # they do not report that they are ready: no rank writes
            for number in self._failing:
                self._ranks[number] = None
            self._every("append")
        for rank, share in zip(ranks, shares, strict=True):
            rank.keep(count, share)
        self.length += count

    def read(self) -> tuple[Array, Array]:
        """Return the keys and values of all ranks, in order: float32 [length, num_kv_heads, head_dim] each. Raises RankLost."""
        rows = self._rows(self._every("read"))[:: self.config.copies]
        keys, values = zip(*map(self._in_order, rows), strict=True)
        return self._backend.xp.concat(list(keys), axis=1), self._backend.xp.concat(list(values), axis=1)

    def read_rank(self, rank: int) -> tuple[Array, Array]:
        """Return the keys and values of one rank: float32 [positions, heads, head_dim] each, in the order of both.

        Raises RankOutOfRange or RankLost.
        """
        return self._rank(rank).read()

    def heads(self, rank: int) -> list[int]:
        """Return the kv heads of a rank, in order (SHARD-01). Raises RankOutOfRange or RankLost."""
        return list(self._rank(rank).heads)

    def positions(self, rank: int) -> list[int]:
        """Return the positions whose tokens a rank has, in order (SHARD-02). Raises RankOutOfRange or RankLost."""
        return [int(position) for position in self._rank(rank).positions()]

    def block_table(self, rank: int) -> list[int]:
        """Return the block ids of a rank's table, in order. It is the same on every rank (SHARD-03).

        Raises RankOutOfRange or RankLost.
        """
        return list(self._rank(rank).table)

    def num_bytes(self, rank: int) -> int:
        """Return the bytes of the blocks in a rank's table (SHARD-03). Raises RankOutOfRange or RankLost."""
        return self._rank(rank).num_bytes

    def attend(self, query: Array, scale: float) -> Array:
        """Return causal attention of the last tokens' queries: float32 [num_queries, num_query_heads, head_dim] (SHARD-02).

        query: [num_queries, num_query_heads, head_dim]. Each rank attends over its own tokens. The partial results of the columns
        of a row are merged (`kvref.online_softmax`), which adds 20 (token_ranks - 1) roundings to the bound of ATTN-04. The query
        heads of all rows are concatenated.

        Raises ShapeMismatch, DtypeMismatch, PositionOutOfRange if there are more queries than tokens, or RankLost.
        """
        config = self.config
        query = accept_query(query, "num_queries", config.num_kv_heads, config.head_dim, self._backend)
        count, num_heads, _ = query.shape
        in_range(count, self.length + 1, PositionOutOfRange, "queries")
        rows = self._rows(self._every("attend"))
        if count == 0 or num_heads == 0:
            return self._backend.zeros(tuple(query.shape), "float32")
        at, out = np.arange(self.length - count, self.length), []
        for row, columns in enumerate(rows):
            own = config.query_heads(row, num_heads // config.num_kv_heads)
            if own:
                share = query[:, own.start : own.stop, :]
                found = (part for rank in columns for part in rank.partials(share, at, scale))
                out.append(merged(found, None, self._backend.xp))
        return self._backend.xp.concat(out, axis=1)

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`, on every rank (EDIT-01).

        Raises PositionOutOfRange unless `length` is in `[0, self.length + 1)`, or RankLost.
        """
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        for rank in self._every("truncate"):
            rank.be(length)
        self.length = length

    def clear(self) -> None:
        """Remove every token. Raises RankLost."""
        self.truncate(0)

    def lose(self, rank: int) -> None:
        """Make a rank fail, with all its tokens. Raises RankOutOfRange, or RankLost if it is lost already."""
        self._ranks[self._number(rank)] = None

    def lose_in_append(self, rank: int) -> None:
        """Make a rank fail in the first phase of the next append that has one (SHARD-04). Raises as `lose` does."""
        self._failing.add(self._number(rank))

    def _every(self, operation: str) -> list[_Rank]:
        """All ranks. Raises RankLost if one is lost."""
        living = [rank for rank in self._ranks if rank is not None]
        if len(living) < len(self._ranks):
            lost = [number for number, rank in enumerate(self._ranks) if rank is None]
            raise RankLost(f"{operation}: ranks {lost} of {len(self._ranks)} are lost")
        return living

    def _number(self, rank: int) -> int:
        """`rank` as a Python int. Raises RankOutOfRange or RankLost."""
        number = in_range(rank, len(self._ranks), RankOutOfRange, "rank")
        if self._ranks[number] is None:
            raise RankLost(f"rank {number} is lost")
        return number

    def _rank(self, rank: int) -> _Rank:
        """The rank with this number. Raises RankOutOfRange or RankLost."""
        return cast(_Rank, self._ranks[self._number(rank)])

    def _rows(self, ranks: list[_Rank]) -> list[list[_Rank]]:
        """All ranks, by row and column."""
        columns = self.config.token_ranks
        return [ranks[first : first + columns] for first in range(0, len(ranks), columns)]

    def _in_order(self, row: list[_Rank]) -> tuple[Array, Array]:
        """The keys and values of all columns of a row, in the order of positions."""
        order = np.argsort(np.concatenate([rank.positions() for rank in row]))
        keys, values = zip(*(rank.read() for rank in row), strict=True)
        xp, gather = self._backend.xp, self._backend.gather
        return gather(xp.concat(list(keys), axis=0), order), gather(xp.concat(list(values), axis=0), order)
