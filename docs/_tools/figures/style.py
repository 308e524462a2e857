"""Colours of caches and formats, and the style of all figures."""

COLOURS = {
    "contiguous": "#2f7fd1", "paged": "#b35c00", "pooled": "#555555", "tiered": "#4b49c4", "int8": "#2c8a4b",
    "float8_e4m3fn": "#a03a8c", "float8_e5m2": "#6b5d00", "q4": "#b3261e", "q8": "#0f7c86",
}  # fmt: skip
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "legend.frameon": False, "svg.hashsalt": "kvref", "figure.dpi": 130}  # fmt: skip
