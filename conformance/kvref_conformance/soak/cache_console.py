"""Output of a soak: a progress bar, one line per family at the end, and the failures. Rates count checked tokens."""

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvref_conformance.results import CheckResult
from kvref_conformance.soak.cache_soak import SoakStatistics

MIB = 2**20
NO_BREAK = "\N{NO-BREAK SPACE}"


@contextmanager
def progress_bar(console: Console, judge: Any, latest: dict[str, SoakStatistics]) -> Iterator[None]:
    """Show the progress of the judge, and store the latest figures of each family in `latest`."""
    columns = (TextColumn("{task.description}"), BarColumn(12), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("making the cache", total=None)

    def tell(text: str, done: int, of: int) -> None:
        figures = SoakStatistics(**json.loads(text))
        latest[figures.family] = figures
        told = f"{figures.family:10} {figures.rate:8,.0f} tokens checked/s  {figures.peak / MIB:6,.0f} MiB"
        progress.update(task, description=told, completed=done, total=of)

    judge.progress = tell
    with progress:
        yield


def print_figures(console: Console, figures: list[SoakStatistics], broken: dict[str, CheckResult]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("family", no_wrap=True)
    for column in ("s", "requests", "refused", "checked", "a second", "MiB", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for each in figures:
        if each.not_offered:
            table.add_row(each.family, *[""] * 6, Text("not offered", style="dim"))
            continue
        first, last = (each.memory[0][1], each.memory[-1][1]) if each.memory else (0, 0)
        memory = f"{first / MIB:,.0f}..{last / MIB:,.0f}"
        verdict = Text("failed", style="bold red") if each.family in broken else Text("passed", style="green")
        table.add_row(
            each.family, f"{each.seconds:.0f}", f"{each.requests:,}", f"{each.refused:,}", f"{each.tokens_checked:,}",
            f"{each.rate:,.0f}", memory, verdict,
        )  # fmt: skip
    console.print(table)
    for each in figures:
        if each.operations:
            print_operations(console, each)
        if each.not_offered:
            console.print(Text(f"not offered: {each.family}, {each.not_offered}", style="dim"), soft_wrap=True)


def print_operations(console: Console, figures: SoakStatistics) -> None:
    """Print how often each operation was called, and what was not exercised."""
    counts = sorted(figures.operations.items(), key=lambda each: -each[1])
    _print_list(console, f"{figures.family} calls:", [f"{name} {count:,}" for name, count in counts])
    if figures.not_exercised:
        _print_list(console, f"{figures.family} not exercised:", figures.not_exercised, "yellow")


def _print_list(console: Console, label: str, items: Sequence[str], style: str = "") -> None:
    """Print a list whose items are not broken across lines."""
    lines = textwrap.wrap(f"{label} {', '.join(item.replace(' ', NO_BREAK) for item in items)}", 79, subsequent_indent="  ")
    console.print(Text("\n".join(lines).replace(NO_BREAK, " "), style=style), soft_wrap=True)


def print_violation(
    console: Console, clause: str, outcome: CheckResult, name: str, trace: Path | None, more: Sequence[tuple[str, str]]
) -> None:
    """Print a failure as `kvref check` does. more: additional lines, each a label and a text."""
    console.print(Text(f"{clause} · {outcome.check}   ({name})", style="bold red"), soft_wrap=True)
    lines = [*(f"  {call}" for call in outcome.calls), f"    {outcome.what}"]
    lines += [f"    expected {outcome.expected}", f"    got      {outcome.got}"]
    lines += [f"    at       {outcome.where}"] if outcome.where else []
    lines += [f"  replay   kvref replay {shlex.quote(str(trace))} {shlex.quote(name)}"] if trace else []
    lines += [f"  {word:8} {said}" for word, said in more]
    console.print(Text("\n".join([*lines, ""])), soft_wrap=True)
