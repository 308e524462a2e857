"""What a person reads in a terminal: a failure, and the table at the end."""

import shlex
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import spec

Result = dict[str, Any]
VERDICTS = ("passed", "failed", "not offered", "not run")


def rerun_command(name: str, clause: str, seed: int, family: str | None) -> str:
    command = ["kvref", "check", name, "--clause", clause]
    command += ["--family", family] if family else []
    command += ["--seed", str(seed)] if seed else []
    return shlex.join(command)


def failure_text(result: Result, name: str, seed: int, family: str | None) -> str:
    """Clause, calls, expected and got, and the command that reruns just this one."""
    lines = [f"{result['clause']} · {result['title']}   ({name})"]
    for outcome in (each for each in result["checks"] if each["verdict"] == "failed"):
        lines.append(f"  {outcome['check']}")
        lines += [f"    {call}" for call in outcome["calls"]]
        lines += [f"    {outcome['what']}", f"      expected {outcome['expected']}", f"      got      {outcome['got']}"]
    lines += [f"  again    {rerun_command(name, result['clause'], seed, family)}", f"  read     kvref explain {result['clause']}"]
    return "\n".join(lines)


def print_failures(console: Console, results: list[Result], name: str, seed: int, family: str | None) -> None:
    for result in (each for each in results if each["verdict"] == "failed"):
        heading, _, rest = failure_text(result, name, seed, family).partition("\n")
        console.print(Text(heading, style="bold red"))
        console.print(Text(rest), soft_wrap=True)
        console.print()


def print_table(console: Console, results: list[Result], implementation: Any) -> None:
    """One line a chapter: how many clauses passed, failed, are not offered."""
    title = f"{implementation.name} {implementation.version} ({implementation.language}, {implementation.level})"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", show_footer=True)
    verdicts = [each for each in VERDICTS if each != "not run" or any(r["verdict"] == each for r in results)]
    table.add_column("chapter", footer="all")
    for verdict in verdicts:
        count = sum(result["verdict"] == verdict for result in results)
        table.add_column(verdict, justify="right", footer=str(count))
    for chapter in spec():
        tally = Counter(result["verdict"] for result in results if result["chapter"] == chapter.code)
        if tally:
            cells = [_cell(verdict, tally[verdict]) for verdict in verdicts]
            table.add_row(f"{chapter.code} {escape(chapter.title)}", *cells)
    console.print(table)


def _cell(verdict: str, count: int) -> str:
    style = {"passed": "green", "failed": "bold red"}.get(verdict, "dim") if count else "dim"
    return f"[{style}]{count or '·'}[/]"
