"""Wrong caches of recurrent state."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.errors import NotTruncatable
from kvref.partial_load import Part
from kvref.prefix import CachedBlock, block_keys
from kvref.recurrent import RecurrentSequence
from kvref.snapshot import TokenSpan
from kvref_zoo.mutant import mutant

Slots = NDArray[np.int64]


@mutant("RECUR-09", also="RECUR-08", seen_in="sgl-project/sglang#26351")
class RecurrentAcceptedDraftsAreLost(kvref.RecurrentCache):
    """After drafts were verified, the state is the one before all of them. The accepted ones are missing."""

    def truncate(self, sequence: int, length: int) -> None:
        state = self._sequences.get(sequence)
        first = state.drafts.start if state and length in state.drafts else length
        super().truncate(sequence, length)
        if state and first < length:
            self._copy(self._slots(state.block, self._draft(first)), self._slots(state.block))


@mutant("RECUR-05", also="RECUR-04", seen_in="NVIDIA/TensorRT-LLM#13278")
class RecurrentBatchUsesTheIndicesOfTheLastOne(kvref.RecurrentCache):
    """The indices of the states of a batch are computed once, and used as long as the batch has the same size.

    If the requests of the batch change, their tokens go to the states of the requests before.
    """

    def __init__(self, config: kvref.RecurrentConfig) -> None:
        super().__init__(config)
        self.indices: list[int] = []

    def append_batch(self, sequences: Sequence[int], counts: Sequence[int], *arrays: Any, **named: Any) -> None:
        live = [each for each in self.indices if each in self._sequences]
        if len(live) != len(sequences):
            self.indices = live = list(sequences)
        super().append_batch(sequences if set(sequences) - set(self._sequences) else live, counts, *arrays, **named)


@mutant("RECUR-03", also="LAW-04 LAW-06 RECUR-02 RECUR-08 RECUR-09 RECUR-11 RECUR-15", seen_in="huggingface/transformers#46741")
class RecurrentChunkBeginsFromZero(kvref.RecurrentCache):
    """Several tokens in one call are treated as a new prompt: the matrix before them is not used."""

    def _update(self, matrix: Any, keys: Any, values: Any, gates: Any) -> Any:
        return super()._update(matrix if keys.shape[0] == 1 else 0 * matrix, keys, values, gates)


@mutant("RECUR-03", also="LAW-04 LAW-06 RECUR-02 RECUR-08 RECUR-09 RECUR-11 RECUR-15", seen_in="huggingface/transformers#46741")
class RecurrentChunkUsesItsFirstToken(kvref.RecurrentCache):
    """If there is a state already, the code for one generated token runs, also for several tokens: the others are not used."""

    def _update(self, matrix: Any, keys: Any, values: Any, gates: Any) -> Any:
        count = 1 if bool((matrix != 0).any()) else keys.shape[0]
        return super()._update(matrix, keys[:count], values[:count], gates[:count])


@mutant("RECUR-07")
class RecurrentForkCopiesRejectedDrafts(kvref.RecurrentCache):
    """A rollback is noted and done by the next append. A fork copies the state that is still there.

    llama.cpp (xllamacpp 2026.10.11549) copies a sequence this way.
    """

    def __init__(self, config: kvref.RecurrentConfig) -> None:
        super().__init__(config)
        self.before: dict[int, Any] = {}  # per block, the matrices before a rollback

    def truncate(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        before = self._matrices.stored(self._slots(state.block)) if length in state.drafts else None
        super().truncate(sequence, length)
        self.before |= {} if before is None else {state.block: before}

    def fork(self, sequence: int) -> int:
        child = super().fork(sequence)
        before = self.before.get(self._sequence(sequence).block)
        if before is not None:
            self._matrices.put(self._slots(self._sequence(child).block), before)
        return child

    def _advance(self, state: RecurrentSequence, tokens: Sequence[Any]) -> None:
        self.before.pop(state.block, None)
        super()._advance(state, tokens)


@mutant("RECUR-11", also="RECUR-12", seen_in="vllm-project/vllm#43090")
class RecurrentHitIgnoresTheStates(kvref.RecurrentCache):
    """Every committed boundary is a hit, because the attention layers have its blocks.

    The state is that of an earlier boundary.
    """

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        state, interval = self._sequence(sequence), self.config.interval
        for number, key in enumerate(state.committed.keys, 1):
            earlier = [length for length in state.checkpoints if length <= number * interval]
            if earlier and self.pool.find(key) is None:
                self.pool.add_to_index(CachedBlock(key, np.array([state.checkpoints[max(earlier)]], np.int32)))


@mutant("RECUR-12", seen_in="vllm-project/vllm#34587")
class RecurrentIncompleteBlockIsCached(kvref.RecurrentCache):
    """A checkpoint at the end of a chunk is cached for the block that the chunk ends in, and not for its own length.

    If the chunk ends before the boundary, a hit continues from a state that lacks the last tokens.
    """

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        state, interval = self._sequence(sequence), self.config.interval
        for length, block in state.checkpoints.items():
            number = -(-length // interval)
            if length % interval and number <= len(state.committed.keys):
                self.pool.add_to_index(CachedBlock(state.committed.keys[number - 1], np.array([block], np.int32)))


@mutant("RECUR-04", also="RECUR-05", seen_in="huggingface/transformers#48256")
class RecurrentPaddingDecaysTheState(kvref.RecurrentCache):
    """Keys, values and inputs of padding are set to zero, and its decay is applied.

    The matrix becomes smaller with every padded token.
    """

    def append_batch(self, sequences: Sequence[int], counts: Sequence[int], *arrays: Any, **named: Any) -> None:
        super().append_batch(sequences, counts, *arrays, **named)
        gates = np.asarray([*arrays, *named.values()][-1], np.float32)
        for sequence, count in zip(sequences, counts, strict=True):
            block = self._sequence(sequence).block
            for slot in self._slots(block).tolist() if count < gates.shape[2] else ():
                self._write(slot, self._read_inputs(slot), self._read_matrix(slot) * np.float32(0.5) ** (gates.shape[2] - count))


@mutant("RECUR-04", also="RECUR-05 RECUR-09", seen_in="vllm-project/vllm#55178")
class RecurrentPaddingStaysInTheState(kvref.RecurrentCache):
    """A row that is padded to the length of the batch is computed as a whole.

    The length does not count the tokens that pad it, and the state contains them.
    """

    def append_batch(self, sequences: Sequence[int], counts: Sequence[int], *arrays: Any, **named: Any) -> None:
        names = ("inputs", "keys", "values", "gates")
        given = dict(zip(names, arrays, strict=False)) | named
        super().append_batch(sequences, counts, **given)
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            padding = [np.nan_to_num(np.asarray(given[name], np.float32)[:, row, count:]) for name in names]
            state = self._sequence(sequence)
            length, drafts = state.length, state.drafts
            if count and padding[0].shape[1]:
                self._advance(state, padding)
                state.length, state.drafts = length, drafts


@mutant("RECUR-17", also="RECUR-13")
class RecurrentPartIsReadBeforeTheLastOne(kvref.RecurrentCache):
    """The first part of a state replaces the present one: a rank continues before the states of the other heads are loaded."""

    def receive(self, file: BinaryIO, sequence: int) -> None:
        super().receive(file, sequence)
        state = self._sequence(sequence)
        if state.pending is not None:
            self._copy(self._slots(state.pending.room), self._slots(state.block))
            state.length, state.drafts = state.pending.extent.first, range(0)


@mutant("RECUR-11", also="RECUR-13 RECUR-14", seen_in="modular/modular#6681")
class RecurrentPrefixRestoresNoState(kvref.RecurrentCache):
    """A hit restores keys and values. The layers without attention begin from the zero state in the middle of the prompt."""

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        self._copy(None, self._slots(self._sequence(sequence).block))
        return sequence


@mutant("RECUR-11", also="RECUR-12", seen_in="vllm-project/vllm#45238")
class RecurrentPromptsNeedEveryBoundary(kvref.RecurrentCache):
    """A hit needs a checkpoint at every boundary, as blocks of keys and values do. Prompts in longer chunks are never a hit."""

    def _find_hit(self, tokens: NDArray[np.int64], salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        keys, found = list[bytes](), np.zeros(0, np.int32)
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.interval, salt):
            copy = self.pool.find(key)
            if copy is None:
                break
            keys, found = [*keys, key], copy.blocks
        return keys, found


@mutant("RECUR-17")
class RecurrentReshardsTheMatrixAlone(kvref.RecurrentCache):
    """A part of some heads contains their matrices, and the same share of the array of inputs, which is not split by head.

    Every array has the right shape. When all parts are loaded, heads have inputs of other heads.
    """

    def __init__(self, config: kvref.RecurrentConfig) -> None:
        super().__init__(config)
        self.saving = False

    def save(self, sequence: int, **part: Any) -> Any:
        self.saving = True
        try:
            return super().save(sequence, **part)
        finally:
            self.saving = False

    def _spans(self, block: int, part: Part) -> list[TokenSpan]:
        *inputs, matrices = super()._spans(block, part)
        if not self.saving or len(part.heads) == self.config.num_heads:
            return [*inputs, matrices]
        count, first = len(part.heads), part.heads.start * self.config.num_inputs
        starts = [first + number * count for number in range(len(inputs))]
        return [*(replace(each, heads=range(at, at + count)) for each, at in zip(inputs, starts, strict=True)), matrices]


@mutant("RECUR-11", seen_in="vllm-project/vllm#53505")
class RecurrentResumesFromAnotherBoundary(kvref.RecurrentCache):
    """The length of a hit and its state are found by two parts of the scheduler. The state is that of the boundary before."""

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        state = self._sequence(sequence)
        for key in state.committed.keys[-2:-1]:
            if earlier := self.pool.find(key):
                self._copy(self._slots(int(earlier.blocks[0])), self._slots(state.block))
        return sequence


@mutant("RECUR-09", also="RECUR-07 RECUR-08 RECUR-10 RECUR-11 RECUR-14 RECUR-16 RECUR-17", seen_in="ggml-org/llama.cpp#28123")
class RecurrentRollbackForgetsTheInputs(kvref.RecurrentCache):
    """The matrix is kept per draft, and the inputs of the convolution are not.

    After a rollback the two are of different lengths.
    """

    def truncate(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        inputs = self._inputs.stored(self._slots(state.block)) if length in state.drafts else None
        super().truncate(sequence, length)
        if inputs is not None and length:
            self._inputs.put(self._slots(state.block), inputs)


@mutant("RECUR-09", also="RECUR-07 RECUR-08 RECUR-10 RECUR-11 RECUR-14 RECUR-16 RECUR-17", seen_in="ggml-org/llama.cpp#26695")
class RecurrentRollbackOfAWholeBatch(kvref.RecurrentCache):
    """The states after the tokens of a batch are kept, and the state before its first token is not.

    Removing all tokens of the batch succeeds, and the state is whatever was at this place before.
    """

    def _advance(self, state: RecurrentSequence, tokens: Sequence[Any]) -> None:
        start = state.length
        super()._advance(state, tokens)
        if start in state.drafts and start:
            self._copy(self._slots(state.block), self._slots(state.block, self._draft(start)))


@mutant("RECUR-10", also="RECUR-08 RECUR-11", seen_in="vllm-project/vllm#56196")
class RecurrentShortChunkOverwritesItsPrefix(kvref.RecurrentCache):
    """A chunk that is shorter than the convolution writes its inputs to the checkpoint that the sequence continues from."""

    def _advance(self, state: RecurrentSequence, tokens: Sequence[Any]) -> None:
        source = state.checkpoints.get(state.length)
        super()._advance(state, tokens)
        if source is not None and 0 < tokens[0].shape[1] < self.config.num_inputs:
            self._inputs.put(self._slots(source), self._inputs.stored(self._slots(state.block)))


@mutant(
    "RECUR-06",
    also="LAW-04 LAW-05 LAW-08 LAW-21 RECUR-03 RECUR-08 RECUR-09 RECUR-10 RECUR-11 RECUR-13 RECUR-14 RECUR-17",
    seen_in="vllm-project/vllm#56524",
)
class RecurrentStateIsNotZeroed(kvref.RecurrentCache):
    """A block is allocated again without being zeroed: the first token continues the state of another request."""

    def _copy(self, sources: Slots | None, targets: Slots) -> None:
        if sources is not None:
            super()._copy(sources, targets)


@mutant("RECUR-09", also="RECUR-01 RECUR-02 RECUR-17", seen_in="vllm-project/vllm#52942")
class RecurrentStepAfterDraftsReadsAnOldState(kvref.RecurrentCache):
    """The state after accepted drafts is at the place of the last one. A step without drafts reads the first place instead."""

    def __init__(self, config: kvref.RecurrentConfig) -> None:
        super().__init__(config)
        self.first: dict[int, int] = {}  # per block, the length whose state is at the first place

    def truncate(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        self.first |= {state.block: state.drafts.start} if length in state.drafts else {}
        super().truncate(sequence, length)

    def _advance(self, state: RecurrentSequence, tokens: Sequence[Any]) -> None:
        first = self.first.pop(state.block, state.length)
        if tokens[0].shape[1] == 1 and first in state.drafts:
            self._copy(self._slots(state.block, self._draft(first)), self._slots(state.block))
        super()._advance(state, tokens)


@mutant("RECUR-08", also="RECUR-16 RECUR-17", seen_in="ml-explore/mlx-lm#1486")
class RecurrentTruncateKeepsTheState(kvref.RecurrentCache):
    """`truncate` reduces the length, as for keys and values, and leaves the state as it is."""

    def truncate(self, sequence: int, length: int) -> None:
        try:
            super().truncate(sequence, length)
        except NotTruncatable:
            self._forget_after(sequence, length)

    def _forget_after(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        self._release(state, [each for each in state.checkpoints if each > length])
        state.committed.truncate(length, self.config.interval)
        state.length, state.drafts = int(length), range(0)


@mutant("RECUR-08", also="RECUR-16 RECUR-17", seen_in="ml-explore/mlx-lm#1254")
class RecurrentTruncateRestoresTheZeroState(RecurrentTruncateKeepsTheState):
    """`truncate` restores the zero state if it has no copy of the state, so that the cache counts as truncatable."""

    def _forget_after(self, sequence: int, length: int) -> None:
        self._copy(None, self._slots(self._sequence(sequence).block))
        super()._forget_after(sequence, length)


@mutant("RECUR-12", also="RECUR-11", seen_in="LMCache/LMCache#5004")
class RecurrentUnwrittenBoundaryIsCached(kvref.RecurrentCache):
    """A step of several blocks writes the state at its end alone. The blocks of the boundaries before it are cached as well."""

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        state = self._sequence(sequence)
        for key in state.committed.keys:
            if self.pool.find(key) is None and state.checkpoints:
                self.pool.add_to_index(CachedBlock(key, np.array([max(state.checkpoints.items())[1]], np.int32)))
