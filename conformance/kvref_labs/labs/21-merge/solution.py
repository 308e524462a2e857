"""A cache whose tokens are divided among several ranks."""

import numpy as np

from kvref.errors import CapacityExceeded, PositionOutOfRange, RankOutOfRange


class Cache:
    """length: the number of tokens. parts: for each rank, position -> keys and values of its tokens."""

    def __init__(self, num_kv_heads, head_dim, head_ranks, token_ranks, block_size, num_blocks, dtype):
        self.row = num_kv_heads, head_dim
        self.token_ranks, self.block_size, self.num_blocks = token_ranks, block_size, num_blocks
        self.clear()

    def clear(self):
        self.length = 0
        self.parts = [{} for _ in range(self.token_ranks)]

    def rank_of(self, position):
        return position // self.block_size % self.token_ranks

    def append(self, keys, values):
        """Store tokens after the last one. Both arrays: float32 [tokens, num_kv_heads, head_dim]."""
        stop, room = self.length + len(keys), self.num_blocks * self.block_size * self.token_ranks
        if stop > room:
            raise CapacityExceeded(f"{stop} tokens, but there is room for {room}")
        for position, key, value in zip(range(self.length, stop), keys, values, strict=True):
            self.parts[self.rank_of(position)][position] = np.array(key, np.float32), np.array(value, np.float32)
        self.length = stop

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length {length}, but there are {self.length} tokens")
        for position in range(length, self.length):
            del self.parts[self.rank_of(position)][position]
        self.length = length

    def read(self):
        """Return the keys and values of all tokens."""
        return self.stacked([self.parts[self.rank_of(position)][position] for position in range(self.length)])

    def read_rank(self, rank):
        return self.stacked([self.part(rank)[position] for position in self.positions(rank)])

    def positions(self, rank):
        return sorted(self.part(rank))

    def heads(self, rank):
        self.part(rank)
        return list(range(self.row[0]))

    def block_table(self, rank):
        """Return the blocks of a rank, which are the same for all ranks."""
        self.part(rank)
        return list(range(-(-self.length // (self.block_size * self.token_ranks))))

    def num_bytes(self, rank):
        return len(self.block_table(rank)) * self.block_size * 2 * self.row[0] * self.row[1] * 4

    def part(self, rank):
        if not 0 <= rank < self.token_ranks:
            raise RankOutOfRange(f"rank {rank}")
        return self.parts[rank]

    def stacked(self, tokens):
        rows = np.array(tokens, np.float32).reshape(-1, 2, *self.row)
        return rows[:, 0], rows[:, 1]

    def attend(self, query, scale):
        """Return causal attention of the queries of the last tokens, [queries, query heads, head_dim]."""
        if len(query) > self.length:
            raise PositionOutOfRange(f"{len(query)} queries, but there are {self.length} tokens")
        out = np.zeros(query.shape, np.float32)
        for i, own in enumerate(range(self.length - len(query), self.length)):
            columns = [self.attend_column(rank, query[i], own, scale) for rank in range(self.token_ranks)]
            out[i] = self.merged([column for column in columns if column is not None])
        return out

    def attend_column(self, rank, query, own, scale):
        """Return the output of one query over a rank's tokens up to `own`, and the logarithm of the sum of weights.

        Returns None if the query sees no token of the rank.
        """
        tokens = [self.parts[rank][position] for position in self.positions(rank) if position <= own]
        if not tokens:
            return None
        group = len(query) // self.row[0]
        keys, values = (np.repeat(part, group, axis=1).astype(np.float64) for part in self.stacked(tokens))
        scores = np.einsum("hd,thd->ht", query.astype(np.float64), keys) * scale
        largest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        return np.einsum("ht,thd->hd", weights / total, values), largest + np.log(total)

    def merged(self, columns):
        """Return the output over the tokens of all columns."""
        outputs, logarithms = (np.array(part) for part in zip(*columns, strict=True))
        weights = np.exp(logarithms - logarithms.max(axis=0))
        return (weights * outputs).sum(axis=0) / weights.sum(axis=0)
