"""The console output of a search: a progress bar, each failure when it is found, and a summary."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import all_clauses
from kvref_conformance.fuzz.campaign import Campaign
from kvref_conformance.fuzz.corpus import KnownFailure
from kvref_conformance.fuzz.work_unit import UnitFailure
from kvref_conformance.fuzz.worker_tasks import RecheckResult
from kvref_conformance.report.console import count_noun
from kvref_conformance.soak.cache_console import print_violation


class CampaignConsole:
    """The output while a search runs. out: for failures. err: for the progress bar, if it is a terminal."""

    def __init__(self, out: Console, err: Console, name: str) -> None:
        self._out, self._name = out, name
        columns = (TextColumn("{task.description}"), BarColumn(10), TimeRemainingColumn())
        self._progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self._task = self._progress.add_task("starting the workers", total=None)

    @contextmanager
    def progress_bar(self, seconds: float) -> Iterator[None]:
        self._progress.update(self._task, total=seconds)
        with self._progress:
            yield

    def show_progress(self, campaign: Campaign) -> None:
        done = campaign.seconds
        said = f"{campaign.calls / done:,.0f} calls/s · {campaign.states} states · {campaign.transitions:,} transitions"
        said += f" · {len(campaign.corpus.failures)} failed"
        self._progress.update(self._task, description=said, completed=done)

    def show_failure(self, failed: UnitFailure, trace: Path | None) -> None:
        with self._without_bar():
            print_violation(self._out, failed.clause, failed.outcome, self._name, trace, [("unit", str(failed.unit))])

    def show_recheck(self, known: KnownFailure, came: RecheckResult) -> None:
        """Print what became of a failure of an earlier run."""
        said = {"mended": "fixed", "broken": "still fails", "not offered": f"no longer offered ({came.why})"}[came.still]
        style = {"mended": "green", "broken": "bold red", "not offered": "dim"}[came.still]
        with self._without_bar():
            self._out.print(Text(f"{said}: {clause_with_title(known.clause)}", style=style), soft_wrap=True)

    def show_invalid_trace(self, known: KnownFailure, why: str) -> None:
        """Print that the stored trace of a failure is invalid."""
        with self._without_bar():
            said = f"no valid trace of {clause_with_title(known.clause)}; its unit {known.unit} runs again ({why})"
            self._out.print(Text(said, style="yellow"), soft_wrap=True)

    @contextmanager
    def _without_bar(self) -> Iterator[None]:
        """Remove the bar, which may be on the same terminal, while the block prints."""
        if self._progress.disable:
            yield
            self._out.file.flush()
            return
        self._progress.stop()
        yield
        self._progress.start()


def clause_with_title(clause: str) -> str:
    found = all_clauses().get(clause)
    return f"{clause} · {found.title}" if found else clause


def print_summary(console: Console, campaign: Campaign, folder: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("family", no_wrap=True)
    for column in ("states", "transitions", "seeds kept", "failures"):
        table.add_column(column, justify="right", no_wrap=True)
    failures = campaign.corpus.failures
    others = {each.unit.family for each in failures} - set(campaign.scheduler.counts)
    for family, met in campaign.scheduler.counts.items():
        row = len(met.states), len(met.transitions), len(met.seeds), sum(each.unit.family == family for each in failures)
        table.add_row(family, *(f"{number:,}" if number else "·" for number in row))
    for family in sorted(others):
        table.add_row(family, "·", "·", "·", str(sum(each.unit.family == family for each in failures)))
    console.print(table)
    rate = campaign.calls / campaign.seconds
    said = f"{count_noun(campaign.units, 'unit')}, {campaign.calls:,} calls in {campaign.seconds:.0f} s ({rate:,.0f} per second)"
    console.print(Text(f"{said} by {count_noun(campaign.run.workers, 'worker')}"))
    if campaign.run.lost:
        console.print(Text(f"lost because a worker ended: {count_noun(campaign.run.lost, 'unit')}", style="yellow"))
    console.print(Text(f"corpus: {folder}; report: {folder / 'report.html'}", style="dim"), soft_wrap=True)
