"""The output of `kvref check NAME --list`: one table per family, and the benefit of each missing operation."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvref_conformance.judging.conclusion import is_about_other_formats
from kvref_conformance.judging.forecast import LONG, Forecast, Reach
from kvref_conformance.judging.offered import Offered
from kvref_conformance.report.text import NAMED, counted

STYLES = {"derived": "green", "partly": "yellow", "not offered": "dim"}


def print_reach(console: Console, surface: Mapping[str, Offered], found: Forecast) -> None:
    for family, offered in surface.items():
        if offered.unmade:
            console.print(Text(f"{family}: no object can be made: {offered.unmade}", style="bold"), soft_wrap=True)
        else:
            _print_family(console, family, offered, [reach for reach in found.reaches if reach.family == family])
    for gain in found.gains:
        console.print(Text(gain_text(gain.operation, gain.checks, gain.clauses)), soft_wrap=True)
    console.print(Text(f"not included: {LONG}, whose checks take longer", style="dim"))


def gain_text(operation: str, checks: int, clauses: list[str]) -> str:
    more = f" and {len(clauses) - NAMED} more" if len(clauses) > NAMED else ""
    return f"offer {operation}: {counted(checks, 'more check')} ({', '.join(clauses[:NAMED])}{more})"


def _print_family(console: Console, family: str, offered: Offered, reaches: list[Reach]) -> None:
    judged = sum(reach.judged > 0 for reach in reaches)
    # as `kvref check` counts
    count = sum(reach.judged > 0 or not is_about_other_formats(reach.clause, reach.missing) for reach in reaches)
    console.print(Text(f"{family}: {judged} of {counted(count, 'clause')} can be judged", style="bold"))
    if all(reach.how == "directly" for reach in reaches):
        return
    lists = Table.grid(padding=(0, 2, 0, 0))
    for word, named in (
        ("offered", [short(family, op) for op in offered.operations]),
        ("missing", [short(family, op) for op in offered.missing]),
        ("directly", [reach.clause for reach in reaches if reach.how == "directly"]),
    ):
        lists.add_row(f"  {word}", Text(", ".join(named) or "none"))
    console.print(lists)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("clause", no_wrap=True)
    table.add_column("judged", no_wrap=True)
    table.add_column("derived operations; not offered")
    for reach in reaches:
        if reach.how != "directly":
            table.add_row(reach.clause, Text(reach.how, STYLES[reach.how]), Text(detail(reach)))
    console.print(table)


def detail(reach: Reach) -> str:
    """The derived operations that the checks use, and what is missing for the checks that cannot judge."""
    through = ", ".join(short(reach.family, way) for way in reach.through)
    missing = ", ".join(short(reach.family, reason) for reason in reach.missing)
    if reach.how == "partly":
        part = f"{reach.judged} of {counted(reach.checks, 'check')}"
        return "; ".join(filter(None, (part, through, f"not offered: {missing}")))
    return "; ".join(filter(None, (through, missing)))


def short(family: str, words: str) -> str:
    """Remove the name of the family from an operation."""
    return words.removeprefix(f"{family}.")


def reach_as_json(surface: Mapping[str, Offered], found: Forecast) -> dict[str, Any]:
    """The same content as JSON data."""
    families = {
        family: {
            "offered": offered.operations,
            "missing": offered.missing,
            "unmade": offered.unmade or None,
            "clauses": [
                {
                    "clause": reach.clause, "how": reach.how, "checks": reach.checks, "judged": reach.judged,
                    "through": reach.through, "missing": reach.missing,
                }
                for reach in found.reaches if reach.family == family
            ],
        }
        for family, offered in surface.items()
    }  # fmt: skip
    return {"families": families, "gains": [vars(gain) for gain in found.gains]}
