"""The figure of "Windows", computed by kvref's Sight."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from kvref import Sight

OUTSIDE, SEEN, OWN = "#eef1f5", "#8fbbe8", "#2f7fd1"
MASKS = {"a window of 4": Sight(window=4), "with 2 sink tokens": Sight(window=4, sinks=2), "chunks of 4": Sight(chunk=4)}
TOKENS = 12


def draw_window_masks() -> plt.Figure:
    """Which tokens each query sees: one line per query, one column per token."""
    figure, panels = plt.subplots(1, len(MASKS), figsize=(8, 3.1), sharey=True)
    query, token = np.ogrid[:TOKENS, :TOKENS]
    for axes, (name, sight) in zip(panels, MASKS.items(), strict=True):
        seen = sight.sees(query, token).astype(int) + (query == token)  # a query's own token is darker
        axes.imshow(seen, cmap=ListedColormap([OUTSIDE, SEEN, OWN]), vmin=0, vmax=2)
        axes.set_xticks(np.arange(TOKENS + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(TOKENS + 1) - 0.5, minor=True)
        axes.grid(which="major", visible=False)
        axes.grid(which="minor", color="white", linewidth=1.5, alpha=1)
        axes.tick_params(which="minor", length=0)
        axes.set(xticks=range(0, TOKENS, 2), yticks=range(0, TOKENS, 2), xlabel="token", title=name)
    panels[0].set_ylabel("query")
    figure.tight_layout()
    return figure
