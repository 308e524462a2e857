"""`kvref zoo`: judges every cache with a planted bug, and shows what found the bug."""

import argparse
import os

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import kvref_zoo
from kvref_conformance.exceptions import CannotRun, suggest
from kvref_conformance.runner.zoo_report import judge_member


def show_zoo(options: argparse.Namespace) -> int:
    unknown = [name for name in options.names if name.removeprefix("zoo:") not in kvref_zoo.names()]
    if unknown:
        raise CannotRun(f"no member of the zoo {unknown[0]!r}{suggest(unknown[0], kvref_zoo.names())} (kvref zoo lists all)")
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("member", "clause"):
        table.add_column(column, no_wrap=True)
    table.add_column("found by", no_wrap=True)
    table.add_column("calls", justify="right")
    table.add_column("modelled on", style="dim", overflow="fold")
    survivors = 0
    with (
        Live(table, console=console, refresh_per_second=2, vertical_overflow="visible") if console.is_terminal else _NoLiveTable()
    ):
        for name in [name.removeprefix("zoo:") for name in options.names] or kvref_zoo.names():
            seen = judge_member(name)
            if seen.failed:
                calls = len(seen.shortest.trace) // 2  # one header line, then two lines per call
                table.add_row(name, seen.member.clause, Text(seen.detected_by, style="green"), str(calls), seen.member.seen_in)
            else:
                survivors += 1
                table.add_row(name, seen.member.clause, Text("nothing", style="bold red"), "", seen.member.seen_in)
    if not console.is_terminal:
        console.width = max(console.width, int(os.environ.get("COLUMNS", 120)))
        console.print(table)
    caught = table.row_count - survivors
    console.print(
        Text(f"{caught} of {table.row_count} found by the clause that they name", style="bold red" if survivors else "bold green")
    )
    return 1 if survivors else 0


class _NoLiveTable:
    """Stands in for Live if there is no terminal: the table is printed once, at the end."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...
