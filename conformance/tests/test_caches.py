"""Behavior of kvref's caches beyond what the judge requires of every implementation."""

import numpy as np
import pytest

import kvref
from kvref import errors
from kvref.token_store import TokenStore
from kvref_conformance.oracle.attention import attention as exact

RNG = np.random.default_rng(1)


def rows(count, heads=2, dim=3):
    return RNG.normal(size=(count, heads, dim)).astype(np.float32)


def test_a_block_table_looks_up_blocks_and_slots():
    tables = kvref.BlockTables(num_layers=2, block_size=4)
    other, second, third = (tables.open() for _ in range(3))
    tables.extend({second: 1}, np.array([7, 9]))
    tables.extend({second: 1, third: 2}, np.array([2, 3, 0, 1, 4, 5]))
    assert (tables.blocks(third, 0), tables.blocks(third, 1)) == ([0, 1], [4, 5])
    assert (tables.blocks(second, 0), tables.blocks(second, 1), tables.blocks(other, 0)) == ([7, 2], [9, 3], [])
    assert (tables.capacity(second), tables.capacity(other)) == (8, 0)
    assert tables.slots(second, 0, np.array([0, 3, 4, 7])).tolist() == [28, 31, 8, 11]
    for _ in range(20):  # more tables than allocated: existing ones must stay
        tables.open()
    assert tables.blocks(second, 1) == [9, 3]
    assert tables.close(second).tolist() == [2, 3, 7, 9]  # last entry first
    assert tables.open() == second
    assert tables.blocks(second, 0) == []
    assert tables.padded(np.array([second, third]), 1).tolist() == [[-1, -1], [4, 5]]


def test_a_pooled_block_takes_what_fits():
    pool = kvref.BufferPool()
    block = kvref.PooledBlock(pool, num_kv_heads=2, head_dim=3, max_tokens=5)
    keys = rows(7)
    assert (block.append(keys[:3], keys[:3]), block.remaining, block.is_full) == (3, 2, False)
    assert (block.append(keys[3:], keys[3:]), block.num_tokens, block.is_full) == (2, 5, True)
    assert (block.read()[0] == keys[:5]).all()
    block.clear()
    assert block.num_tokens == 0
    block.release()
    assert pool.stats().returns == 2
    with pytest.raises(errors.BufferTooLarge):
        kvref.PooledBlock(pool, 2, 3, max_tokens=20000)


def test_an_append_that_runs_out_of_memory_leaves_nothing_behind(monkeypatch):
    """The hardest case of POOL-04: the third of four buffers cannot be allocated."""
    pool = kvref.BufferPool()
    cache = kvref.PooledCache(kvref.PooledConfig(num_kv_heads=2, head_dim=3, tokens_per_block=2, max_tokens=6), pool)
    keys = rows(3)
    cache.append(keys, keys)
    acquire, left = pool.acquire, iter(range(2))

    def failing(num_bytes):
        if next(left, None) is None:
            raise MemoryError("no memory")
        return acquire(num_bytes)

    monkeypatch.setattr(pool, "acquire", failing)
    with pytest.raises(MemoryError):
        cache.append(rows(6), rows(6))
    assert (cache.read()[0] == keys).all()
    stats = pool.stats()
    assert stats.hits + stats.misses - stats.returns == 4  # its two blocks


def test_a_tiered_cache_reads_into_pool_buffers():
    pool = kvref.BufferPool(backend=kvref.backend("numpy"))
    cache = kvref.TieredCache(kvref.TieredConfig(2, 3, max_tokens=8, tail_length=2), pool.backend)
    cache.append(rows(7), rows(7))
    keys, values = cache.read_into(pool)
    assert keys.values().tolist() == cache.read()[0].reshape(-1).tolist()
    assert values.values().tolist() == cache.read()[1].reshape(-1).tolist()
    assert keys.address % 64 == 0


@pytest.mark.parametrize("taken", [0, 1])
def test_a_tiered_cache_that_cannot_fill_its_buffers_gives_both_back(taken, monkeypatch):
    pool = kvref.BufferPool()
    cache = kvref.TieredCache(kvref.TieredConfig(2, 3, max_tokens=8, tail_length=2))
    cache.append(rows(7), rows(7))
    extend, left = kvref.Buffer.extend, iter(range(taken))

    def failing(self, values):
        if next(left, None) is None:
            raise MemoryError("no memory")
        extend(self, values)

    monkeypatch.setattr(kvref.Buffer, "extend", failing)
    with pytest.raises(MemoryError):
        cache.read_into(pool)
    assert (pool.stats().misses, pool.stats().returns) == (2, 2)


