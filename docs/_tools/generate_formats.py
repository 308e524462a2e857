"""The table of all storage formats: bits per value, error, and the times of docs/results/bench_formats.json."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from kvref import get_format
from kvref.array import ITEM_BYTES
from kvref.formats import FORMATS, Format
from kvref.formats.base import stored_as
from kvref.formats.group_scales import GroupFormat

WIDTH, ROWS = 128, 2000
# mean by channel: these channels are far from zero in every token, as in the keys of models
OUTLIERS = {5: 9.0, 70: -7.0, 99: 12.0}
MEASURED = Path(__file__).parents[1] / "results/bench_formats.json"
TIMED = ("numpy", "torch-compiled")


def listed_formats() -> list[Format]:
    """Return the formats to show: of FMT-GROUP only those with float16 scales. A given scale is 1.0."""
    return [each for each in FORMATS.values() if not isinstance(each, GroupFormat) or each.scale.name == "float16"]


def bits_per_value(format: Format) -> float:
    """Bits per value, including scales, for rows of WIDTH numbers."""
    parts = stored_as(format, (WIDTH,), np)
    return 8 * sum(ITEM_BYTES[dtype] * int(np.prod(shape)) for shape, dtype in parts) / WIDTH


@cache
def relative_error(name: str, outliers: bool) -> float:
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
def measured_times() -> dict[str, dict[str, float]]:
    """Times in units of a memcpy of the float32 numbers, by "quantize NAME" or "dequantize NAME" and by backend."""
    contests = json.loads(MEASURED.read_text(encoding="utf-8"))["contests"]
    return {
        contest["title"]: {score["who"].removeprefix("kvref "): score["of_data"][0] for score in contest["scores"]}
        for contest in contests
    }


def measured_time(what: str, format: Format, backend: str) -> float | None:
    """Return the time, None if it was not measured.

    Groups were measured with size 64 and float32 scales, shown for float16 scales.
    """
    return measured_times().get(f"{what} {format.name.replace('_g64_float16', '_g64_float32')}", {}).get(backend)


def formats_table() -> str:
    """A table of the formats, by bits per value."""
    lines = [
        "| format | one scale per | element | bits per value | error | error with outliers | quantize | dequantize |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for format in sorted(listed_formats(), key=lambda each: (-bits_per_value(each), each.name)):
        shared = {
            "element": "–", "head": "row", "token": "token", "group": f"{format.group} adjacent numbers",
            "given": "cache (given)",
        }[format.granularity]  # fmt: skip
        measured = [_format_percent(relative_error(format.name, outliers)) for outliers in (False, True)]
        for what in ("quantize", "dequantize"):
            measured.append(" / ".join(_format_times(measured_time(what, format, each)) for each in TIMED))
        lines.append(f"| `{format.name}` | {shared} | {format.element} | {bits_per_value(format):g} | {' | '.join(measured)} |")
    return "\n".join(lines) + "\n"


def _format_percent(part: float) -> str:
    return f"{100 * part:.{0 if part >= 0.1 else 1 if part >= 0.01 else 2}f} %" if part else "0"


def _format_times(memcpys: float | None) -> str:
    return "–" if memcpys is None else f"{memcpys:.{0 if memcpys >= 10 else 1}f}"
