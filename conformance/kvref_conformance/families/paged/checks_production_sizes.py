"""Checks of LAW-18: the paged cache at the sizes of serving."""

from itertools import pairwise
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import in_use, layers_of, with_room
from kvref_conformance.families.paged.soak_driver import SoakPagedCache
from kvref_conformance.testlib.assertions import assert_equal, assert_pair
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.production_sizes import BLOCK_SIZES, HEAD_DIMS, affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair

ENTRIES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025)  # entries of a block table
MOST = 2400  # blocks in all, if the cache has more layers than the check needs


def production_cache(subject: Subject, num_blocks: int, **sizes: Any) -> SoakPagedCache:
    wanted = {"block_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    return SoakPagedCache(subject, num_blocks=num_blocks, **wanted)


def entries(subject: Subject, wanted: int, num_layers: int = 1) -> dict[str, int]:
    """Returns sizes of a pool with `wanted` blocks per layer, or fewer if MOST limits it."""
    layers = subject.size("num_layers", num_layers)
    each = wanted if layers <= num_layers else min(wanted, MOST // layers)
    return {"num_blocks": max(1, each) * layers, "num_layers": num_layers}


@check("LAW-18", "paged")
def write_to_a_growing_table_keeps_every_token(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache = production_cache(subject, **entries(subject, 1200))
    long, beside = cache.create(), cache.create()
    last = affordable_tokens(subject, ENTRIES[-1] * cache.size, len(cache.layers))
    for before, count in pairwise((0, *ENTRIES)):
        tokens = count * cache.size - 3 - cache.live[long].lengths[0]
        if cache.live[long].lengths[0] + tokens <= last and cache.fits([long], tokens):
            cache.fill(long, tokens)
            cache.fill(beside, 5)
        if before < 65:
            cache.look(long)
        cache.look(beside)
        if count == 65:  # more than 1,024 tokens
            cache.look_at_batch([beside, long], cache.layers[-1])
    cache.look(long)
    cache.counted()


@check("LAW-18", "paged")
def append_step_to_hundreds_of_sequences_keeps_every_token(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache = production_cache(subject, **entries(subject, 1200, num_layers=2))
    some = cache.config["num_blocks"] // len(cache.layers) // 3  # no sequence gets more than 3 blocks per layer
    count = subject.size("sequences", max(2, min(300, some)))
    numbers = [cache.create() for _ in range(count)]
    for number in numbers:
        cache.fill(number, affordable_tokens(subject, number % 31, 2 * count))
    for _ in range(12):
        if cache.fits(numbers):
            cache.step(numbers)
    for layer in cache.layers:
        cache.look_at_batch(numbers, layer)
    cache.owned()
    for number in numbers[::3]:
        cache.drop(number)
    cache.counted()
    for _ in range(count // 5):
        number = cache.create()
        cache.fill(number, affordable_tokens(subject, 20 + number % 16, 2 * count))
    for layer in cache.layers:
        cache.look_at_batch(list(cache.live), layer)
    cache.owned()


@check("LAW-18", "paged")
def create_and_drop_of_thousands_of_sequences_leaves_live_ones_unchanged(subject: Subject) -> None:
    cache = production_cache(subject, **entries(subject, 64))
    alive = subject.size("sequences", 20)
    for number in range(1000):
        tokens = affordable_tokens(subject, 10 + number % 23, 1000)
        while cache.live and (len(cache.live) >= alive or not cache.allows_length(tokens)):
            oldest = min(cache.live)
            if number % 100 == 0:
                cache.look(oldest)
            cache.drop(oldest)
        cache.fill(cache.create(), tokens, layers=[number % len(cache.layers)])
    for number in cache.live:
        cache.look(number)
    cache.counted()


@check("LAW-18", "paged")
def write_in_a_pool_of_thousands_of_blocks_keeps_every_token(subject: Subject) -> None:
    write_to_distant_blocks(subject, 4200, (256, 1024, 2048, 4096))


@check("LAW-18", "paged", real=True)
def write_to_block_ids_of_more_than_16_bits_keeps_every_token(subject: Subject) -> None:
    write_to_distant_blocks(subject, 70_000, (256, 4096, 32_768, 65_536))


def write_to_distant_blocks(subject: Subject, num_blocks: int, places: tuple[int, ...]) -> None:
    """Checks sequences that begin in the blocks `places`, if blocks are allocated in ascending order."""
    subject.require_size(sequences=4)
    cache = production_cache(subject, num_blocks=num_blocks)
    most, layers = subject.size("sequences", 2 * len(places) + 2) // 2 - 1, len(cache.layers)
    cache.fill(cache.create(), 3 * cache.size)
    fillers = []
    for place in [place for place in places if place < cache.config["num_blocks"] - 4 * layers][-most:]:
        before = (place - (cache.config["num_blocks"] - cache.free)) // layers
        if before > 0:
            fillers.append(cache.create())
            cache.reserve(fillers[-1], before * cache.size)
            cache.fill(cache.create(), 3 * cache.size - 1)
    if not fillers:
        raise NotOffered(f"block {places[0]} and above: the pool has {cache.config['num_blocks']} blocks")
    for filler in fillers[::2]:
        cache.drop(filler)
    cache.counted()
    again = cache.create()
    cache.fill(again, affordable_tokens(subject, 100 * cache.size, layers))
    for number in (number for number in cache.live if number not in fillers):
        cache.look(number)
    cache.owned()
    for number in list(cache.live):
        cache.drop(number)
    cache.reserve(cache.create(), cache.config["num_blocks"] // layers * cache.size)  # every block is free again
    cache.counted()


@check("LAW-18", "paged")
def write_to_layers_of_very_different_length_keeps_every_token(subject: Subject) -> None:
    subject.require_size(sequences=2, num_layers=2)
    cache = production_cache(subject, num_kv_heads=2, **entries(subject, 80, num_layers=5))
    first, second = cache.create(), cache.create()
    for tokens in (1, 16, 112, 171):
        for layer in cache.layers[:-1]:
            cache.fill(first, affordable_tokens(subject, tokens + layer, 2 * len(cache.layers)), layers=[layer])
            cache.fill(second, affordable_tokens(subject, tokens, 2 * len(cache.layers)) // (layer + 1), layers=[layer])
            if tokens < 20 and layer % 2:
                break  # later layers have fewer tokens, and keep them
    for number in (first, second):
        cache.look(number)
    cache.counted()


@check("LAW-18", "paged")
def write_to_the_end_of_blocks_of_any_size_keeps_every_token(subject: Subject) -> None:
    for block_size, dim in zip((*BLOCK_SIZES, 16, 128), HEAD_DIMS, strict=True):
        cache = production_cache(
            subject, block_size=block_size, num_kv_heads=3, head_dim=dim, **entries(subject, 20, num_layers=2)
        )
        numbers, layers = [cache.create() for _ in range(subject.size("sequences", 3))], cache.layers[-2:]
        layer = layers[-1]
        for tokens in (cache.size - 1, 1, 1, cache.size + 1):
            for number in numbers:
                cache.fill(number, affordable_tokens(subject, tokens, 6 * len(HEAD_DIMS) * len(layers)), layers)
        for _ in range(3):
            if cache.fits(numbers):
                cache.step(numbers)
        for number in numbers:
            cache.look(number, layers)
            length = cache.live[number].lengths[layer]
            wanted = (2 * cache.size + 1, 0, cache.size, cache.size - 1, 2 * cache.size)
            cache.look_at(number, layer, [position for position in wanted if position < length])
        one = cache.live[numbers[len(numbers) // 2]]
        across = range(cache.size - 1, min(cache.size + 2, one.blocks * cache.size))
        table = [int(block) for block in cache.cache.block_table(one.id, layer)]
        slots = [int(slot) for slot in cache.cache.slot_mapping(one.id, layer, across.start, len(across))]
        want = [table[p // cache.size] * cache.size + p % cache.size for p in across]
        assert_equal(slots, want, f"slots of positions [{across.start}, {across.stop}) in blocks of {cache.size}")


@check("LAW-18", "paged", real=True)
def write_in_a_pool_filled_many_times_keeps_every_token(subject: Subject) -> None:
    cache = production_cache(subject, num_blocks=4200, num_layers=2, num_kv_heads=2, head_dim=128)
    most, rounds = subject.size("sequences", 4200), 5000 // len(cache.layers)
    for number in range(rounds):
        tokens = affordable_tokens(subject, int(subject.rng.integers(1, 300)), rounds)
        while cache.live and (len(cache.live) >= most or not cache.allows_length(tokens)):
            oldest = int(subject.rng.choice(list(cache.live)))
            cache.look(oldest, layers=[number % len(cache.layers)])
            cache.drop(oldest)
        cache.fill(cache.create(), tokens)
    cache.counted()
    for number in cache.live:
        cache.look(number)


@check("LAW-18", "paged")
def release_before_along_a_long_sequence_keeps_the_window(subject: Subject) -> None:
    release_in_steps(subject, 1, 64, 128, (1, 127, 300, 1, 16, 65, 1, 1, 257))


@check("LAW-18", "paged", real=True)
def release_before_at_the_windows_of_models_keeps_the_window(subject: Subject) -> None:
    release_in_steps(subject, 8, 128, 4096, (1, 4095, 2048, 1, 16, 65, 1, 1, 8193, 1))


def release_in_steps(subject: Subject, heads: int, dim: int, window: int, steps: tuple[int, ...]) -> None:
    """Checks one sequence in a pool with room for its window and its longest step only. steps: numbers of tokens."""
    steps = tuple(affordable_tokens(subject, each, len(steps)) for each in steps)
    size = subject.size("block_size", 16)
    entries = -(-(window + max(steps)) // size) + 1
    cache = with_room(subject, entries, num_layers=1, num_kv_heads=heads, head_dim=dim, block_size=size)
    written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
    sequence, layers, length = cache.create(), layers_of(cache), 0
    for count in steps:
        positions = range(length, length + count)
        length += count
        for layer in layers:
            cache.write(sequence, layer, positions.start, *content_pair(0, layer, positions, written.heads, written.dim))
            written.add_up_to(0, layer, length)
        first = max(0, length - window + 1)
        cache.release_before(sequence, first)
        left = range(first // size * size, length)
        for layer in layers:
            assert_content(cache.read(sequence, layer, list(left)), 0, layer, left, written)
    assert_equal(cache.length(sequence, 0), length, "length of a sequence with released blocks")


@check("LAW-18", "paged")
def fork_of_a_long_prompt_hundreds_of_times_keeps_every_token(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache, count = with_room(subject, 400, block_size=16, num_layers=1), subject.size("sequences", 300)
    prompt = random_pair(subject, affordable_tokens(subject, 65 * cache.config["block_size"] + 5, 2))
    parent, length = cache.create(), len(prompt[0])
    cache.write(parent, 0, 0, *prompt)
    tokens = dict.fromkeys((parent, *(cache.fork(parent) for _ in range(min(count, 300) - 1))), prompt)
    rows = random_pair(subject, len(tokens))
    cache.append([*tokens], 0, *rows)  # copies the last block for every sequence but one
    for sequence, *row in zip(tokens, *rows, strict=True):
        keys, values = (np.concatenate([old, new[None]]) for old, new in zip(prompt, row, strict=True))
        tokens[sequence] = keys, values
    for sequence, start in (*((sequence, length) for sequence in [*tokens][::50]), ([*tokens][-1], 15)):
        more = random_pair(subject, 2)
        cache.write(sequence, 0, start, *more)
        keys, values = (np.concatenate([o[:start], n, o[start + 2 :]]) for o, n in zip(tokens[sequence], more, strict=True))
        tokens[sequence] = keys, values
    for dropped in ([], [*tokens][::2]):
        for sequence in dropped:
            cache.drop(sequence)
            del tokens[sequence]
        for sequence, wrote in tokens.items():
            assert_pair(cache.gather(sequence, 0), wrote, f"sequence {sequence} of {len(tokens)} live ones")
    for sequence in tokens:
        cache.drop(sequence)
    in_use(subject, cache, {}, "after drop of all sequences")
