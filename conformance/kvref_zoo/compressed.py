"""Wrong compressed caches."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant(
    "COMPR-02", also="COMPR-01 COMPR-03 COMPR-04 COMPR-05 COMPR-06 COMPR-07 COMPR-08 LAW-18", seen_in="ml-explore/mlx-lm#1189"
)
class CompressedRowsAreNotRotated(kvref.CompressedCache):
    """Rows are not rotated: a query that is rotated for its own position reads every row as if it were at position 0."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rotary = None


@mutant("COMPR-03", also="COMPR-06 LAW-18", seen_in="vllm-project/tpu-inference#3536")
class CompressedQueriesSeeTheirOwnGroup(kvref.CompressedCache):
    """A query sees the row of the group that it is in: in a prefill, this row contains the tokens after the query."""

    def _visible(self, queries: Any, positions: Any, groups: Any) -> Any:
        visible = super()._visible(queries, positions, groups)
        visible[:, len(positions) :] = groups * self.config.ratio <= queries[:, None]
        return visible


@mutant("COMPR-06", also="COMPR-02 COMPR-08 LAW-02 LAW-09", seen_in="Avarok-Cybersecurity/atlas#279")
class CompressedRowsOfTheFormerOwner(kvref.CompressedCache):
    """Until a sequence has a row of its own, the number of rows of its block is that of the former owner."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._left: dict[int, int] = {}  # the number of rows of the last owner, by block

    def drop(self, sequence: int) -> None:
        state = self._known(sequence)
        super().drop(sequence)
        self._left[state.block] = self._num_rows(state)

    def _num_rows(self, state: Any) -> int:
        return super()._num_rows(state) or self._left.get(state.block, 0)


@mutant("COMPR-07", also="COMPR-05", seen_in="ggml-org/llama.cpp#26063")
class CompressedStateIsNotSaved(kvref.CompressedCache):
    """A copy contains the window and the rows, but not the compressor state: the next row is computed from zeros."""

    def offload(self, sequence: int) -> int:
        handle = super().offload(sequence)
        length, end, (window, *state, rows) = self._copies[handle]
        self._copies[handle] = length, end, [window, *map(np.zeros_like, state), rows]
        return handle


@mutant("COMPR-05")
class CompressedStateIsNotRolledBack(kvref.CompressedCache):
    """The compressor keeps the tokens of one group: if a rejected draft completes it, the tokens before the draft are lost."""

    def truncate(self, sequence: int, length: int) -> None:
        state, ratio = self._known(sequence), self.config.ratio
        before = state.length
        super().truncate(sequence, length)
        if length // ratio < before // ratio and length % ratio:
            at = np.arange(length // ratio * ratio, length)
            for index in (1, 2):
                self._put(state, index, at, np.zeros((len(at), self.config.head_dim), np.float32))