def test_a_tiered_cache_too_large_for_buffers_takes_none():
    pool = kvref.BufferPool()
    cache = kvref.TieredCache(kvref.TieredConfig(1, 128, max_tokens=600, tail_length=600))
    cache.append(rows(600, 1, 128), rows(600, 1, 128))
    with pytest.raises(errors.BufferTooLarge):
        cache.read_into(pool)
    assert pool.stats().misses == pool.stats().returns


@pytest.mark.parametrize("backend", [kvref.reference, kvref.backend("numpy")], ids=lambda backend: backend.name)
def test_contiguous_and_pooled_attend_over_what_they_read_as(backend):
    keys, values, query = rows(6), rows(6), rows(2, heads=4)
    pooled = kvref.PooledCache(kvref.PooledConfig(2, 3, tokens_per_block=4, max_tokens=8), backend=backend)
    pooled.append(keys, values)
    want, bound = exact(query, keys, values, scale=0.5, causal=True)
    assert (np.abs(pooled.attend(query, 0.5, causal=True) - want) <= bound).all()
    contiguous = kvref.ContiguousCache(kvref.ContiguousConfig(2, 3, max_seq_len=8, batch_size=2), backend)
    contiguous.append(*(np.stack([part, part[::-1]]).transpose(0, 2, 1, 3) for part in (keys, values)))
    got = contiguous.attend(np.stack([query, query]).transpose(0, 2, 1, 3), 0.5, causal=True).transpose(0, 2, 1, 3)
    assert (np.abs(got[0] - want) <= bound).all()
    want, bound = exact(query, keys[::-1], values[::-1], scale=0.5, causal=True)
    assert (np.abs(got[1] - want) <= bound).all()


def test_queries_see_every_token_unless_they_are_causal():
    keys, values, query = rows(6), rows(6), rows(2, heads=4)
    pooled = kvref.PooledCache(kvref.PooledConfig(2, 3, tokens_per_block=4, max_tokens=8))
    contiguous = kvref.ContiguousCache(kvref.ContiguousConfig(2, 3, max_seq_len=8))
    tiered = kvref.TieredCache(kvref.TieredConfig(2, 3, max_tokens=8, tail_length=8, tail_dtype="float32"))
    paged = kvref.PagedCache(kvref.PagedConfig(8, 1, 2, 3))
    quantized = kvref.QuantizedCache(kvref.QuantizedConfig(1, 8, 2, 3))
    pooled.append(keys, values)
    tiered.append(keys, values)
    contiguous.append(*(part.transpose(1, 0, 2)[None] for part in (keys, values)))
    paged.write(paged.create(), 0, 0, keys, values)
    quantized.append(0, keys, values)
    for causal in (False, True):
        options = {"causal": True} if causal else {}
        for given, got in (
            ((keys, values), pooled.attend(query, **options)),
            ((keys, values), tiered.attend(query, **options)),
            ((keys, values), contiguous.attend(query.transpose(1, 0, 2)[None], **options)[0].transpose(1, 0, 2)),
            ((keys, values), paged.attend(0, 0, query, **options)),
            (quantized.read_tokens(0, range(6)), quantized.attend(0, query, **options)),
        ):
            want, bound = exact(query, *given, scale=3**-0.5, causal=causal)
            assert (np.abs(got - want) <= bound).all()


def test_buffers_are_released_by_with():
    pool = kvref.BufferPool()
    with pool.acquire(100) as buffer:
        with pytest.raises(errors.CapacityExceeded, match="257 values needed, capacity is 256"):
            buffer.extend(np.zeros(257, np.float32))
        assert buffer.length == 0
    with pytest.raises(errors.BufferReleased):
        buffer.extend(np.zeros(1, np.float32))
    pool.prewarm_all(2)
    assert pool.stats().free == {1024: 3, 4096: 2, 16384: 2, 65536: 2, 262144: 2}  # one buffer was released


def test_attention_refuses_what_does_not_fit():
    for scale in (None, 1.0):
        with pytest.raises(errors.ShapeMismatch, match=r"keys: expected a head_dim of at least 1, got shape \[4, 2, 0\]"):
            kvref.attention(rows(1, dim=0), rows(4, dim=0), rows(4), scale=scale)
    with pytest.raises(errors.ShapeMismatch, match=r"values: expected shape \[4, 2, value_dim\], got \[4, 1, 3\]"):
        kvref.attention(rows(1), rows(4), rows(4, heads=1))
    with pytest.raises(errors.ShapeMismatch, match="multiple of 2 query heads, got 3"):
        kvref.attention(rows(1, heads=3), rows(4), rows(4))
    with pytest.raises(errors.ShapeMismatch, match="query: expected shape"):
        kvref.attention(rows(1, dim=4), rows(4), rows(4))
    with pytest.raises(errors.PositionOutOfRange, match=r"in \[0, 5\), got 5"):
        kvref.attention(rows(1), rows(4), rows(4), length=5)


