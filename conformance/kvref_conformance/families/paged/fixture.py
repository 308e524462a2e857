"""A paged cache as a session of a check, and the counting of its blocks by every observable that is provided.

An *entry* is one index of the block tables of a sequence: one block in each layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered, OperationDeclined
from kvref_conformance.families.paged.model import Paged
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import SCALED_FORMATS
from kvref_conformance.oracle.token_storage import expected_tokens
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, assert_reads, raises
from kvref_conformance.testlib.fixtures import block_table_of, new_object, random_pair
from kvref_conformance.testlib.session import Session

ENTRIES = 12  # entries of a cache, unless a check needs another number
NO_BLOCK = -1  # in a block table: a released entry
MANY = 2**14  # tokens: no check fills a larger pool


def with_room(subject: Subject, entries: int, **changes: Any) -> ObjectProxy:
    """Returns a cache with at least `entries` entries, and more if the limits allow it. Raises NotOffered."""
    return _made(subject, entries, max(entries, ENTRIES), changes)


def just_room(subject: Subject, entries: int, **changes: Any) -> ObjectProxy:
    """Returns a cache with `entries` entries, or the next larger number; one more entry lacks one block. Raises NotOffered."""
    return _made(subject, entries, entries, changes, spare=_layers(subject, changes) - 1)


def _layers(subject: Subject, changes: dict[str, Any]) -> int:
    return subject.size("num_layers", changes.get("num_layers", 2))


def _made(subject: Subject, least: int, entries: int, changes: dict[str, Any], spare: int = 0) -> ObjectProxy:
    layers = _layers(subject, changes)
    cache = new_object(subject, subject.family, num_blocks=entries * layers + spare, **changes)
    if room(cache) < least:
        raise NotOffered(
            f"num_blocks {least * layers}, where its limits say {subject.limits.limit(subject.family, 'num_blocks')}"
        )
    return cache


def to_be_filled(subject: Subject, entries: int, one_short: bool = False, **changes: Any) -> ObjectProxy:
    """Returns a cache with `entries` entries, or the nearest larger number, that can be filled with tokens. Raises NotOffered."""
    cache = just_room(subject, entries, **changes) if one_short else _made(subject, entries, entries, changes)
    if room(cache) * cache.config["block_size"] > MANY:
        raise NotOffered(
            f"a pool small enough to fill, where its limits say num_blocks {subject.limits.limit(subject.family, 'num_blocks')}"
        )
    return cache


def room(cache: ObjectProxy) -> int:
    """Returns the number of entries for which the pool has blocks."""
    return int(cache.config["num_blocks"] // cache.config["num_layers"])


def layers_of(cache: ObjectProxy) -> range:
    return range(cache.config["num_layers"])


def reserve(subject: Subject, cache: ObjectProxy, sequence: int, entries: int) -> None:
    """Gives a sequence `entries` entries, by ensure_capacity, or by writing tokens if it is missing."""
    count = entries * cache.config["block_size"]
    try:
        cache.ensure_capacity(sequence, count)
    except OperationDeclined:
        length = cache.length(sequence, 0)
        row = cache.config["num_kv_heads"], cache.config["head_dim"]
        cache.write(sequence, 0, length, *random_pair(subject, count - length, *row))


def tables_alone(subject: Subject) -> bool:
    """Returns whether its limits say that it stores block tables and no tokens. The checks then track the tokens themselves."""
    return subject.limits.switch(subject.family, "tables_alone")


def need_tokens(subject: Subject) -> None:
    """Raises NotOffered if it stores no tokens, so that it cannot know their number or contents."""
    if tables_alone(subject):
        raise NotOffered("tokens, where its limits say tables_alone")


def write_or_ensure_capacity(
    subject: Subject, cache: ObjectProxy, sequence: int, layer: int, start: int, keys: NDArray, values: NDArray
) -> None:
    """Writes tokens, or ensures the capacity for them if it stores no tokens."""
    if tables_alone(subject):
        if start + len(keys):  # without tokens it need not accept 0
            cache.ensure_capacity(sequence, start + len(keys))
    else:
        cache.write(sequence, layer, start, keys, values)


def in_use(subject: Subject, cache: ObjectProxy, entries: Mapping[int, int], when: str) -> None:
    """Raises ClauseViolation unless the live sequences have entries[sequence] entries each and all other blocks are free."""

    def counted() -> None:
        free = cache.config["num_blocks"] - cache.config["num_layers"] * sum(entries.values())
        assert_equal(cache.num_free_blocks, free, f"free blocks {when}")

    def listed() -> None:
        for sequence, count in entries.items():
            held = [sum(block != NO_BLOCK for block in block_table_of(cache, sequence, layer)) for layer in layers_of(cache)]
            assert_equal(held, [count] * len(held), f"blocks in each layer of sequence {sequence} {when}")

    seen = [offered(counted), offered(listed) and bool(entries)]
    if not any(seen):
        _fill_what_is_free(subject, cache, room(cache) - sum(entries.values()), len(entries))


def offered(act: Callable[[], object]) -> bool:
    """Returns whether `act` is provided: False if it raises NotOffered. Other errors are passed on."""
    try:
        act()
    except NotOffered:
        return False
    return True


def _fill_what_is_free(subject: Subject, cache: ObjectProxy, free: int, living: int) -> None:
    """Raises ClauseViolation unless another sequence can allocate exactly the `free` entries."""
    subject.require_size(sequences=living + 1)
    filler = cache.create()
    reserve(subject, cache, filler, free)
    with raises("OutOfBlocks"):
        reserve(subject, cache, filler, free + 1)
    cache.drop(filler)


# A paged cache whose contents the model has.

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

    size: tokens per block. layers: the range of layers. row: the shape of a token. unit: blocks that are allocated together.
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
