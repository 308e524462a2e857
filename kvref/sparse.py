"""The sparse cache: a paged cache whose tokens have an index key too, which decides what a query attends to (DeepSeek V3.2).

One block table per sequence, and three stores with the same slots: keys, values and index keys. Whatever happens to a block
happens to its slots in all of them.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref.array import Array
from kvref.attention import accept_query
from kvref.backend import Backend, reference
from kvref.block_sequences import BlockOwner
from kvref.errors import KeyNotFound, ShapeMismatch, integer, whole_fields
from kvref.formats import get_format
from kvref.token_store import SlotStore
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class SparseConfig:
    """Sizes of a SparseCache. Raises ConfigError (LAW-12).

    - `num_blocks`: blocks in the pool, 0 or more. `block_size`: tokens per block.
    - `index_dim`: the numbers of an index key, which all heads of the indexer use.
    - `top_k`: the largest number of tokens that a query attends to. DeepSeek V3.2 has 2048, and an index_dim of 128.
    """

    num_blocks: int
    num_kv_heads: int
    head_dim: int
    index_dim: int = 128
    top_k: int = 2048
    block_size: int = 16

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_kv_heads", "head_dim", "index_dim", "top_k", "block_size")


class SparseCache(BlockOwner):
    """Sequences in one layer with sparse attention by an index (chapter SPARSE). All rows are float32.

    In every method, `sequence` is an id that `create`, `fork` or `restore` returned; otherwise it raises SequenceNotFound.
    """

    def __init__(self, config: SparseConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks on the device of `backend`."""
        super().__init__(config.num_blocks, 1, config.block_size, backend)
        self.config = config
        shapes = ((config.num_kv_heads, config.head_dim), (config.num_kv_heads, config.head_dim), (1, config.index_dim))
        slots, format = config.num_blocks * config.block_size, get_format("float32")
        self._stores = [SlotStore(backend, format, slots, *shape) for shape in shapes]  # keys, values, index keys
        self._offloaded: dict[int, list[NDArray[np.float32]]] = {}  # the rows of each store, by handle
        self._next_handle = 0

    def append(self, sequence: int, keys: Array, values: Array, index_keys: Array) -> None:
        """Append n tokens. keys, values: [n, num_kv_heads, head_dim]. index_keys: [n, index_dim].

        Raises ShapeMismatch, DtypeMismatch or OutOfBlocks. If it raises, nothing has changed (SPARSE-01).
        """
        table, config = self._table(sequence), self.config
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        index_keys = accept("index_keys", index_keys, (keys.shape[0], config.index_dim), self._backend)
        start = self.length(sequence)
        positions = np.arange(start, start + keys.shape[0])
        self._make_writable(self._missing_entries(table, start + keys.shape[0]), table, 0, positions)
        slots = self._tables.slots(table, 0, positions)
        for store, rows in zip(self._stores, (keys, values, index_keys[:, None, :]), strict=True):
            store.put(slots, store.quantized(rows))
        self._tables.lengths[table] = start + keys.shape[0]

    def length(self, sequence: int) -> int:
        """Return the number of tokens."""
        return int(self._tables.lengths[self._table(sequence), 0])

    def read(self, sequence: int) -> tuple[Array, Array]:
        """Return the keys and values of all tokens: float32 [length, num_kv_heads, head_dim] each."""
        keys, values, _ = self._rows(sequence)
        return keys, values

    def read_index(self, sequence: int) -> Array:
        """Return the index keys of all tokens: float32 [length, index_dim]."""
        return self._rows(sequence)[2][:, 0, :]

    def select(self, sequence: int, index_queries: Array, weights: Array, causal: bool = False) -> Array:
        """Return the positions of the tokens with the largest index scores: int32 [num_queries, top_k] (SPARSE-02).

        index_queries: [num_queries, index_heads, index_dim]. weights: [num_queries, index_heads]. causal: query i is at position
        length - num_queries + i and sees positions up to its own (SPARSE-03). Positions are ascending, followed by -1.
        Raises ShapeMismatch or DtypeMismatch.
        """
        scores = self._scores(sequence, *self._accept_index(index_queries, weights, "num_queries"))
        chosen = np.full((len(scores), self.config.top_k), -1, np.int32)
        for row, seen in enumerate(_count_seen(len(scores), scores.shape[1], causal)):
            # stable: of equal scores, the earlier token is first
            best = np.sort(np.argsort(-scores[row, :seen], kind="stable")[: self.config.top_k])
            chosen[row, : len(best)] = best
        return self._backend.asarray(chosen)

    def attend(
        self,
        sequence: int,
        query: Array,
        index_queries: Array,
        weights: Array,
        scale: float | None = None,
        causal: bool = False,
    ) -> Array:
        """Return the attention of each query over the tokens that `select` returns for it (SPARSE-04).

        query: [num_queries, num_query_heads, head_dim]. The other arrays are those of `select`. scale: None means
        1/sqrt(head_dim). Returns float32 [num_queries, num_query_heads, head_dim], zeros for a query that sees no token.
        Raises ShapeMismatch or DtypeMismatch.
        """
        keys, values, _ = self._rows(sequence)
        query = accept_query(query, "num_queries", self.config.num_kv_heads, self.config.head_dim, self._backend)
        self._accept_index(index_queries, weights, query.shape[0])
        mask = np.zeros((query.shape[0], keys.shape[0]), np.bool_)
        for row, chosen in enumerate(self._backend.to_numpy(self.select(sequence, index_queries, weights, causal))):
            mask[row, chosen[chosen >= 0]] = True
        scale = 1 / math.sqrt(self.config.head_dim) if scale is None else scale
        return self._backend.attend(query, keys, values, scale, self._backend.asarray(mask))

    def offload(self, sequence: int) -> int:
        """Copy a sequence's tokens to host memory, and return the handle of the copy (SPARSE-07)."""
        rows = [self._backend.to_numpy(part).copy() for part in self._rows(sequence)]
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._offloaded[handle] = rows
        return handle

    def restore(self, handle: int) -> int:
        """Create a sequence with the tokens of an offloaded copy, and return its id. Raises KeyNotFound or OutOfBlocks."""
        keys, values, index_keys = self._offloaded[self._known(handle)]
        sequence = self.create()
        try:
            self.append(sequence, keys, values, index_keys[:, 0, :])
        except BaseException:
            self.drop(sequence)
            raise
        return sequence

    def discard(self, handle: int) -> None:
        """Remove an offloaded copy. Raises KeyNotFound."""
        del self._offloaded[self._known(handle)]

    def _known(self, handle: int) -> int:
        """`handle` as a Python int. Raises KeyNotFound unless it is the handle of a copy."""
        number = integer(handle)
        if number is None or number not in self._offloaded:
            raise KeyNotFound(f"unknown handle {handle!r} (never returned by offload, or already discarded)")
        return number

    def _accept_index(self, index_queries: Array, weights: Array, num_queries: int | str) -> tuple[Array, Array]:
        """Both as float32 arrays. Raises ShapeMismatch or DtypeMismatch."""
        index_queries = accept("index_queries", index_queries, (num_queries, "index_heads", self.config.index_dim), self._backend)
        if index_queries.shape[1] == 0:
            raise ShapeMismatch("index_queries: expected at least one head, got 0")
        return index_queries, accept("weights", weights, tuple(index_queries.shape[:2]), self._backend)

    def _scores(self, sequence: int, index_queries: Array, weights: Array) -> NDArray[np.float32]:
        """The index score of each token for each query, float32 [num_queries, length]."""
        xp = self._backend.xp
        products = xp.matmul(index_queries, xp.matrix_transpose(self.read_index(sequence)))  # [num_queries, index_heads, length]
        positive = xp.where(products > 0, products, xp.zeros_like(products))
        return np.asarray(self._backend.to_numpy(xp.matmul(weights[:, None, :], positive)[:, 0, :]), np.float32)

    def _rows(self, sequence: int) -> tuple[Array, Array, Array]:
        """The rows of all tokens in each store."""
        table = self._table(sequence)
        slots = self._tables.slots(table, 0, np.arange(self.length(sequence)))
        keys, values, index_keys = (store.read(slots) for store in self._stores)
        return keys, values, index_keys

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for store in self._stores:
            store.copy(sources, targets, self.config.block_size)


def _count_seen(num_queries: int, length: int, causal: bool) -> list[int]:
    """How many tokens each query sees: those at the first positions."""
    return [max(0, length - num_queries + 1 + row) if causal else length for row in range(num_queries)]
