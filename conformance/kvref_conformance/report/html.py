"""The results of several runs as pages: a matrix of implementations by clauses, a page for each clause, the traces, a badge each.

Static files that work from a file:// address without a network. Whatever came from an implementation is escaped: the templates
escape everything, and the Markdown of the clauses, which is ours, is rendered with raw HTML switched off.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

import kvref
from kvref_conformance.checking.registry import all_checks
from kvref_conformance.clauses import Clause, spec
from kvref_conformance.conversation.trace.store import name_in_a_path
from kvref_conformance.families import names
from kvref_conformance.judging.conclusion import Conclusion, conclude
from kvref_conformance.report.text import Result, conclusion_text
from kvref_conformance.report.traces import find_trace

SIGNS = {"passed": "✓", "failed": "✗", "xfailed": "✗", "xpassed": "!", "not offered": "·", "not run": "–", "no result": " "}
COLOURS = {"good": "#1a7f37", "bad": "#b42318", "some": "#8a6100"}
GENERATOR = '<meta name="generator" content="kvref report">'  # in each page, which says whose they are
CHARACTER = 7  # pixels of a badge's width, at its font's size


@dataclass(frozen=True)
class Run:
    """One file of results. label: its name in the report, where it is not to be the implementation's own."""

    path: Path
    document: dict[str, Any]
    label: str = ""

    @property
    def name(self) -> str:
        name: str = self.label or self.document["implementation"]["name"]
        return name

    @property
    def slug(self) -> str:
        """The name as a part of a path."""
        return name_in_a_path(self.name)

    @property
    def verdicts(self) -> dict[str, Result]:
        return {result["clause"]: result for result in self.document["clauses"]}

    @property
    def tally(self) -> Counter[str]:
        return Counter(result["verdict"] for result in self.document["clauses"])

    @property
    def conclusion(self) -> Conclusion:
        """What its clauses come to, whatever the file says they do."""
        said = self.document
        return conclude(said["clauses"], said["conclusion"]["least"], "interrupted" in said)

    @property
    def broken(self) -> int:
        return self.tally["failed"] + self.tally["xfailed"]

    @property
    def said(self) -> str:
        """What it comes to, in a few words."""
        found = self.conclusion
        if self.broken:
            return f"breaks {self.broken} of {found.judged}"
        if found.verdict == "not judged":
            return f"not judged: {found.judged} of {found.of}"
        share = f"{found.judged} clauses" if found.judged == found.of else f"{found.judged} of {found.of} clauses"
        return share if found.whole else f"{share} asked for"

    @property
    def colour(self) -> str:
        found = self.conclusion
        return "bad" if self.broken else "good" if found.whole and found.verdict != "not judged" else "some"


@dataclass(frozen=True)
class Cell:
    run: Run
    verdict: str
    result: Result | None
    trace: str | None = None  # where the report keeps it

    @property
    def sign(self) -> str:
        return SIGNS[self.verdict]

    @property
    def through(self) -> list[str]:
        """The operations that its verdict rests on and that were made of others, and of which."""
        return self.result.get("through", []) if self.result else []

    @property
    def said(self) -> str:
        """The verdict, and what it went through."""
        return "; ".join([self.verdict, *self.through])

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
    """Write the pages; the path of the first. No two runs may have the same name. Raises OSError."""
    for each in ("clauses", "traces", "badges"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    chapters = [(chapter, [_row(folder, clause, runs) for clause in chapter.clauses]) for chapter in spec()]
    chapters = [(chapter, rows) for chapter, rows in chapters if any(cell.result for row in rows for cell in row.cells)]
    environment = _environment()
    style = (files("kvref_conformance.report") / "templates" / "style.css").read_text(encoding="utf-8")
    common = {"runs": runs, "style": Markup(style), "version": kvref.__version__, "generator": Markup(GENERATOR)}
    page = folder / "index.html"
    rows = [row for _, rows in chapters for row in rows]
    there = {cell.verdict for row in rows for cell in row.cells}
    derived = any(cell.through for row in rows for cell in row.cells)
    present = [family for family in names() if any(family in row.families for row in rows)]
    html = environment.get_template("matrix.html").render(
        chapters=chapters,
        families=present,
        verdicts=[each for each in SIGNS if each in there],
        derived=derived,
        signs=SIGNS,
        **common,
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


def is_report(folder: Path) -> bool:
    """Whether a report lies there: its first page says so."""
    try:
        return GENERATOR in (folder / "index.html").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def badge(run: Run) -> str:
    """An SVG for a README: what the implementation was found to be."""
    label = f"kvref {run.document['kvref']}"
    widths = [CHARACTER * len(words) + 12 for words in (label, run.said)]
    return _environment().get_template("badge.svg").render(run=run, label=label, colour=COLOURS[run.colour], widths=widths)


def _environment() -> Environment:
    loader = PackageLoader("kvref_conformance.report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["markdown"] = _markdown
    environment.filters["sentence"] = conclusion_text
    return environment


def _markdown(text: str) -> Markup:
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _row(folder: Path, clause: Clause, runs: list[Run]) -> Row:
    checks = [check for check in all_checks() if check.clause == clause.id]
    families = tuple(family for family in names() if any(check.family == family for check in checks))
    cells = []
    for run in runs:
        result = run.verdicts.get(clause.id)
        cell = Cell(run, result["verdict"] if result else "no result", result)
        cells.append(replace(cell, trace=_copy_trace(folder, cell)))
    return Row(clause, families, cells)


def _copy_trace(folder: Path, cell: Cell) -> str | None:
    """Into the report, under a name of our own."""
    if cell.result is None or cell.shown is None or not cell.result["trace"]:
        return None
    failed = {name: cell.shown[name] for name in ("what", "expected", "got")}
    if cause := cell.shown.get("cause"):
        failed["cause"] = cause
    text = find_trace(cell.run.path, cell.result["trace"], cell.result["clause"], failed)
    if text is None:
        return None
    target = Path("traces") / cell.run.slug / f"{cell.result['clause']}.jsonl"
    (folder / target).parent.mkdir(exist_ok=True)
    (folder / target).write_text(text, encoding="utf-8")
    return target.as_posix()
