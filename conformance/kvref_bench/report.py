"""Output of a bench: a table in the terminal, JSON, and a plot."""

import math
from dataclasses import asdict
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.table import Table
from rich.text import Text

from kvref_bench.comparison import ComparisonResult, Spread

FORMAT = 1
PLOT_WIDTH = 540  # pixels of the scale


def results_table(outcome: ComparisonResult) -> Table:
    """Return the table of a contest, the fastest entry first."""
    comparison = outcome.contest
    moved = f", {_format_bytes(comparison.bytes)} to move" if comparison.bytes else ""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    found.title = f"{comparison.title} ({comparison.shape}{moved})"
    found.add_column("", width=35, no_wrap=True)
    found.add_column("time", justify="right", width=8)
    if comparison.bytes:
        found.add_column("x memcpy", justify="right", width=8)
        found.add_column("quartiles", justify="right", style="dim", width=11, no_wrap=True)
    if comparison.data:
        found.add_column("x data", justify="right", width=6)
    for score in sorted(outcome.scores, key=lambda score: score.seconds):
        cells = [_format_seconds(score.seconds[0])]
        cells += [_format_ratio(score.of_bytes[0]), _format_quartiles(score.of_bytes)] if score.of_bytes else []
        cells += [_format_ratio(score.of_data[0])] if score.of_data else []
        found.add_row(Text(score.who, style="bold" if score.who.startswith("kvref") else ""), *cells)
    return found


def results_document(machine: dict[str, Any], outcomes: list[ComparisonResult]) -> dict[str, Any]:
    """Return all results as plain data. Spreads are [median, lower quartile, upper quartile]; bytes and seconds."""
    contests = []
    for outcome in outcomes:
        comparison = outcome.contest
        about = {"title": comparison.title, "shape": comparison.shape, "bytes": comparison.bytes, "data": comparison.data}
        contests.append({**about, "scores": [asdict(score) for score in outcome.scores]})
    return {"format": FORMAT, "machine": machine, "contests": contests}


def results_plot(machine: dict[str, Any], outcomes: list[ComparisonResult]) -> str:
    """Return an SVG: one line per contest, one mark per entry, on a logarithmic scale of the ratio to memcpy."""
    drawn = [outcome for outcome in outcomes if outcome.contest.bytes]
    ratios = [score.of_bytes[0] for outcome in drawn for score in outcome.scores if score.of_bytes]
    least, most = math.floor(math.log10(min([1.0, *ratios]))), math.ceil(math.log10(max([10.0, *ratios])))

    def x(ratio: float) -> float:
        return round(PLOT_WIDTH * (math.log10(ratio) - least) / (most - least), 1)

    powers = [10.0**power for power in range(least, most + 1)]
    ticks = [{"x": x(power), "value": power, "label": f"{power:,g}" if power < 1 else f"{power:,.0f}"} for power in powers]
    lines: list[dict[str, Any]] = [
        {
            "title": f"{outcome.contest.title} ({outcome.contest.shape})",
            "marks": [
                {
                    "x": x(score.of_bytes[0]),
                    "who": score.who,
                    "summary": _format_ratio(score.of_bytes[0]),
                    "kind": _backend_of(score.who),
                }
                for score in sorted(outcome.scores, key=lambda score: score.who.startswith("kvref"))  # ours on top
                if score.of_bytes
            ],
        }
        for outcome in drawn
    ]
    kinds = dict.fromkeys(mark["kind"] for line in lines for mark in line["marks"])
    loader = PackageLoader("kvref_bench")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("bench.svg")
    return template.render(lines=lines, ticks=ticks, kinds=sorted(kinds, key="others".__eq__), machine=machine)


def _backend_of(who: str) -> str:
    """Return the backend of an entry of kvref, or "others"."""
    return f"kvref {who.split()[-1]}" if who.startswith("kvref") else "others"


def _format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _format_bytes(count: int) -> str:
    for unit, size in (("MB", 2**20), ("kB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _format_quartiles(spread: Spread) -> str:
    return f"{_format_ratio(spread[1])}..{_format_ratio(spread[2])}"


def _format_ratio(ratio: float) -> str:
    if ratio >= 10_000:
        return f"{ratio / 1000:.0f}k"
    return f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}"
