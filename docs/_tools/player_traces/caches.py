"""Calls to each kind of cache, and to an engine with a canary. Sharing and windows have files of their own."""

import numpy as np

from kvref_conformance.testlib.assertions import raises
from player_traces.recorder import TraceRecorder


def record_decoding(trace: TraceRecorder) -> None:
    """Prefill and decode: every key is computed once"""
    trace.note("An empty cache for one sequence and one layer.")
    cache = trace.new("contiguous", batch_size=1, num_kv_heads=1, head_dim=2, initial_capacity=8, max_seq_len=8, dtype="float32")
    trace.note("Prefill: the prompt is four tokens. Their keys and values are computed in one pass and stored.")
    cache.append(trace.tokens(1, 1, 4, 2), trace.tokens(1, 1, 4, 2))
    trace.note("The query of the last prompt token attends over all four tokens. The result is the first generated token.")
    cache.read()
    for word in ("fifth", "sixth", "seventh"):
        trace.note(f"Decode: one token is appended. One key and one value are computed for it, the {word} of the cache.")
        cache.append(trace.tokens(1, 1, 1, 2), trace.tokens(1, 1, 1, 2))
        trace.note("Its query attends over all stored tokens. No earlier key is computed again.")
        cache.read()


def record_contiguous(trace: TraceRecorder) -> None:
    """One buffer that doubles"""
    trace.note("A buffer with room for two tokens, which may grow to eight.")
    cache = trace.new("contiguous", batch_size=1, num_kv_heads=1, head_dim=2, initial_capacity=2, max_seq_len=8, dtype="float32")
    trace.note("Two tokens fill it. Nothing is copied.")
    cache.append(trace.tokens(1, 1, 2, 2), trace.tokens(1, 1, 2, 2))
    trace.note("The third does not fit: the cache allocates a buffer twice as large and copies the two tokens into it.")
    cache.append(trace.tokens(1, 1, 1, 2), trace.tokens(1, 1, 1, 2))
    trace.note("The fourth fits into the new buffer.")
    cache.append(trace.tokens(1, 1, 1, 2), trace.tokens(1, 1, 1, 2))
    trace.note(
        "Three more: the buffer doubles again, and four tokens are copied. So far, six tokens were copied for seven appended."
    )
    cache.append(trace.tokens(1, 1, 3, 2), trace.tokens(1, 1, 3, 2))
    trace.note("The eighth token fills the last slot. This has to work.")
    cache.append(trace.tokens(1, 1, 1, 2), trace.tokens(1, 1, 1, 2))
    trace.note("A ninth token raises and changes nothing (CONTIG-06).")
    with raises("CapacityExceeded"):
        cache.append(trace.tokens(1, 1, 1, 2), trace.tokens(1, 1, 1, 2))
    trace.note("For a new sequence, reset sets the length to 0 and keeps the memory. The old numbers are still after the length.")
    cache.reset()
    trace.note("A read now returns no tokens: the old numbers must not be readable (CONTIG-03, LAW-05).")
    cache.read()
    trace.note("The next sequence overwrites them.")
    cache.append(trace.tokens(1, 1, 3, 2), trace.tokens(1, 1, 3, 2))


