"""The recurrent cache: the states of layers without attention (Mamba-2, gated delta networks, short convolutions).

A layer of a sequence has one state instead of keys and values per token: the last inputs of its convolution, and a matrix per
head. The state is valid for exactly one length. It cannot be truncated, only replaced by a copy that was taken before:

- A checkpoint is a copy of the state at one length, taken by `checkpoint`. `commit` adds checkpoints to the prefix index, and
  `begin` creates a sequence from the longest one that it finds.
- The states after the last `max_drafts` tokens of an append are kept until the next append, for rejected drafts.

A block is room for the states of one sequence at one length in all layers, and for those after its drafts. Every live sequence
has one block, every checkpoint has one, and so has a state of which only some parts are loaded (RECUR-17).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvref import serialization
from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import (
    ConfigError,
    FileDamaged,
    InUse,
    KVRefError,
    LayerOutOfRange,
    NonFinite,
    NotTruncatable,
    OutOfBlocks,
    PositionOutOfRange,
    SequenceNotFound,
    ShapeMismatch,
    in_range,
    integer,
    whole,
    whole_fields,
)
from kvref.formats import get_format
from kvref.partial_load import Part, PendingLoad, SavedRecurrentState, Span
from kvref.prefix import CachedBlock, CommittedTokens, IndexedBlockPool, block_keys, token_numbers
from kvref.recurrences import apply_matrix, chunk_matrix, keep_inputs, step_matrix
from kvref.snapshot import Contents, SavedState, TokenSpan, shape_of
from kvref.token_store import SlotStore
from kvref.validation import accept

PLAIN = ("float32", "float16", "bfloat16")
GATES = 2  # per token and head: the decay and the strength of the write
CHUNK = 64  # tokens that `chunk_matrix` gets at once
NOW = 0  # the index in a block of the present state; the others are those after drafts


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes and formats of a RecurrentCache. Raises ConfigError (LAW-12).

    - `num_blocks`: live sequences and checkpoints that there is room for.
    - `channels`: numbers per head and token that are inputs of the convolution.
    - `num_inputs`: inputs that the state contains: the width of the convolution's kernel, less 1.
    - `key_dim`, `value_dim`: sizes of the matrix of a head. Mamba-2 calls the first one the state size.
    - `delta_rule`: 1 for the gated delta rule, 0 for SSD (RECUR-02).
    - `max_drafts`: tokens of the last append that `truncate` can remove without a checkpoint (RECUR-09).
    - `interval`: `begin` finds checkpoints at multiples of this length only (RECUR-11).
    - `dtype`, `matrix_dtype`: formats of the inputs and of the matrices: float32, float16 or bfloat16.
    """

    num_blocks: int
    num_layers: int
    num_heads: int
    channels: int
    num_inputs: int
    key_dim: int
    value_dim: int
    delta_rule: int = 0
    max_drafts: int = 0
    interval: int = 16
    dtype: str = "float32"
    matrix_dtype: str = "float32"

    def __post_init__(self) -> None:
        whole_fields(self, "num_blocks", "max_drafts", minimum=0)
        whole_fields(self, "num_layers", "num_heads", "channels", "num_inputs", "key_dim", "value_dim", "interval")
        object.__setattr__(self, "delta_rule", whole("delta_rule", self.delta_rule, 0, 1))
        for name in ("dtype", "matrix_dtype"):
            if getattr(self, name) not in PLAIN:
                raise ConfigError(f"{name}: expected one of {', '.join(PLAIN)}, got {getattr(self, name)!r}")


@dataclass
class RecurrentSequence:
    """A live sequence: the block and the length of its state, and the copies of earlier states that `truncate` can restore.

    checkpoints: blocks, by length. drafts: lengths whose states are in the block of the sequence. pending: a new state, of which
    only some parts are loaded.
    """

    block: int
    length: int = 0
    committed: CommittedTokens = field(default_factory=lambda: CommittedTokens(""))
    checkpoints: dict[int, int] = field(default_factory=dict)
    drafts: range = range(0)
    pending: PendingLoad | None = None


