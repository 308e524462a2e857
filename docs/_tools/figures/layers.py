"""Figures of "Layers that differ" and "Latents", measured on kvref's own caches."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

from kvref import GroupedCache, GroupedConfig, LatentCache, LatentConfig
from kvref.latent import record_of

FREE, WINDOW, EVERYTHING = "#eef1f5", "#2f7fd1", "#b35c00"


def draw_blocks_of_groups() -> plt.Figure:
    """The owner of each block of one pool, after each token of a sequence. Two of three groups have a window of 8."""
    config = GroupedConfig(num_blocks=24, block_size=4, num_layers=3, num_groups=3, window=8, num_kv_heads=1, head_dim=1)
    cache, steps = GroupedCache(config), 40
    sequence, token = cache.create(), np.zeros((config.num_layers, 1, 1, 1), np.float32)
    whose = np.zeros((config.num_blocks, steps), int)
    for step in range(steps):
        cache.step(sequence, token, token)
        for layer in range(config.num_groups):
            held = [block for block in cache.block_table(sequence, layer) if block >= 0]
            whose[held, step] = 2 if layer == config.num_groups - 1 else 1
    used = int(whose.any(axis=1).sum())
    figure, axes = plt.subplots(figsize=(7.4, 3.6))
    extent = (0.5, steps + 0.5, used - 0.5, -0.5)
    axes.imshow(whose[:used], cmap=ListedColormap([FREE, WINDOW, EVERYTHING]), vmin=0, vmax=2, aspect="auto", extent=extent)
    axes.grid(visible=False)
    axes.set(xlabel="tokens of the sequence", ylabel="block of the pool")
    names = {EVERYTHING: "layers that see all tokens", WINDOW: "layers with a window of 8", FREE: "free"}
    axes.legend(
        handles=[Patch(color=colour, label=name) for colour, name in names.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=3,
    )
    figure.tight_layout()
    return figure


def draw_latent_bytes() -> plt.Figure:
    """Bytes per token and layer with 128 heads, with 8, and with a latent; and the bytes of one packed record."""
    plain, packed = (LatentConfig(max_tokens=1, dtype=dtype) for dtype in ("bfloat16", "packed"))
    ways = {"128 heads, keys and values": 128 * (128 + 64 + 128) * 2, "8 heads (GQA)": 2 * 8 * 128 * 2}
    for name, config in {"a latent, bfloat16": plain, "a latent, packed": packed}.items():
        cache = LatentCache(config)
        cache.append(np.ones((1, config.rank), np.float32), np.ones((1, config.rope_dim), np.float32))
        ways[name] = cache.num_bytes
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.4, 3.6), height_ratios=(4, 1))
    bars = above.barh(list(ways), list(ways.values()), color=[EVERYTHING, EVERYTHING, WINDOW, WINDOW], height=0.6)
    above.bar_label(bars, [f" {number:,}" for number in ways.values()])
    above.set(xscale="log", xlim=(100, 400_000), xlabel="bytes per token and layer")
    above.invert_yaxis()
    fields = record_of(packed).fields
    assert fields is not None
    names = {"codes": "512 codes, E4M3", "scales": "4\nscales", "numbers": "rope part,\n64 bfloat16"}
    for number, (name, (field, start, *_)) in enumerate(fields.items()):
        colour = ["#8fbbe8", WINDOW, "#f0c9a0"][number]
        below.add_patch(Rectangle((start, 0), field.itemsize, 1, facecolor=colour, edgecolor="white"))
        # The scales are too narrow for their name.
        where = (start + field.itemsize / 2, 0.5) if name != "scales" else (start + field.itemsize / 2, 1.55)
        below.text(*where, names[name], ha="center", va="center", fontsize=9)
    below.set(xlim=(0, record_of(packed).itemsize), ylim=(0, 1), yticks=[], xticks=[0, 512, 528, 656], xlabel="byte of a record")
    below.get_xticklabels()[1].set_ha("right")
    below.get_xticklabels()[2].set_ha("left")
    below.grid(visible=False)
    below.spines[["left", "bottom"]].set_visible(False)
    figure.tight_layout()
    return figure
