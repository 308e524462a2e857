"""Figures of computed keys, allocated slots and bytes, measured on kvref's own caches."""

import matplotlib.pyplot as plt
import numpy as np

import kvref
from figures.style import COLOURS
from kvref import (
    ContiguousCache,
    ContiguousConfig,
    PagedCache,
    PagedConfig,
    PooledCache,
    PooledConfig,
    QuantizedCache,
    QuantizedConfig,
    TieredCache,
    TieredConfig,
)
from kvref.buffers import SIZE_CLASSES


def draw_computed_keys() -> plt.Figure:
    """Keys computed until the n-th token is generated, with a prompt of 100 tokens."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    prompt, generated = 100, np.arange(1, 1001)
    again = np.cumsum(prompt + generated - 1)
    axes.plot(generated, again, color=COLOURS["q4"], label="all keys again, at every token")
    axes.plot(generated, prompt + generated - 1, color=COLOURS["contiguous"], label="every key once, then cached")
    axes.set(yscale="log", xlabel="tokens generated after a prompt of 100", ylabel="keys computed, per layer and head")
    axes.legend()
    return figure


def draw_contiguous_capacity() -> plt.Figure:
    """The length and the capacity of a contiguous cache, after each token."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    cache = ContiguousCache(ContiguousConfig(num_kv_heads=1, head_dim=1, initial_capacity=256, max_seq_len=3000))
    lengths, capacities = np.arange(1, 3001), list[int]()
    for _ in lengths:
        cache.append(np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
        capacities.append(cache.capacity)
    axes.fill_between(
        lengths, lengths, capacities, color=COLOURS["contiguous"], alpha=0.2, label="allocated and empty", linewidth=0
    )
    axes.plot(lengths, capacities, color=COLOURS["contiguous"], drawstyle="steps-mid", label="capacity")
    axes.plot(lengths, lengths, color="#333333", label="tokens stored")
    axes.set(xlabel="tokens", ylabel="slots")
    axes.legend()
    return figure


def sequence_lengths(count: int = 200, longest: int = 2048) -> np.ndarray:
    """Lengths of requests to a busy server: most are short, some are long. int64 [count]."""
    drawn = np.random.default_rng(5).lognormal(np.log(300), 0.9, size=count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def draw_fragmentation() -> plt.Figure:
    """Slots allocated for 200 sequences, and slots that contain a token."""
    lengths, longest = sequence_lengths(), 2048
    allocated = {"one buffer of 2048 each": len(lengths) * longest, "buffers that double from 256": 0}
    for length in lengths:
        config = ContiguousConfig(num_kv_heads=1, head_dim=1, initial_capacity=256, max_seq_len=longest)
        cache, tokens = ContiguousCache(config), np.zeros((1, 1, int(length), 1), np.float32)
        cache.append(tokens, tokens)
        allocated["buffers that double from 256"] += cache.capacity
    for size in (128, 16):
        blocks = PagedCache(
            PagedConfig(num_blocks=len(lengths) * longest // size, num_layers=1, num_kv_heads=1, head_dim=1, block_size=size)
        )
        for length in lengths:
            blocks.ensure_capacity(blocks.create(), int(length))
        allocated[f"blocks of {size}"] = blocks.pool.num_used * size
    held = int(lengths.sum())
    figure, axes = plt.subplots(figsize=(7, 2.9))
    axes.grid(axis="y", visible=False)
    for row, (name, slots) in enumerate(reversed(allocated.items())):
        colour = COLOURS["paged" if "blocks" in name else "contiguous"]
        axes.barh(row, held, color=colour)
        axes.barh(row, slots - held, left=held, color=colour, alpha=0.25)
        axes.text(slots, row, f"  {held / slots:.0%} used", va="center")
    axes.set(yticks=range(len(allocated)), yticklabels=list(reversed(allocated)), xlabel="slots, one layer (dark: with a token)",
        xlim=(0, 1.25 * max(allocated.values())))  # fmt: skip
    return figure


HEADS, HEAD_DIM, LAYERS = 8, 128, 32  # of a model with 8 billion parameters


def draw_memory_by_context() -> plt.Figure:
    """GiB against tokens of one sequence, as each cache reports them. One layer is measured and counted 32 times."""
    doublings = 256 * 2 ** np.arange(8)
    contexts = np.unique([*np.geomspace(64, 32768, 40).astype(int), *doublings, *(doublings[:-1] + 1)])
    token = 2 * HEADS * HEAD_DIM  # numbers, keys and values
    lines = dict.fromkeys(("pooled", "contiguous", "paged", "int8", "tiered"), np.zeros(0))
    for context in contexts:
        one = {"num_kv_heads": 1, "head_dim": 1}
        contiguous = ContiguousCache(ContiguousConfig(**one, initial_capacity=256, max_seq_len=32768, dtype="float16"))
        contiguous.append(*[np.zeros((1, 1, context, 1), np.float32)] * 2)
        paged = PagedCache(PagedConfig(**one, num_blocks=2048, num_layers=1, dtype="float16"))
        paged.ensure_capacity(paged.create(), int(context))
        quantized = QuantizedCache(QuantizedConfig(1, int(context), HEADS, HEAD_DIM, "int8"))
        lines["contiguous"] = np.append(lines["contiguous"], contiguous.capacity * token * 2)
        lines["paged"] = np.append(lines["paged"], paged.pool.num_used * 16 * token * 2)
        lines["int8"] = np.append(lines["int8"], quantized.memory_bytes)
        lines["pooled"] = np.append(lines["pooled"], -(-context // 16) * _pooled_block())
        lines["tiered"] = np.append(lines["tiered"], _tiered_bytes(int(context)))
    labels = {
        "pooled": "pooled, float32, blocks of 16",
        "contiguous": "contiguous, float16, doubling",
        "paged": "paged, float16, blocks of 16",
        "int8": "quantized, INT8",
        "tiered": "tiered, 256 in float16, rest in Q4",
    }
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, num_bytes in lines.items():
        axes.plot(contexts, LAYERS * num_bytes / 2**30, color=COLOURS[name], label=labels[name])
    axes.set(xlabel="tokens of context, one sequence", ylabel=f"GiB ({LAYERS} layers, {HEADS} kv heads of {HEAD_DIM})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def _tiered_bytes(context: int) -> int:
    """Bytes of one layer. The bytes of a token do not depend on its values, so 300 tokens show them for each tier."""
    cache = TieredCache(TieredConfig(num_kv_heads=HEADS, head_dim=HEAD_DIM, max_tokens=32768, tail_length=256))
    cache.append(*[np.zeros((300, HEADS, HEAD_DIM), np.float32)] * 2)
    stats = cache.stats()
    tail, store = stats.tail_bytes // stats.tail_tokens, stats.store_bytes // stats.store_tokens
    return min(context, 256) * tail + max(0, context - 256) * store


def _pooled_block() -> int:
    """Bytes of one layer's block of 16 tokens, keys and values."""
    cache = PooledCache(PooledConfig(num_kv_heads=HEADS, head_dim=HEAD_DIM, tokens_per_block=16))
    cache.append(*[np.zeros((1, HEADS, HEAD_DIM), np.float32)] * 2)
    return cache.stats().bytes


def draw_buffer_sizes() -> plt.Figure:
    """The size of the buffer that a request gets: the smallest of five sizes that fits."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    wanted = np.geomspace(64, SIZE_CLASSES[-1], 600).astype(int)
    pool = kvref.BufferPool()
    given = []
    for num_bytes in wanted:
        with pool.acquire(int(num_bytes)) as buffer:
            given.append(buffer.size)
    axes.plot(wanted / 1024, np.array(given) / 1024, color=COLOURS["tiered"], drawstyle="steps-post", label="buffer")
    axes.plot(wanted / 1024, wanted / 1024, color="#333333", label="requested")
    axes.set(xscale="log", yscale="log", xlabel="KiB requested", ylabel="KiB")
    axes.set_xticks([size // 1024 for size in SIZE_CLASSES], [str(size // 1024) for size in SIZE_CLASSES])
    axes.set_yticks([size // 1024 for size in SIZE_CLASSES], [str(size // 1024) for size in SIZE_CLASSES])
    axes.minorticks_off()
    axes.legend()
    return figure
