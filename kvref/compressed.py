"""The compressed cache: the last tokens as they are, and one row for every `ratio` consecutive tokens (DeepSeek V4).

A block is room for one sequence. It has three parts: a ring of window + rollback latents, the window; a ring of ratio + rollback
contributions with their gates, the compressor state; and one row per complete group. The token at position p is at p modulo the
size of a ring. A row is computed when the last token of its group is appended, and then never again.

The error bound of a row. Before the rotation, number i is the attention of the query 1 over keys of one number, and its bound
b[i] is that of ATTN-04. A rotation is linear and preserves lengths: an error (b[i], b[i + 1]) of a pair becomes an error of at
most hypot(b[i], b[i + 1]) in each number, and the rotation adds BOUND (see `kvref.rope`) times the length of the pair.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import accept_query
from kvref.backend import Backend, reference
from kvref.block_pool import BlockPool
from kvref.errors import (
    CapacityExceeded,
    ConfigError,
    KeyNotFound,
    NotTruncatable,
    OutOfBlocks,
    PositionOutOfRange,
    SequenceNotFound,
    in_range,
    integer,
    whole_fields,
)
from kvref.formats import get_format
from kvref.rope import Rotary, rotary_frequencies
from kvref.token_store import SlotStore
from kvref.validation import accept

THETA = 160_000.0  # the base of the rotary embedding of rows in DeepSeek V4


@dataclass(frozen=True)
class CompressedConfig:
    """Sizes of a CompressedCache. Raises ConfigError (LAW-12, COMPR-04).

    - `num_blocks`: the largest number of sequences. `max_tokens`: the largest number of tokens of one.
    - `head_dim`: the numbers of a latent, of a contribution, of its gates and of a row. `rope_dim`: how many of them, the last
      ones, are rotated in a row; an even number, 0 for none.
    - `window`: the last tokens that a query sees as they are, at least ratio - 1. `ratio`: tokens per row.
    - `rollback`: the number of newest tokens that `truncate` can always remove (COMPR-05).
    """

    num_blocks: int
    head_dim: int = 512
    rope_dim: int = 64
    window: int = 128
    ratio: int = 128
    max_tokens: int = 4096
    rollback: int = 0

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", "rope_dim", "rollback", minimum=0)
        whole_fields(self, "head_dim", "window", "ratio", "max_tokens")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ConfigError(f"rope_dim: expected an even number of at most head_dim {self.head_dim}, got {self.rope_dim}")
        if self.window < self.ratio - 1:
            raise ConfigError(f"window: expected at least ratio - 1 = {self.ratio - 1}, got {self.window}")


@dataclass
class _Sequence:
    """block: its block. end: one more than the largest position that was written and can be in the rings."""

    block: int
    length: int = 0
    end: int = 0


class CompressedCache:
    """Sequences in one layer with a window and compressed rows (chapter COMPR). All rows are float32.

    In every method, `sequence` is an id that `create`, `fork` or `restore` returned; otherwise it raises SequenceNotFound.
    """

    def __init__(self, config: CompressedConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks on the device of `backend`."""
        self.config = config
        self._backend = backend
        self._pool = BlockPool(config.num_blocks)
        # slots per block of each store: latents, contributions, gates, rows
        state = config.ratio + config.rollback
        self._sizes = (config.window + config.rollback, state, state, config.max_tokens // config.ratio)
        self._stores = [
            SlotStore(backend, get_format("float32"), config.num_blocks * size, 1, config.head_dim) for size in self._sizes
        ]
        self._rotary = Rotary(config.rope_dim, rotary_frequencies(config.rope_dim, THETA), "pairs") if config.rope_dim else None
        self._sequences: dict[int, _Sequence] = {}
        self._copies: dict[int, tuple[int, int, list[NDArray[np.float32]]]] = {}  # length, end and the block's stores, by handle
        self._next_sequence = self._next_handle = 0

    @property
    def num_free_blocks(self) -> int:
        """The number of further sequences for which there is room."""
        return self._pool.num_free

    def create(self) -> int:
        """Create an empty sequence and return its id. Raises OutOfBlocks."""
        return self._open(0, 0)

    def fork(self, sequence: int) -> int:
        """Create a sequence with the same window, state and rows, and return its id. Raises OutOfBlocks (COMPR-06)."""
        parent = self._known(sequence)
        child = self._open(parent.length, parent.end)
        self._write_block(self._sequences[child].block, [store.read(self._block(parent, i)) for i, store in self._numbered()])
        return child

    def drop(self, sequence: int) -> None:
        """Remove a sequence and free its block."""
        self._pool.free(self._known(sequence).block)
        del self._sequences[int(sequence)]

    def length(self, sequence: int) -> int:
        """Return the number of tokens that were appended and not removed."""
        return self._known(sequence).length

    def append(self, sequence: int, latents: Array, contributions: Array, gates: Array) -> None:
        """Append n tokens. latents, contributions, gates: [n, head_dim].

        Raises ShapeMismatch, DtypeMismatch or CapacityExceeded. If it raises, nothing has changed (COMPR-01).
        """
        state = self._known(sequence)
        self._append(state, *self._accepted(state, latents, contributions, gates))

    def step(
        self, sequence: int, query: Array, latents: Array, contributions: Array, gates: Array, scale: float | None = None
    ) -> Array:
        """Append n tokens, and return the attention of their queries: float32 [n, num_query_heads, head_dim] (COMPR-03).

        query: [n, num_query_heads, head_dim], one query per token. scale: 1 / sqrt(head_dim) by default. Raises ShapeMismatch,
        DtypeMismatch or CapacityExceeded, and then appends nothing.
        """
        state, config, xp = self._known(sequence), self.config, self._backend.xp
        latents, contributions, gates = self._accepted(state, latents, contributions, gates)
        count, start = latents.shape[0], state.length
        query = accept_query(query, count, 1, config.head_dim, self._backend)
        first = max(0, start - config.window + 1)
        before = self._stores[0].read(self._slots(state, 0, np.arange(first, start)))  # before new tokens overwrite the ring
        self._append(state, latents, contributions, gates)
        rows = self._stores[3].read(self._slots(state, 3, np.arange(self._num_rows(state))))
        entries = xp.concat([before, latents[:, None, :], rows], axis=0)
        mask = self._visible(np.arange(start, start + count), np.arange(first, start + count), np.arange(rows.shape[0]))
        return self._backend.attend(query, entries, entries, _scale(scale, config.head_dim), self._backend.asarray(mask))

    def read_window(self, sequence: int) -> Array:
        """Return the latents of the tokens that the next query sees, its own aside: float32 [n, head_dim], at most window - 1."""
        state = self._known(sequence)
        return self._read(state, 0, np.arange(max(0, state.length - self.config.window + 1), state.length))

    def read_rows(self, sequence: int) -> Array:
        """Return the rows of all complete groups: float32 [length // ratio, head_dim]."""
        state = self._known(sequence)
        return self._read(state, 3, np.arange(self._num_rows(state)))

    def read_state(self, sequence: int) -> tuple[Array, Array]:
        """Return the contributions and gates of the incomplete group: float32 [length % ratio, head_dim] each."""
        state = self._known(sequence)
        at = np.arange(state.length // self.config.ratio * self.config.ratio, state.length)
        return self._read(state, 1, at), self._read(state, 2, at)

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length` (COMPR-05).

        Raises PositionOutOfRange unless `length` is in `[0, length(sequence) + 1)`, or NotTruncatable if a token of the window,
        or of the group that becomes incomplete, was overwritten.
        """
        state, config = self._known(sequence), self.config
        length = in_range(length, state.length + 1, PositionOutOfRange, "length")
        if length == 0:
            state.length = state.end = 0
            return
        for index, first in ((0, max(0, length - config.window + 1)), (1, length // config.ratio * config.ratio)):
            stored = max(0, state.end - self._sizes[index])
            if first < min(stored, length):
                raise NotTruncatable(f"cannot truncate to {length}: position {first} is needed, those before {stored} are gone")
        state.length = length

    def offload(self, sequence: int) -> int:
        """Copy the window, the state and the rows of a sequence to host memory, and return the handle of the copy (COMPR-07)."""
        state = self._known(sequence)
        parts = [self._backend.to_numpy(store.read(self._block(state, i))).copy() for i, store in self._numbered()]
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._copies[handle] = state.length, state.end, parts
        return handle

    def restore(self, handle: int) -> int:
        """Create a sequence with the contents of a copy, and return its id. Raises KeyNotFound or OutOfBlocks."""
        length, end, parts = self._copies[self._known_copy(handle)]
        sequence = self._open(length, end)
        self._write_block(self._sequences[sequence].block, [self._backend.asarray(part) for part in parts])
        return sequence

    def discard(self, handle: int) -> None:
        """Remove a copy. Raises KeyNotFound."""
        del self._copies[self._known_copy(handle)]

    def _open(self, length: int, end: int) -> int:
        if self._pool.num_free == 0:
            raise OutOfBlocks(f"out of blocks: 1 needed, 0 of {self.config.num_blocks} free")
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._sequences[sequence] = _Sequence(self._pool.allocate(), length, end)
        return sequence

    def _known(self, sequence: int) -> _Sequence:
        number = integer(sequence)
        if number is None or number not in self._sequences:
            raise SequenceNotFound(f"unknown sequence {sequence!r} (never created, or already dropped)")
        return self._sequences[number]

    def _known_copy(self, handle: int) -> int:
        number = integer(handle)
        if number is None or number not in self._copies:
            raise KeyNotFound(f"unknown handle {handle!r} (never returned by offload, or already discarded)")
        return number

    def _accepted(self, state: _Sequence, latents: Array, contributions: Array, gates: Array) -> tuple[Array, Array, Array]:
        """The arrays as float32. Raises ShapeMismatch, DtypeMismatch or CapacityExceeded."""
        latents = accept("latents", latents, ("n", self.config.head_dim), self._backend)
        shape = latents.shape[0], self.config.head_dim
        contributions = accept("contributions", contributions, shape, self._backend)
        gates = accept("gates", gates, shape, self._backend)
        if state.length + shape[0] > self.config.max_tokens:
            needed = state.length + shape[0]
            raise CapacityExceeded(f"cache full: {needed} tokens needed, max_tokens is {self.config.max_tokens}")
        return latents, contributions, gates

    def _append(self, state: _Sequence, latents: Array, contributions: Array, gates: Array) -> None:
        ratio, xp = self.config.ratio, self._backend.xp
        start, end = state.length, state.length + latents.shape[0]
        first = start // ratio * ratio  # of the incomplete group
        held = self._slots(state, 1, np.arange(first, start))
        parts, scores = (
            xp.concat([self._stores[i].read(held), new[:, None, :]], axis=0) for i, new in ((1, contributions), (2, gates))
        )
        for group in range(first // ratio, end // ratio):
            at = slice(group * ratio - first, (group + 1) * ratio - first)
            row = self._compress(parts[at, 0, :], scores[at, 0, :], group * ratio)
            self._put(state, 3, np.array([group]), row)
        for index, new in ((0, latents), (1, contributions), (2, gates)):
            kept = np.arange(max(start, end - self._sizes[index]), end)  # of more tokens than slots, the last ones
            self._put(state, index, kept, new[end - start - len(kept) :, :])
        state.length, state.end = end, max(state.end, end)

    def _num_rows(self, state: _Sequence) -> int:
        return state.length // self.config.ratio

    def _visible(self, queries: NDArray[np.int64], positions: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the latents at `positions`, and of the rows of `groups`, each query sees: [queries, positions + groups]."""
        at = queries[:, None]
        in_window = (positions <= at) & (positions > at - self.config.window)
        complete = (groups + 1) * self.config.ratio - 1 <= at
        return np.concatenate([in_window, complete], axis=1)

    def _compress(self, contributions: Array, gates: Array, position: int) -> Array:
        """The row of a group: float32 [1, head_dim]. contributions, gates: [ratio, head_dim]. position: of its first token.

        Number i is the attention of the query 1 over the keys gates[:, i] and the values contributions[:, i] (COMPR-02).
        """
        xp, dim, rope = self._backend.xp, self.config.head_dim, self.config.rope_dim
        query, mask = xp.ones_like(gates[:1, :, None]), self._backend.asarray(np.ones((1, gates.shape[0]), np.bool_))
        row = self._backend.attend(query, gates[:, :, None], contributions[:, :, None], 1.0, mask)[:, :, 0]
        if self._rotary is None:
            return row
        return xp.concat([row[:, : dim - rope], self._rotary.turned(row[:, dim - rope :], position, self._backend)], axis=1)

    def _numbered(self) -> list[tuple[int, SlotStore]]:
        return list(enumerate(self._stores))

    def _block(self, state: _Sequence, index: int) -> NDArray[np.int64]:
        """All slots of a sequence in a store."""
        return state.block * self._sizes[index] + np.arange(self._sizes[index])

    def _slots(self, state: _Sequence, index: int, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of positions, or of rows, in a store."""
        return state.block * self._sizes[index] + at % max(1, self._sizes[index])

    def _read(self, state: _Sequence, index: int, at: NDArray[np.int64]) -> Array:
        return self._stores[index].read(self._slots(state, index, at))[:, 0, :]

    def _put(self, state: _Sequence, index: int, at: NDArray[np.int64], new: Array) -> None:
        store = self._stores[index]
        store.put(self._slots(state, index, at), store.quantized(new[:, None, :]))

    def _write_block(self, block: int, parts: list[Array]) -> None:
        state = _Sequence(block)
        for (index, store), part in zip(self._numbered(), parts, strict=True):
            store.put(self._block(state, index), store.quantized(part))


def _scale(scale: float | None, head_dim: int) -> float:
    return 1 / math.sqrt(head_dim) if scale is None else scale
