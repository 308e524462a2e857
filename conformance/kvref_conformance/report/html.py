"""The results of several runs as pages: a matrix of implementations by clauses, a page for each clause, the traces, a badge each.

Static files that work from a file:// address without a network. Whatever came from an implementation is escaped: the templates
escape everything, and the Markdown of the clauses, which is ours, is rendered with raw HTML switched off.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

import kvref
from kvref_conformance.checking.registry import all_checks
from kvref_conformance.clauses import Clause, spec
from kvref_conformance.interface import FAMILIES
from kvref_conformance.report.text import Result
from kvref_conformance.trace.store import in_a_path

SIGNS = {"passed": "✓", "failed": "✗", "xfailed": "✗", "xpassed": "!", "not offered": "·", "not run": "–", "no result": " "}
COLOURS = {"good": "#1a7f37", "bad": "#b42318", "some": "#8a6100"}
CHARACTER = 7  # pixels of a badge's width, at its font's size


@dataclass(frozen=True)
class Run:
    """One file of results."""

    path: Path
    document: dict[str, Any]
    slug: str = ""  # its name as a part of a path, one of its own

    @property
    def name(self) -> str:
        name: str = self.document["implementation"]["name"]
        return name

    @property
    def verdicts(self) -> dict[str, Result]:
        return {result["clause"]: result for result in self.document["clauses"]}

    @property
    def tally(self) -> Counter[str]:
        return Counter(result["verdict"] for result in self.document["clauses"])

    @property
    def offered(self) -> int:
        """Clauses that have a verdict."""
        return sum(count for verdict, count in self.tally.items() if verdict not in ("not offered", "not run"))

    @property
    def broken(self) -> int:
        return self.tally["failed"] + self.tally["xfailed"]


@dataclass(frozen=True)
class Cell:
    run: Run
    verdict: str
    result: Result | None
    trace: str | None  # where the report keeps it

    @property
    def sign(self) -> str:
        return SIGNS[self.verdict]

    @property
    def shown(self) -> dict[str, Any] | None:
        """The check that shows the failure."""
        checks = self.result["checks"] if self.result else []
        return next((check for check in checks if self.result and check["check"] == self.result["shown"]), None)


@dataclass(frozen=True)
class Row:
    clause: Clause
    families: tuple[str, ...]
    cells: list[Cell] = field(default_factory=list)


def write_site(folder: Path, runs: list[Run]) -> Path:
    """Write the pages; the path of the first. Raises OSError."""
    runs = _with_slugs(runs)
    for each in ("clauses", "traces", "badges"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    chapters = [(chapter, [_row(folder, clause, runs) for clause in chapter.clauses]) for chapter in spec()]
    chapters = [(chapter, rows) for chapter, rows in chapters if any(cell.result for row in rows for cell in row.cells)]
    environment = _environment()
    style = (files("kvref_conformance.report") / "templates" / "style.css").read_text(encoding="utf-8")
    common = {"runs": runs, "style": Markup(style), "version": kvref.__version__}
    page = folder / "index.html"
    rows = [row for _, rows in chapters for row in rows]
    there = {cell.verdict for row in rows for cell in row.cells}
    families = [family for family in FAMILIES if any(family in row.families for row in rows)]
    html = environment.get_template("matrix.html").render(
        chapters=chapters, families=families, verdicts=[each for each in SIGNS if each in there], signs=SIGNS, **common
    )
    page.write_text(html, encoding="utf-8")
    clause_page = environment.get_template("clause.html")
    for chapter, rows in chapters:
        for row in rows:
            html = clause_page.render(chapter=chapter, row=row, **common)
            (folder / "clauses" / f"{row.clause.id}.html").write_text(html, encoding="utf-8")
    for run in runs:
        (folder / "badges" / f"{run.slug}.svg").write_text(badge(run), encoding="utf-8")
    return page


def badge(run: Run) -> str:
    """An SVG for a README: what the implementation was found to be."""
    if run.broken:
        said, colour = f"breaks {run.broken} of {run.offered}", COLOURS["bad"]
    elif run.offered:
        said, colour = f"{run.offered} clauses", COLOURS["good"]
    else:
        said, colour = "nothing to judge", COLOURS["some"]
    label = f"kvref {run.document['kvref']}"
    widths = [CHARACTER * len(words) + 12 for words in (label, said)]
    return _environment().get_template("badge.svg").render(run=run, label=label, said=said, colour=colour, widths=widths)


def _environment() -> Environment:
    loader = PackageLoader("kvref_conformance.report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["markdown"] = _markdown
    return environment


def _markdown(text: str) -> Markup:
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _with_slugs(runs: list[Run]) -> list[Run]:
    found: dict[str, Run] = {}
    for run in runs:
        slug = in_a_path(run.name)
        while slug in found:  # two names may look alike in a path
            slug += "-2"
        found[slug] = Run(run.path, run.document, slug)
    return list(found.values())


def _row(folder: Path, clause: Clause, runs: list[Run]) -> Row:
    checks = [check for check in all_checks() if check.clause == clause.id]
    families = tuple(family for family in FAMILIES if any(check.family == family for check in checks))
    cells = []
    for run in runs:
        result = run.verdicts.get(clause.id)
        cells.append(Cell(run, result["verdict"] if result else "no result", result, _copy_trace(folder, run, result)))
    return Row(clause, families, cells)


def _copy_trace(folder: Path, run: Run, result: Result | None) -> str | None:
    source = run.path.parent / result["trace"] if result and result["trace"] else None
    if source is None or result is None or not source.is_file():
        return None
    target = Path("traces") / run.slug / f"{result['clause']}.jsonl"
    (folder / target).parent.mkdir(exist_ok=True)
    shutil.copyfile(source, folder / target)
    return target.as_posix()