def test_numpy_integers_are_integers():
    cache = kvref.PagedCache(kvref.PagedConfig(np.int64(4), 1, 2, 3, block_size=2))
    sequence, keys = np.int64(cache.create()), rows(3)
    cache.write(sequence, np.int32(0), np.int64(0), keys, keys)
    assert (cache.read(sequence, 0, np.array([2, 0]))[0] == keys[[2, 0]]).all()
    for wrong in (True, 0.0, "0", [0], None):
        with pytest.raises(errors.SequenceNotFound):
            cache.gather(wrong, 0)
        with pytest.raises(errors.BlockNotAllocated):
            cache.pool.free(wrong)
        with pytest.raises(errors.LayerOutOfRange):
            cache.gather(sequence, wrong)


def test_lists_are_taken_and_uneven_ones_refused():
    cache = kvref.QuantizedCache(kvref.QuantizedConfig(1, 2, 1, 2))
    with pytest.raises(errors.ShapeMismatch, match=r"even lists of numbers, got \[\[\[1.0\], \[1.0, 2.0\]\]\]"):
        cache.append(0, [[[1.0], [1.0, 2.0]]], [[[1.0, 2.0]]])
    for wrong in ("abc", {"a": 1}, None, 1.0, {1.0, 2.0}, iter([[[1.0, 2.0]]])):
        with pytest.raises(errors.ShapeMismatch):
            cache.append(0, wrong, [[[1.0, 2.0]]])
    assert cache.length() == 0
    cache.append(0, [[(1, 2.0)]], [np.ones((1, 2), np.float32)])
    cache.append(0, [[[np.float32(1), 2]]], [[np.ones(2, np.float16)]])
    assert cache.read_tokens(0, [0, 1])[0].shape == (2, 1, 2)


def test_what_is_in_a_list_is_looked_at():
    cache = kvref.QuantizedCache(kvref.QuantizedConfig(1, 2, 1, 2))
    good = [[[1.0, 2.0]]]
    for wrong in ("1", None, True, 1j, b"1", np.float64(1), np.int64(1), np.True_):
        with pytest.raises(errors.DtypeMismatch, match="values: expected"):
            cache.append(0, good, [[[1.0, wrong]]])
    for wrong in ([np.ones((1, 2))], [[np.ones(2)]], [[np.ones(2, np.int32)]], [[np.ones(2, np.float32)], [np.ones(2)]]):
        with pytest.raises(errors.DtypeMismatch, match="keys: expected float32, float16 or bfloat16, got "):
            cache.append(0, wrong, good)
    for wrong in (1e39, -3.5e38, 10**400):
        with pytest.raises(errors.NonFinite, match="keys: expected numbers in the range of float32, got "):
            cache.append(0, [[[1.0, wrong]]], good)
    assert cache.length() == 0


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
def test_other_dtypes_are_refused(dtype):
    cache = kvref.PooledCache(kvref.PooledConfig(2, 3))
    with pytest.raises(errors.DtypeMismatch, match=f"keys: expected float32, float16 or bfloat16, got {dtype}"):
        cache.append(rows(2).astype(dtype), rows(2))


def test_a_batch_is_named_by_integers_of_any_kind_and_by_nothing_else():
    cache = kvref.PagedCache(kvref.PagedConfig(num_blocks=4, num_layers=1, num_kv_heads=2, head_dim=3))
    for _ in range(2):
        cache.create()
    cache.append(np.array([1, 0]), 0, rows(2), rows(2))
    lengths, tables = cache.lengths([np.int64(0), 1], 0), cache.block_tables([0, 1], 0)
    assert (lengths.tolist(), lengths.dtype, tables.dtype) == ([1, 1], np.int32, np.int32)
    for wrong in (True, 1.0, "1", None, 2):
        with pytest.raises(errors.SequenceNotFound, match="never created, or already dropped"):
            cache.append([0, wrong], 0, rows(2), rows(2))
    assert cache.length(0, 0) == 1


