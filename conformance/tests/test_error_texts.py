"""The complete texts of error messages. A user who made a mistake reads them, and no clause defines them."""

import numpy as np
import pytest

import kvref
from kvref import errors
from kvref.block_tables import BlockTables
from kvref.rope import Rotary


def paged(kind=kvref.PagedCache, tokens=5):
    """One sequence of five tokens in blocks of four, two of six blocks; three table entries."""
    cache = kind(kvref.PagedConfig(num_blocks=6, block_size=4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32"))
    cache.create()
    cache.write(0, 0, 0, *2 * [np.ones((tokens, 1, 2), np.float32)])
    return cache


def pool():
    found = kvref.BlockPool(3)
    found.allocate()
    return found


def released():
    """The same, without its first block."""
    cache = paged()
    cache.release_before(0, 4)
    return cache


def windowed(**sizes):
    """A window of two tokens and one sink token, after five tokens."""
    sizes = {"num_kv_heads": 1, "head_dim": 2, "window": 2, "sinks": 1} | sizes
    cache = kvref.WindowedCache(kvref.WindowedConfig(**sizes))
    cache.append(*2 * [np.ones((5, 1, 2), np.float32)])
    return cache


def grouped():
    """A sequence of five tokens in blocks of two, in one group with a window of two and one without."""
    cache = kvref.GroupedCache(
        kvref.GroupedConfig(num_blocks=6, block_size=2, num_layers=2, num_groups=2, window=2, num_kv_heads=1, head_dim=2)
    )
    cache.create()
    cache.step(0, *2 * [np.ones((2, 5, 1, 2), np.float32)])
    cache.step(0, *2 * [np.ones((2, 1, 1, 2), np.float32)])
    return cache


def ragged():
    """Rows of one and two tokens."""
    cache = kvref.RaggedCache(kvref.RaggedConfig(batch_size=2, num_kv_heads=1, head_dim=2, max_tokens=4))
    cache.append(*2 * [np.ones((2, 1, 2, 2), np.float32)], [1, 2])
    return cache


def crossed():
    """Two rows, of which the first has a source of one entry."""
    cache = kvref.CrossCache(kvref.CrossConfig(batch_size=2, num_kv_heads=1, head_dim=2, max_tokens=4, max_source=3))
    cache.write_source([0], *2 * [np.ones((1, 1, 1, 2), np.float32)])
    return cache


def compressed(tokens=5):
    """A sequence in the only block, with room for six tokens, in groups of four."""
    cache = kvref.CompressedCache(kvref.CompressedConfig(1, head_dim=2, rope_dim=2, window=4, ratio=4, max_tokens=6))
    cache.append(cache.create(), *3 * [np.ones((tokens, 2), np.float32)])
    return cache


def transferring():
    """A sequence of three tokens with an export, an open transfer of which one row of 24 has arrived, and an aborted one."""
    sizes = {"num_blocks": 8, "num_layers": 2, "num_kv_heads": 4, "head_dim": 2, "block_size": 4}
    cache = kvref.TransferCache(kvref.TransferConfig(**sizes, head_ranks=2))
    cache.append(cache.create(), *2 * [np.ones((2, 3, 4, 2), np.float32)])
    cache.export(0)
    cache.arrive(cache.begin(3), 0, 0, [0, 1], *2 * [np.ones((1, 1, 2), np.float32)])
    cache.abort(cache.begin(1))
    return cache


def drafting():
    """Two tokens and a tree of two nodes in two blocks of two tokens."""
    cache = kvref.TreeCache(kvref.TreeConfig(num_blocks=2, num_kv_heads=1, head_dim=2, block_size=2))
    cache.append(cache.create(), *2 * [np.ones((2, 1, 2), np.float32)])
    cache.draft(0, *2 * [np.ones((2, 1, 2), np.float32)], [-1, 0])
    return cache


def sharded(lost=None):
    """Five tokens on two rows and two columns; one rank can be lost."""
    cache = kvref.ShardedCache(kvref.ShardedConfig(2, 1, block_size=2, num_blocks=4, head_ranks=2, token_ranks=2))
    cache.append(*2 * [np.ones((5, 2, 1), np.float32)])
    if lost is not None:
        cache.lose(lost)
    return cache


def latent(**sizes):
    cache = kvref.LatentCache(kvref.LatentConfig(**{"rank": 4, "rope_dim": 2, "max_tokens": 2} | sizes))
    cache.append(np.ones((1, 4), np.float32), np.ones((1, 2), np.float32))
    return cache


def channels(count=64, **sizes):
    cache = kvref.ChannelCache(
        kvref.ChannelConfig(**{"num_kv_heads": 1, "head_dim": 32, "max_tokens": 64, "residual": 32} | sizes)
    )
    cache.append(*2 * [np.ones((count, 1, 32), np.float32)])
    return cache


def recurrent(count=5, **sizes):
    """A sequence of three tokens and a checkpoint, then two more tokens in another call, all of which are committed."""
    sizes = {"num_blocks": 2, "channels": 1, "num_inputs": 1, "key_dim": 1, "value_dim": 1, "interval": 3} | sizes
    cache = kvref.RecurrentCache(kvref.RecurrentConfig(num_layers=1, num_heads=1, **sizes))
    cache.create()
    for tokens in (3, count - 3):
        cache.append(0, *(np.ones((1, tokens, 1, width), np.float32) for width in (1, 1, 1, 2)))
        if tokens == 3:
            cache.checkpoint(0)
    cache.commit(0, range(count))
    return cache


def load_parts(length, loaded, then):
    """Load a part of a state at length 3, and then one of a state at `length`, into a sequence of the same cache."""
    cache = kvref.RecurrentCache(kvref.RecurrentConfig(4, 2, 2, 1, 1, 1, 1))
    for count in (3, length, 0):
        cache.append(cache.create(), *(np.ones((2, count, 2, width), np.float32) for width in (1, 1, 1, 2)))
    cache.load(2, cache.save(0, **loaded))
    cache.load(2, cache.save(1, **then))


def shared():
    """Two sequences of one token each that share a block, and one free block too few to write to it and continue."""
    cache = kvref.PagedCache(kvref.PagedConfig(num_blocks=2, block_size=2, num_layers=1, num_kv_heads=1, head_dim=2))
    cache.create()
    cache.write(0, 0, 0, *2 * [np.ones((1, 1, 2), np.float32)])
    cache.fork(0)
    return cache


NUMBER = "expected an integer in"
WORDS = [
    (lambda: paged().truncate(0, 6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (lambda: paged().truncate(1, 0), errors.SequenceNotFound, "unknown sequence 1 (never created, or already dropped)"),
    (lambda: paged().remove(0, 1, 6), errors.PositionOutOfRange, f"stop: {NUMBER} [0, 6), got 6"),
    (lambda: paged().remove(0, 3, 2), errors.PositionOutOfRange, f"start: {NUMBER} [0, 3), got 3"),
    (lambda: paged().slot_mapping(0, 0, -1, 1), errors.PositionOutOfRange, "start: expected an integer of at least 0, got -1"),
    (lambda: paged().slot_mapping(0, 0, 0, -1), errors.PositionOutOfRange, "count: expected an integer of at least 0, got -1"),
    (lambda: paged().slot_mapping(0, 0, 7, 2), errors.PositionOutOfRange, f"start + count: {NUMBER} [0, 9), got 9"),
    (
        lambda: paged().write(0, 0, 6, *2 * [np.ones((1, 1, 2), np.float32)]),
        errors.PositionOutOfRange,
        f"start: {NUMBER} [0, 6), got 6",
    ),
    (lambda: paged().ensure_capacity(0, 25), errors.OutOfBlocks, "out of blocks: 5 needed, 4 free"),
    (
        lambda: paged().ensure_capacity(0, -1),
        errors.PositionOutOfRange,
        "num_tokens: expected an integer of at least 0, got -1",
    ),
    (lambda: paged().length(0, 1), errors.LayerOutOfRange, f"layer: {NUMBER} [0, 1), got 1"),
    (lambda: paged().read(0, 0, [5]), errors.PositionOutOfRange, f"position in sequence 0, layer 0: {NUMBER} [0, 5), got 5"),
    (
        lambda: paged().write(0, 0, 5, *2 * [np.ones((1, 2), np.float32)]),
        errors.ShapeMismatch,
        "keys: expected shape [n, 1, 2], got [1, 2]",
    ),
    (
        lambda: shared().write(0, 0, 1, *2 * [np.ones((2, 1, 2), np.float32)]),
        errors.OutOfBlocks,
        "out of blocks: 2 needed, 1 free",
    ),
    (lambda: paged().release_before(0, 6), errors.PositionOutOfRange, f"position: {NUMBER} [0, 6), got 6"),
    (
        lambda: released().truncate(0, 2),
        errors.NotTruncatable,
        "cannot truncate to 2: blocks before position 4 were released",
    ),
    (
        lambda: released().read(0, 0, [3]),
        errors.PositionOutOfRange,
        "position in sequence 0, layer 0: 3 was released: positions from 4 on remain",
    ),
    (lambda: pool().references(3), errors.BlockNotAllocated, "references: expected a block in [0, 3), got 3"),
    (lambda: kvref.BlockPool(-1), errors.ConfigError, "num_blocks: expected an integer of at least 0, got -1"),
    (lambda: pool().allocate_many(-1), errors.PositionOutOfRange, "count: expected an integer of at least 0, got -1"),
    (lambda: pool().allocate_many(3), errors.OutOfBlocks, "out of blocks: 3 needed, 2 of 3 free"),
    (lambda: BlockTables(0, 1), errors.ConfigError, "num_layers: expected an integer of at least 1, got 0"),
    (lambda: BlockTables(1, 0), errors.ConfigError, "block_size: expected an integer of at least 1, got 0"),
    (lambda: pool().share(2), errors.BlockNotAllocated, "share: block 2 is not allocated"),
    (lambda: pool().free(1), errors.BlockNotAllocated, "free: block 1 is not allocated"),
    (lambda: Rotary(0, [1]), errors.ConfigError, "head_dim: expected an integer of at least 1, got 0"),
    (lambda: Rotary(3, [1, 2]), errors.ConfigError, "frequencies: expected 1 to 1 finite numbers, got [1, 2]"),
    (lambda: Rotary(4, [float("inf")]), errors.ConfigError, "frequencies: expected 1 to 2 finite numbers, got [inf]"),
    (lambda: Rotary(4, [True]), errors.ConfigError, "frequencies: expected 1 to 2 finite numbers, got [True]"),
    (lambda: kvref.rotary_frequencies(3), errors.ConfigError, "num_rotated: expected an even number, got 3"),
    (lambda: kvref.rotary_frequencies(4, -1), errors.ConfigError, "theta: expected a positive number, got -1"),
    (lambda: Rotary(4, [10.0], "both"), errors.ConfigError, "layout: expected one of halves, pairs, got 'both'"),
    (lambda: paged(kvref.PrefixCache).reset(), errors.InUse, "cannot reset: live sequences: 1"),
    (lambda: paged(kvref.PrefixCache).commit(0, [1] * 6), errors.PositionOutOfRange, f"len(tokens): {NUMBER} [0, 6), got 6"),
    (lambda: paged(kvref.PrefixCache).match([1, -2]), errors.TokenOutOfRange, f"token: {NUMBER} [0, {2**63}), got -2"),
    (lambda: paged(kvref.PrefixCache).begin([1] * 25), errors.OutOfBlocks, "out of blocks: 7 needed, 4 free"),
    (lambda: windowed().read([5]), errors.PositionOutOfRange, f"position: {NUMBER} [0, 5), got 5"),
    (
        lambda: windowed().read([2]),
        errors.PositionOutOfRange,
        "position 2 was evicted: sinks and positions from 3 on remain",
    ),
    (lambda: windowed().truncate(6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (lambda: windowed().truncate(3), errors.NotTruncatable, "cannot truncate to 3: its window starts at 2, which was evicted"),
    (lambda: windowed(window=0), errors.ConfigError, "window: expected an integer of at least 1, got 0"),
    (lambda: windowed(sinks=-1), errors.ConfigError, "sinks: expected an integer of at least 0, got -1"),
    (
        lambda: grouped().read(0, 0, [1]),
        errors.PositionOutOfRange,
        "position in sequence 0, layer 0: 1 was released: positions from 4 on remain",
    ),
    (lambda: grouped().truncate(0, 2), errors.NotTruncatable, "cannot truncate to 2: blocks of its window were freed"),
    (lambda: grouped().read(0, 2, [1]), errors.LayerOutOfRange, f"layer: {NUMBER} [0, 2), got 2"),
    (
        lambda: grouped().step(0, *2 * [np.ones((2, 9, 1, 2), np.float32)]),
        errors.OutOfBlocks,
        "out of blocks: 10 needed, 2 free",
    ),
    (lambda: kvref.GroupedConfig(6, 3, 2, 2, 1, 2), errors.ConfigError, "num_layers: expected a multiple of num_groups 2, got 3"),
    (
        lambda: latent().append(np.ones((2, 4), np.float32), np.ones((2, 2), np.float32)),
        errors.CapacityExceeded,
        "cache full: 3 tokens needed, max_tokens is 2",
    ),
    (lambda: latent().truncate(2), errors.PositionOutOfRange, f"length: {NUMBER} [0, 2), got 2"),
    (lambda: latent(dtype="packed"), errors.ConfigError, "rank: expected a multiple of 128 for packed rows, got 4"),
    (
        lambda: latent().attend(np.ones((1, 2, 5), np.float32), np.ones((2, 3, 5), np.float32), np.ones((2, 3, 4), np.float32)),
        errors.ShapeMismatch,
        "up_keys: expected shape [num_heads, nope_dim, 4], got [2, 3, 5]",
    ),
    (
        lambda: sharded().append(*2 * [np.ones((12, 2, 1), np.float32)]),
        errors.CapacityExceeded,
        "cache full: 17 tokens needed, max_tokens is 16",
    ),
    (lambda: sharded().truncate(6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (
        lambda: sharded().attend(np.ones((6, 2, 1), np.float32), 1.0),
        errors.PositionOutOfRange,
        f"queries: {NUMBER} [0, 6), got 6",
    ),
    (lambda: ragged().read(2), errors.RowOutOfRange, f"row: {NUMBER} [0, 2), got 2"),
    (lambda: ragged().filter([]), errors.RowOutOfRange, "rows: expected at least one row, got none"),
    (lambda: ragged().trim([2, 0]), errors.PositionOutOfRange, f"count: {NUMBER} [0, 2), got 2"),
    (lambda: ragged().trim([1]), errors.ShapeMismatch, "counts: expected 2 counts, one per row, got 1"),
    (
        lambda: ragged().append(*2 * [np.ones((2, 1, 3, 2), np.float32)]),
        errors.CapacityExceeded,
        "append: expected at most 4 tokens in a row, got 5",
    ),
    (
        lambda: crossed().read_source(1),
        errors.SourceNotWritten,
        "row 1 has no source: write it first, with 0 entries if there is none",
    ),
    (
        lambda: crossed().write_source([0], *2 * [np.ones((1, 1, 1, 2), np.float32)]),
        errors.SourceAlreadyWritten,
        "row 0 already has a source: clear the row before another one is written",
    ),
    (
        lambda: crossed().write_source([1], *2 * [np.ones((1, 1, 4, 2), np.float32)]),
        errors.CapacityExceeded,
        "write_source: expected at most 3 entries in a source, got 4",
    ),
    (
        lambda: crossed().write_source([1], *2 * [np.ones((1, 1, 1, 2), np.float32)], [1, 1]),
        errors.ShapeMismatch,
        "counts: expected 1 counts, one per row, got 2",
    ),
    (
        lambda: compressed().append(0, *3 * [np.ones((2, 2), np.float32)]),
        errors.CapacityExceeded,
        "cache full: 7 tokens needed, max_tokens is 6",
    ),
    (
        lambda: compressed().truncate(0, 3),
        errors.NotTruncatable,
        "cannot truncate to 3: position 0 is needed, those before 1 are gone",
    ),
    (lambda: compressed().truncate(0, 6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (lambda: compressed().fork(0), errors.OutOfBlocks, "out of blocks: 1 needed, 0 of 1 free"),
    (lambda: compressed().restore(0), errors.KeyNotFound, "unknown handle 0 (never returned by offload, or already discarded)"),
    (lambda: compressed().drop(1), errors.SequenceNotFound, "unknown sequence 1 (never created, or already dropped)"),
    (
        lambda: kvref.CompressedConfig(1, window=2, ratio=4),
        errors.ConfigError,
        "window: expected at least ratio - 1 = 3, got 2",
    ),
    (
        lambda: kvref.CompressedConfig(1, head_dim=4, rope_dim=6),
        errors.ConfigError,
        "rope_dim: expected an even number of at most head_dim 4, got 6",
    ),
    (lambda: transferring().commit(0), errors.TransferIncomplete, "transfer 0: 23 of 24 rows are missing"),
    (lambda: transferring().commit(1), errors.TransferNotFound, "no open transfer 1 (1 transfers are open)"),
    (lambda: transferring().fence(0), errors.TransferNotFound, "no aborted transfer 0 (1 transfers are aborted)"),
    (
        lambda: transferring().arrive(0, 0, 0, [0, 2], *2 * [np.ones((1, 2, 2), np.float32)]),
        errors.AlreadyArrived,
        "transfer 0: 1 rows of this part have arrived before",
    ),
    (
        lambda: transferring().arrive(0, 0, 2, [0, 4], *2 * [np.ones((2, 4, 2), np.float32)]),
        errors.PositionOutOfRange,
        f"start + n: {NUMBER} [0, 4), got 4",
    ),
    (lambda: transferring().send(0, 0, [0, 4], [0, 4]), errors.PositionOutOfRange, f"tokens, stop: {NUMBER} [0, 4), got 4"),
    (lambda: transferring().send(0, 0, [0, 3], [2, 5]), errors.HeadOutOfRange, f"heads, stop: {NUMBER} [0, 5), got 5"),
    (lambda: transferring().release(1), errors.ExportNotFound, "unknown export 1 (never created, or already released)"),
    (lambda: transferring().begin(9), errors.OutOfBlocks, "out of blocks: 6 needed, 2 free"),
    (
        lambda: kvref.TransferConfig(8, 1, 4, 2, head_ranks=3),
        errors.ConfigError,
        "head_ranks: expected a divisor of num_kv_heads 4, got 3",
    ),
    (lambda: drafting().accept(0, 2), errors.PositionOutOfRange, f"node: {NUMBER} [0, 2), got 2"),
    (
        lambda: drafting().draft(0, *2 * [np.ones((1, 1, 2), np.float32)], [2]),
        errors.PositionOutOfRange,
        f"parent: {NUMBER} [-1, 2), got 2",
    ),
    (
        lambda: drafting().draft(0, *2 * [np.ones((1, 1, 2), np.float32)], []),
        errors.ShapeMismatch,
        "parents: expected 1 parents, got 0",
    ),
    (
        lambda: drafting().attend(0, [0], np.ones((2, 1, 2), np.float32)),
        errors.ShapeMismatch,
        "nodes: expected 2 nodes, got 1",
    ),
    (
        lambda: drafting().fork(0),
        errors.InUse,
        "fork: the tree of sequence 0 is open, with 2 nodes: accept or reject it first",
    ),
    (
        lambda: drafting().draft(0, *2 * [np.ones((1, 1, 2), np.float32)], [0]),
        errors.OutOfBlocks,
        "out of blocks: 1 needed, 0 free",
    ),
    (lambda: sharded().heads(4), errors.RankOutOfRange, f"rank: {NUMBER} [0, 4), got 4"),
    (lambda: sharded(lost=1).positions(1), errors.RankLost, "rank 1 is lost"),
    (lambda: sharded(lost=1).read(), errors.RankLost, "read: ranks [1] of 4 are lost"),
    (
        lambda: kvref.ShardedConfig(4, 1, 2, 2, head_ranks=6),
        errors.ConfigError,
        "head_ranks: expected a divisor or a multiple of 4, got 6",
    ),
    (
        lambda: recurrent().truncate(0, 4),
        errors.NotTruncatable,
        "cannot truncate to 4: there is no checkpoint of this length, and no draft ended there",
    ),
    (lambda: recurrent().truncate(0, 6), errors.PositionOutOfRange, f"length: {NUMBER} [0, 6), got 6"),
    (lambda: recurrent().fork(0), errors.OutOfBlocks, "out of blocks: 1 needed, 0 of 2 free"),
    (lambda: recurrent().begin([0]), errors.OutOfBlocks, "out of blocks: 1 needed, 0 free"),
    (lambda: recurrent().reset(), errors.InUse, "cannot reset: live sequences: 1"),
    (lambda: recurrent().read_matrix(0, 1), errors.LayerOutOfRange, f"layer: {NUMBER} [0, 1), got 1"),
    (
        lambda: recurrent().append(0, *(np.ones((1, 1, 1, width), np.float32) for width in (1, 2, 1, 2))),
        errors.ShapeMismatch,
        "keys: expected shape [1, 1, 1, 1], got [1, 1, 1, 2]",
    ),
    (
        lambda: recurrent().append_batch([0], [2], *(np.ones((1, 1, 1, 1, width), np.float32) for width in (1, 1, 1, 2))),
        errors.PositionOutOfRange,
        f"count: {NUMBER} [0, 2), got 2",
    ),
    (
        lambda: recurrent().append(0, *(np.full((1, 1, 1, width), np.nan, np.float32) for width in (1, 1, 1, 2))),
        errors.NonFinite,
        "tokens: expected finite values, got a NaN or an infinity",
    ),
    (lambda: recurrent().save(0, heads=[0, 2]), errors.HeadOutOfRange, f"heads, stop: {NUMBER} [0, 2), got 2"),
    (
        lambda: load_parts(2, {"layers": [0, 1]}, {"layers": [1, 2]}),
        errors.ConfigError,
        "load: expected a part of a state at length 3, like the earlier parts, got one of a state at length 2",
    ),
    (
        lambda: load_parts(3, {"layers": [0, 1]}, {"heads": [0, 1]}),
        errors.ConfigError,
        "load: expected a part that does not overlap the earlier parts, got layers [0, 2), heads [0, 1)",
    ),
    (lambda: recurrent().commit(0, range(6)), errors.PositionOutOfRange, f"len(tokens): {NUMBER} [0, 6), got 6"),
    (
        lambda: recurrent().commit(0, [1]),
        errors.TokenMismatch,
        "token at position 0: 1 differs from the committed token 0",
    ),
    (
        lambda: recurrent(matrix_dtype="int8"),
        errors.ConfigError,
        "matrix_dtype: expected one of float32, float16, bfloat16, got 'int8'",
    ),
    (lambda: channels(65), errors.CapacityExceeded, "cache full: 65 tokens needed, max_tokens is 64"),
    (lambda: channels(residual=40), errors.ConfigError, "residual: expected a multiple of 32, got 40"),
    (
        lambda: channels(head_dim=48),
        errors.ConfigError,
        "uint2_g32_float16 rows: expected a width that is a multiple of 32, got 48",
    ),
    (lambda: channels().read([64]), errors.PositionOutOfRange, f"position: {NUMBER} [0, 64), got 64"),
    (
        lambda: channels().truncate(63),
        errors.NotTruncatable,
        "cannot truncate to 63: keys before position 64 are quantized in groups (only 0 is possible)",
    ),
    (
        lambda: channels().attend(np.ones((1, 1, 31), np.float32)),
        errors.ShapeMismatch,
        "query: expected shape [num_queries, num_query_heads, 32], got [1, 1, 31]",
    ),
    (
        lambda: channels(0).append(*2 * [np.full((1, 1, 32), 7e4, np.float32)]),
        errors.NonFinite,
        "keys: expected magnitudes below 65520 in float32, got 70000",
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), WORDS)
def test_an_error_says_what_was_expected_and_what_came(call, kind, words):
    with pytest.raises(errors.KVRefError) as raised:
        call()
    assert (type(raised.value), str(raised.value)) == (kind, words)
