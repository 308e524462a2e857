"""Figures of quantization errors: of formats, and of attention over a tiered cache."""

import matplotlib.pyplot as plt
import numpy as np

import kvref
from figures.style import COLOURS
from kvref import TieredCache, TieredConfig
from kvref.attention import attention
from kvref.formats import FORMATS

NAMES = {"int8": "INT8", "float8_e4m3fn": "FP8 E4M3", "float8_e5m2": "FP8 E5M2", "q4": "Q4", "q8": "Q8"}


def draw_representable_values() -> plt.Figure:
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


def draw_quantization_errors() -> plt.Figure:
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
    """float32 [TOKENS, 1, WIDTH]: "gaussian", or "outliers", which has a few outlier channels, as keys of models do."""
    keys = rng.normal(size=(TOKENS, 1, WIDTH))
    if kind == "outliers":
        for channel, centre in OUTLIERS.items():
            keys[..., channel] = centre + 1.5 * keys[..., channel]
    return keys.astype(np.float32)


def queries_for(keys: np.ndarray, rng: np.random.Generator, count: int = 200) -> np.ndarray:
    """float32 [count, 1, WIDTH]: each looks for one token, whose distance is log-uniform (1 to 2 is as likely as 512 to 1024)."""
    centred = keys - keys.mean(axis=0)
    back = np.floor(TOKENS ** rng.uniform(0, 1, size=count)).astype(int)
    return (centred[TOKENS - back] + 0.5 * rng.normal(size=(count, 1, WIDTH))).astype(np.float32)


def draw_tail_length_errors() -> plt.Figure:
    """Error of attention against tail length: mean of |out - exact| / |exact| over the queries."""
    lengths = [0, 4, 16, 32, 64, 128, 256, 512, 768, 1024]
    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, line in (("outliers", "-"), ("gaussian", "--")):
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
            keys_label = "with outlier channels" if kind == "outliers" else "Gaussian"
            axes.plot(
                lengths,
                measured,
                line,
                marker="o",
                markersize=3,
                color=COLOURS[store],
                label=f"{NAMES[store]}, keys {keys_label}",
            )
    axes.set(
        xscale="symlog", yscale="log", xlabel="tail_length, of 1024 tokens", ylabel="relative error of attention", xlim=(0, 1100)
    )
    axes.set_xticks(lengths[:1] + lengths[1:8] + [1024], [str(n) for n in lengths[:1] + lengths[1:8] + [1024]])
    axes.legend()
    return figure