@pytest.mark.parametrize("tokens", [2**63 - 1, 2**63, np.uint64(2**64 - 1), 2**64, 10**30])
def test_more_blocks_than_an_integer_holds_are_refused_like_any_others(tokens):
    cache = kvref.PagedCache(kvref.PagedConfig(num_blocks=4, num_layers=1, num_kv_heads=2, head_dim=3))
    sequence = cache.create()
    with pytest.raises(errors.OutOfBlocks):
        cache.ensure_capacity(sequence, tokens)
    with pytest.raises(errors.PositionOutOfRange):
        cache.write(sequence, 0, tokens, rows(1), rows(1))
    with pytest.raises(errors.PositionOutOfRange):
        cache.slot_mapping(sequence, 0, tokens, tokens)
    assert cache.num_free_blocks == 4


CONFIGURED = {
    kvref.ContiguousConfig: {"num_kv_heads": 1, "head_dim": 1, "max_seq_len": 1, "batch_size": 1, "initial_capacity": 0},
    kvref.PagedConfig: {"num_blocks": 0, "num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_size": 1},
    kvref.QuantizedConfig: {"num_layers": 1, "capacity": 1, "num_kv_heads": 1, "head_dim": 1},
    kvref.TieredConfig: {
        "num_kv_heads": 1, "head_dim": 1, "max_tokens": 1, "tail_length": 0, "warm_length": 0, "migration_batch": 1,
    },
    kvref.PooledConfig: {"num_kv_heads": 1, "head_dim": 1, "tokens_per_block": 1, "max_tokens": 1},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGURED, ids=lambda config: config.__name__)
def test_a_configuration_keeps_pythons_integers_and_takes_no_others(config):
    sizes = CONFIGURED[config]
    kept = config(**{name: np.int8(size) for name, size in sizes.items()})
    assert {type(getattr(kept, name)) for name in sizes} == {int}
    for name in sizes:
        for wrong in (True, np.True_, np.float32(1), np.array(1), 2**63):
            with pytest.raises(errors.ConfigError, match=name):
                config(**sizes | {name: wrong})


def test_what_is_made_without_a_configuration_keeps_pythons_integers_too():
    pool, tables = kvref.BlockPool(np.int8(100)), kvref.BlockTables(np.int8(2), np.int8(16))
    buffers = kvref.BufferPool(np.int8(4))
    block = kvref.PooledBlock(buffers, np.int8(2), np.int8(3), max_tokens=np.int8(100))
    kept = (pool.num_blocks, pool.num_free, tables.num_layers, tables.block_size, buffers.max_buffers, block.max_tokens)
    assert {type(number) for number in kept} == {int}
    assert (block.remaining, block.bytes) == (100, 2 * 4096)
    with pytest.raises(errors.ConfigError, match="num_blocks: expected at most 2147483647, got 2147483648"):
        kvref.BlockPool(2**31)  # block tables contain int32
    for wrong in (1024.0, True, "1024"):
        with pytest.raises(errors.ConfigError, match="size: expected one of 1024"):
            buffers.prewarm(wrong, 1)
    assert buffers.stats().allocations == 2


def test_a_store_writes_keys_and_values_or_neither():
    store = TokenStore(kvref.reference, kvref.get_format("int8"), num_slots=2, num_kv_heads=2, head_dim=3)
    store.write([1], rows(1), rows(1))
    before = [part.tolist() for part in store.read([0, 1])]
    with pytest.raises(errors.NonFinite):
        store.write([1], rows(1) + 1, rows(1) * np.nan)
    assert [part.tolist() for part in store.read([0, 1])] == before


def test_a_policy_for_which_there_is_no_memory_is_not_half_adopted(monkeypatch):
    cache = kvref.TieredCache(kvref.TieredConfig(2, 3, max_tokens=8, tail_length=2, tail_dtype="float32"))
    cache.append(rows(3), rows(3))
    before, config, zeros = [part.tolist() for part in cache.read()], cache.config, kvref.ReferenceBackend.zeros
    calls = iter(range(10**6))

    def once(self, shape, dtype):
        if next(calls) == 3:  # the tail's keys and values are stored, those of the store are not
            raise MemoryError
        return zeros(self, shape, dtype)

    monkeypatch.setattr(kvref.ReferenceBackend, "zeros", once)
    with pytest.raises(MemoryError):
        cache.update_policy(tail_length=4, store_format="q8")
    assert (cache.config, [part.tolist() for part in cache.read()]) == (config, before)
    more = rows(4)
    cache.append(more, more)
    assert [cache.tier_of(p) for p in range(7)] == ["store"] * 5 + ["tail"] * 2
    assert cache.read()[0][-2:].tolist() == more[-2:].tolist()
