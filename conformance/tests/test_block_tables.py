"""The block tables against lists, and the memory that they take."""

import tracemalloc

import numpy as np
import pytest

from kvref import BlockTables

LAYERS, BLOCK_SIZE = 8, 16
ENTRY = 4 * LAYERS  # bytes: a block id in each layer


def growth(work):
    """Bytes that are allocated, and not given back, while something is done."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at_once", [1, 64, 4096])
def test_one_long_table_beside_many_empty_ones_takes_what_it_takes_alone(at_once):
    entries = 4096
    tables = BlockTables(LAYERS, BLOCK_SIZE)
    long, *_ = [tables.open() for _ in range(256)]
    blocks = np.zeros(at_once * LAYERS, np.int32)

    def grow():
        for _ in range(entries // at_once):
            tables.extend({long: at_once}, blocks)

    # Room is at most doubled as a table grows, and doubled again as the array does; and a few numbers a table.
    assert growth(grow) <= 4 * (entries + 1) * ENTRY + 256 * 32
    assert tables.capacity(long) == entries * BLOCK_SIZE


def test_what_closed_tables_held_is_used_again():
    tables = BlockTables(LAYERS, BLOCK_SIZE)

    def come_and_go():
        for length in 20 * [1, 100, 7, 30]:
            opened = [tables.open() for _ in range(10)]
            tables.extend(dict.fromkeys(opened, length), np.zeros(10 * length * LAYERS, np.int32))
            for table in opened:
                tables.close(table)

    assert growth(come_and_go) <= 4 * 10 * 101 * ENTRY + 10_000


def test_tables_that_grow_move_and_go_are_as_lists_would_be():
    rng = np.random.default_rng(0)
    tables, held = BlockTables(2, BLOCK_SIZE), {}  # by table, the list of each layer
    for step in range(600):
        choice = rng.random()
        if not held or choice < 0.15:
            held[tables.open()] = ([], [])
        elif choice < 0.25:
            table = int(rng.choice(list(held)))
            first, second = held.pop(table)
            pairs = zip(first, second, strict=True)
            assert tables.close(table).tolist() == [block for pair in reversed(list(pairs)) for block in pair]
        else:
            named = rng.choice(list(held), size=min(len(held), 1 + step % 3), replace=False).tolist()
            more = {table: int(rng.integers(0, 5)) for table in named}
            blocks = rng.integers(0, 10**6, 2 * sum(more.values())).astype(np.int32)
            tables.extend(more, blocks)
            rest = blocks.tolist()
            for table, count in more.items():
                for layer in held[table]:
                    layer += rest[:count]
                    del rest[:count]
        numbers = np.array(sorted(held), np.int64)
        for layer in (0, 1):
            lists = [held[table][layer] for table in sorted(held)]
            most = max(map(len, lists), default=0)
            assert [tables.blocks(table, layer) for table in sorted(held)] == lists
            assert tables.padded(numbers, layer).tolist() == [each + [-1] * (most - len(each)) for each in lists]
            for table, each in zip(sorted(held), lists, strict=True):
                slots = [block * BLOCK_SIZE + offset for block in each for offset in range(BLOCK_SIZE)]
                assert tables.slots(table, layer, np.arange(len(slots))).tolist() == slots
                assert tables.capacity(table) == len(slots)