class RecurrentCache:
    """States of many sequences, with checkpoints, drafts and a prefix index (chapter RECUR).

    `sequence` is an id that `create`, `begin` or `fork` returned, and `layer` is in `[0, num_layers)`; otherwise a method raises
    SequenceNotFound or LayerOutOfRange. Ids count up from 0 and are never reused.
    """

    def __init__(self, config: RecurrentConfig, backend: Backend = reference) -> None:
        """Allocate memory for all blocks, and for one state that is being loaded, on the device of `backend`."""
        self.config, self.pool, self._backend = config, IndexedBlockPool(config.num_blocks), backend
        self._sequences: dict[int, RecurrentSequence] = {}
        self._next_sequence = 0
        slots = (config.num_blocks + 1) * (1 + config.max_drafts) * config.num_layers
        self._inputs = SlotStore(backend, get_format(config.dtype), slots, config.num_inputs * config.num_heads, config.channels)
        matrix = get_format(config.matrix_dtype)
        self._matrices = SlotStore(backend, matrix, slots, config.num_heads * config.key_dim, config.value_dim)

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks. The block of a cached checkpoint that no sequence has is free (RECUR-13)."""
        return self.pool.num_free

    def create(self) -> int:
        """Create a sequence with the zero state, and return its id (RECUR-06). Raises OutOfBlocks."""
        return self._open(RecurrentSequence(self.pool.allocate()), None)

    def fork(self, sequence: int) -> int:
        """Create a sequence with a copy of the state, and return its id (RECUR-07).

        It has the checkpoints, the salt and the committed tokens of its parent, and none of its drafts. Raises SequenceNotFound
        or OutOfBlocks.
        """
        parent = self._sequence(sequence)
        committed = CommittedTokens(parent.committed.salt, parent.committed.tokens, list(parent.committed.keys))
        child = RecurrentSequence(self.pool.allocate(), parent.length, committed, dict(parent.checkpoints))
        self.pool.share_many(list(child.checkpoints.values()))
        return self._open(child, self._slots(parent.block))

    def drop(self, sequence: int) -> None:
        """Remove a sequence. Its cached checkpoints stay in the index (RECUR-14). Raises SequenceNotFound."""
        state = self._sequence(sequence)
        self._release(state, state.checkpoints)
        self._discard_pending_load(state)
        self.pool.free(state.block)
        del self._sequences[int(sequence)]

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence. Raises SequenceNotFound."""
        return self._sequence(sequence).length

    def append(self, sequence: int, inputs: Array, keys: Array, values: Array, gates: Array) -> None:
        """Append n tokens in every layer (RECUR-01, RECUR-02).

        inputs: [num_layers, n, num_heads, channels]. keys: [num_layers, n, num_heads, key_dim]. values: [num_layers, n,
        num_heads, value_dim]. gates: [num_layers, n, num_heads, 2], the decay, in (0, 1], and the strength of the write.

        Raises ShapeMismatch, DtypeMismatch, NonFinite or SequenceNotFound. If it raises, nothing has changed.
        """
        state = self._sequence(sequence)
        self._advance(state, self.accept_tokens(inputs, keys, values, gates))

    def accept_tokens(self, inputs: Array, keys: Array, values: Array, gates: Array) -> tuple[Array, ...]:
        """Return the arguments of `append` as float32. Raises ShapeMismatch, DtypeMismatch or NonFinite."""
        arrays = self._accept((self.config.num_layers, "n"), inputs, keys, values, gates)
        self._check_finite(arrays)
        return arrays

    def append_batch(
        self, sequences: Sequence[int], counts: Sequence[int], inputs: Array, keys: Array, values: Array, gates: Array
    ) -> None:
        """Append the first `counts[i]` tokens of row i to `sequences[i]`, for every i (RECUR-04, RECUR-05).

        The arrays are those of `append`, with one more axis after the layers: [num_layers, batch, n, num_heads, ...]. The other
        tokens of a row are padding, of which nothing is stored. Sequences are named at most once.

        Raises PositionOutOfRange unless each count is in `[0, n + 1)`, and as `append` does. If it raises, nothing has changed.
        """
        states = [self._sequence(sequence) for sequence in sequences]
        ShapeMismatch.check("counts", (len(counts),), (len(states),))
        arrays = self._accept((self.config.num_layers, len(states), "n"), inputs, keys, values, gates)
        room = arrays[0].shape[2] + 1
        numbers = [in_range(count, room, PositionOutOfRange, "count") for count in counts]
        rows = [tuple(each[:, row, :count, ...] for each in arrays) for row, count in enumerate(numbers)]
        for tokens in rows:
            self._check_finite(tokens)
        for state, tokens in zip(states, rows, strict=True):
            self._advance(state, tokens)

    def read_inputs(self, sequence: int, layer: int) -> Array:
        """Return the last inputs of a layer, oldest first: float32 [num_inputs, num_heads, channels] (RECUR-01).

        The places before the first token are zeros.
        """
        return self._read_inputs(self._slot(sequence, layer))

    def read_matrix(self, sequence: int, layer: int) -> Array:
        """Return the matrices of a layer: float32 [num_heads, key_dim, value_dim] (RECUR-02)."""
        return self._read_matrix(self._slot(sequence, layer))

    def apply(self, sequence: int, layer: int, query: Array) -> Array:
        """Return the read-out q' S of each query: float32 [n, num_heads, value_dim] (RECUR-02).

        query: [n, num_heads, key_dim]. Raises ShapeMismatch or DtypeMismatch.
        """
        slot = self._slot(sequence, layer)
        query = accept("query", query, ("n", self.config.num_heads, self.config.key_dim), self._backend)
        return apply_matrix(self._read_matrix(slot), query)

    def checkpoint(self, sequence: int) -> None:
        """Take a checkpoint: a copy of the present state, which stays at this length (RECUR-10).

        It does nothing for an empty sequence, or if the sequence has a checkpoint of this length. Raises SequenceNotFound, or
        OutOfBlocks with nothing changed.
        """
        state = self._sequence(sequence)
        if state.length and state.length not in state.checkpoints:
            block = self.pool.allocate()
            self._copy(self._slots(state.block), self._slots(block))
            state.checkpoints[state.length] = block

    def truncate(self, sequence: int, length: int) -> None:
        """Restore the state at an earlier length: 0, a checkpoint, or among the drafts of the last append (RECUR-08).

        Checkpoints at larger lengths are released. Raises PositionOutOfRange unless `length` is in `[0, n + 1)`, where n is the
        present length; NotTruncatable if there is no copy of the state at this length; SequenceNotFound.
        """
        state, source, length = self._sequence(sequence), self.state_at(sequence, length), int(length)
        if length == state.length:
            return
        self._copy(source, self._slots(state.block))
        self._release(state, [each for each in state.checkpoints if each > length])
        state.committed.truncate(length, self.config.interval)
        state.length, state.drafts = length, range(state.drafts.start, min(state.drafts.stop, length))

    def state_at(self, sequence: int, length: int) -> NDArray[np.int64] | None:
        """Return the slots with the state of a sequence at `length`, None for the zero state. Raises as `truncate` does."""
        state = self._sequence(sequence)
        length = in_range(length, state.length + 1, PositionOutOfRange, "length")
        if length == 0:
            return None
        if length == state.length:
            return self._slots(state.block)
        if length in state.drafts:
            return self._slots(state.block, self._draft(length))
        if length in state.checkpoints:
            return self._slots(state.checkpoints[length])
        raise NotTruncatable(f"cannot truncate to {length}: there is no checkpoint of this length, and no draft ended there")

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the hit: the length of the sequence that `begin(tokens, salt)` would create (RECUR-11). It changes nothing.

        Raises TokenOutOfRange.
        """
        keys, _ = self._find_hit(token_numbers(tokens), salt)
        return len(keys) * self.config.interval

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """Create a sequence from the longest checkpoint of the first tokens of a prompt, and return its id (RECUR-11).

        Its length is the hit, which `match` returns, and less than the number of tokens. It has this checkpoint. tokens, salt: as
        in `PrefixCache.begin`. Raises TokenOutOfRange, or OutOfBlocks with nothing changed.
        """
        numbers = token_numbers(tokens)
        keys, found = self._find_hit(numbers, salt)
        needed = 1 + self.pool.num_unreferenced(found)
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"out of blocks: {needed} needed, {self.pool.num_free} free")
        self.pool.share_many(found)
        hit = len(keys) * self.config.interval
        state = RecurrentSequence(self.pool.allocate(), hit, CommittedTokens(salt, numbers[:hit], keys))
        state.checkpoints.update(zip([hit], found.tolist(), strict=False))  # none without a hit
        return self._open(state, self._slots(int(found[0])) if hit else None)

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the first positions of a sequence contain `tokens`, and add checkpoints to the index (RECUR-12).

        Each checkpoint of the sequence is added whose length is a multiple of `interval` and whose tokens are known. Raises
        SequenceNotFound, TokenOutOfRange, PositionOutOfRange if there are more tokens than the sequence has, and TokenMismatch if
        a token differs from the committed one.
        """
        state, numbers = self._sequence(sequence), token_numbers(tokens)
        committed, interval = state.committed, self.config.interval
        committed.add(numbers, state.length)
        committed.keys += block_keys(committed.tokens, interval, committed.salt, committed.keys)
        for length, block in sorted(state.checkpoints.items()):
            if length % interval == 0 and length <= len(committed.tokens):
                self.pool.add_to_index(CachedBlock(committed.keys[length // interval - 1], np.array([block], np.int32)))

    def reset(self) -> None:
        """Remove all checkpoints from the prefix index. Raises InUse if a sequence is live (RECUR-14)."""
        if self._sequences:
            raise InUse(f"cannot reset: live sequences: {len(self._sequences)}")
        self.pool.clear_index()

    def save(self, sequence: int, *, layers: Span = None, heads: Span = None) -> Array:
        """Return the state of a sequence, or a part of it, as the bytes of a file: uint8 [n] (RECUR-16, RECUR-17).

        layers, heads: a range `[start, stop)` each, as a list of two integers, or None for all. Raises SequenceNotFound,
        LayerOutOfRange or HeadOutOfRange.
        """
        return serialization.as_array(self.contents(sequence, layers=layers, heads=heads), self._backend)

    def load(self, sequence: int, data: Array) -> None:
        """Replace the state of a sequence by a saved one (RECUR-16).

        data: uint8 [n], as `save` returned it, the whole or a part.

        Afterwards the sequence has no checkpoint and no committed tokens. Before the last part, it keeps its present state, and
        the parts are in a block of their own (RECUR-17).

        Raises SequenceNotFound; ShapeMismatch or DtypeMismatch for `data`; FileDamaged (MOVE-03); ConfigError if the sizes or
        formats differ, or for a part that does not fit the parts loaded before; OutOfBlocks if there is no block for the first
        part. If it raises, nothing has changed.
        """
        self.receive(serialization.open_bytes(data, self._backend), sequence)

    def contents(self, sequence: int, *, layers: Span = None, heads: Span = None) -> Contents:
        """Describe what `kvref.save` writes. Raises as `save` does."""
        state = self._sequence(sequence)
        extent, part = self._part_at(state.length, layers, heads)
        which = {} if self._is_whole(extent, part) else {name: part.to_json()[name] for name in ("layers", "heads")}
        return Contents("recurrent", self._shape_to_match(), {"length": state.length, **which}, self._spans(state.block, part))

    def receive(self, file: BinaryIO, sequence: int) -> None:
        """`load` from an open binary file. Used by `kvref.load`."""
        state, spare = self._sequence(sequence), self.config.num_blocks
        saved_file = serialization.SavedFile(file, "recurrent", self._shape_to_match())
        extent, part = self._read_part(saved_file.saved)
        load = state.pending
        if load is None or self._is_whole(extent, part):
            load = PendingLoad(spare, extent)
        else:
            load.check(extent, part)
            self._copy(self._slots(load.room), self._slots(spare))
        saved_file.read_into(self._spans(spare, part), self._backend)  # its checksum matches: blocks can change
        if load is not state.pending:
            load.room = spare if self._is_whole(extent, part) else self.pool.allocate()
        load.add(part)
        if load.is_complete(self._part_at(extent.first)[1]):
            self._replace_state(state, self._slots(spare), extent.first)
        else:
            self._copy(self._slots(spare), self._slots(load.room))
            state.pending = load

    def _replace_state(self, state: RecurrentSequence, source: NDArray[np.int64], length: int) -> None:
        """Give a sequence the loaded state in the slots `source`. Its checkpoints and a pending load are freed."""
        self._copy(source, self._slots(state.block))
        self._release(state, list(state.checkpoints))
        self._discard_pending_load(state)
        state.committed.truncate(0, self.config.interval)
        state.length, state.drafts = length, range(0)

    def _discard_pending_load(self, state: RecurrentSequence) -> None:
        """Free the block of a state of which only some parts are loaded, if there is one."""
        if state.pending is not None:
            self.pool.free(state.pending.room)
            state.pending = None

    def _part_at(self, length: int, layers: Span = None, heads: Span = None) -> tuple[SavedRecurrentState, Part]:
        """A state at this length, and a part of it. Raises LayerOutOfRange or HeadOutOfRange."""
        extent = SavedRecurrentState.at(length, self.config.num_layers)
        return extent, Part.of(extent, self.config.num_heads, layers, [length, length + 1], heads)

    def _read_part(self, saved: SavedState) -> tuple[SavedRecurrentState, Part]:
        """The state and the part that a file contains. Raises FileDamaged."""
        length, spans = saved.number("length"), {}
        if {"layers", "heads"} & set(saved.state):  # a whole state has neither
            spans = {name: saved.numbers(name, 2) for name in ("layers", "heads")}
        try:
            return self._part_at(length, **spans)
        except KVRefError as error:
            raise FileDamaged(f"file: {error}") from None

    def _is_whole(self, extent: SavedRecurrentState, part: Part) -> bool:
        """Whether a part is the whole state."""
        return extent.size(part) == self.config.num_layers * self.config.num_heads

    def _open(self, state: RecurrentSequence, source: NDArray[np.int64] | None) -> int:
        """Give a new sequence an id, and the state in the slots `source`, None for the zero state."""
        self._copy(source, self._slots(state.block))
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._sequences[sequence] = state
        return sequence

    def _sequence(self, sequence: int) -> RecurrentSequence:
        """A live sequence. Raises SequenceNotFound."""
        number = integer(sequence)
        if number is None or number not in self._sequences:
            raise SequenceNotFound(f"unknown sequence {sequence!r} (never created, or already dropped)")
        return self._sequences[number]

    def _accept(self, first: Sequence[int | str], inputs: Array, keys: Array, values: Array, gates: Array) -> tuple[Array, ...]:
        """The arrays of an append as float32, whose first axes are `first`. Raises ShapeMismatch or DtypeMismatch."""
        config = self.config
        arrays, shape = list[Array](), tuple(first)
        widths = {"inputs": config.channels, "keys": config.key_dim, "values": config.value_dim, "gates": GATES}
        for (name, width), array in zip(widths.items(), (inputs, keys, values, gates), strict=True):
            arrays.append(accept(name, array, (*shape, config.num_heads, width), self._backend))
            shape = arrays[0].shape[:-2]  # the number of tokens of the first array is that of all
        return tuple(arrays)

    def _check_finite(self, tokens: Iterable[Array]) -> None:
        """Raise NonFinite if a token contains a NaN or an infinity, which would never leave the state."""
        xp = self._backend.xp
        for array in tokens:
            if not bool(xp.all(xp.isfinite(array))):
                raise NonFinite("tokens: expected finite values, got a NaN or an infinity")

    def _advance(self, state: RecurrentSequence, tokens: Sequence[Array]) -> None:
        """Append n tokens [num_layers, n, num_heads, ...] to a sequence, and keep the states before its last drafts."""
        start, stop = state.length, state.length + tokens[0].shape[1]
        if stop == start:
            return
        drafts = range(max(start, stop - self.config.max_drafts), stop)
        if start in drafts:
            self._copy(self._slots(state.block), self._slots(state.block, self._draft(start)))
        for layer in range(self.config.num_layers):
            inputs, keys, values, gates = (each[layer, ...] for each in tokens)
            slot, at = int(self._slots(state.block)[layer]), start
            history, matrix = self._read_inputs(slot), self._read_matrix(slot)
            for end in (*(each for each in drafts if each > start), stop):
                part = slice(at - start, end - start)
                history = keep_inputs(history, inputs[part, ...])
                matrix = self._update(matrix, keys[part, ...], values[part, ...], gates[part, ...])
                index, at = NOW if end == stop else self._draft(end), end
                self._write(int(self._slots(state.block, index)[layer]), history, matrix)
        state.length, state.drafts = stop, drafts

    def _update(self, matrix: Array, keys: Array, values: Array, gates: Array) -> Array:
        """The matrices of a layer after n more tokens: the step form for one token, chunks for several."""
        count, decays, strengths, rule = keys.shape[0], gates[..., 0], gates[..., 1], bool(self.config.delta_rule)
        if count == 1:
            return step_matrix(matrix, keys[0, ...], values[0, ...], decays[0, ...], strengths[0, ...], rule)
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            matrix = chunk_matrix(matrix, keys[part, ...], values[part, ...], decays[part, ...], strengths[part, ...], rule)
        return matrix

    def _find_hit(self, tokens: NDArray[np.int64], salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        """The keys up to the longest cached checkpoint, and its block, int32 [1]; without a hit, both are empty.

        Checkpoints before the hit are not needed: the state contains all tokens.
        """
        keys = list(block_keys(tokens[: max(0, len(tokens) - 1)], self.config.interval, salt))
        while keys and (found := self.pool.find(keys[-1])) is None:
            keys.pop()
        return keys, found.blocks if keys and found else np.zeros(0, np.int32)

    def _release(self, state: RecurrentSequence, lengths: Iterable[int]) -> None:
        """Remove checkpoints of a sequence, longer ones first: they are evicted first (RECUR-14)."""
        for length in sorted(lengths, reverse=True):
            self.pool.free(state.checkpoints.pop(length))

    def _slot(self, sequence: int, layer: int) -> int:
        """The slot of the present state of a layer. Raises SequenceNotFound or LayerOutOfRange."""
        block = self._sequence(sequence).block
        return int(self._slots(block)[in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")])

    def _slots(self, block: int, index: int = NOW) -> NDArray[np.int64]:
        """The slots of all layers in one of the 1 + max_drafts states of a block."""
        return (block * (1 + self.config.max_drafts) + index) * self.config.num_layers + np.arange(self.config.num_layers)

    def _draft(self, length: int) -> int:
        """The index in a block of the state at `length`: max_drafts consecutive lengths have different ones."""
        return NOW + 1 + length % self.config.max_drafts

    def _copy(self, sources: NDArray[np.int64] | None, targets: NDArray[np.int64]) -> None:
        """Copy states in all layers, bit for bit. sources None: write the zero state."""
        for store in (self._inputs, self._matrices):
            if sources is None:
                zeros = self._backend.zeros((len(targets), *store.token_shape), "float32")
                store.put(targets, store.quantized(zeros))
            else:
                store.copy(sources, targets, 1)

    def _read_inputs(self, slot: int) -> Array:
        config = self.config
        return self._backend.xp.reshape(self._inputs.read([slot]), (config.num_inputs, config.num_heads, config.channels))

    def _read_matrix(self, slot: int) -> Array:
        config = self.config
        return self._backend.xp.reshape(self._matrices.read([slot]), (config.num_heads, config.key_dim, config.value_dim))

    def _write(self, slot: int, inputs: Array, matrix: Array) -> None:
        """Write the state of a layer. It is rounded to the formats of the cache here, and nowhere else (RECUR-15)."""
        for store, new in ((self._inputs, inputs), (self._matrices, matrix)):
            store.put([slot], store.quantized(self._backend.xp.reshape(new, (1, *store.token_shape))))

    def _spans(self, block: int, part: Part) -> list[TokenSpan]:
        """A part of the present state in a block, as it is saved: per layer, the inputs and matrices of its heads."""
        config, heads, slots = self.config, part.heads, self._slots(block)[part.layers.start : part.layers.stop]
        if len(heads) == config.num_heads:
            return [TokenSpan("inputs", self._inputs, slots), TokenSpan("matrices", self._matrices, slots)]
        rows = [range(start + heads.start, start + heads.stop) for start in range(0, self._inputs.rows[0], config.num_heads)]
        inputs = [TokenSpan(f"inputs.{number}", self._inputs, slots, each) for number, each in enumerate(rows)]
        matrices = range(heads.start * config.key_dim, heads.stop * config.key_dim)
        return [*inputs, TokenSpan("matrices", self._matrices, slots, matrices)]

    def _shape_to_match(self) -> dict[str, int | float | str]:
        """The sizes and formats that a loading cache must have too (MOVE-02)."""
        return shape_of(self.config, "num_blocks", "max_drafts", "interval")
