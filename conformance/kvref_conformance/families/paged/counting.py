"""What the checks of the paged cache count: blocks, by every way of looking that there is.

An *entry* is what the tables of a sequence list for one block of its tokens: a block in each layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.setup import blocks_of, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import Declined, NotOffered

ENTRIES = 12  # of a cache, unless a check needs more, or fewer
NO_BLOCK = -1  # in a table: what was given back
MANY = 2**14  # tokens: no check fills a larger pool


def with_room(subject: Subject, entries: int, **changes: Any) -> Handle:
    """A cache of so many entries at least, and more where that may be. Raises NotOffered."""
    return _made(subject, entries, max(entries, ENTRIES), changes)


def just_room(subject: Subject, entries: int, **changes: Any) -> Handle:
    """A cache of so many entries, or the nearest number of more; of each further one a block is missing. Raises NotOffered."""
    return _made(subject, entries, entries, changes, spare=_layers(subject, changes) - 1)


def _layers(subject: Subject, changes: dict[str, Any]) -> int:
    return subject.size("num_layers", changes.get("num_layers", 2))


def _made(subject: Subject, least: int, entries: int, changes: dict[str, Any], spare: int = 0) -> Handle:
    layers = _layers(subject, changes)
    cache = new(subject, subject.family, num_blocks=entries * layers + spare, **changes)
    if room(cache) < least:
        raise NotOffered(f"num_blocks {least * layers}, where its limits say {subject.limits.of(subject.family, 'num_blocks')}")
    return cache


def to_be_filled(subject: Subject, entries: int, one_short: bool = False, **changes: Any) -> Handle:
    """A cache of so many entries, or the nearest number of more, of a pool that tokens can fill in time. Raises NotOffered."""
    cache = just_room(subject, entries, **changes) if one_short else _made(subject, entries, entries, changes)
    if room(cache) * cache.config["block_size"] > MANY:
        raise NotOffered(
            f"a pool to be filled, where its limits say num_blocks {subject.limits.of(subject.family, 'num_blocks')}"
        )
    return cache


def room(cache: Handle) -> int:
    """Entries that there are blocks for in all."""
    return int(cache.config["num_blocks"] // cache.config["num_layers"])


def layers_of(cache: Handle) -> range:
    return range(cache.config["num_layers"])


def reserve(subject: Subject, cache: Handle, sequence: int, entries: int) -> None:
    """Let a sequence hold so many entries: without tokens, where that can be asked for, or else with as many as they take."""
    count = entries * cache.config["block_size"]
    try:
        cache.ensure_capacity(sequence, count)
    except Declined:
        length = cache.length(sequence, 0)
        row = cache.config["num_kv_heads"], cache.config["head_dim"]
        cache.write(sequence, 0, length, *pair_of_tokens(subject, count - length, *row))


def tables_alone(subject: Subject) -> bool:
    """Whether its limits say that it keeps no tokens: then what would lie in its blocks is for the checks to know."""
    return subject.limits.switch(subject.family, "tables_alone")


def need_tokens(subject: Subject) -> None:
    """Raises NotOffered where none lie in its blocks, so that it cannot know how many there are, nor what they are."""
    if tables_alone(subject):
        raise NotOffered("tokens, where its limits say tables_alone")


def stay(subject: Subject, cache: Handle, sequence: int, before: list[list[int]], released: int, when: str) -> list[list[int]]:
    """The tables of a sequence. Where nothing else says where tokens lie, what it held has to lie where it did."""
    now = [blocks_of(cache, sequence, layer) for layer in layers_of(cache)]
    if tables_alone(subject):
        for layer, blocks in enumerate(now):
            left = [NO_BLOCK] * released + (before[layer][released:] if before else [])
            equal(blocks[: len(left)], left, f"the first entries of layer {layer}'s block table {when}")
    return now


def put(subject: Subject, cache: Handle, sequence: int, layer: int, start: int, keys: NDArray, values: NDArray) -> None:
    """Write tokens; where it keeps none, let the sequence have room for them."""
    if tables_alone(subject):
        if start + len(keys):  # whoever has nothing to write may have no word for it
            cache.ensure_capacity(sequence, start + len(keys))
    else:
        cache.write(sequence, layer, start, keys, values)


def in_use(subject: Subject, cache: Handle, entries: Mapping[int, int], when: str) -> None:
    """That the sequences, all that are alive, hold so many entries each. Raises NotOffered where nothing shows it."""

    def counted() -> None:
        free = cache.config["num_blocks"] - cache.config["num_layers"] * sum(entries.values())
        equal(cache.num_free_blocks, free, f"free blocks {when}")

    def listed() -> None:
        for sequence, count in entries.items():
            held = [sum(block != NO_BLOCK for block in blocks_of(cache, sequence, layer)) for layer in layers_of(cache)]
            equal(held, [count] * len(held), f"blocks in each layer of sequence {sequence} {when}")

    seen = [offered(counted), offered(listed) and bool(entries)]
    if not any(seen):
        _fill_what_is_free(subject, cache, room(cache) - sum(entries.values()), len(entries))


def offered(act: Callable[[], object]) -> bool:
    """Whether what was to be done could be done; what it raises besides NotOffered it raises."""
    try:
        act()
    except NotOffered:
        return False
    return True


def _fill_what_is_free(subject: Subject, cache: Handle, free: int, living: int) -> None:
    """Another sequence can take what is free, and no more."""
    subject.need(sequences=living + 1)
    filler = cache.create()
    reserve(subject, cache, filler, free)
    with raises("OutOfBlocks"):
        reserve(subject, cache, filler, free + 1)
    cache.drop(filler)
