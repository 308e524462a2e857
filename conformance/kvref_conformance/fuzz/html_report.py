"""The report of a search, `report.html` in its folder. It is rewritten while the search runs, and needs no network."""

from dataclasses import dataclass
from pathlib import Path

from kvref_conformance.fuzz.campaign import Campaign
from kvref_conformance.fuzz.console import titled
from kvref_conformance.fuzz.corpus import ProgressPoint
from kvref_conformance.report.console import counted
from kvref_conformance.report.html import environment

WIDE, HIGH = 320, 90  # the size of a plot, in SVG units


@dataclass(frozen=True)
class ProgressPlot:
    """One quantity over the time of a run. first, last: its first and last value. line: the points of an SVG polyline."""

    title: str
    first: int
    last: int
    line: str


def plot(title: str, points: list[ProgressPoint], values: list[int]) -> ProgressPlot:
    """A plot whose axes range from 0 to the largest value, and from the start of the run to its last point."""
    most, end = max([1, *values]), max([1e-9, *(point.seconds for point in points)])
    places = [
        f"{WIDE * point.seconds / end:.1f},{HIGH * (1 - value / most):.1f}" for point, value in zip(points, values, strict=True)
    ]
    return ProgressPlot(title, values[0] if values else 0, values[-1] if values else 0, " ".join(places))


def write_page(exploring: Campaign, path: Path) -> None:
    """Write the report. Raises OSError."""
    points, families = exploring.run.points, exploring.steering.met
    wholes = [
        plot("states", points, [point.states for point in points]),
        plot("transitions", points, [point.transitions for point in points]),
        plot("calls", points, [point.calls for point in points]),
        plot("failures", points, [point.failures for point in points]),
    ]
    by_family = [
        (name, plot("states", points, [point.families[name][0] for point in points]),
         plot("transitions", points, [point.families[name][1] for point in points]), families[name])
        for name in families
    ]  # fmt: skip
    page = environment().get_template("search.html").render(
        name=exploring.corpus.name, run=exploring.run, exploring=exploring, wholes=wholes, by_family=by_family,
        failures=[(each, titled(each.clause)) for each in exploring.corpus.failures], runs=exploring.corpus.runs,
        wide=WIDE, high=HIGH, counted=counted,
    )  # fmt: skip
    beside = path.with_suffix(".new")
    beside.write_text(page, encoding="utf-8")
    beside.replace(path)