def record_paged(trace: TraceRecorder) -> None:
    """Two sequences, six blocks, and a block handed on"""
    trace.note("A pool of six blocks of two tokens each, and one layer. All blocks are free.")
    cache = trace.new("paged", num_blocks=6, block_size=2, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")
    trace.note("Sequence A is created. It has no block yet: blocks are allocated when tokens are written.")
    a = cache.create()
    trace.note("A's prompt is three tokens. It needs two blocks, and the second one is half full.")
    cache.write(a, 0, 0, trace.tokens(3, 1, 2), trace.tokens(3, 1, 2))
    trace.note("The block table lists the blocks of A's tokens, in order. Attention needs nothing else to find the tokens.")
    cache.block_table(a, 0)
    trace.note("Sequence B is created.")
    b = cache.create()
    trace.note("B's prompt is two tokens: one block.")
    cache.write(b, 0, 0, trace.tokens(2, 1, 2), trace.tokens(2, 1, 2))
    cache.block_table(b, 0)
    trace.note("One step of a batch appends a token to A and to B. A's fits into its half-full block; B needs a new block.")
    cache.append([a, b], 0, trace.tokens(2, 1, 2), trace.tokens(2, 1, 2))
    cache.block_table(b, 0)
    trace.note(
        "Another step. Now A needs a third block, and gets one after B's blocks. Blocks of a sequence need not be adjacent."
    )
    cache.append([a, b], 0, trace.tokens(2, 1, 2), trace.tokens(2, 1, 2))
    cache.block_table(a, 0)
    trace.note("The slots of A's tokens: slot = block × block_size + offset (PAGED-06).")
    cache.slot_mapping(a, 0, 0, 5)
    trace.note("A is finished and dropped. Its three blocks are free again, but not erased: A's bits are still in them.")
    cache.drop(a)
    trace.note("Sequence C is created, and gets blocks that A had.")
    c = cache.create()
    cache.write(c, 0, 0, trace.tokens(3, 1, 2), trace.tokens(3, 1, 2))
    trace.note("A had these two blocks. Any order of allocation is right if no block has two owners.")
    cache.block_table(c, 0)
    trace.note("C has three tokens. The slot after them still contains a token of A. Reading it has to raise (PAGED-09, LAW-05).")
    with raises("PositionOutOfRange"):
        cache.read(c, 0, [3])
    trace.note("C requests room for nine tokens, three more blocks. Only two are free, so C gets none of them (PAGED-05).")
    with raises("OutOfBlocks"):
        cache.ensure_capacity(c, 9)
    trace.note("A read of C returns what was written to C, in order, wherever its blocks are.")
    cache.gather(c, 0)


def record_quantized(trace: TraceRecorder) -> None:
    """Rows become codes and a scale"""
    trace.note("Two layers with room for four tokens, in INT8: one byte per number, and one float32 scale per row.")
    cache = trace.new("quantized", num_layers=2, capacity=4, num_kv_heads=1, head_dim=4, format="int8")
    rows = np.array([[[1.0, -0.5, 0.25, 0.01]], [[100.0, -50.0, 25.0, 1.0]]], np.float32)
    trace.note("One call appends a token in every layer. Look at the numbers: the rows of layer 1 are a hundred times as large.")
    cache.append_step(rows, rows)
    trace.note(
        "Read back, 1 is exact: it is the largest number of its row, code 127. 0.01 became 0.00787, the nearest of 255 steps."
    )
    cache.read_token(0, 0)
    trace.note("Layer 1 has its own scale, a hundred times as large, so its codes are the same (QUANT-06, FMT-INT8-01).")
    cache.read_token(1, 0)
    large = np.array([[[1000.0, 0.0, 0.0, 1.0]], [[1.0, 2.0, 3.0, 4.0]]], np.float32)
    trace.note("A much larger row is appended. A scale that the first row determined would clip it.")
    cache.append_step(large, large)
    trace.note("With its own scale it is not clipped. Its 1 is lost: beside 1000, one step is 7.9 (FMT-LEVEL-03).")
    cache.read_token(0, 1)
    trace.note("The first token is read as before. It was quantized once and is not changed again (QUANT-05).")
    cache.read_token(0, 0)
    trace.note("Several tokens in one read, as attention uses them.")
    cache.read_tokens(0, [0, 1])


def record_tiered(trace: TraceRecorder) -> None:
    """Tail, warm tier, store, eviction"""
    trace.note(
        "At most ten tokens: the newest three exact (tail), three older ones in 8 bits (warm tier), the others in 4 (store)."
    )
    sizes = {"num_kv_heads": 1, "head_dim": 4, "max_tokens": 10, "tail_length": 3, "warm_length": 3, "migration_batch": 2}
    cache = trace.new("tiered", **sizes, tail_dtype="float32", warm_format="q8", store_format="q4")
    rng = np.random.default_rng(6)

    def random_tokens(count: int) -> np.ndarray:
        return rng.normal(size=(count, 1, 4)).round(2).astype(np.float32)

    trace.note("Three tokens fill the tail. They are stored exactly.")
    cache.append(random_tokens(3), random_tokens(3))
    cache.read()
    trace.note("One more. The oldest token migrates from the tail: it is quantized once, to 8 bits (TIER-02).")
    cache.append(random_tokens(1), random_tokens(1))
    trace.note("A read returns the oldest token first. Token 0 has a small error now, the others are exact. Compare its rows.")
    cache.read()
    trace.note("Three more: the warm tier is full, and token 0 migrates to the store, in 4 bits.")
    cache.append(random_tokens(3), random_tokens(3))
    cache.tier_of(0)
    trace.note("Three more: the cache is full, with ten tokens.")
    cache.append(random_tokens(3), random_tokens(3))
    trace.note(
        "Two more than it has room for: the two oldest are evicted. The others keep their positions: 2 is still 2 (TIER-07)."
    )
    cache.append(random_tokens(2), random_tokens(2))
    trace.note("The tier of an evicted token: the call has to raise.")
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    trace.note("A new policy: no warm tier. Its tokens migrate to the store at once (TIER-10).")
    cache.update_policy(warm_length=0)
    trace.note("The bytes that are stored in each tier (TIER-08).")
    cache.stats()


def record_pooled(trace: TraceRecorder) -> None:
    """Freed memory that is reused"""
    trace.note("A pool of buffers in five sizes. It keeps at most four free ones of each size.")
    pool = trace.new("buffers", max_buffers=4)
    trace.note("A cache that gets its memory from the pool: blocks of two tokens, at most four tokens.")
    cache = trace.new("pooled", num_kv_heads=1, head_dim=2, tokens_per_block=2, max_tokens=4, pool=pool)
    trace.note("Three tokens are two blocks, each with a buffer for keys and one for values: four new buffers of 1 KiB.")
    cache.append(trace.tokens(3, 1, 2), trace.tokens(3, 1, 2))
    trace.note("Four misses: the free list was empty.")
    pool.stats()
    trace.note("Two more tokens are one too many. The oldest block is evicted (POOL-03), and its two buffers return to the pool.")
    cache.append(trace.tokens(2, 1, 2), trace.tokens(2, 1, 2))
    cache.read()
    trace.note("Another user requests 100 bytes and gets a buffer that the cache had: a hit, without a system call.")
    buffer = pool.acquire(100)
    trace.note("It is empty for its next owner: the old keys cannot be read (LAW-05).")
    buffer.values()
    trace.note("The new owner writes its own values.")
    buffer.extend(trace.tokens(3))
    trace.note("The owner releases the buffer.")
    buffer.release()
    trace.note("A second release has no effect and is not counted (BUF-05). Otherwise the buffer would get two owners.")
    buffer.release()
    trace.note("A call on the released buffer raises.")
    with raises("BufferReleased"):
        buffer.extend(trace.tokens(1))
    trace.note("The cache releases all its buffers. The pool keeps four free ones and drops the others (BUF-04).")
    cache.clear()
    pool.stats()


def record_canary(trace: TraceRecorder) -> None:
    """A canary in an engine"""
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 64, "period": 12, "window": 0}
    trace.note("An engine runs a canary with a period of twelve tokens: its two layers attend 4 and 7 tokens back.")
    engine = trace.new("engine", **sizes, recalls=0, cache_tokens=256)
    first = engine.open()
    trace.note("The prompt is begin-of-text and twelve words, with the ids 4 to 15.")
    engine.extend(first, [1, *range(4, 16)])
    trace.note(
        "The model generates the words again. It finds each in the cache; a wrong word would show which entry was read instead."
    )
    engine.generate(first, 6)
    trace.note("A second session, with other words.")
    second = engine.open()
    engine.extend(second, [1, *range(104, 116)])
    trace.note("Both generate in the same steps, and each generates its own words (ENG-02, ENG-12).")
    engine.step([first, second])
    engine.step([second, first])
    trace.note("A fork of the second gets another word. The parent does not change (ENG-08).")
    fork = engine.fork(second)
    engine.extend(fork, [200])
    engine.generate(second, 2)
    engine.generate(fork, 2)
    trace.note("Three draft words are appended and truncated. Nothing remains of them (ENG-09).")
    engine.extend(first, [50, 51, 52])
    engine.truncate(first, 21)
    engine.generate(first, 3)
    trace.note("The second session is closed before the end of its text. The other sessions do not change (ENG-05).")
    engine.close(second)
    engine.generate(fork, 2)
