"""A paged cache together with the tokens that each of its sequences must contain."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import layers_of
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import SCALED
from kvref_conformance.oracle.token_storage import tokens_as
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_within, expected_attention, normal, reads
from kvref_conformance.testlib.fixtures import blocks_of, pair_of_tokens

Pair = tuple[NDArray, NDArray]
Way = Callable[[int, int, Pair, str], None]  # (sequence, layer, its tokens, label)


def spliced(old: Pair, start: int, stop: int, new: Pair) -> Pair:
    """Returns tokens in which [start, stop) is replaced by `new`."""
    keys, values = (np.concatenate([o[:start], n, o[stop:]]) for o, n in zip(old, new, strict=True))
    return keys, values


def read_back(subject: Subject, cache: ObjectProxy, got: Pair, wrote: Pair, what: str) -> None:
    """Raises Broken unless tokens [n, heads, dim] read as written, or as the format of the cache defines if it has scales."""
    if (format := cache.config["dtype"]) not in SCALED:
        assert_pair(got, wrote, what)
    else:
        scales = cache.config.get("key_scale"), cache.config.get("value_scale")
        keys, values = (tokens_as(part, format, scale) for part, scale in zip(wrote, scales, strict=True))
        reads(subject, got, (keys, values), what, format)


class PagedFixture:
    """tokens: per sequence and layer, the keys and values that were written."""

    def __init__(self, subject: Subject, cache: ObjectProxy) -> None:
        self.subject, self.cache = subject, cache
        self.size, self.layers = int(cache.config["block_size"]), layers_of(cache)
        self.row = cache.config["num_kv_heads"], cache.config["head_dim"]
        self.tokens: dict[int, list[Pair]] = {}
        self.dropped: list[int] = []

    @property
    def unit(self) -> int:
        """The number of blocks that one table entry stands for."""
        return len(self.layers) if self.subject.limits.switch("paged", "one_block_table") else 1

    def create(self, *lengths: int) -> int:
        """Creates a sequence with lengths[i] tokens in layer i; the last length is used for further layers."""
        sequence: int = self.cache.create()
        self.tokens[sequence] = [self.given(0) for _ in self.layers]
        for layer in self.layers:
            self.write(sequence, layer, 0, lengths[min(layer, len(lengths) - 1)])
        return sequence

    def given(self, count: int) -> Pair:
        """Returns `count` random tokens."""
        return pair_of_tokens(self.subject, count, *self.row)

    def write(self, sequence: int, layer: int, start: int, count: int) -> None:
        if not count:
            return
        rows = self.given(count)
        self.cache.write(sequence, layer, start, *rows)
        self.tokens[sequence][layer] = spliced(self.tokens[sequence][layer], start, start + count, rows)

    def step(self, sequences: list[int]) -> None:
        """Appends one token per sequence in every layer."""
        rows = [self.given(len(sequences)) for _ in self.layers]
        keys, values = (np.stack(part) for part in zip(*rows, strict=True))
        self.cache.append_step(sequences, keys, values)
        for layer in self.layers:
            for at, sequence in enumerate(sequences):
                length = self.length(sequence, layer)
                row = keys[layer, at : at + 1], values[layer, at : at + 1]
                self.tokens[sequence][layer] = spliced(self.tokens[sequence][layer], length, length, row)

    def fork(self, sequence: int) -> int:
        child: int = self.cache.fork(sequence)
        self.tokens[child] = list(self.tokens[sequence])
        return child

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        self.tokens[sequence] = [(keys[:length], values[:length]) for keys, values in self.tokens[sequence]]

    def remove(self, sequence: int, start: int, stop: int) -> None:
        self.cache.remove(sequence, start, stop)
        nothing = self.given(0)
        self.tokens[sequence] = [spliced(each, start, stop, nothing) for each in self.tokens[sequence]]

    def drop(self, sequence: int) -> None:
        self.cache.drop(sequence)
        del self.tokens[sequence]

    def length(self, sequence: int, layer: int) -> int:
        return len(self.tokens[sequence][layer][0])

    def look(self, when: str) -> None:
        """Raises Broken unless every sequence has its length and tokens."""
        for at, (sequence, layers) in enumerate(self.tokens.items()):
            for layer, wanted in enumerate(layers):
                what = f"layer {layer} of sequence {at} {when}"
                assert_equal(self.cache.length(sequence, layer), len(wanted[0]), f"length of {what}")
                read_back(self.subject, self.cache, self.cache.gather(sequence, layer), wanted, what)

    def ways(self) -> list[Way]:
        """Returns the other ways to observe where tokens are, as far as they are provided and right at the moment."""
        return [way for way in (self._slots, self._padded, self._attended) if self._right(way)]

    def _right(self, way: Way) -> bool:
        try:
            self.look_by(way, "")
        except (NotOffered, Broken):  # a wrong result is for the clauses about this operation
            return False
        return True

    def look_by(self, way: Way, when: str) -> None:
        """Checks every sequence in one of these ways."""
        for at, (sequence, layers) in enumerate(self.tokens.items()):
            for layer, wanted in enumerate(layers):
                way(sequence, layer, wanted, f"layer {layer} of sequence {at} {when}")

    def _slots(self, sequence: int, layer: int, wanted: Pair, what: str) -> None:
        """Compares slot_mapping with the block table."""
        table, length = self.table(sequence, layer), len(wanted[0])
        slots = [table[position // self.size] * self.size + position % self.size for position in range(length)]
        assert_equal([int(slot) for slot in self.cache.slot_mapping(sequence, layer, 0, length)], slots, f"slots of {what}")

    def _padded(self, sequence: int, layer: int, wanted: Pair, what: str) -> None:
        (row,) = self.cache.block_tables([sequence], layer)
        assert_equal([int(block) for block in row], self.table(sequence, layer), f"row of block_tables for {what}")

    def _attended(self, sequence: int, layer: int, wanted: Pair, what: str) -> None:
        """Compares attend with attention over the expected tokens."""
        heads, dim = wanted[0].shape[1:]
        query, scale = normal(self.subject, 1, heads * self.subject.size("group_size", 1), dim), 2.5 / dim
        want, bound = expected_attention(self.subject, query, *wanted, scale=scale)
        assert_within(self.cache.attend(sequence, layer, query, scale), want, bound, f"attention over {what}")

    def used(self) -> int:
        """Returns the number of allocated blocks, as reported or as the tables list them."""
        try:
            return int(self.cache.config["num_blocks"] - self.cache.num_free_blocks)
        except NotOffered:
            return len(self.listed())

    def listed(self) -> set[int]:
        """Returns the ids that the tables list."""
        return {block for sequence in self.tokens for layer in self.layers for block in self.table(sequence, layer)}

    def table(self, sequence: int, layer: int) -> list[int]:
        return blocks_of(self.cache, sequence, layer)

    def tables(self) -> dict[int, list[list[int]]]:
        return {sequence: [self.table(sequence, layer) for layer in self.layers] for sequence in self.tokens}

    def seen(self) -> Any:
        """Returns the observables of blocks: the number of allocated ones and, if provided, the tables."""
        try:
            return self.used(), self.tables()
        except NotOffered:
            return self.used()

    def partly(self, sequence: int) -> int:
        """Returns the number of blocks that fork can copy: the partly filled last one of each layer."""
        last = [length // self.size for layer in self.layers if (length := self.length(sequence, layer)) % self.size]
        return len(set(last)) * self.unit if self.unit > 1 else len(last)

    def adds_up(self, when: str) -> None:
        """Raises Broken unless the number of allocated blocks is the number of blocks in the tables, if both are provided."""
        try:
            assert_equal(
                self.cache.config["num_blocks"] - self.cache.num_free_blocks, len(self.listed()), f"allocated blocks {when}"
            )
        except NotOffered:
            return
