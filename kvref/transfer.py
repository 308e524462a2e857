"""The transfer cache: a paged cache that sends sequences to other caches and receives sequences from them, while it is in use.

    sender                                                     receiver
    export(sequence) -> handle                                 begin(length) -> transfer    reserves blocks
    send(handle, layer, tokens, heads) -> rows    ------->     arrive(transfer, layer, start, heads, rows)
    release(handle)                                            commit(transfer) -> sequence
                                                               or abort(transfer), later fence(transfer)

The owners of blocks are sequences, open transfers, aborted transfers that were not fenced, and exports. Each has a block table,
and a block is free if no table lists it. The cache copies nothing between machines: the caller passes rows from one cache to the
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.block_sequences import BlockOwner
from kvref.errors import (
    AlreadyArrived,
    ConfigError,
    ExportNotFound,
    HeadOutOfRange,
    LayerOutOfRange,
    PositionOutOfRange,
    TransferIncomplete,
    TransferNotFound,
    in_range,
    integer,
    whole,
    whole_fields,
)
from kvref.formats import PLAIN_DTYPES, get_format
from kvref.partial_load import checked_range
from kvref.token_store import TokenStore
from kvref.validation import accept_pair


@dataclass(frozen=True)
class TransferConfig:
    """Sizes and dtype of a TransferCache. Raises ConfigError (LAW-12).

    - `num_blocks`: blocks in the pool, 0 or more. A block is for one layer.
    - `block_size`: tokens per block.
    - `head_ranks`: the number of ranks that the kv heads are divided among, a divisor of num_kv_heads.
    - `dtype`: float32, float16 or bfloat16.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    head_ranks: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_layers", "num_kv_heads", "head_dim", "block_size", "head_ranks")
        get_format(self.dtype, among=PLAIN_DTYPES, argument="dtype")
        if self.num_kv_heads % self.head_ranks:
            raise ConfigError(f"head_ranks: expected a divisor of num_kv_heads {self.num_kv_heads}, got {self.head_ranks}")


@dataclass
class _Transfer:
    """A sequence that arrives. table: the number of its block table. arrived: bool [num_layers, length, num_kv_heads]."""

    table: int
    deadline: int | None
    arrived: NDArray[np.bool_]


