"""The figures of the course "How a KV cache works", measured on kvref's own caches and formats: _static/pictures/*.svg."""

import io
import re
from collections.abc import Callable, Iterator

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

import kvref
import pictures_layers
import pictures_sharing
import pictures_windows
import stored_formats
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
from kvref.attention import attention
from kvref.buffers import SIZE_CLASSES
from kvref.formats import FORMATS

COLOURS = {
    "contiguous": "#2f7fd1", "paged": "#b35c00", "pooled": "#555555", "tiered": "#4b49c4", "int8": "#2c8a4b",
    "float8_e4m3fn": "#a03a8c", "float8_e5m2": "#6b5d00", "q4": "#b3261e", "q8": "#0f7c86",
}  # fmt: skip
NAMES = {"int8": "INT8", "float8_e4m3fn": "FP8 E4M3", "float8_e5m2": "FP8 E5M2", "q4": "Q4", "q8": "Q8"}
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "svg.hashsalt": "kvref", "figure.dpi": 130}  # fmt: skip


def drawn() -> Iterator[tuple[str, str]]:
    """The name and SVG of each figure. Coordinates are rounded, so that the files do not depend on the last bit of a sum."""
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure, file = draw(), io.StringIO()
            figure.savefig(file, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
            plt.close(figure)
            yield name, re.sub(r"(?<!scale\()\b\d+\.\d{3,}\b", lambda number: f"{float(number[0]):.2f}", file.getvalue())


def without() -> plt.Figure:
    """Keys computed until the n-th token is generated, with a prompt of 100 tokens."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    prompt, generated = 100, np.arange(1, 1001)
    again = np.cumsum(prompt + generated - 1)
    axes.plot(generated, again, color=COLOURS["q4"], label="all keys again, at every token")
    axes.plot(generated, prompt + generated - 1, color=COLOURS["contiguous"], label="every key once, then cached")
    axes.set(yscale="log", xlabel="tokens generated after a prompt of 100", ylabel="keys computed, per layer and head")
    axes.legend()
    return figure


def capacity() -> plt.Figure:
    """The length and the capacity of a contiguous cache, after each token."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    cache = ContiguousCache(ContiguousConfig(num_kv_heads=1, head_dim=1, initial_capacity=256, max_seq_len=3000))
    lengths, taken = np.arange(1, 3001), list[int]()
    for _ in lengths:
        cache.append(np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32))
        taken.append(cache.capacity)
    axes.fill_between(lengths, lengths, taken, color=COLOURS["contiguous"], alpha=0.2, label="allocated and empty", linewidth=0)
    axes.plot(lengths, taken, color=COLOURS["contiguous"], drawstyle="steps-mid", label="capacity")
    axes.plot(lengths, lengths, color="#333333", label="tokens stored")
    axes.set(xlabel="tokens", ylabel="slots")
    axes.legend()
    return figure


def sequence_lengths(count: int = 200, longest: int = 2048) -> np.ndarray:
    """Lengths of requests to a busy server: most are short, some are long. int64 [count]."""
    drawn = np.random.default_rng(5).lognormal(np.log(300), 0.9, size=count)
    return np.clip(drawn, 16, longest).astype(np.int64)


