"""LAW-03 and LAW-05: blocks and memory are conserved, and nobody reads what is not theirs."""

from collections import Counter

import numpy as np

from kvref_conformance.checking.expect import equal, pair, raises, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Subject


@check("LAW-03", "blocks")
def free_and_used_blocks_add_up(subject: Subject) -> None:
    pool, held = new(subject, "blocks", num_blocks=7), list[int]()
    for _ in range(200):
        if held and subject.rng.random() < 0.5:
            pool.free(held.pop(subject.rng.integers(len(held))))
        elif pool.num_free:
            held.append(pool.allocate())
        equal((pool.num_free, pool.num_used), (7 - len(held), len(held)), "free and used blocks")
        equal(len(set(held)), len(held), "distinct blocks held")


@check("LAW-03", "paged")
def every_block_belongs_to_the_tables_that_list_it(subject: Subject) -> None:
    cache, lengths = new(subject, "paged"), dict[int, int]()
    for _ in range(60):
        if lengths and subject.rng.random() < 0.3:
            sequence = int(subject.rng.choice(list(lengths)))
            cache.drop(sequence)
            del lengths[sequence]
        else:
            sequence = int(subject.rng.choice([*lengths, cache.create()]))
            start, rows = lengths.setdefault(sequence, 0), pair_of_tokens(subject, int(subject.rng.integers(0, 6)))
            needed = -(-(start + len(rows[0])) // 3) - -(-start // 3)
            if 2 * needed <= cache.num_free_blocks:
                cache.write(sequence, 0, start, *rows)
                lengths[sequence] += len(rows[0])
        listed = Counter(b for sequence in lengths for layer in (0, 1) for b in blocks_of(cache, sequence, layer))
        equal(max(listed.values(), default=1), 1, "tables that list one block")
        equal(cache.num_free_blocks, 24 - len(listed), "free blocks")


@check("LAW-03", "pooled")
def buffers_held_and_given_back_add_up(subject: Subject) -> None:
    cache = new(subject, "pooled", max_tokens=7)
    for _ in range(12):
        cache.append(*pair_of_tokens(subject, int(subject.rng.integers(0, 5))))
        stats = cache.stats()
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        equal(live, 2 * stats.num_blocks, "buffers in use")


@check("LAW-05", "paged")
def a_position_never_written_cannot_be_read(subject: Subject) -> None:
    cache = new(subject, "paged")
    old = cache.create()
    cache.write(old, 0, 0, *pair_of_tokens(subject, 9))
    cache.drop(old)
    sequence = cache.create()
    cache.ensure_capacity(sequence, 9)
    keys, values = pair_of_tokens(subject, 4)
    cache.write(sequence, 0, 0, keys, values)
    for position in (4, 5, 8):
        with raises("PositionOutOfRange"):
            cache.read(sequence, 0, [position])
    with raises("PositionOutOfRange"):
        cache.read(sequence, 1, [0])
    pair(cache.gather(sequence, 0), (keys, values), "4 tokens in blocks another sequence had")


@check("LAW-05", "quantized")
def a_token_never_appended_cannot_be_read(subject: Subject) -> None:
    for name in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", format=name)
        for _ in range(3):
            cache.append_step(*pair_of_tokens(subject, 2))
        with raises("PositionOutOfRange"):
            cache.read_token(0, 3)
        cache.clear()
        with raises("PositionOutOfRange"):
            cache.read_token(0, 0)
        with raises("PositionOutOfRange"):
            cache.read_head(1, 2, 0)


@check("LAW-05", "tiered")
def a_token_forgotten_is_nowhere(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=6)
    cache.append(*pair_of_tokens(subject, 9))
    for position in (0, 2):
        with raises("PositionOutOfRange"):
            cache.tier_of(position)
    cache.clear()
    equal((cache.total_tokens, len(cache.read()[0])), (0, 0), "tokens after clear")
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    cache.append(*pair_of_tokens(subject, 1))
    equal(cache.tier_of(0), "tail", "tier of the first token after clear")


@check("LAW-05", "buffers")
def a_buffer_starts_empty_for_its_next_owner(subject: Subject) -> None:
    pool = new(subject, "buffers")
    first = pool.acquire(1000)
    first.extend(np.full(200, 5.0, np.float32))
    first.release()
    second = pool.acquire(1000)
    equal(second.length, 0, "values in a buffer just acquired")
    second.extend(np.array([1.0, 2.0], np.float32))
    same(second.values(), np.array([1.0, 2.0], np.float32), "values of the buffer's second owner")
    with raises("BufferReleased"):
        first.values()
