"""Checks of PAGED: which sequence owns a block, and which tokens are read from it."""

from contextlib import suppress

from kvref_conformance.checking.expect import equal, may_raise, pair, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks import Pair, written
from kvref_conformance.families.paged.counting import in_use, layers_of, reserve, room, to_be_filled, with_room
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.outcome import Declined, NotOffered


def in_turn(subject: Subject) -> tuple[Handle, dict[int, Pair]]:
    """Returns a cache with sequences whose blocks interleave, and the tokens of each in layer 0."""
    cache, size = with_room(subject, 4 * subject.size("sequences", 2)), subject.size("block_size", 3)
    count = 2 * size + 2
    streams = {cache.create(): pair_of_tokens(subject, count) for _ in range(subject.size("sequences", 2))}
    for at in range(0, count, max(2, size // 2)):
        for sequence, parts in streams.items():
            cache.write(sequence, 0, at, *(part[at : at + max(2, size // 2)] for part in parts))
    return cache, streams


def all_of(cache: Handle, sequence: int) -> Pair:
    """Returns every token of layer 0, by `gather` or, if it is missing, by `read`."""
    try:
        found: Pair = cache.gather(sequence, 0)
    except Declined:
        found = cache.read(sequence, 0, list(range(cache.length(sequence, 0))))
    return found


@check("PAGED-12a", "paged")
def gathering_gives_every_token_in_order(subject: Subject) -> None:
    cache, streams = in_turn(subject)
    for sequence, wrote in streams.items():
        pair(cache.gather(sequence, 0), wrote, f"sequence {sequence}")


@check("PAGED-12b", "paged")
def reading_gives_the_tokens_asked_for(subject: Subject) -> None:
    cache, streams = in_turn(subject)
    for sequence, (keys, values) in streams.items():
        last = len(keys) - 1
        for order in ([last, 0, last // 2, last // 2], list(range(last + 1))):
            got = cache.read(sequence, 0, order)
            pair(got, (keys[order], values[order]), f"positions {order} of sequence {sequence}")


@check("PAGED-12ab", "paged")
def gathering_reads_blocks_in_the_tables_order(subject: Subject) -> None:
    subject.need(sequences=4)
    for dropped in ((2, 0), (0, 2)):  # the order in which blocks return to the pool
        cache = to_be_filled(subject, 8, num_layers=1)
        first = [cache.create() for _ in range(4)]
        for sequence, entries in zip(first, (2, 2, 2, room(cache) - 6), strict=True):
            reserve(subject, cache, sequence, entries)
        for each in dropped:
            cache.drop(first[each])
        sequence, wrote = cache.create(), pair_of_tokens(subject, 4 * cache.config["block_size"])
        cache.write(sequence, 0, 0, *wrote)
        pair(all_of(cache, sequence), wrote, "a sequence in reused blocks")


@check("PAGED-12c", "paged")
def narrow_dtypes_round_once(subject: Subject) -> None:
    for dtype in subject.formats("float16", "bfloat16", "float32"):
        cache, sequence, keys, values = written(subject, 2, 1, dtype=dtype)
        pair(all_of(cache, sequence), (round_to(keys, dtype), round_to(values, dtype)), f"tokens of a {dtype} cache")


@check("PAGED-13abc", "paged")
def no_block_is_in_two_tables(subject: Subject) -> None:
    cache, live, most = with_room(subject, 2 * subject.size("sequences", 6)), list[int](), subject.size("sequences", 6)
    for step in range(12):
        if len(live) == most:
            cache.drop(live.pop(0))
        live.append(cache.create())
        reserve(subject, cache, live[-1], 1 + step % 5 // 3)
        if step % 3 == 2 and len(live) > 1:
            cache.drop(live.pop(0))
            cache.drop(live.pop())
        tables = [[blocks_of(cache, sequence, layer) for layer in layers_of(cache)] for sequence in live]
        blocks = [block for each in tables for table in each for block in table]
        equal(len(blocks), len(set(blocks)), "number of distinct blocks in all tables, compared with the number of entries")
        true(set(blocks) <= set(range(cache.config["num_blocks"])), "block ids", "ids below num_blocks", blocks)
        if subject.limits.switch(subject.family, "one_block_table"):  # id b is block b * num_layers + layer
            for each in tables:
                own = [[block // len(each) for block in table] for table in each]
                equal(own, own[:1] * len(own), "the block table, read from each layer")


@check("PAGED-13a", "paged")
def everyones_tokens_stay_in_a_full_pool(subject: Subject) -> None:
    cache, size, most = to_be_filled(subject, 6), subject.size("block_size", 3), subject.size("sequences", 3)
    share = room(cache) // most
    live = {cache.create(): share for _ in range(most - 1)} | {cache.create(): room(cache) - share * (most - 1)}
    wrote = fill(subject, cache, live)
    with suppress(NotOffered):
        in_use(subject, cache, live, "in a full pool")
    look(cache, wrote, "in a full pool")
    dropped = next(iter(live))
    cache.drop(dropped)
    wrote = {place: parts for place, parts in wrote.items() if place[0] != dropped}
    wrote |= fill(subject, cache, {cache.create(): live[dropped]})
    look(cache, wrote, f"after another sequence reused blocks of {size} tokens")


Place = tuple[int, int]  # (sequence, layer)


def fill(subject: Subject, cache: Handle, entries: dict[int, int]) -> dict[Place, Pair]:
    """Fills empty sequences with entries[sequence] blocks of tokens in turns, and returns the tokens that were written."""
    size, wrote = cache.config["block_size"], dict[Place, Pair]()
    places = [(sequence, layer) for sequence in entries for layer in layers_of(cache)]
    tokens = {place: pair_of_tokens(subject, entries[place[0]] * size) for place in places}
    for start in range(0, max(entries.values()) * size, size):
        for (sequence, layer), (keys, values) in tokens.items():
            end = start + size
            if start < len(keys):
                with may_raise("OutOfBlocks"):  # if blocks are lost, which other clauses judge
                    cache.write(sequence, layer, start, keys[start:end], values[start:end])
                    wrote[sequence, layer] = keys[:end], values[:end]
    return wrote


def look(cache: Handle, wrote: dict[Place, Pair], when: str) -> None:
    for (sequence, layer), parts in wrote.items():
        pair(cache.gather(sequence, layer), parts, f"sequence {sequence}, layer {layer}, {when}")
