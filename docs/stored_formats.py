"""A table and a figure of all storage formats: bits per value, error, and the times of docs/results/bench_formats.json."""

import json
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kvref import get_format
from kvref.array import ITEM_BYTES
from kvref.formats import FORMATS, Format
from kvref.formats.base import stored_as
from kvref.formats.grouped import Groups

WIDTH, ROWS = 128, 2000
# mean by channel: these channels are far from zero in every token, as in the keys of models
OUTLIERS = {5: 9.0, 70: -7.0, 99: 12.0}
KINDS = {
    "element": "cast", "head": "one scale per row", "token": "one scale per token", "group": "one scale per group",
    "given": "one given scale",
}  # fmt: skip
MEASURED = Path(__file__).parent / "results/bench_formats.json"
TIMED = ("numpy", "torch-compiled")
COLOURS = {"element": "#555555", "head": "#2c8a4b", "token": "#b3261e", "group": "#2f7fd1", "given": "#8a5a00"}


def listed() -> list[Format]:
    """Return the formats to show: of FMT-GROUP only those with float16 scales. A given scale is 1.0."""
    return [each for each in FORMATS.values() if not isinstance(each, Groups) or each.scale.name == "float16"]


def bits(format: Format) -> float:
    """Bits per value, including scales, for rows of WIDTH numbers."""
    parts = stored_as(format, (WIDTH,), np)
    return 8 * sum(ITEM_BYTES[dtype] * int(np.prod(shape)) for shape, dtype in parts) / WIDTH


@cache
def error(name: str, outliers: bool) -> float:
    """Root mean square of (read - written) in the channels without outliers, whose standard deviation is 1."""
    rows = np.random.default_rng(5).normal(size=(ROWS, WIDTH))
    if outliers:
        for channel, centre in OUTLIERS.items():
            rows[:, channel] = centre + 1.5 * rows[:, channel]
    rows = rows.astype(np.float32)
    format = get_format(name)
    read = np.asarray(format.dequantize(format.quantize(rows), WIDTH), np.float64)
    plain = [channel for channel in range(WIDTH) if channel not in OUTLIERS]
    return float(np.sqrt(np.mean((read - rows)[:, plain] ** 2)))


@cache
def times() -> dict[str, dict[str, float]]:
    """Times in units of a memcpy of the float32 numbers, by "quantize NAME" or "dequantize NAME" and by backend."""
    contests = json.loads(MEASURED.read_text(encoding="utf-8"))["contests"]
    return {
        contest["title"]: {score["who"].removeprefix("kvref "): score["of_data"][0] for score in contest["scores"]}
        for contest in contests
    }


def time_of(what: str, format: Format, backend: str) -> float | None:
    """Return the time, None if it was not measured.

    Groups were measured with size 64 and float32 scales, shown for float16 scales.
    """
    return times().get(f"{what} {format.name.replace('_g64_float16', '_g64_float32')}", {}).get(backend)


def formats_table() -> str:
    """A table of the formats, by bits per value."""
    lines = [
        "| format | one scale per | element | bits per value | error | error with outliers | quantize | dequantize |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for format in sorted(listed(), key=lambda each: (-bits(each), each.name)):
        shared = {
            "element": "–", "head": "row", "token": "token", "group": f"{format.group} adjacent numbers",
            "given": "cache (given)",
        }[format.granularity]  # fmt: skip
        measured = [_percent(error(format.name, outliers)) for outliers in (False, True)]
        measured += [" / ".join(_times(time_of(what, format, each)) for each in TIMED) for what in ("quantize", "dequantize")]
        lines.append(f"| `{format.name}` | {shared} | {format.element} | {bits(format):g} | {' | '.join(measured)} |")
    return "\n".join(lines) + "\n"


def _percent(part: float) -> str:
    return f"{100 * part:.{0 if part >= 0.1 else 1 if part >= 0.01 else 2}f} %" if part else "0"


def _times(memcpys: float | None) -> str:
    return "–" if memcpys is None else f"{memcpys:.{0 if memcpys >= 10 else 1}f}"


def _line(axes: plt.Axes, y: int, colour: str, filled: float, hollow: float) -> None:
    axes.plot((filled, hollow), (y, y), color=colour, linewidth=1, alpha=0.5)
    axes.plot(filled, y, "o", color=colour, markersize=6)
    axes.plot(hollow, y, "o", color=colour, markersize=6, markerfacecolor="white")


def spent() -> plt.Figure:
    """One line per format, by bits per value.

    Left: its error without and with outlier channels. Right: the times to store and read.
    """
    ordered = sorted(listed(), key=lambda each: (bits(each), -error(each.name, outliers=False)))
    ordered = [each for each in ordered if each.name != "float32"]
    figure, (axes, beside) = plt.subplots(1, 2, figsize=(10, 9), sharey=True, width_ratios=(3, 2))
    for y, format in enumerate(ordered):
        colour = COLOURS[format.granularity]
        _line(axes, y, colour, error(format.name, outliers=False), error(format.name, outliers=True))
        quantize, dequantize = (time_of(what, format, TIMED[-1]) for what in ("quantize", "dequantize"))
        if quantize and dequantize:
            _line(beside, y, colour, quantize, dequantize)
    axes.set_yticks(range(len(ordered)), [f"{each.name}   {bits(each):g}" for each in ordered], fontsize=9)
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


PICTURES = (spent,)
