"""The figures of the course "How a KV cache works": `_static/figures/*.svg`. Each function `draw_NAME` draws one figure."""

import io
import re
from collections.abc import Callable, Iterator

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from figures import formats, layers, memory, quantization, sharing, windows
from figures.style import STYLE

DRAWN = (
    memory.draw_computed_keys, memory.draw_contiguous_capacity, memory.draw_fragmentation, memory.draw_memory_by_context,
    memory.draw_buffer_sizes, quantization.draw_representable_values, quantization.draw_quantization_errors,
    quantization.draw_tail_length_errors, formats.draw_format_costs, sharing.draw_blocks_of_forks, sharing.draw_removal_errors,
    sharing.draw_prefix_hit_rate, windows.draw_window_masks, layers.draw_blocks_of_groups, layers.draw_latent_bytes,
)  # fmt: skip
FIGURES: dict[str, Callable[[], plt.Figure]] = {draw.__name__.removeprefix("draw_").replace("_", "-"): draw for draw in DRAWN}


def render_figures() -> Iterator[tuple[str, str]]:
    """The name and SVG of each figure. Coordinates are rounded, so that the files do not depend on the last bit of a sum."""
    with plt.rc_context(STYLE):
        for name, draw in FIGURES.items():
            figure, file = draw(), io.StringIO()
            figure.savefig(file, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
            plt.close(figure)
            yield name, re.sub(r"(?<!scale\()\b\d+\.\d{3,}\b", lambda number: f"{float(number[0]):.2f}", file.getvalue())
