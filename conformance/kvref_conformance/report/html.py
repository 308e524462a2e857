"""The HTML report of several runs: static pages that work from a file:// address without a network.

`index.html` is a table of implementations and chapters. `clauses.html` has a table per chapter, of its clauses and the
implementations that offer any of them. Each implementation and each clause has its own page. The page of a clause shows the
calls of each failure, with a player for its trace. Text of implementations is untrusted: the templates escape everything, and
the Markdown of the clauses is rendered without raw HTML.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

import kvref
from kvref_conformance.clauses import Clause, spec
from kvref_conformance.families import names
from kvref_conformance.report import player_element
from kvref_conformance.report.console import conclusion_text
from kvref_conformance.report.results_model import VERDICT_SIGNS, ChapterShare, FindingLink, MatrixCell, ResultFile
from kvref_conformance.report.staleness import stale_clauses
from kvref_conformance.report.trace_links import find_trace
from kvref_conformance.testlib.registry import all_checks

COLORS = {"good": "#1a7f37", "bad": "#b42318", "some": "#8a6100"}
GENERATOR = '<meta name="generator" content="kvref report">'  # in each page; `is_report` recognizes it
TEMPLATES = Path(__file__).parent / "templates"
CHARACTER_WIDTH = 7  # average width of a character in a badge, in pixels

Findings = Mapping[tuple[str, str], Sequence[FindingLink]]  # by implementation and clause


@dataclass(frozen=True)
class ClauseRow:
    """The row of a clause in clauses.html. families: those with a check of the clause."""

    clause: Clause
    families: tuple[str, ...]
    cells: tuple[MatrixCell, ...]


def write_site(folder: Path, runs: list[ResultFile], findings: Findings | None = None) -> Path:
    """Write all pages, and return the path of the first. All runs must have different names. Raises OSError."""
    for each in ("clauses", "implementations", "traces", "badges"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    shutil.copytree(player_element.STATIC, folder, dirs_exist_ok=True)
    shutil.copy(TEMPLATES / "style.css", folder)
    chapters = [(chapter, [_clause_row(clause, runs, findings or {}) for clause in chapter.clauses]) for chapter in spec()]
    chapters = [(chapter, rows) for chapter, rows in chapters if any(cell.result for row in rows for cell in row.cells)]
    rows = [row for _, rows in chapters for row in rows]
    shares = [
        (run, [ChapterShare(run, chapter, tuple(row.cells[at] for row in rows)) for chapter, rows in chapters])
        for at, run in enumerate(runs)
    ]
    stale = {run.slug: stale_clauses(run) for run in runs}
    there = {cell.verdict for row in rows for cell in row.cells}
    made = jinja_environment()

    def page(path: str, template: str, **what: object) -> None:
        (folder / path).write_text(made.get_template(template).render(**what), encoding="utf-8")

    about = [run.document["implementation"] for run in runs]
    page(
        "index.html",
        "index.html",
        shares=shares,
        chapters=[chapter for chapter, _ in chapters],
        projects=sorted({run.project for run in runs}),
        languages=sorted({each["language"] for each in about}),
        families=[family for family in names() if any(family in each["families"] for each in about)],
        stale=stale,
        derived=any(share.num_derived for _, of_run in shares for share in of_run),
    )
    page(
        "clauses.html",
        "clauses.html",
        runs=runs,
        tables=[(chapter, rows, _offering_columns(rows)) for chapter, rows in chapters],
        families=[family for family in names() if any(family in row.families for row in rows)],
        verdicts=[each for each in VERDICT_SIGNS if each in there],
        derived=any(cell.through for row in rows for cell in row.cells),
    )
    for chapter, of_chapter in chapters:
        for row in of_chapter:
            page(f"clauses/{row.clause.id}.html", "clause.html", chapter=chapter, row=row)
    for run, of_run in shares:
        page(f"implementations/{run.slug}.html", "implementation.html", run=run, shares=of_run, stale=stale[run.slug])
        (folder / "badges" / f"{run.slug}.svg").write_text(make_badge(run), encoding="utf-8")
    for cell in [cell for row in rows for cell in row.cells if cell.trace]:
        (folder / cell.file).parent.mkdir(exist_ok=True)
        (folder / cell.file).write_text(cell.trace or "", encoding="utf-8")
    return folder / "index.html"


def is_report(folder: Path) -> bool:
    """Whether the folder contains a report, by the generator that its first page names."""
    try:
        return GENERATOR in (folder / "index.html").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def make_badge(run: ResultFile) -> str:
    """An SVG badge with the overall verdict, for a README."""
    label = f"kvref {run.document['kvref']}"
    widths = [CHARACTER_WIDTH * len(words) + 12 for words in (label, run.summary)]
    return jinja_environment().get_template("badge.svg").render(run=run, label=label, colour=COLORS[run.color], widths=widths)


def jinja_environment() -> Environment:
    """The Jinja environment of the templates, with autoescape."""
    loader = PackageLoader("kvref_conformance.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["markdown"] = _markdown
    made.filters["sentence"] = conclusion_text
    made.filters["player"] = lambda trace: Markup(player_element.element(trace))
    made.globals |= {
        "style": Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        "version": kvref.__version__,
        "generator": Markup(GENERATOR),
        "signs": VERDICT_SIGNS,
        "player_scripts": player_element.SCRIPTS,
        "player_styles": player_element.STYLES,
    }
    return made


def _markdown(text: str) -> Markup:
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _clause_row(clause: Clause, runs: list[ResultFile], findings: Findings) -> ClauseRow:
    checks = [check for check in all_checks() if check.clause == clause.id]
    families = tuple(family for family in names() if any(check.family == family for check in checks))
    cells = [
        MatrixCell(run, clause, _trace_text(MatrixCell(run, clause)), tuple(findings.get((run.name, clause.id), ())))
        for run in runs
    ]
    return ClauseRow(clause, families, tuple(cells))


def _offering_columns(rows: list[ClauseRow]) -> list[int]:
    """The positions of the runs that offer the family of any of these clauses."""
    return [at for at in range(len(rows[0].cells)) if any(row.cells[at].is_offered for row in rows)]


def _trace_text(cell: MatrixCell) -> str | None:
    """The text of the trace that shows a failure, or None."""
    if cell.result is None or cell.shown_check is None or not cell.result["trace"]:
        return None
    failed = {name: cell.shown_check[name] for name in ("what", "expected", "got")}
    if cause := cell.shown_check.get("cause"):
        failed["cause"] = cause
    return find_trace(cell.run.path, cell.result["trace"], cell.result["clause"], failed)
