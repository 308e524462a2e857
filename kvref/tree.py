"""Sequences with speculation trees: draft tokens with parents, of which one path is kept (SpecInfer, Medusa, EAGLE-2).

The rows of a tree are stored in the slots after the committed tokens, in the order of their nodes, whatever their parents are. A
list of parents per tree decides what a node sees, and `accept` moves the rows of one path to the front.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.attention import accept_query
from kvref.backend import Backend, reference
from kvref.errors import InUse, PositionOutOfRange, ShapeMismatch, in_range, integer, whole_fields
from kvref.paged import PagedCache, PagedConfig
from kvref.validation import accept_pair


@dataclass(frozen=True)
class TreeConfig:
    """Sizes of a TreeCache: `num_blocks` (0 or more) blocks of `block_size` tokens. Raises ConfigError (LAW-12)."""

    num_blocks: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", minimum=0)
        whole_fields(self, "num_kv_heads", "head_dim", "block_size")


class TreeCache:
    """Sequences of committed tokens in one layer, each with at most one tree of drafts (chapter TREE).

    Keys and values are passed as float32, float16 or bfloat16 arrays, and returned as float32. In every method, `sequence` is an
    id that `create` or `fork` returned; otherwise the method raises SequenceNotFound.
    """

    def __init__(self, config: TreeConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        self._rows = PagedCache(
            PagedConfig(config.num_blocks, 1, config.num_kv_heads, config.head_dim, config.block_size), backend
        )
        self._parents: dict[int, list[int]] = {}  # of the nodes of each sequence's tree; empty without an open tree

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence uses."""
        return self._rows.num_free_blocks

    def create(self) -> int:
        """Create an empty sequence, and return its id."""
        sequence = self._rows.create()
        self._parents[sequence] = []
        return sequence

    def fork(self, sequence: int) -> int:
        """Create a sequence with the same tokens, and return its id. Raises InUse while a tree is open."""
        self._check_closed(sequence, "fork")
        child = self._rows.fork(sequence)
        self._parents[child] = []
        return child

    def drop(self, sequence: int) -> None:
        """Remove a sequence, its tokens and its tree."""
        self._rows.drop(sequence)
        del self._parents[sequence]

    def length(self, sequence: int) -> int:
        """Return the number of committed tokens."""
        return self._rows.length(sequence, 0) - len(self._parents[sequence])

    def append(self, sequence: int, keys: Array, values: Array) -> None:
        """Append committed tokens [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, OutOfBlocks, or InUse while a tree is open.
        """
        self._check_closed(sequence, "append")
        self._rows.write(sequence, 0, self.length(sequence), keys, values)

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length`. Raises PositionOutOfRange, or InUse while a tree is open."""
        self._check_closed(sequence, "truncate")
        self._rows.truncate(sequence, length)

    def read(self, sequence: int) -> tuple[Array, Array]:
        """Return the committed keys and values: float32 [length, num_kv_heads, head_dim] each."""
        return self._rows.read(sequence, 0, range(self.length(sequence)))

    def draft(self, sequence: int, keys: Array, values: Array, parents: Sequence[int]) -> list[int]:
        """Add nodes to the tree of a sequence, and return their numbers (TREE-01).

        keys, values: [n, num_kv_heads, head_dim]. parents: n integers, each the number of an earlier node of this tree, or -1 for
        the last committed token. Raises ShapeMismatch, also for another number of parents; DtypeMismatch, PositionOutOfRange for
        a parent, or OutOfBlocks.
        """
        stored = self._rows.length(sequence, 0)
        tree = self._parents[sequence]
        keys, values = accept_pair(keys, values, ("n", self.config.num_kv_heads, self.config.head_dim), self._backend)
        if len(parents) != keys.shape[0]:
            raise ShapeMismatch(f"parents: expected {keys.shape[0]} parents, got {len(parents)}")
        new = [_node(parent, node, "parent") for node, parent in enumerate(parents, start=len(tree))]
        self._rows.write(sequence, 0, stored, keys, values)
        tree += new
        return list(range(len(tree) - len(new), len(tree)))

    def positions(self, sequence: int) -> list[int]:
        """Return the position of each node: the number of tokens that it follows (TREE-03)."""
        length, found = self.length(sequence), list[int]()
        for parent in self._parents[sequence]:
            found.append(length if parent < 0 else found[parent] + 1)
        return found

    def ancestors(self, sequence: int, node: int) -> list[int]:
        """Return the path to a node: the nodes from its root to itself. Raises PositionOutOfRange."""
        self.length(sequence)  # raises SequenceNotFound
        parents, path = self._parents[sequence], list[int]()
        node = in_range(node, len(parents), PositionOutOfRange, "node")
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        return path

    def attend(self, sequence: int, nodes: Sequence[int], query: Array, scale: float | None = None) -> Array:
        """Return the attention of each query over the committed tokens and the path to its node (TREE-05).

        nodes: a node per query, or -1 for a query that sees the committed tokens only. query: [n, num_query_heads, head_dim].
        scale: None means 1/sqrt(head_dim). Returns float32 [n, num_query_heads, head_dim].
        Raises ShapeMismatch, also for another number of nodes; DtypeMismatch, or PositionOutOfRange for a node.
        """
        length = self.length(sequence)
        query = accept_query(query, "num_queries", self.config.num_kv_heads, self.config.head_dim, self._backend)
        if len(nodes) != query.shape[0]:
            raise ShapeMismatch(f"nodes: expected {query.shape[0]} nodes, got {len(nodes)}")
        count = len(self._parents[sequence])
        chosen = [_node(node, count, "node") for node in nodes]
        mask = np.zeros((len(chosen), length + count), bool)
        mask[:, :length] = True
        for row, node in enumerate(chosen):
            if node >= 0:
                mask[row, np.array(self.ancestors(sequence, node)) + length] = True
        keys, values = self._rows.gather(sequence, 0)
        scale = 1 / math.sqrt(self.config.head_dim) if scale is None else scale
        return self._backend.attend(query, keys, values, scale, self._backend.asarray(mask))

    def accept(self, sequence: int, node: int) -> None:
        """Commit the path to a node, in the order of its positions, and close the tree (TREE-07). Raises PositionOutOfRange."""
        length, path = self.length(sequence), self.ancestors(sequence, node)
        keys, values = self._rows.read(sequence, 0, [length + each for each in path])
        self.reject(sequence)
        self._rows.write(sequence, 0, length, keys, values)

    def reject(self, sequence: int) -> None:
        """Remove all nodes, and close the tree (TREE-08)."""
        self._rows.truncate(sequence, self.length(sequence))
        self._parents[sequence].clear()

    def _check_closed(self, sequence: int, operation: str) -> None:
        """Raise SequenceNotFound, or InUse while a tree is open (TREE-09)."""
        self.length(sequence)
        if nodes := len(self._parents[sequence]):
            raise InUse(f"{operation}: the tree of sequence {sequence} is open, with {nodes} nodes: accept or reject it first")


def _node(node: int, stop: int, what: str) -> int:
    """The number of a node as a Python int. Raises PositionOutOfRange unless it is in [-1, stop)."""
    number = integer(node)
    if number is None or not -1 <= number < stop:
        raise PositionOutOfRange(f"{what}: expected an integer in [-1, {stop}), got {node!r}")
    return number
