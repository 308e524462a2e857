"""`kvref check --list`: the checks; with a NAME, which clauses can be judged with the operations of that implementation."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import kvref
from kvref_conformance.clauses import Clause
from kvref_conformance.exceptions import CallTimeout, CannotRun
from kvref_conformance.families import names
from kvref_conformance.report.console import print_reach, reach_as_json
from kvref_conformance.runner.capabilities import preview_coverage, probe_operations
from kvref_conformance.runner.check_runner import CheckRunner, RunEnded
from kvref_conformance.testlib.registry import Check

SelectedChecks = Mapping[Clause, Sequence[Check]]


def list_checks(console: Console, chosen: SelectedChecks) -> None:
    for clause, checks in chosen.items():
        console.print(Text(f"{clause.id} · {clause.title}", style="bold"))
        for each in checks:
            console.print(Text(f"  {each.name}{f'  [{each.option}]' if each.option else ''}"))


def list_coverage(console: Console, options: argparse.Namespace, judge: CheckRunner, chosen: SelectedChecks) -> None:
    """Raises CannotRun if the implementation dies or hangs while the judge finds out which operations it has."""
    families = [family for family in names() if any(check.family == family for checks in chosen.values() for check in checks)]
    try:
        surface = judge.run(probe_operations, families)
    except RunEnded as ended:
        raise CannotRun(f"{options.name}: {_describe_end(ended.violation)}") from None
    except CallTimeout as hung:
        raise CannotRun(f"{options.name}: {_describe_end(hung)}") from None
    if not surface:
        raise CannotRun(f"{options.name}: nothing to list, it offers no family of the selected clauses")
    found = preview_coverage(judge.implementation, surface, chosen)
    print_reach(console, surface, found)
    if options.json:
        document = {"format": 1, "kvref": kvref.__version__, "name": options.name, **reach_as_json(surface, found)}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _describe_end(broken: CallTimeout) -> str:
    return f"{broken.what}: expected {broken.expected}, got {broken.got}"