class TransferCache(BlockOwner):
    """A paged cache whose sequences can be sent and received while others are used (chapter TRANSFER).

    Ids of sequences, transfers and exports count up from 0, separately, and are never reused. In every method, `layer` is in
    `[0, num_layers)`, and `heads` and `tokens` are ranges [start, stop), as lists of two integers.
    """

    def __init__(self, config: TransferConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks on the device of `backend`: one store per rank."""
        super().__init__(config.num_blocks, config.num_layers, config.block_size, backend)
        self.config = config
        each, slots = config.num_kv_heads // config.head_ranks, config.num_blocks * config.block_size
        format = get_format(config.dtype)
        self._stores = [TokenStore(backend, format, slots, each, config.head_dim) for _ in range(config.head_ranks)]
        self._open: dict[int, _Transfer] = {}
        self._aborted: dict[int, _Transfer] = {}  # until they are fenced
        self._exports: dict[int, int] = {}  # the block tables of exports
        self._next_transfer = self._next_export = 0

    @property
    def num_sequences(self) -> int:
        """The number of sequences. Transfers and exports are not sequences (TRANSFER-05)."""
        return len(self._table_of)

    def append(self, sequence: int, keys: Array, values: Array) -> None:
        """Append n tokens to a sequence, in every layer. keys, values: [num_layers, n, num_kv_heads, head_dim].

        A block that an export holds is copied before it is written to. Raises ShapeMismatch, DtypeMismatch, OutOfBlocks or
        SequenceNotFound. If it raises, nothing has changed.
        """
        table, config = self._table(sequence), self.config
        shape = (config.num_layers, "n", config.num_kv_heads, config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        start = int(self._tables.lengths[table, 0])
        end = start + keys.shape[1]
        step = table, np.arange(config.num_layers)[:, None], np.arange(start, end)
        self._make_writable(self._missing_entries(table, end), *step)
        rows = (config.num_layers * (end - start), config.num_kv_heads, config.head_dim)
        keys, values = (self._backend.xp.reshape(each, rows) for each in (keys, values))
        self._write(self._tables.slots(*step).reshape(-1), range(config.num_kv_heads), keys, values)
        self._tables.lengths[table] = end

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence, the same in every layer. Raises SequenceNotFound."""
        return int(self._tables.lengths[self._table(sequence), 0])

    def gather(self, sequence: int, layer: int) -> tuple[Array, Array]:
        """Return the keys and values of a layer: float32 [length, num_kv_heads, head_dim] each.

        Raises SequenceNotFound or LayerOutOfRange.
        """
        table, layer = self._table(sequence), self._layer(layer)
        return self._read(table, layer, range(self.length(sequence)))

    def begin(self, length: int, deadline: int | None = None) -> int:
        """Reserve blocks for a sequence of `length` tokens that will arrive, and return the id of the transfer (TRANSFER-01).

        deadline: the time at which `expire` aborts it, an integer in the caller's units; None for never.

        Raises PositionOutOfRange if `length` is negative, ConfigError for a negative deadline, OutOfBlocks. If it raises, nothing
        has changed.
        """
        length = in_range(length, None, PositionOutOfRange, "length")
        deadline = None if deadline is None else whole("deadline", deadline, minimum=0)
        table = self._tables.open()
        try:
            self._make_writable(self._missing_entries(table, length), table, 0, np.arange(0))
        except BaseException:
            self._tables.close(table)
            raise
        transfer, self._next_transfer = self._next_transfer, self._next_transfer + 1
        rows = (self.config.num_layers, length, self.config.num_kv_heads)
        self._open[transfer] = _Transfer(table, deadline, np.zeros(rows, np.bool_))
        return transfer

    def arrive(self, transfer: int, layer: int, start: int, heads: Sequence[int], keys: Array, values: Array) -> None:
        """Write a part of a transfer: n tokens at the positions `[start, start + n)` of one layer, with some heads.

        keys, values: [n, number of heads, head_dim]. Parts arrive in any order, and each row once (TRANSFER-02, TRANSFER-03).

        Raises TransferNotFound unless the transfer is open, LayerOutOfRange, HeadOutOfRange, PositionOutOfRange, ShapeMismatch,
        DtypeMismatch, or AlreadyArrived. If it raises, nothing has changed.
        """
        found = self._open[self._known(transfer, self._open)]
        slots, part, keys, values = self._part(found, layer, start, heads, keys, values)
        arrived = found.arrived[layer, start : start + keys.shape[0], part.start : part.stop]  # a view
        if arrived.any():
            raise AlreadyArrived(f"transfer {transfer}: {int(arrived.sum())} rows of this part have arrived before")
        self._write(slots, part, keys, values)
        arrived[...] = True

    def commit(self, transfer: int) -> int:
        """Turn a transfer into a sequence, and return its id. All rows must have arrived (TRANSFER-04).

        Raises TransferNotFound unless the transfer is open, or TransferIncomplete. If it raises, nothing has changed.
        """
        number = self._known(transfer, self._open)
        arrived = self._open[number].arrived
        if not arrived.all():
            raise TransferIncomplete(f"transfer {number}: {arrived.size - int(arrived.sum())} of {arrived.size} rows are missing")
        table = self._open.pop(number).table
        self._tables.lengths[table] = arrived.shape[1]
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._table_of[sequence] = table
        return sequence

    def abort(self, transfer: int) -> None:
        """End a transfer without a sequence. Its blocks are not free until `fence` (TRANSFER-06, TRANSFER-07).

        Raises TransferNotFound unless the transfer is open.
        """
        number = self._known(transfer, self._open)
        self._aborted[number] = self._open.pop(number)

    def expire(self, now: int) -> list[int]:
        """Abort every open transfer whose deadline is at most `now`, and return their ids in ascending order (TRANSFER-08).

        Raises ConfigError if `now` is negative.
        """
        now = whole("now", now, minimum=0)
        expired = [id for id, found in self._open.items() if found.deadline is not None and found.deadline <= now]
        for transfer in expired:
            self.abort(transfer)
        return expired

    def fence(self, transfer: int) -> None:
        """Free the blocks of an aborted transfer. The caller knows that no write to them is in flight any more (TRANSFER-07).

        Raises TransferNotFound unless the transfer is aborted and was not fenced before.
        """
        found = self._aborted.pop(self._known(transfer, self._aborted))
        self.pool.free_many(self._tables.close(found.table))

    def write_late(self, transfer: int, layer: int, start: int, heads: Sequence[int], keys: Array, values: Array) -> None:
        """Write rows to the blocks of an aborted transfer, as a one-sided write does that was in flight. For the judge.

        Arguments and errors are those of `arrive`, without AlreadyArrived. Raises TransferNotFound unless the transfer is aborted
        and was not fenced.
        """
        found = self._aborted[self._known(transfer, self._aborted)]
        self._write(*self._part(found, layer, start, heads, keys, values))

    def export(self, sequence: int) -> int:
        """Hold the present tokens of a sequence for `send`, and return the handle of the export (TRANSFER-09).

        It allocates no block and copies no token. Raises SequenceNotFound.
        """
        table = self._tables.fork(self._table(sequence))
        self.pool.share_many(self._tables.held(table))
        handle, self._next_export = self._next_export, self._next_export + 1
        self._exports[handle] = table
        return handle

    def send(self, handle: int, layer: int, tokens: Sequence[int], heads: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values of an export at the positions `tokens` of one layer, with the heads `heads` (TRANSFER-11).

        Returns float32 [number of tokens, number of heads, head_dim] each. Raises ExportNotFound, LayerOutOfRange,
        PositionOutOfRange or HeadOutOfRange.
        """
        table, layer = self._export(handle), self._layer(layer)
        positions = checked_range("tokens", tokens, int(self._tables.lengths[table, 0]), PositionOutOfRange)
        part = checked_range("heads", heads, self.config.num_kv_heads, HeadOutOfRange)
        keys, values = self._read(table, layer, positions)
        return keys[:, part.start : part.stop, :], values[:, part.start : part.stop, :]

    def release(self, handle: int) -> None:
        """Remove an export. Blocks that no sequence and no other export lists are free afterwards. Raises ExportNotFound."""
        table = self._export(handle)
        del self._exports[int(handle)]
        self.pool.free_many(self._tables.close(table))

    def _layer(self, layer: int) -> int:
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")

    def _known(self, transfer: int, among: dict[int, _Transfer]) -> int:
        """`transfer` as a Python int. Raises TransferNotFound unless it is among these transfers."""
        number = integer(transfer)
        if number is None or number not in among:
            wanted = "open" if among is self._open else "aborted"
            raise TransferNotFound(f"no {wanted} transfer {transfer!r} ({len(among)} transfers are {wanted})")
        return number

    def _export(self, handle: int) -> int:
        """The block table of an export. Raises ExportNotFound."""
        number = integer(handle)
        if number is None or number not in self._exports:
            raise ExportNotFound(f"unknown export {handle!r} (never created, or already released)")
        return self._exports[number]

    def _part(
        self, found: _Transfer, layer: int, start: int, heads: Sequence[int], keys: Array, values: Array
    ) -> tuple[NDArray[np.int64], range, Array, Array]:
        """Check the arguments of `arrive`, and return those of `_write`."""
        layer, length = self._layer(layer), found.arrived.shape[1]
        start = in_range(start, length + 1, PositionOutOfRange, "start")
        part = checked_range("heads", heads, self.config.num_kv_heads, HeadOutOfRange)
        keys, values = accept_pair(keys, values, ("n", len(part), self.config.head_dim), self._backend)
        stop = in_range(start + keys.shape[0], length + 1, PositionOutOfRange, "start + n")
        return self._tables.slots(found.table, layer, np.arange(start, stop)), part, keys, values

    def _read(self, table: int, layer: int, positions: range) -> tuple[Array, Array]:
        """The tokens of a layer at these positions, from all ranks."""
        slots = self._tables.slots(table, layer, np.arange(positions.start, positions.stop))
        keys, values = zip(*(store.read(slots) for store in self._stores), strict=True)
        return self._backend.xp.concat(list(keys), axis=1), self._backend.xp.concat(list(values), axis=1)

    def _write(self, slots: NDArray[np.int64], heads: range, keys: Array, values: Array) -> None:
        """Write rows with some heads to the slots of each rank that has one of them. Its other heads keep their numbers."""
        concat, each = self._backend.xp.concat, self.config.num_kv_heads // self.config.head_ranks
        for rank, store in enumerate(self._stores):
            first, last = max(heads.start - rank * each, 0), min(heads.stop - rank * each, each)  # heads of the rank
            if first < last:
                given = slice(rank * each + first - heads.start, rank * each + last - heads.start)
                pairs = zip(store.read(slots), (keys, values), strict=True)
                store.write(
                    slots, *(concat([old[:, :first, :], new[:, given, :], old[:, last:, :]], axis=1) for old, new in pairs)
                )

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for store in self._stores:
            store.copy(sources, targets, self.config.block_size)
