"""Counting of blocks for the checks of the paged cache, by every observable that an implementation provides.

An *entry* is one index of the block tables of a sequence: one block in each layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered, OperationDeclined
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, raises
from kvref_conformance.testlib.fixtures import block_table_of, new_object, random_pair

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
