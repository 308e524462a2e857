"""The hybrid cache: models in which some layers attend and others keep a recurrent state.

It consists of a GroupedCache for the layers with attention and a RecurrentCache for the others. Both have the same sequences and
lengths. A call changes both or neither.

A hit needs both (RECUR-11): blocks of keys and values that every group of layers serves, and a checkpoint at the same length.
Boundaries of the state are multiples of the block size, so that such lengths exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.errors import ConfigError, SequenceNotFound, ShapeMismatch, integer
from kvref.grouped import GroupedCache, GroupedConfig
from kvref.recurrent import RecurrentCache, RecurrentConfig


@dataclass(frozen=True)
class HybridConfig:
    """Sizes of a HybridCache. Raises ConfigError unless the interval of the states is a multiple of the block size."""

    attention: GroupedConfig
    recurrent: RecurrentConfig

    def __post_init__(self) -> None:
        interval, size = self.recurrent.interval, self.attention.block_size
        if interval % size:
            raise ConfigError(f"interval: expected a multiple of block_size {size}, got {interval}")


class HybridCache:
    """Sequences with keys and values in some layers and states in others.

    `attention` and `recurrent` are the two caches, for reads and attention: `ids` returns the ids of a sequence in them.
    """

    def __init__(self, config: HybridConfig, backend: Backend = reference) -> None:
        self.config, self.attention = config, GroupedCache(config.attention, backend)
        self.recurrent = RecurrentCache(config.recurrent, backend)
        self._ids: dict[int, tuple[int, int]] = {}
        self._next_sequence = 0

    def ids(self, sequence: int) -> tuple[int, int]:
        """Return the ids of a sequence in `attention` and in `recurrent`. Raises SequenceNotFound."""
        number = integer(sequence)
        if number is None or number not in self._ids:
            raise SequenceNotFound(f"unknown sequence {sequence!r} (never created, or already dropped)")
        return self._ids[number]

    def create(self) -> int:
        """Create an empty sequence, and return its id. Raises OutOfBlocks if there is no block for a state."""
        state = self.recurrent.create()
        return self._open(self.attention.create(), state)

    def fork(self, sequence: int) -> int:
        """Create a sequence with the same tokens, and return its id: it shares blocks, and has a copy of the state."""
        attention, recurrent = self.ids(sequence)
        state = self.recurrent.fork(recurrent)
        return self._open(self.attention.fork(attention), state)

    def drop(self, sequence: int) -> None:
        """Remove a sequence. Raises SequenceNotFound."""
        attention, recurrent = self.ids(sequence)
        self.attention.drop(attention)
        self.recurrent.drop(recurrent)
        del self._ids[int(sequence)]

    def length(self, sequence: int) -> int:
        """Return the number of tokens. Raises SequenceNotFound."""
        return self.recurrent.length(self.ids(sequence)[1])

    def step(self, sequence: int, attended: tuple[Array, Array], recurrent: tuple[Array, Array, Array, Array]) -> None:
        """Append n tokens in every layer.

        attended: keys and values, as in `GroupedCache.step`. recurrent: inputs, keys, values and gates, as in
        `RecurrentCache.append`. Raises as the two do, and ShapeMismatch if they have different numbers of tokens. If it raises,
        nothing has changed.
        """
        blocks, state = self.ids(sequence)
        tokens = self.recurrent.accept_tokens(*recurrent)
        counts = tokens[0].shape[1], attended[0].shape[1]
        if counts[0] != counts[1]:
            raise ShapeMismatch(f"recurrent: expected {counts[1]} tokens, as many as keys and values, got {counts[0]}")
        self.attention.step(blocks, *attended)  # can raise: before the state changes
        self.recurrent.append(state, *tokens)

    def checkpoint(self, sequence: int) -> None:
        """Take a checkpoint of the state (RECUR-10). Raises SequenceNotFound or OutOfBlocks."""
        self.recurrent.checkpoint(self.ids(sequence)[1])

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length`. Raises PositionOutOfRange, SequenceNotFound, or NotTruncatable if blocks of a
        window were freed (GROUP-07) or if there is no state of this length (RECUR-08).
        """
        attention, recurrent = self.ids(sequence)
        self.recurrent.state_at(recurrent, length)  # can raise: before blocks are freed
        self.attention.truncate(attention, length)
        self.recurrent.truncate(recurrent, length)

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record the tokens of the first positions, and add full blocks and checkpoints to the two indices."""
        attention, recurrent = self.ids(sequence)
        self.attention.commit(attention, tokens)
        self.recurrent.commit(recurrent, tokens)

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the hit: the longest boundary for which every group has its blocks and the state has a checkpoint.

        Each cache is asked for its longest hit within that of the other, until both are the same. Raises TokenOutOfRange.
        """
        hit, other = self.recurrent.match(tokens, salt), -1
        while hit != other:
            other = self.attention.match(tokens[: hit + 1], salt)
            hit = self.recurrent.match(tokens[: other + 1], salt)
        return hit

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """Create a sequence of the hit's length, and return its id.

        Raises TokenOutOfRange, or OutOfBlocks with nothing changed.
        """
        beginning = tokens[: self.match(tokens, salt) + 1]  # one more token, because a hit is less than the number of tokens
        state = self.recurrent.begin(beginning, salt)
        return self._open(self.attention.begin(beginning, salt), state)

    def reset(self) -> None:
        """Empty the two indices. Raises InUse if a sequence is live."""
        self.recurrent.reset()
        self.attention.reset()

    def _open(self, attention: int, recurrent: int) -> int:
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        self._ids[sequence] = attention, recurrent
        return sequence
