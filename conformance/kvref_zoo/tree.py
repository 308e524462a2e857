"""Wrong caches with speculation trees."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant

TILE = 16  # rows of a tile of keys


@mutant("TREE-07", also="TREE-09 TREE-10 TREE-11 TREE-12", seen_in="sgl-project/sglang#15360")
class TreeAcceptsTheFirstRows(kvref.TreeCache):
    """`accept` increases the length by the number of accepted nodes, and moves no row: the first nodes of the tree are kept."""

    def accept(self, sequence: int, node: int) -> None:
        length, count = self.length(sequence), len(self.ancestors(sequence, node))
        self._rows.truncate(sequence, length + count)
        self._parents[sequence].clear()


class _Masked(kvref.TreeCache):
    """Attends with the mask [queries, stored rows] that `mask` returns, which can be wrong."""

    def mask(self, sequence: int, nodes: Sequence[int]) -> Any:
        length, parents = self.length(sequence), self._parents[sequence]
        found = np.zeros((len(nodes), length + len(parents)), bool)
        found[:, :length] = True
        for row, node in enumerate(nodes):
            while node >= 0:
                found[row, length + node] = True
                node = parents[node]
        return found

    def attend(self, sequence: int, nodes: Sequence[int], query: Any, scale: float | None = None) -> Any:
        super().attend(sequence, nodes, query, scale)  # for its errors
        keys, values = self._rows.gather(sequence, 0)
        scale = self.config.head_dim**-0.5 if scale is None else scale
        return self._backend.attend(query, keys, values, scale, self._backend.asarray(self.mask(sequence, nodes)))


@mutant("TREE-05", also="TREE-01 TREE-07 TREE-08 TREE-11", seen_in="sgl-project/sglang#8409")
class TreeSeesTheFirstParent(_Masked):
    """The drafts of a level are stored for the first parent: a node attends to this parent, instead of its own."""

    def mask(self, sequence: int, nodes: Sequence[int]) -> Any:
        found, length, parents = super().mask(sequence, nodes), self.length(sequence), self._parents[sequence]
        depths = self.positions(sequence)
        for row, node in enumerate(nodes):
            if node >= 0 and parents[node] >= 0:
                found[row, length + parents[node]] = False
                found[row, length + depths.index(depths[parents[node]])] = True
        return found


@mutant("TREE-05", also="TREE-07 TREE-08 TREE-11 TREE-12", seen_in="PaddlePaddle/FastDeploy#3514")
class TreeMasksTheLastTile(_Masked):
    """The tree mask is applied to the last tile of keys only: nodes in earlier tiles are seen by every later node."""

    def mask(self, sequence: int, nodes: Sequence[int]) -> Any:
        found, length = super().mask(sequence, nodes), self.length(sequence)
        first_of_last = (found.shape[1] - 1) // TILE * TILE
        for row, node in enumerate(nodes):
            found[row, : min(first_of_last, length + node)] = True
        return found


@mutant("TREE-08", also="TREE-05 TREE-07 TREE-09 TREE-11 TREE-12", seen_in="NVIDIA/TensorRT-LLM#13081")
class TreeKeepsTheLastMask(_Masked):
    """The rows of the mask are not cleared for the next tree: its nodes also see what the nodes with their numbers saw."""

    def __init__(self, config: kvref.TreeConfig) -> None:
        super().__init__(config)
        self._bits: dict[tuple[int, int], set[int]] = {}  # by sequence and node, the nodes that are seen

    def draft(self, sequence: int, keys: Any, values: Any, parents: Sequence[int]) -> list[int]:
        new = super().draft(sequence, keys, values, parents)
        for node in new:
            self._bits.setdefault((sequence, node), set()).update(self.ancestors(sequence, node))
        return new

    def mask(self, sequence: int, nodes: Sequence[int]) -> Any:
        found, length = super().mask(sequence, nodes), self.length(sequence)
        for row, node in enumerate(nodes):
            for seen in self._bits.get((sequence, node), ()):
                found[row, length + seen : length + seen + 1] = True
        return found


@mutant("TREE-10", also="TREE-07 TREE-08 TREE-11", seen_in="sgl-project/sglang#13826")
class TreeLeaksBlocksOfDrafts(kvref.TreeCache):
    """The blocks of nodes that are not accepted are never freed: they leave the sequence, but not the list of blocks in use."""

    def _leaked(self, sequence: int, close: Any) -> None:
        before = self._rows.num_free_blocks
        close()
        if (freed := self._rows.num_free_blocks - before) > 0:
            lost = self._rows.create()
            shape = freed * self.config.block_size, self.config.num_kv_heads, self.config.head_dim
            self._rows.write(lost, 0, 0, *(np.zeros(shape, np.float32) for _ in range(2)))

    def accept(self, sequence: int, node: int) -> None:
        self._leaked(sequence, lambda: super(TreeLeaksBlocksOfDrafts, self).accept(sequence, node))
