"""The report of a search, `report.html` in its folder. It is rewritten while the search runs, and needs no network."""

from dataclasses import dataclass
from pathlib import Path

from kvref_conformance.fuzz.campaign import Campaign
from kvref_conformance.fuzz.console import clause_with_title
from kvref_conformance.fuzz.corpus import ProgressPoint
from kvref_conformance.report.console import count_noun
from kvref_conformance.report.html import jinja_environment

PLOT_WIDTH, PLOT_HEIGHT = 320, 90  # the size of a plot, in SVG units


@dataclass(frozen=True)
class ProgressPlot:
    """One quantity over the time of a run. first, last: its first and last value. line: the points of an SVG polyline."""

    title: str
    first: int
    last: int
    line: str


def make_plot(title: str, points: list[ProgressPoint], values: list[int]) -> ProgressPlot:
    """A plot whose axes range from 0 to the largest value, and from the start of the run to its last point."""
    most, end = max([1, *values]), max([1e-9, *(point.seconds for point in points)])
    places = [
        f"{PLOT_WIDTH * point.seconds / end:.1f},{PLOT_HEIGHT * (1 - value / most):.1f}"
        for point, value in zip(points, values, strict=True)
    ]
    return ProgressPlot(title, values[0] if values else 0, values[-1] if values else 0, " ".join(places))


def write_page(campaign: Campaign, path: Path) -> None:
    """Write the report. Raises OSError."""
    points, families = campaign.run.points, campaign.scheduler.counts
    wholes = [
        make_plot("states", points, [point.states for point in points]),
        make_plot("transitions", points, [point.transitions for point in points]),
        make_plot("calls", points, [point.calls for point in points]),
        make_plot("failures", points, [point.failures for point in points]),
    ]
    by_family = [
        (name, make_plot("states", points, [point.families[name][0] for point in points]),
         make_plot("transitions", points, [point.families[name][1] for point in points]), families[name])
        for name in families
    ]  # fmt: skip
    page = jinja_environment().get_template("search.html").render(
        name=campaign.corpus.name, run=campaign.run, campaign=campaign, wholes=wholes, by_family=by_family,
        failures=[(each, clause_with_title(each.clause)) for each in campaign.corpus.failures], runs=campaign.corpus.runs,
        wide=PLOT_WIDTH, high=PLOT_HEIGHT, counted=count_noun,
    )  # fmt: skip
    beside = path.with_suffix(".new")
    beside.write_text(page, encoding="utf-8")
    beside.replace(path)
