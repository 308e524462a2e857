"""Every format that rows are stored in, side by side: what it is, how many bits it takes, how far its values are off, and how
long it takes, as docs/results/bench_formats.json has it.
"""

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
OUTLIERS = {5: 9.0, 70: -7.0, 99: 12.0}  # channels that lie far from zero in every token, as keys of models have
KINDS = {
    "element": "casts", "head": "a scale a row", "token": "a scale a token", "group": "a scale a group", "given": "one scale",
}  # fmt: skip
MEASURED = Path(__file__).parent / "results/bench_formats.json"
TIMED = ("numpy", "torch-compiled")
COLOURS = {"element": "#555555", "head": "#2c8a4b", "token": "#b3261e", "group": "#2f7fd1", "given": "#8a5a00"}


def listed() -> list[Format]:
    """All but those of FMT-GROUP that differ from another in the dtype of their scales alone. A scale that is given is 1.0."""
    return [each for each in FORMATS.values() if not isinstance(each, Groups) or each.scale.name == "float16"]


def bits(format: Format) -> float:
    """Bits a value, scales included, in rows of WIDTH."""
    parts = stored_as(format, (WIDTH,), np)
    return 8 * sum(ITEM_BYTES[dtype] * int(np.prod(shape)) for shape, dtype in parts) / WIDTH


@cache
def error(name: str, outliers: bool) -> float:
    """The root of the mean square of what was read less what was written, in channels without outliers, whose own is 1."""
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
    """Times as long as a memcpy of the float32, by "quantize NAME" or "dequantize NAME" and by backend."""
    contests = json.loads(MEASURED.read_text(encoding="utf-8"))["contests"]
    return {
        contest["title"]: {score["who"].removeprefix("kvref "): score["of_data"][0] for score in contest["scores"]}
        for contest in contests
    }


def time_of(what: str, format: Format, backend: str) -> float | None:
    """None where it was not measured. Of groups those of 64 with scales in float32 were, and stand for those in float16."""
    return times().get(f"{what} {format.name.replace('_g64_float16', '_g64_float32')}", {}).get(backend)


def formats_table() -> str:
    """A table of them, by the bits they take."""
    lines = [
        "| format | a scale for | element | bits a value | error | with outliers | quantize | dequantize |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for format in sorted(listed(), key=lambda each: (-bits(each), each.name)):
        shared = {
            "element": "–", "head": "a row", "token": "a token", "group": f"{format.group} neighbours", "given": "all, and given",
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
    """A line a format, by its bits: the error of rows, and that of rows with outlier channels; beside it what it takes."""
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
    axes.set(xscale="log", xlabel="error, in parts of what was written", ylim=(-0.7, len(ordered) - 0.3))
    axes.set_title("bits a value", fontsize=9, loc="left", x=-0.13)
    beside.set(
        xscale="log",
        xlabel="compiled, times as long as a memcpy",
        xticks=(1, 2, 3, 10, 30),
        xticklabels=["1", "2", "3", "10", "30"],
    )
    beside.minorticks_off()
    for goal in (2, 3):  # what we wanted of bytes and of nibbles
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
