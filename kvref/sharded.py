"""The sharded cache: the tokens of one sequence and layer on several ranks, each of which has memory of its own.

Ranks stand in a grid of head_ranks rows and token_ranks columns: rank r is in row r // token_ranks and column r % token_ranks. A
row has some of the kv heads (tensor parallel), or shares one with the rows next to it, which hold copies of it then; a column has
every token_ranks-th block of tokens (context parallel, interleaved). So a rank holds the tokens of its column, of the heads of
its row. Where a token belongs follows from its position alone: every rank keeps the same books by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import TOKENS, accept_query
from kvref.backend import Backend, reference
from kvref.blocks import BlockPool
from kvref.errors import CapacityExceeded, ConfigError, PositionOutOfRange, RankLost, RankOutOfRange, in_range, whole_fields
from kvref.formats import PLAIN_DTYPES, Quantized, get_format
from kvref.inputs import accept_pair
from kvref.pieces import Partial, merged, partial
from kvref.slots import TokenStore


@dataclass(frozen=True)
class ShardedConfig:
    """num_blocks: that each rank has, of block_size tokens each. dtype: float32, float16 or bfloat16.

    head_ranks divides num_kv_heads, or is a multiple of it. Raises ConfigError.
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
        get_format(self.dtype, among=PLAIN_DTYPES)
        if self.num_kv_heads % self.head_ranks and self.head_ranks % self.num_kv_heads:
            raise ConfigError(f"head_ranks: expected a divisor or a multiple of {self.num_kv_heads}, got {self.head_ranks}")

    @property
    def num_ranks(self) -> int:
        return self.head_ranks * self.token_ranks

    @property
    def copies(self) -> int:
        """Rows that hold the same head; 1 where each head is in one."""
        return max(1, self.head_ranks // self.num_kv_heads)

    @property
    def max_tokens(self) -> int:
        """That there is room for, on all ranks together."""
        return self.num_blocks * self.block_size * self.token_ranks

    def heads(self, row: int) -> range:
        """The kv heads of a row: its share, or the one that it holds a copy of (SHARD-01)."""
        each = max(1, self.num_kv_heads // self.head_ranks)
        first = row // self.copies * each
        return range(first, first + each)

    def query_heads(self, row: int, group: int) -> range:
        """The query heads that a row answers, where `group` of them share a kv head: the copies of one divide them."""
        heads, copy = self.heads(row), row % self.copies
        if self.copies == 1:
            return range(heads.start * group, heads.stop * group)
        return range(heads.start * group + copy * group // self.copies, heads.start * group + (copy + 1) * group // self.copies)


class _Rank:
    """What one rank holds, and its books. It is told of every call, and of no other rank."""

    def __init__(self, config: ShardedConfig, number: int, backend: Backend) -> None:
        row, self._column = divmod(number, config.token_ranks)
        self.heads = config.heads(row)
        self.table: list[int] = []  # of the blocks of its memory, those that hold tokens, in order
        self.length = 0  # tokens, on all ranks
        self._config, self._backend = config, backend
        self._pool = BlockPool(config.num_blocks)
        num_slots = config.num_blocks * config.block_size
        self._store = TokenStore(backend, get_format(config.dtype), num_slots, len(self.heads), config.head_dim)

    def positions(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Of the positions [start, stop), all unless given, those whose tokens belong here, in order (SHARD-02)."""
        every: NDArray[np.int64] = np.arange(start, self.length if stop is None else stop)
        return np.asarray(every[every // self._config.block_size % self._config.token_ranks == self._column])

    def prepared(self, keys: Array, values: Array) -> tuple[Quantized, Quantized]:
        """Its share of tokens [n, num_kv_heads, head_dim] that come, as it will hold them: nothing is written yet."""
        come = self.positions(self.length, self.length + keys.shape[0]) - self.length
        heads = slice(self.heads.start, self.heads.stop)
        share = (self._backend.gather(each, come)[:, heads, :] for each in (keys, values))
        return self._store.quantized(*share)

    def keep(self, count: int, share: tuple[Quantized, Quantized]) -> None:
        """Hold what was prepared of `count` tokens, for which there is room."""
        come = self.positions(self.length, self.length + count)
        self.be(self.length + count)
        self._store.put(self._slots(come), share)

    def be(self, length: int) -> None:
        """Have as many blocks as so many tokens take, the same on every rank: blocks of one column's last turn may be empty."""
        self.length = length
        needed = -(-length // (self._config.block_size * self._config.token_ranks))
        self._pool.free_many(self.table[needed:])
        self.table = self.table[:needed] + self._pool.allocate_many(max(0, needed - len(self.table))).tolist()

    def read(self) -> tuple[Array, Array]:
        return self._store.read(self._slots(self.positions()))

    def partials(self, query: Array, at: NDArray[np.int64], scale: float) -> Iterator[Partial]:
        """Attention of queries at these positions over its own tokens, some at a time: none where it has none."""
        positions = self.positions()
        for start in range(0, len(positions), TOKENS):
            piece = positions[start : start + TOKENS]
            mask = self._backend.asarray(piece <= at[:, None])
            yield partial(query, *self._store.read(self._slots(piece)), scale, mask, self._backend.xp)

    @property
    def num_bytes(self) -> int:
        return len(self.table) * self._config.block_size * self._store.token_bytes

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where in its memory tokens lie that are its own."""
        block, offset = np.divmod(positions, self._config.block_size)
        found: NDArray[np.int64] = np.array(self.table, np.int64)[block // self._config.token_ranks]
        return found * self._config.block_size + offset


class ShardedCache:
    """What the ranks hold together. A rank may be lost: then what needs it raises RankLost (SHARD-04).

    `append`, `read`, `attend`, `truncate` and `clear` need every rank, what is asked of one rank that one, and `length` none.
    """

    def __init__(self, config: ShardedConfig, backend: Backend = reference) -> None:
        self.config = config
        self.length = 0
        self._backend = backend
        self._ranks: list[_Rank | None] = [_Rank(config, number, backend) for number in range(config.num_ranks)]  # None: lost
        self._failing: set[int] = set()  # those that the next append will lose

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim], on all ranks or on none.

        Raises ShapeMismatch, DtypeMismatch, CapacityExceeded past max_tokens, or RankLost.
        """
        config = self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        count = keys.shape[0]
        if self.length + count > config.max_tokens:
            raise CapacityExceeded(f"cache full: {self.length + count} tokens needed, max_tokens is {config.max_tokens}")
        ranks = self._every("append")
        shares = [rank.prepared(keys, values) for rank in ranks]
        if count and self._failing:  # some did not say that they are ready: nobody keeps what was prepared
            for number in self._failing:
                self._ranks[number] = None
            self._every("append")
        for rank, share in zip(ranks, shares, strict=True):
            rank.keep(count, share)
        self.length += count

    def read(self) -> tuple[Array, Array]:
        """All keys and values, put together: float32 [length, num_kv_heads, head_dim]. Raises RankLost."""
        rows = self._rows(self._every("read"))[:: self.config.copies]
        keys, values = zip(*map(self._in_order, rows), strict=True)
        return self._backend.xp.concat(list(keys), axis=1), self._backend.xp.concat(list(values), axis=1)

    def read_rank(self, rank: int) -> tuple[Array, Array]:
        """What a rank holds, float32 [its positions, its heads, head_dim]. Raises RankOutOfRange or RankLost."""
        return self._rank(rank).read()

    def heads(self, rank: int) -> list[int]:
        """The kv heads that a rank holds, in order. Raises RankOutOfRange or RankLost."""
        return list(self._rank(rank).heads)

    def positions(self, rank: int) -> list[int]:
        """The positions whose tokens a rank holds, in order. Raises RankOutOfRange or RankLost."""
        return [int(position) for position in self._rank(rank).positions()]

    def block_table(self, rank: int) -> list[int]:
        """The blocks of a rank's memory that hold tokens, in order: the same on every rank (SHARD-03).

        Raises RankOutOfRange or RankLost.
        """
        return list(self._rank(rank).table)

    def num_bytes(self, rank: int) -> int:
        """Bytes of the blocks in a rank's table. Raises RankOutOfRange or RankLost."""
        return self._rank(rank).num_bytes

    def attend(self, query: Array, scale: float) -> Array:
        """Causal attention of the last tokens' queries: float32 [num_queries, num_query_heads, head_dim], as the query is.

        Each rank attends to what it holds. What the columns of a row found is merged by log-sum-exp (kvref.pieces), which adds
        20 (token_ranks - 1) roundings to the bound of ATTN-04; the rows' query heads stand side by side.

        Raises ShapeMismatch, DtypeMismatch, PositionOutOfRange for more queries than tokens, or RankLost.
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
        """Forget all but the first `length` tokens, on every rank (EDIT-01).

        Raises PositionOutOfRange for more than there are, or RankLost.
        """
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        for rank in self._every("truncate"):
            rank.be(length)
        self.length = length

    def clear(self) -> None:
        """Forget every token. Raises RankLost."""
        self.truncate(0)

    def lose(self, rank: int) -> None:
        """Let a rank be lost, with what it holds. Raises RankOutOfRange, or RankLost where it is already."""
        self._ranks[self._number(rank)] = None

    def lose_in_append(self, rank: int) -> None:
        """Let a rank be lost in the middle of the next append of a token or more that is not refused. Raises as `lose` does."""
        self._failing.add(self._number(rank))

    def _every(self, operation: str) -> list[_Rank]:
        """All ranks. Raises RankLost."""
        living = [rank for rank in self._ranks if rank is not None]
        if len(living) < len(self._ranks):
            lost = [number for number, rank in enumerate(self._ranks) if rank is None]
            raise RankLost(f"{operation}: ranks {lost} of {len(self._ranks)} are lost")
        return living

    def _number(self, rank: int) -> int:
        """Of a rank that is there. Raises RankOutOfRange or RankLost."""
        number = in_range(rank, len(self._ranks), RankOutOfRange, "rank")
        if self._ranks[number] is None:
            raise RankLost(f"rank {number} is lost")
        return number

    def _rank(self, rank: int) -> _Rank:
        return cast(_Rank, self._ranks[self._number(rank)])

    def _rows(self, ranks: list[_Rank]) -> list[list[_Rank]]:
        columns = self.config.token_ranks
        return [ranks[first : first + columns] for first in range(0, len(ranks), columns)]

    def _in_order(self, row: list[_Rank]) -> tuple[Array, Array]:
        """Keys and values of a row's heads, of all its columns, by position."""
        order = np.argsort(np.concatenate([rank.positions() for rank in row]))
        keys, values = zip(*(rank.read() for rank in row), strict=True)
        xp, gather = self._backend.xp, self._backend.gather
        return gather(xp.concat(list(keys), axis=0), order), gather(xp.concat(list(values), axis=0), order)
