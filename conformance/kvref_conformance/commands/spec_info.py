"""`kvref list` and `kvref explain`: the implementations that have a name, and the text of a clause."""

import argparse
import re

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import Clause, all_clauses, spec, suggest_clause
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementations import all_implementations
from kvref_conformance.testlib.registry import all_checks


def list_implementations(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("implementation", no_wrap=True)
    table.add_column("status")
    for listed in all_implementations():
        table.add_row(listed.name, Text(listed.missing, style="yellow") if listed.missing else Text("ready", style="green"))
    console.print(table)
    return 0


def explain(options: argparse.Namespace) -> int:
    name: str = options.clause
    console = Console(highlight=False)
    chapters = {chapter.code: chapter for chapter in spec()}
    if name.upper() in chapters:
        chapter = chapters[name.upper()]
        console.print(Markdown(f"# {chapter.title} ({chapter.code})\n\n{chapter.intro}"))
        console.print()
        for each in chapter.clauses:
            console.print(Text.assemble((each.id, "bold"), f"  {each.title}"))
        return 0
    id = re.sub(r" ?\(?[a-z](?:, ?[a-z])*\)?$", "", name)  # as failures cite a clause: PAGED-18 (b)
    clause = all_clauses().get(name.upper()) or all_clauses().get(id.upper())
    if clause is None:
        raise CannotRun(f"no clause {name!r}{suggest_clause(name, chapters)} (chapters: {', '.join(chapters)})")
    console.print(Markdown(_clause_markdown(clause)))
    return 0


def _clause_markdown(clause: Clause) -> str:
    parts = [f"# {clause.id} · {clause.title}", clause.text, f"*Why.* {clause.why}", f"```python\n{clause.example}\n```"]
    parts.append(f"The example uses the functions at the top of {clause.path.name}.")
    if clause.differs:
        parts.append(f"*Differs from.* {clause.differs}")
    if clause.caught:
        parts.append(f"*Would have caught.* {clause.caught}")
    checks = [each for each in all_checks() if each.clause == clause.id]
    lines = [
        f"- {''.join(f'({letter}) ' for letter in each.letters)}{each.name}{f' ({each.option})' if each.option else ''}"
        for each in checks
    ]
    parts.append("*Checks.*\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
