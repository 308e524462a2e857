"""The figure of all storage formats: bits per value, error, and times."""

import matplotlib.pyplot as plt

from generate_formats import TIMED, bits_per_value, listed_formats, measured_time, relative_error

KINDS = {
    "element": "cast", "head": "one scale per row", "token": "one scale per token", "group": "one scale per group",
    "given": "one given scale",
}  # fmt: skip
COLOURS = {"element": "#555555", "head": "#2c8a4b", "token": "#b3261e", "group": "#2f7fd1", "given": "#8a5a00"}


def _draw_range(axes: plt.Axes, y: int, colour: str, filled: float, hollow: float) -> None:
    axes.plot((filled, hollow), (y, y), color=colour, linewidth=1, alpha=0.5)
    axes.plot(filled, y, "o", color=colour, markersize=6)
    axes.plot(hollow, y, "o", color=colour, markersize=6, markerfacecolor="white")


def draw_format_costs() -> plt.Figure:
    """One line per format, by bits per value.

    Left: its error without and with outlier channels. Right: the times to store and read.
    """
    ordered = sorted(listed_formats(), key=lambda each: (bits_per_value(each), -relative_error(each.name, outliers=False)))
    ordered = [each for each in ordered if each.name != "float32"]
    figure, (axes, beside) = plt.subplots(1, 2, figsize=(10, 9), sharey=True, width_ratios=(3, 2))
    for y, format in enumerate(ordered):
        colour = COLOURS[format.granularity]
        _draw_range(axes, y, colour, relative_error(format.name, outliers=False), relative_error(format.name, outliers=True))
        quantize, dequantize = (measured_time(what, format, TIMED[-1]) for what in ("quantize", "dequantize"))
        if quantize and dequantize:
            _draw_range(beside, y, colour, quantize, dequantize)
    axes.set_yticks(range(len(ordered)), [f"{each.name}   {bits_per_value(each):g}" for each in ordered], fontsize=9)
    axes.set(xscale="log", xlabel="relative error (root mean square)", ylim=(-0.7, len(ordered) - 0.3))
    axes.set_title("bits per value", fontsize=9, loc="left", x=-0.13)
    beside.set(
        xscale="log",
        xlabel="compiled, time in units of a memcpy",
        xticks=(1, 2, 3, 10, 30),
        xticklabels=["1", "2", "3", "10", "30"],
    )
    beside.minorticks_off()
    for goal in (2, 3):  # targets for formats with one code per byte, and with two
        beside.axvline(goal, color="#cccccc", linewidth=1, zorder=0)
    for granularity, label in KINDS.items():
        axes.plot([], [], "o", color=COLOURS[granularity], label=label)
    axes.plot([], [], "o", color="#333333", markerfacecolor="white", label="with outlier channels")
    axes.legend(loc="lower left")
    beside.plot([], [], "o", color="#333333", label="quantize")
    beside.plot([], [], "o", color="#333333", markerfacecolor="white", label="dequantize")
    beside.legend(loc="upper right")
    return figure
