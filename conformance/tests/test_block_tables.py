"""The block tables compared with lists, and their memory."""

import gc
import tracemalloc

import numpy as np
import pytest

from kvref import BlockPool, BlockTables, PagedCache, PagedConfig, PrefixCache
from kvref.errors import NotTruncatable

LAYERS, BLOCK_SIZE = 8, 16
ENTRY = 4 * LAYERS  # bytes: one block id per layer


def growth(work):
    """Bytes that are allocated during an action and still reachable after it.

    Reference cycles are collected first: without that, the figure depends on when the collector last ran.
    """
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at_once", [1, 64, 4480])
def test_one_long_table_beside_many_empty_ones_takes_what_it_takes_alone(at_once):
    entries = 4480
    tables = BlockTables(LAYERS, BLOCK_SIZE)
    long, *_ = [tables.open() for _ in range(256)]
    blocks = np.zeros(at_once * LAYERS, np.int32)

    def grow():
        for _ in range(entries // at_once):
            tables.extend({long: at_once}, blocks)

    # A growing table at most doubles its entries, and the array at most doubles too; plus a few numbers per table.
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


def test_what_can_be_found_already_is_not_kept_again():
    cache = PrefixCache(PagedConfig(num_blocks=2, num_layers=1, num_kv_heads=1, head_dim=2, block_size=2))
    told = cache.create()
    cache.write(told, 0, 0, *2 * [np.ones((2, 1, 2), np.float32)])

    def come_and_go():
        for _ in range(1000):
            child = cache.fork(told)
            cache.commit(child, [1, 2])  # reuses its parent's block each time
            cache.drop(child)

    assert growth(come_and_go) <= 1000 * 100  # the size of a copy per iteration: a key, an array, and their slots


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


def test_a_pool_hands_out_the_first_first_and_what_came_back_last_before_others():
    pool = BlockPool(6)
    taken = pool.allocate_many(4)
    assert (taken.tolist(), taken.dtype) == ([0, 1, 2, 3], np.int32)
    pool.free_many([1, 0])
    pool.free(2)
    assert [pool.allocate() for _ in range(4)] == [2, 0, 1, 4]


def test_none_of_several_blocks_is_shared_and_freed():
    pool = BlockPool(2)
    pool.allocate()
    pool.share_many([])
    pool.free_many([])
    assert (pool.references(0), pool.num_free) == (1, 1)


def test_a_block_is_shared_from_its_second_reference_on():
    pool = BlockPool(4)
    pool.allocate_many(3)
    pool.share_many([1, 2])
    pool.share(2)
    assert pool.shared([0, 1, 2, 3]).tolist() == [False, True, True, False]


def test_what_is_released_comes_back_the_last_entrys_first():
    tables = BlockTables(2, 4)
    table = tables.open()
    tables.extend({table: 4}, np.array([0, 1, 2, 3, 4, 5, 6, 7]))
    assert tables.release(table, 2).tolist() == [1, 5, 0, 4]
    assert tables.release(table, np.array([3, 1])).tolist() == [2]
    assert tables.release(table, np.array([3, 4])).tolist() == [7, 6]
    assert (tables.blocks(table, 0), tables.blocks(table, 1)) == ([-1, -1, -1, 3], [-1, -1, -1, -1])
    assert tables.first(table).tolist() == [12, 16]


def test_empty_tables_are_int32_and_have_no_columns():
    tables = BlockTables(2, BLOCK_SIZE)
    numbers = np.array([tables.open() for _ in range(3)], np.int64)
    for asked in (numbers, numbers[:1], numbers[:0]):
        padded = tables.padded(asked, 1)
        assert (padded.shape, padded.dtype) == ((len(asked), 0), np.int32)
    assert tables.held(0).dtype == np.int32


def test_as_many_tables_as_there_is_room_for_keep_what_they_hold():
    tables = BlockTables(2, BLOCK_SIZE)
    numbers = [tables.open() for _ in range(8)]  # one more would grow the arrays
    for round in range(40):
        for table in numbers:
            tables.extend({table: 1}, np.array([1000 * table + round, -1000 * table - round - 2]))
    for table in numbers:
        assert tables.blocks(table, 0) == [1000 * table + round for round in range(40)]
        assert tables.blocks(table, 1) == [-1000 * table - round - 2 for round in range(40)]


@pytest.fixture
def cache():
    """Two sequences of six tokens in blocks of two; the first two blocks of the second one are released."""
    made = PagedCache(PagedConfig(num_blocks=12, num_layers=1, num_kv_heads=1, head_dim=2, block_size=2))
    for _ in range(2):
        made.write(made.create(), 0, 0, *2 * [np.arange(12, dtype=np.float32).reshape(6, 1, 2)])
    made.release_before(1, 5)
    return made


def test_what_one_sequence_released_another_still_has(cache):
    assert cache.read(0, 0, [0])[0].tolist() == [[[0.0, 1.0]]]
    assert cache.slot_mapping(0, 0, 0, 2) == [0, 1]
    cache.write(0, 0, 0, *2 * [np.full((1, 1, 2), 9.0, np.float32)])
    cache.remove(0, 1, 3)
    assert cache.gather(0, 0)[0].tolist() == [[[9.0, 9.0]], [[6.0, 7.0]], [[8.0, 9.0]], [[10.0, 11.0]]]
    cache.truncate(0, 1)
    assert cache.length(0, 0) == 1


def test_a_sequence_is_cut_to_what_was_released_and_no_further(cache):
    cache.truncate(1, 4)
    assert (cache.length(1, 0), cache.block_table(1, 0)) == (4, [-1, -1])
    cache.write(1, 0, 4, *2 * [np.ones((1, 1, 2), np.float32)])
    assert cache.gather(1, 0)[0].tolist() == [[[1.0, 1.0]]]


def test_of_what_was_released_in_part_all_or_nothing_is_forgotten(cache):
    for length in (1, 3):
        with pytest.raises(NotTruncatable, match="blocks before position 4 were released"):
            cache.truncate(1, length)
    cache.truncate(1, 0)
    assert (cache.length(1, 0), cache.block_table(1, 0)) == (0, [])


def test_sequences_are_counted_up_however_they_come(cache):
    assert [cache.fork(0), cache.create(), cache.fork(2), cache.create()] == [2, 3, 4, 5]


def test_room_is_made_without_copying_what_is_shared(cache):
    child = cache.fork(0)
    free = cache.num_free_blocks
    cache.ensure_capacity(child, 6)
    assert (cache.num_free_blocks, cache.block_table(child, 0)) == (free, cache.block_table(0, 0))


def test_a_batch_of_none_is_one(cache):
    assert (cache.lengths([], 0).shape, cache.block_tables([], 0).shape) == ((0,), (0, 0))
    keys, values, offsets = cache.gather_batch([], 0)
    assert (keys.shape, values.shape, offsets.tolist(), offsets.dtype) == ((0, 1, 2), (0, 1, 2), [0], np.int32)
    cache.append([], 0, *2 * [np.ones((0, 1, 2), np.float32)])
    cache.append_step([], *2 * [np.ones((1, 0, 1, 2), np.float32)])
    assert cache.read(0, 0, [])[0].shape == (0, 1, 2)
    assert (cache.length(0, 0), cache.length(1, 0)) == (6, 6)
