"""The session of a check of the paged cache: random tokens, and the blocks that the implementation reports."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.block_accounting import NO_BLOCK, layers_of, with_room
from kvref_conformance.families.paged.model import Paged
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import SCALED_FORMATS
from kvref_conformance.oracle.token_storage import expected_tokens
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_reads
from kvref_conformance.testlib.fixtures import block_table_of, random_pair
from kvref_conformance.testlib.session import Session

Pair = tuple[NDArray, NDArray]


def read_back(subject: Subject, cache: ObjectProxy, got: Pair, wrote: Pair, what: str) -> None:
    """Raises ClauseViolation unless tokens [n, heads, dim] read as written, or as the format of the cache defines if it has
    scales.
    """
    if (format := cache.config["dtype"]) not in SCALED_FORMATS:
        assert_pair(got, wrote, what)
    else:
        scales = cache.config.get("key_scale"), cache.config.get("value_scale")
        keys, values = (expected_tokens(part, format, scale) for part, scale in zip(wrote, scales, strict=True))
        assert_reads(subject, got, (keys, values), what, format)


def small_session(subject: Subject, entries: int = 12, sequences: int = 2, **sizes: Any) -> "PagedFixture":
    """Returns a cache with at least `entries` entries. Raises NotOffered if the limits do not allow them or the sequences."""
    subject.require_size(sequences=sequences)
    return PagedFixture(subject, lambda: with_room(subject, entries, **sizes))


class PagedFixture(Session):
    """A paged cache, to which random tokens are written.

    size: tokens per block. layers: the range of layers. row: the shape of a token. unit: blocks that one table entry stands for.
    """

    def __init__(self, subject: Subject, make: Callable[[], ObjectProxy]) -> None:
        super().__init__(subject, make)
        self.size, self.layers = int(self.cache.config["block_size"]), layers_of(self.cache)
        self.row = self.cache.config["num_kv_heads"], self.cache.config["head_dim"]
        self.unit = len(self.layers) if subject.limits.switch("paged", "one_block_table") else 1

    @property
    def model(self) -> Paged:
        model = super().model
        assert isinstance(model, Paged)
        return model

    def create(self, *lengths: int) -> int:
        """Creates a sequence with lengths[i] tokens in layer i; the last length is used for further layers."""
        sequence: int = self.cache.create()
        for layer in self.layers:
            self.write(sequence, layer, 0, lengths[min(layer, len(lengths) - 1)])
        return sequence

    def random_tokens(self, count: int) -> Pair:
        return random_pair(self.subject, count, *self.row)

    def write(self, sequence: int, layer: int, start: int, count: int) -> None:
        if count:
            self.cache.write(sequence, layer, start, *self.random_tokens(count))

    def write_in_each_layer(self, sequence: int, start: int, count: int) -> None:
        for layer in self.layers:
            self.write(sequence, layer, start, count)

    def append_step(self, sequences: list[int]) -> None:
        """Appends one token per sequence in every layer."""
        rows = [self.random_tokens(len(sequences)) for _ in self.layers]
        keys, values = (np.stack(part) for part in zip(*rows, strict=True))
        self.cache.append_step(sequences, keys, values)

    def length(self, sequence: int, layer: int) -> int:
        """Returns the length that the model predicts."""
        return len(self.model.sequences[sequence][layer].tokens)

    def used(self) -> int:
        """Returns the number of allocated blocks, as reported or as the tables list them."""
        try:
            return int(self.cache.config["num_blocks"] - self.cache.num_free_blocks)
        except NotOffered:
            return len(self.listed())

    def listed(self) -> set[int]:
        """Returns the ids that the tables list."""
        return {block for layers in self.tables().values() for table in layers for block in table if block != NO_BLOCK}

    def tables(self) -> dict[int, list[list[int]]]:
        """Returns the block tables of each sequence and layer."""
        return {each: [block_table_of(self.cache, each, layer) for layer in self.layers] for each in self.model.sequences}

    def blocks(self) -> Any:
        """Returns the observables of blocks: the number of allocated ones and, if provided, the tables."""
        try:
            return self.used(), self.tables()
        except NotOffered:
            return self.used()

    def count_blocks(self) -> None:
        """Raises ClauseViolation unless the number of allocated blocks is the number of blocks in the tables, if both are
        provided.
        """
        try:
            used, listed = self.cache.config["num_blocks"] - self.cache.num_free_blocks, len(self.listed())
        except NotOffered:
            return
        assert_equal(used, listed, "number of allocated blocks, compared with the blocks in the tables")

    def drop_all(self) -> None:
        """Drops every sequence. Raises ClauseViolation unless all blocks are free afterwards."""
        for sequence in list(self.model.sequences):
            self.cache.drop(sequence)
        assert_equal(self.used(), 0, "allocated blocks after drop of all sequences")
