"""The states of layers without attention (Mamba-2), with drafts that can be rejected."""

import numpy as np

from kvref.errors import LayerOutOfRange, NotTruncatable, OutOfBlocks, PositionOutOfRange, SequenceNotFound


class Cache:
    """lengths: sequence -> tokens. inputs: sequence -> the last inputs, [num_layers, num_inputs, num_heads, channels].

    matrices: sequence -> [num_layers, num_heads, key_dim, value_dim]. drafts: sequence -> length -> the inputs and matrices at
    this length, for the last tokens of the last append.
    """

    def __init__(
        self, num_blocks, num_layers, num_heads, channels, num_inputs, key_dim, value_dim, delta_rule, max_drafts, interval,
        dtype, matrix_dtype,
    ):  # fmt: skip
        self.num_blocks, self.num_layers, self.max_drafts = num_blocks, num_layers, max_drafts
        self.zero_inputs = np.zeros((num_layers, num_inputs, num_heads, channels), np.float32)
        self.zero_matrices = np.zeros((num_layers, num_heads, key_dim, value_dim), np.float32)
        self.lengths, self.inputs, self.matrices, self.drafts, self.next_id = {}, {}, {}, {}, 0

    @property
    def num_free_blocks(self):
        return self.num_blocks - len(self.lengths)

    def create(self):
        return self.add_sequence(0, self.zero_inputs, self.zero_matrices)

    def fork(self, sequence):
        """Return a new sequence with the same state."""
        self.require(sequence)
        return self.add_sequence(self.lengths[sequence], self.inputs[sequence], self.matrices[sequence])

    def add_sequence(self, length, inputs, matrices):
        if self.num_free_blocks == 0:
            raise OutOfBlocks("1 needed, 0 free")
        sequence, self.next_id = self.next_id, self.next_id + 1
        self.lengths[sequence], self.drafts[sequence] = length, {}
        self.inputs[sequence], self.matrices[sequence] = inputs.copy(), matrices.copy()
        return sequence

    def drop(self, sequence):
        self.require(sequence)
        for part in (self.lengths, self.inputs, self.matrices, self.drafts):
            del part[sequence]

    def append(self, sequence, inputs, keys, values, gates):
        """Append tokens to all layers. The arrays: float32 [num_layers, tokens, num_heads, ...]."""
        self.require(sequence)
        drafts = {}
        for token in range(inputs.shape[1]):
            drafts[self.lengths[sequence]] = self.inputs[sequence], self.matrices[sequence]
            self.append_token(sequence, *(part[:, token] for part in (inputs, keys, values, gates)))
        if drafts:
            first = self.lengths[sequence] - self.max_drafts
            self.drafts[sequence] = {length: state for length, state in drafts.items() if length >= first}

    def append_token(self, sequence, inputs, keys, values, gates):
        decay, strength = gates[..., 0, None, None], gates[..., 1, None, None]
        outer = keys[..., :, None] * values[..., None, :]
        self.matrices[sequence] = decay * self.matrices[sequence] + strength * outer
        self.inputs[sequence] = np.concatenate([self.inputs[sequence][:, 1:], inputs[:, None]], axis=1)
        self.lengths[sequence] += 1

    def truncate(self, sequence, length):
        """Restore the state at a length: 0, the present one, or one of the last drafts."""
        self.require(sequence)
        if not 0 <= length <= self.lengths[sequence]:
            raise PositionOutOfRange(f"length {length}, but there are {self.lengths[sequence]} tokens")
        if length == self.lengths[sequence]:
            return
        if length == 0:
            state = self.zero_inputs, self.zero_matrices
        elif length in self.drafts[sequence]:
            state = self.drafts[sequence][length]
        else:
            raise NotTruncatable(f"the state at {length} was not kept")
        self.inputs[sequence], self.matrices[sequence] = state
        self.lengths[sequence] = length

    def length(self, sequence):
        self.require(sequence)
        return self.lengths[sequence]

    def read_inputs(self, sequence, layer):
        self.require(sequence, layer)
        return self.inputs[sequence][layer].copy()

    def read_matrix(self, sequence, layer):
        self.require(sequence, layer)
        return self.matrices[sequence][layer].copy()

    def apply(self, sequence, layer, query):
        """Return the product of queries [queries, num_heads, key_dim] and the matrices."""
        self.require(sequence, layer)
        return np.einsum("qhk,hkv->qhv", query, self.matrices[sequence][layer])

    def require(self, sequence, layer=0):
        if sequence not in self.lengths:
            raise SequenceNotFound(f"sequence {sequence}")
        if not 0 <= layer < self.num_layers:
            raise LayerOutOfRange(f"layer {layer}")
