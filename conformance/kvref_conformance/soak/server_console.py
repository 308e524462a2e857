"""Output of a server under load: a progress bar, the report, and figures over time as JSON and as a plot."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvref.canary.hybrid import AnyCanary
from kvref_canary.files import vocabulary
from kvref_conformance.soak.server_statistics import Latencies, ServerStatistics, WrongAnswer

MAX_SHOWN = 5  # words of a wrong answer
LONG_SECONDS = 5.0  # seconds after which a request unanswered at the end is reported
WIDTH, HEIGHT = 760, 130  # pixels of a panel of the plot


@contextmanager
def progress_bar(console: Console, figures: ServerStatistics, seconds: float) -> Iterator[Callable[[], None]]:
    """Yield a function that updates the progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(12), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("asking", total=seconds)

    def tell() -> None:
        trouble = f", {figures.wrong_tokens:,} wrong" if figures.wrong_tokens else ""
        trouble += f", {figures.failed.total():,} failed" if figures.failed else ""
        said = f"{figures.tokens_checked:,} tokens checked, {figures.rate:,.0f}/s{trouble}"
        progress.update(task, description=said, completed=figures.seconds)

    with progress:
        yield tell


def print_report(console: Console, canary: AnyCanary, figures: ServerStatistics) -> None:
    for wrong in figures.wrong:
        console.print(Text(_format_wrong(canary, wrong)), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("requests", no_wrap=True)
    for column in ("", "seconds to the", "50 %", "90 %", "99 %"):
        table.add_column(column, justify="right" if column != "seconds to the" else "left", no_wrap=True)
    kinds = [(kind, f"{count:,}") for kind, count in figures.requests.most_common()]
    latencies = [("first token", *_latency_cells(figures.first)), ("end", *_latency_cells(figures.total))]
    for number in range(max(len(kinds), len(latencies))):
        left = kinds[number] if number < len(kinds) else ("", "")
        table.add_row(*left, *(latencies[number] if number < len(latencies) else ("", "", "", "")))
    console.print(table)
    for line in _report_lines(figures):
        console.print(Text(line), soft_wrap=True)


def make_plot(figures: ServerStatistics, title: str) -> str:
    """Return an SVG: tokens per second over time with wrong ones and failures marked; below, seconds to the first token."""
    timeline, seconds = figures.timeline, max(figures.seconds, 1e-9)
    span = timeline.width
    rates = [each.tokens / span for each in timeline.moments]
    if timeline.moments:  # the last span is incomplete
        rates[-1] = timeline.moments[-1].tokens / max(min(span, seconds - span * (len(rates) - 1)), 0.1 * span)
    panels = [_panel("tokens checked per second", {"": rates}, span, seconds)]
    firsts = {f"{percent} %": [each.first.percentile(percent) for each in timeline.moments] for percent in (50, 99)}
    panels.append(_panel("seconds to the first token", firsts, span, seconds))
    marks = [
        {"x": _x_of(span * (number + 0.5), seconds), "wrong": each.wrong, "failed": each.failed}
        for number, each in enumerate(timeline.moments)
        if each.wrong or each.failed
    ]
    ticks = [{"x": _x_of(seconds * part / 4, seconds), "label": _format_seconds(seconds * part / 4)} for part in range(5)]
    loader = PackageLoader("kvref_conformance.soak")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("soak.svg")
    return template.render(title=title, panels=panels, marks=marks, ticks=ticks, width=WIDTH, height=HEIGHT)


def _format_wrong(canary: AnyCanary, wrong: WrongAnswer) -> str:
    must = " ".join("?" if token is None else vocabulary.word_of(canary, token) for token in wrong.expected[:MAX_SHOWN])
    what = f"{wrong.tokens:,} {'token' if wrong.tokens == 1 else 'tokens'} of the answer wrong, the first at index {wrong.place}"
    lines = [
        f"request {wrong.request} ({wrong.kind}), a prompt of {wrong.prompt} tokens: {what}",
        f"  expected {must}",
        f"  got      {vocabulary.to_text(canary, wrong.said[:MAX_SHOWN])}",
    ]
    if wrong.beside:
        lines.append(f"  beside   {', '.join(f'{count} {kind}' for kind, count in Counter(wrong.beside).items())}")
    return "\n".join([*lines, *([f"  {wrong.finding}"] if wrong.finding else []), ""])


def _report_lines(figures: ServerStatistics) -> Iterator[str]:
    yield f"{figures.tokens_checked:,} tokens checked in {figures.seconds:.0f} s, {figures.rate:,.0f} per second"
    if figures.uncertain:
        yield f"{figures.uncertain:,} tokens not checked: they depend on rounding"
    if figures.cached_tokens is not None and figures.prompt_tokens:
        share = 100 * figures.cached_tokens / figures.prompt_tokens
        yield f"prefix hits: {figures.cached_tokens:,} of {figures.prompt_tokens:,} prompt tokens, {share:.0f} %"
    for kind, share in figures.suspects.items():
        yield f"a request of kind {kind!r} was in flight beside every wrong answer, and beside {share:.0f} % of the right ones"
    if figures.refused:
        yield f"rejected for lack of room (HTTP 429, 503): {figures.refused:,}"
    for kind, count in figures.failed.most_common():
        yield f"failed {count:,} times: {figures.examples[kind]}"
    if waited := [seconds for seconds in figures.open if seconds > LONG_SECONDS]:
        many = "request" if len(waited) == 1 else "requests"
        yield f"{len(waited)} {many} still unanswered at the end, after up to {max(waited):.0f} s"
    if figures.gone:
        yield "the run ended early: the server accepts no connections"


def _latency_cells(latencies: Latencies) -> list[str]:
    return ["" if seconds is None else f"{seconds:.3g}" for seconds in latencies.document().values()]


def _panel(title: str, curves: dict[str, list[Any]], span: float, seconds: float) -> dict[str, Any]:
    """Return each curve as an SVG path, interrupted where there is no value."""
    top = max((value for curve in curves.values() for value in curve if value is not None), default=0.0) or 1.0
    paths = {}
    for name, curve in curves.items():
        path, pen = list[str](), "M"
        for number, value in enumerate(curve):
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{_x_of(min(span * (number + 0.5), seconds), seconds)} {round(HEIGHT * (1 - value / top), 1)}")
            pen = "L"
        paths[name] = " ".join(path)
    return {"title": title, "top": f"{top:,.3g}" if top < 1000 else f"{top:,.0f}", "paths": paths}


def _x_of(at: float, seconds: float) -> float:
    return round(WIDTH * min(at / seconds, 1.0), 1)


def _format_seconds(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
