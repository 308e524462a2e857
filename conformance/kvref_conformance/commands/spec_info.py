"""`kvref list` and `kvref explain`: the named implementations, the text of a clause, and the operations of a family."""

import argparse
import re

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import Clause, all_clauses, spec, suggest_clause
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.families import names
from kvref_conformance.generate_protocol import all_operations, describe_type, error_kinds, owner_of
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
    family = name if name in names() else None
    of_family = {file: chapter for chapter in spec() for file in {clause.path.stem for clause in chapter.clauses}}
    chapter = of_family[owner_of(family).chapter] if family else chapters.get(name.upper())
    if chapter:
        console.print(Markdown(f"# {chapter.title} ({chapter.code})\n\n{chapter.intro}"))
        console.print()
        for each in chapter.clauses:
            console.print(Text.assemble((each.id, "bold"), f"  {each.title}"))
        if family:
            console.print()
            _print_operations(console, family)
        return 0
    id = re.sub(r" ?\(?[a-z](?:, ?[a-z])*\)?$", "", name)  # as failures cite a clause: PAGED-18 (b)
    clause = all_clauses().get(name.upper()) or all_clauses().get(id.upper())
    if clause is None:
        known = f"chapters: {', '.join(chapters)}; families: {', '.join(names())}"
        raise CannotRun(f"no clause {name!r}{suggest_clause(name, chapters)} ({known})")
    console.print(Markdown(_clause_markdown(clause)))
    return 0


def _print_operations(console: Console, family: str) -> None:
    """The factory and the operations of a family: arguments, result and errors."""
    console.print(Text(f"Operations of {family} (all are optional)", style="bold"))
    for op, operation in all_operations():
        if op.partition(".")[0] not in (family, *getattr(owner_of(family).interface, "HANDED_OUT", {})):
            continue
        arguments = ", ".join(f"{name}: {describe_type(hint)}" for name, hint in operation.arguments.items())
        result = "" if op.endswith(".new") else describe_type(operation.range_text or operation.result)
        called = op.removesuffix(".new") if result == "" else op
        console.print(Text(f"{called}{'' if operation.attribute else f'({arguments})'}{f' -> {result}' if result else ''}"))
        if kinds := error_kinds(op):
            console.print(Padding(Text(f"raises {', '.join(kinds)}", style="dim"), (0, 0, 0, 4)))


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
