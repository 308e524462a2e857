"""Adapter of a sharded cache of JAX arrays: a mesh of devices, each with its rank's part of one array, by `NamedSharding`.

XLA_FLAGS makes four devices of one CPU and has to be set before JAX initializes, so judge it in a process of its own. Tokens are
written by `.at[].set` on every device, with the slots of that device. Attention is merged by `pmax` and `psum` over a row of the
mesh. All devices have one host, which keeps one block table for all. A device cannot be lost.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()

from functools import cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kvref
from kvref.attention import accept_query
from kvref.errors import CapacityExceeded, PositionOutOfRange, RankOutOfRange, in_range
from kvref.validation import accept_pair
from kvref_adapters.jax.functions import JaxFunctions
from kvref_conformance.exceptions import CannotRun

BACKEND = kvref.backend("numpy")
ROW, COLUMN = "heads", "tokens"  # the axes of the mesh


@cache
def mesh(rows: int, columns: int) -> Mesh:
    """Return the mesh. Raises CannotRun if JAX was initialized before XLA_FLAGS was set to four devices."""
    if len(devices := jax.devices("cpu")) < rows * columns:
        raise CannotRun(
            f"jax: expected {rows * columns} devices, got {len(devices)}: JAX was initialized before XLA_FLAGS was set"
        )
    return Mesh(np.array(devices[: rows * columns]).reshape(rows, columns), (ROW, COLUMN))


def on_each(grid: Mesh, function: Any, given: tuple[Any, ...], made: Any) -> Any:
    """Compile a function that receives each device's own parts."""
    return jax.jit(jax.shard_map(function, mesh=grid, in_specs=given, out_specs=made, check_vma=False))


@cache
def writing(grid: Mesh) -> Any:
    def write(stored: Any, tokens: Any, heads: Any, slots: Any) -> Any:
        """Write tokens into [1, 1, slots, heads, dim]. Tokens whose slot does not exist are dropped."""
        return stored.at[0, 0, slots[0]].set(tokens[:, heads[0]].astype(stored.dtype), mode="drop")

    return on_each(grid, write, (P(ROW, COLUMN), P(), P(ROW), P(COLUMN)), P(ROW, COLUMN))


@cache
def attending(grid: Mesh) -> Any:
    def attend(query: Any, keys: Any, values: Any, heads: Any, positions: Any, at: Any, scale: Any) -> Any:
        """Attend over a row's KV heads: [1, nq, heads, group, dim].

        query: [nq, num_kv_heads, group, dim]. positions: the position in each slot, -1 for an empty slot.
        """
        keys, values = (part[0, 0].astype(jnp.float32) for part in (keys, values))
        seen = (positions[0] >= 0) & (positions[0] <= at[:, None])  # [nq, slots]
        scores = jnp.einsum("qhgd,nhd->qhgn", query[:, heads[0]], keys, precision="highest") * scale
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        # over all columns; each query sees at least one token
        largest = lax.pmax(jnp.max(scores, axis=-1, keepdims=True), COLUMN)
        weights = jnp.exp(scores - largest)
        read = jnp.where(seen[:, :, None, None], values, 0.0)  # otherwise 0 * NaN would reach queries that do not see the token
        found = jnp.einsum("qhgn,qnhd->qhgd", weights, read, precision="highest")
        return (lax.psum(found, COLUMN) / lax.psum(jnp.sum(weights, axis=-1, keepdims=True), COLUMN))[None]

    given = (P(), P(ROW, COLUMN), P(ROW, COLUMN), P(ROW), P(COLUMN), P(), P())
    return on_each(grid, attend, given, P(ROW))