def fragmentation() -> plt.Figure:
    """Slots allocated for 200 sequences, and slots that contain a token."""
    lengths, longest = sequence_lengths(), 2048
    taken = {"one buffer of 2048 each": len(lengths) * longest, "buffers that double from 256": 0}
    for length in lengths:
        config = ContiguousConfig(num_kv_heads=1, head_dim=1, initial_capacity=256, max_seq_len=longest)
        cache, tokens = ContiguousCache(config), np.zeros((1, 1, int(length), 1), np.float32)
        cache.append(tokens, tokens)
        taken["buffers that double from 256"] += cache.capacity
    for size in (128, 16):
        blocks = PagedCache(
            PagedConfig(num_blocks=len(lengths) * longest // size, num_layers=1, num_kv_heads=1, head_dim=1, block_size=size)
        )
        for length in lengths:
            blocks.ensure_capacity(blocks.create(), int(length))
        taken[f"blocks of {size}"] = blocks.pool.num_used * size
    held = int(lengths.sum())
    figure, axes = plt.subplots(figsize=(7, 2.9))
    axes.grid(axis="y", visible=False)
    for row, (name, slots) in enumerate(reversed(taken.items())):
        colour = COLOURS["paged" if "blocks" in name else "contiguous"]
        axes.barh(row, held, color=colour)
        axes.barh(row, slots - held, left=held, color=colour, alpha=0.25)
        axes.text(slots, row, f"  {held / slots:.0%} used", va="center")
    axes.set(yticks=range(len(taken)), yticklabels=list(reversed(taken)), xlabel="slots, one layer (dark: with a token)",
        xlim=(0, 1.25 * max(taken.values())))  # fmt: skip
    return figure


HEADS, HEAD_DIM, LAYERS = 8, 128, 32  # of a model with 8 billion parameters


def memory() -> plt.Figure:
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
    said = {
        "pooled": "pooled, float32, blocks of 16",
        "contiguous": "contiguous, float16, doubling",
        "paged": "paged, float16, blocks of 16",
        "int8": "quantized, INT8",
        "tiered": "tiered, 256 in float16, rest in Q4",
    }
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, taken in lines.items():
        axes.plot(contexts, LAYERS * taken / 2**30, color=COLOURS[name], label=said[name])
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


def codes() -> plt.Figure:
    """Every value that a row with largest element 1 can be read back as (Q4: a row that spans -1 to 1)."""
    figure, panels = plt.subplots(2, 1, figsize=(7, 4.6))
    names = ("int8", "float8_e4m3fn", "float8_e5m2", "q4")
    for axes, (low, high) in zip(panels, ((-1.02, 1.02), (-0.002, 0.062)), strict=True):
        for row, name in enumerate(reversed(names)):
            values = representable(name)
            seen = values[(values >= low) & (values <= high)]
            axes.vlines(seen, row - 0.32, row + 0.32, color=COLOURS[name], linewidth=0.5)
        axes.set(
            yticks=range(len(names)), yticklabels=[f"{NAMES[n]}" for n in reversed(names)], xlim=(low, high), ylim=(-0.6, 3.6)
        )
        axes.grid(visible=False)
    panels[0].set_title("the whole row", fontsize=11, loc="left")
    panels[1].set_title("near zero", fontsize=11, loc="left")
    figure.tight_layout()
    return figure


def representable(name: str) -> np.ndarray:
    """The values of all codes of a format, in a row that spans -1 to 1: float32, in order."""
    format = FORMATS[name]
    ends = format.quantize(np.array([[-1.0, 1.0]], np.float32))
    if name == "q4":
        every = np.arange(256, dtype=np.uint8)[None]  # two codes per byte
    elif name == "int8":
        every = np.arange(-127, 128, dtype=np.int8)[None]
    else:
        every = np.arange(256, dtype=np.uint8)[None]
    width = every.shape[1] * (2 if name == "q4" else 1)
    values = np.unique(np.asarray(format.dequantize(kvref.Quantized(every, ends.scale, ends.zero), width)))
    return values[np.abs(values) <= 1]  # no NaN and no infinity


def errors() -> plt.Figure:
    """|read - written| against |written|, for 40,000 numbers per format, with the derived bound, which is not fitted."""
    figure, panels = plt.subplots(2, 2, figsize=(8, 5.6), sharex=True, sharey=True)
    rng = np.random.default_rng(3)
    rows = (10 ** rng.uniform(-4, 0, size=(400, 100)) * rng.choice([-1, 1], size=(400, 100))).astype(np.float32)
    rows[:, 0], rows[:, 1] = 1, -1  # every row spans -1 to 1, so that all have the same scale
    for axes, name in zip(panels.flat, ("int8", "float8_e4m3fn", "float8_e5m2", "q4"), strict=True):
        format = FORMATS[name]
        stored = format.quantize(rows)
        error = np.abs(np.asarray(format.dequantize(stored, rows.shape[1]), np.float64) - rows)
        bound, size = np.asarray(format.bound(rows, stored)), np.abs(rows)
        assert (error <= bound).all()
        axes.plot(size.ravel(), np.maximum(error, 1e-9).ravel(), ",", color=COLOURS[name], rasterized=True)
        order = np.argsort(size, axis=None)
        axes.plot(size.ravel()[order], bound.ravel()[order], color="#111111", linewidth=1.3, label="bound")
        axes.set(xscale="log", yscale="log", ylim=(1e-7, 0.2), title=NAMES[name])
    panels[0, 0].legend(loc="lower right")
    figure.supxlabel("|value written|, in a row whose largest number is 1", fontsize=11)
    figure.supylabel("|value read - value written|", fontsize=11)
    figure.tight_layout()
    return figure


TOKENS, WIDTH = 1024, 64
OUTLIERS = {5: 9.0, 20: -7.0, 33: 12.0, 58: -8.0}  # channels of a key that are far from zero in every token, and their means


def keys_like(kind: str, rng: np.random.Generator) -> np.ndarray:
    """float32 [TOKENS, 1, WIDTH]: "gaussian", or "real", which has a few outlier channels, as keys of models do."""
    keys = rng.normal(size=(TOKENS, 1, WIDTH))
    if kind == "real":
        for channel, centre in OUTLIERS.items():
            keys[..., channel] = centre + 1.5 * keys[..., channel]
    return keys.astype(np.float32)


def queries_for(keys: np.ndarray, rng: np.random.Generator, count: int = 200) -> np.ndarray:
    """float32 [count, 1, WIDTH]: each looks for one token, whose distance is log-uniform (1 to 2 is as likely as 512 to 1024)."""
    centred = keys - keys.mean(axis=0)
    back = np.floor(TOKENS ** rng.uniform(0, 1, size=count)).astype(int)
    return (centred[TOKENS - back] + 0.5 * rng.normal(size=(count, 1, WIDTH))).astype(np.float32)


def tail() -> plt.Figure:
    """Error of attention against tail length: mean of |out - exact| / |exact| over the queries."""
    lengths = [0, 4, 16, 32, 64, 128, 256, 512, 768, 1024]
    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, line in (("real", "-"), ("gaussian", "--")):
        rng = np.random.default_rng(11)
        keys, values = keys_like(kind, rng), rng.normal(size=(TOKENS, 1, WIDTH)).astype(np.float32)
        query = queries_for(keys, rng)
        exact = np.asarray(attention(query, keys, values), np.float64)
        for store in ("q4", "q8"):
            measured = []
            for length in lengths:
                sizes = {"num_kv_heads": 1, "head_dim": WIDTH, "max_tokens": TOKENS, "tail_length": length}
                cache = TieredCache(TieredConfig(**sizes, tail_dtype="float16", store_format=store))
                cache.append(keys, values)
                out = np.asarray(cache.attend(query), np.float64)
                error = (np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).mean()
                measured.append(float(f"{error:.2e}"))  # the last bits of a product differ from run to run
            said = "with outlier channels" if kind == "real" else "Gaussian"
            axes.plot(
                lengths, measured, line, marker="o", markersize=3, color=COLOURS[store], label=f"{NAMES[store]}, keys {said}"
            )
    axes.set(
        xscale="symlog", yscale="log", xlabel="tail_length, of 1024 tokens", ylabel="relative error of attention", xlim=(0, 1100)
    )
    axes.set_xticks(lengths[:1] + lengths[1:8] + [1024], [str(n) for n in lengths[:1] + lengths[1:8] + [1024]])
    axes.legend()
    return figure


def classes() -> plt.Figure:
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


OTHERS = [draw for module in (pictures_sharing, pictures_windows, pictures_layers, stored_formats) for draw in module.PICTURES]
DRAWN = (without, capacity, fragmentation, memory, codes, errors, tail, classes, *OTHERS)
PICTURES: dict[str, Callable[[], plt.Figure]] = {draw.__name__: draw for draw in DRAWN}
