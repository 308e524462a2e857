"""Attention of the last queries of a sequence, in float64; each query is computed separately, over its window."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import read_back
from kvref_conformance.families.prefix.fixture import streams
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import attention, output_rounding, weight_rounding
from kvref_conformance.testlib.assertions import assert_equal, assert_within, normal_rows, raises
from kvref_conformance.testlib.fixtures import block_table_of, clamp_to_limits, construct
from kvref_conformance.testlib.tagged_content import content_pair


def window_attention(
    query: Any, keys: NDArray, values: NDArray, window: int | None, scale: float, weight_dtype: str = "float32"
) -> tuple[NDArray, NDArray]:
    """Returns the output and its bound. keys, values: [n, heads, dim] of the last n positions, which include the queries' own.

    weight_dtype: the dtype that weights may be rounded to.
    """
    outs, bounds = list[NDArray](), list[NDArray]()
    for index, row in enumerate(np.asarray(query)):
        stop = len(keys) - len(query) + index + 1
        visible = slice(0 if window is None else max(0, stop - window), stop)
        out, bound = attention(row[None], keys[visible], values[visible], scale=scale)
        outs.append(out)
        bounds.append(bound + weight_rounding(row[None], keys[visible], values[visible], weight_dtype, scale=scale))
    empty = np.zeros((0, *np.shape(query)[1:]))
    return np.concatenate([empty, *outs]), np.concatenate([empty, *bounds])


# Sequences that grow step by step. The blocks that each group must have are computed from the steps that were made.

FILLED = 2**11  # slots of the largest pool that a check fills
MOST = 2**13  # tokens of the longest window that a check fills


def groups_of(subject: Subject) -> int:
    """Returns the number of groups of a cache for which a check sets no other number."""
    return int(clamp_to_limits(subject, "grouped")["num_groups"])


@dataclass
class GroupedSequence:
    """A sequence: its tokens, the number of them that were appended, and per group the number of entries whose block is freed."""

    tokens: list[int]
    salt: str
    length: int
    freed: list[int]


class GroupedFixture:
    """A cache with sequences in it.

    The pool has room for `tokens` tokens of each of `sequences` sequences in every group, even if no block is freed.
    """

    def __init__(self, subject: Subject, tokens: int = 0, sequences: int = 1, **sizes: Any) -> None:
        self.subject = subject
        config = clamp_to_limits(subject, "grouped", **sizes)
        if tokens:
            room = config["num_groups"] * sequences * -(-tokens // config["block_size"])
            config = clamp_to_limits(subject, "grouped", **sizes, num_blocks=room)
        self.cache = construct(subject, "grouped", **config)
        self.size, self.window, self.groups = (int(config[name]) for name in ("block_size", "window", "num_groups"))
        self.layers, self.total = range(config["num_layers"]), int(config["num_blocks"])
        self.row = config["num_kv_heads"], config["head_dim"]
        self.sequences: dict[int, GroupedSequence] = {}
        if min(tokens, self.window) > MOST or tokens > self.total // (self.groups * sequences) * self.size:
            raise NotOffered(f"room for {tokens} tokens in every group, where its limits leave {self.total} blocks")

    def to_be_filled(self) -> None:
        """Raises NotOffered if the pool is too large to be filled token by token."""
        if self.total * self.size > FILLED:
            limit = self.subject.limits.limit("grouped", "num_blocks")
            raise NotOffered(f"a pool to be filled, where its limits say num_blocks {limit}")

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        """Begins a sequence for these tokens, and returns it. Its length is the hit."""
        sequence: int = self.cache.begin(list(tokens), *([salt] if salt else []))
        length = int(self.cache.length(sequence))
        self.sequences[sequence] = GroupedSequence(list(tokens), salt, length, self.unseen(length))
        return sequence

    def create(self, tokens: Sequence[int]) -> int:
        """Creates an empty sequence for these tokens, and returns it."""
        sequence: int = self.cache.create()
        self.sequences[sequence] = GroupedSequence(list(tokens), "", 0, [0] * self.groups)
        return sequence

    def fork(self, sequence: int, tokens: Sequence[int]) -> int:
        """Forks a sequence, which continues with `tokens`, and returns the fork."""
        child: int = self.cache.fork(sequence)
        parent = self.sequences[sequence]
        self.sequences[child] = GroupedSequence(list(tokens), parent.salt, parent.length, list(parent.freed))
        return child

    def drop(self, sequence: int) -> None:
        self.cache.drop(sequence)
        del self.sequences[sequence]

    def unseen(self, length: int) -> list[int]:
        """Returns, per group, the number of entries that are wholly before the positions that a query at `length` sees."""
        return [max(0, length - self.window + 1) // self.size] * (self.groups - 1) + [0]

    def step(self, sequence: int, count: int) -> int:
        """Steps with `count` tokens, or with the nearest number within the limits, and returns that number."""
        state, count = self.sequences[sequence], self.subject.size("tokens", count)
        positions = range(state.length, state.length + count)
        rows = [self.compute(sequence, layer, positions) for layer in self.layers]
        self.cache.step(sequence, np.stack([keys for keys, _ in rows]), np.stack([values for _, values in rows]))
        state.freed = [max(pair) for pair in zip(state.freed, self.unseen(state.length), strict=True)]
        state.length += count
        return count

    def step_to(self, sequence: int, length: int, by: int = 1, commit: bool = False) -> None:
        """Steps with at most `by` tokens until the sequence has `length` tokens. commit: after each step."""
        state = self.sequences[sequence]
        while state.length < length:
            self.step(sequence, min(by, length - state.length))
            if commit:
                self.commit(sequence)

    def commit(self, sequence: int) -> None:
        state = self.sequences[sequence]
        self.cache.commit(sequence, state.tokens[: state.length])

    def serve(self, tokens: Sequence[int], by: int = 1, salt: str = "") -> int:
        """Begins a sequence, appends and commits the tokens after the hit, and returns it."""
        sequence = self.begin(tokens, salt)
        self.step_to(sequence, len(tokens), by, commit=True)
        return sequence

    def tables(self, sequence: int) -> list[list[int]]:
        return [block_table_of(self.cache, sequence, layer) for layer in self.layers]

    def match(self, tokens: Sequence[int], salt: str = "") -> int:
        return int(self.cache.match(list(tokens), *([salt] if salt else [])))

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        state = self.sequences[sequence]
        state.length, state.freed = length, state.freed if length else [0] * self.groups

    def compute(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[NDArray, NDArray]:
        """Returns the keys and values that a model would compute at these positions."""
        state = self.sequences[sequence]
        return content_pair(streams(state.tokens, state.salt)[list(positions)], layer, positions, *self.row)

    def entries(self, sequence: int) -> int:
        return -(-self.sequences[sequence].length // self.size)

    def count_needed(self, sequence: int, count: int) -> int:
        """Returns how many more blocks a sequence without shared blocks has after `count` more tokens. It can be negative."""
        state = self.sequences[sequence]
        more = -(-(state.length + count) // self.size) - self.entries(sequence)
        return self.groups * more - sum(max(0, a - b) for a, b in zip(self.unseen(state.length), state.freed, strict=True))

    def count_blocks(self) -> int:
        """Returns the number of blocks of all sequences, if they share none."""
        return sum(self.groups * self.entries(sequence) - sum(state.freed) for sequence, state in self.sequences.items())

    def check_tables(self, sequence: int, when: str) -> None:
        """Raises ClauseViolation unless each table lists -1 at exactly the entries whose block the group must have freed."""
        state = self.sequences[sequence]
        for layer in self.layers:
            freed = state.freed[layer % self.groups]
            listed = [block == -1 for block in block_table_of(self.cache, sequence, layer)]
            want = [True] * freed + [False] * (self.entries(sequence) - freed)
            assert_equal(listed, want, f"whether each entry of layer {layer}'s block table is -1 {when}")

    def check_free_blocks(self, when: str) -> None:
        assert_equal(self.cache.num_free_blocks, self.total - self.count_blocks(), f"free blocks {when}")

    def check_tokens(self, sequence: int, what: str) -> None:
        """Raises ClauseViolation unless every layer reads the tokens from the first stored position of its group to the end."""
        state = self.sequences[sequence]
        assert_equal(int(self.cache.length(sequence)), state.length, f"length of {what}")
        for layer in self.layers:
            first = state.freed[layer % self.groups] * self.size
            positions = list(range(first, state.length))
            got = self.cache.read(sequence, layer, positions)
            what_layer = f"{what}, layer {layer}, from position {first}"
            read_back(self.subject, self.cache, got, self.compute(sequence, layer, positions), what_layer)

    def check_freed_positions(self, sequence: int) -> None:
        """Raises ClauseViolation unless `read` rejects positions in freed blocks and the position after the last token."""
        state = self.sequences[sequence]
        for layer in self.layers:
            first = state.freed[layer % self.groups] * self.size
            for position in [*sorted({0, first - 1} if first else {}), state.length]:
                with raises("PositionOutOfRange"):
                    self.cache.read(sequence, layer, [position])

    def is_windowed(self, layer: int) -> bool:
        """Returns whether the layer has a window. The layers of the last group see every token."""
        return layer % self.groups != self.groups - 1

    def queries(self, count: int) -> NDArray:
        """Returns float32 [count, query heads, dim], with two query heads per kv head if the limits permit it."""
        return normal_rows(self.subject, count, self.row[0] * self.subject.size("group_size", 2), self.row[1])

    def check_attention(self, sequence: int, count: int, what: str, layers: Sequence[int] | None = None) -> None:
        """Raises ClauseViolation unless the attention of the last `count` tokens is correct, in each of `layers` (default
        all).
        """
        state, query, scale = self.sequences[sequence], self.queries(count), 2.5 / self.row[1]
        for layer in self.layers if layers is None else layers:
            window = self.window if self.is_windowed(layer) else None
            first = 0 if window is None else max(0, state.length - count - window + 1)
            keys, values = self.compute(sequence, layer, range(first, state.length))
            limits = self.subject.limits
            weights = limits.dtypes("grouped")[0] if limits.switch("grouped", "rounded_weights") else "float32"
            want, bound = window_attention(query, keys, values, window, scale, weights)
            bound = bound + output_rounding(want, bound, self.subject.dtype)
            assert_within(self.cache.attend(sequence, layer, query, scale), want, bound, f"attention of {what}, layer {layer}")