class JaxShardedCache:
    def __init__(self, config: kvref.ShardedConfig) -> None:
        self.config, self.length = config, 0
        self._mesh = mesh(config.head_ranks, config.token_ranks)
        self._heads = np.array([config.heads(row) for row in range(config.head_ranks)])
        self._slots = config.num_blocks * config.block_size  # per rank
        self._free, self._table = list(range(config.num_blocks))[::-1], list[int]()
        shape = config.head_ranks, config.token_ranks, self._slots, self._heads.shape[1], config.head_dim
        empty = jnp.zeros(shape, getattr(jnp, config.dtype))
        self._stored = [jax.device_put(empty, NamedSharding(self._mesh, P(ROW, COLUMN))) for _ in ("keys", "values")]

    def append(self, keys: Any, values: Any) -> None:
        config = self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), BACKEND)
        if (stop := self.length + len(keys)) > config.max_tokens:
            raise CapacityExceeded(f"cache full: {stop} tokens needed, max_tokens is {config.max_tokens}")
        start, self.length = self.length, stop
        self._fit()
        slots = np.full((config.token_ranks, _padded(stop - start)), self._slots, np.int32)  # a slot number that does not exist
        for column in range(config.token_ranks):
            own = self._positions(column, start)
            slots[column, own - start] = self._at(own)
        write = writing(self._mesh)
        for which, part in enumerate((keys, values)):
            tokens = np.pad(part, ((0, slots.shape[1] - len(part)), (0, 0), (0, 0)))
            self._stored[which] = write(self._stored[which], tokens, self._heads, slots)

    def read(self) -> tuple[Any, Any]:
        config = self.config
        whole = np.zeros((2, self.length, config.num_kv_heads, config.head_dim), np.float32)
        for rank in range(config.num_ranks):
            whole[np.ix_((0, 1), self.positions(rank), self.heads(rank))] = np.stack(self.read_rank(rank))
        return jnp.asarray(whole[0]), jnp.asarray(whole[1])

    def read_rank(self, rank: int) -> tuple[Any, Any]:
        """Return the part on the rank's device."""
        row, column = self._place(rank)
        slots = self._at(self._positions(column))
        keys, values = (self._on_device(stored, row, column)[slots] for stored in self._stored)
        return keys, values

    def _on_device(self, stored: Any, row: int, column: int) -> Any:
        device = self._mesh.devices[row, column]
        (own,) = (shard.data for shard in stored.addressable_shards if shard.device == device)
        return np.asarray(own[0, 0].astype(jnp.float32))

    def heads(self, rank: int) -> list[int]:
        return [int(head) for head in self._heads[self._place(rank)[0]]]

    def positions(self, rank: int) -> list[int]:
        return [int(position) for position in self._positions(self._place(rank)[1])]

    def block_table(self, rank: int) -> list[int]:
        self._place(rank)
        return list(self._table)

    def num_bytes(self, rank: int) -> int:
        row, column = self._place(rank)
        (own,) = (shard.data for shard in self._stored[0].addressable_shards if shard.device == self._mesh.devices[row, column])
        return int(2 * own.nbytes // self.config.num_blocks * len(self._table))

    def attend(self, query: Any, scale: float) -> Any:
        config = self.config
        query = accept_query(query, "num_queries", config.num_kv_heads, config.head_dim, BACKEND)
        count, num_heads, dim = query.shape
        in_range(count, self.length + 1, PositionOutOfRange, "queries")
        group = num_heads // config.num_kv_heads
        if not count or not group:
            return jnp.zeros(query.shape, jnp.float32)
        grouped = np.zeros((_padded(count), config.num_kv_heads, group, dim), np.float32)
        grouped[:count] = query.reshape(count, config.num_kv_heads, group, dim)
        at = np.zeros(len(grouped), np.int32)
        at[:count] = np.arange(self.length - count, self.length)
        positions = np.full((config.token_ranks, self._slots), -1, np.int32)
        for column in range(config.token_ranks):
            own = self._positions(column)
            positions[column, self._at(own)] = own
        found = attending(self._mesh)(grouped, *self._stored, self._heads, positions, at, np.float32(scale))
        out = np.zeros((count, num_heads, dim), np.float32)
        # copies of a KV head find the same tokens, but each has query heads of its own
        for row, answered in enumerate(np.asarray(found)):
            own = config.query_heads(row, group)
            first = int(self._heads[row][0]) * group
            of_row = answered[:count].reshape(count, -1, dim)
            out[:, own.start : own.stop] = of_row[:, own.start - first : own.stop - first]
        return jnp.asarray(out)

    def truncate(self, length: int) -> None:
        self.length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        self._fit()

    def clear(self) -> None:
        self.truncate(0)

    def _fit(self) -> None:
        needed = -(-self.length // (self.config.block_size * self.config.token_ranks))
        while len(self._table) > needed:
            self._free.append(self._table.pop())
        while len(self._table) < needed:
            self._table.append(self._free.pop())

    def _positions(self, column: int, start: int = 0) -> Any:
        every = np.arange(start, self.length)
        return every[every // self.config.block_size % self.config.token_ranks == column]

    def _at(self, positions: Any) -> Any:
        block, offset = np.divmod(positions, self.config.block_size)
        return np.array(self._table, np.int64)[block // self.config.token_ranks] * self.config.block_size + offset

    def _place(self, rank: int) -> tuple[int, int]:
        return divmod(in_range(rank, self.config.num_ranks, RankOutOfRange, "rank"), self.config.token_ranks)


def _padded(count: int) -> int:
    """Round up the number of tokens, because JAX compiles each number separately."""
    return 1 << max(0, count - 1).bit_length()


class JaxSharded(JaxFunctions):
    name, project = "jax-sharded", "kvref"
    formats = ("float32", "float16", "bfloat16")
    limits: ClassVar[Any] = {"sharded": {"head_ranks": [1, 2], "token_ranks": [1, 2]}}

    def sharded(self, **config: Any) -> JaxShardedCache:
        return JaxShardedCache(kvref.ShardedConfig(**config))
