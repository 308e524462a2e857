"""What is generated and committed, so that GitHub shows it too: tables in pages, links to clauses, figures.

`python docs/_tools/generate_committed_parts.py` updates all of it, and exits with 1 if anything was out
of date. `nox -s docs` runs it.

A table stands between `<!-- generated: NAME -->` and `<!-- end generated -->` in a page. A link to a clause is written
`[PAGED-07](#PAGED-07)` and becomes a link to the clause's heading in kvref/spec, whose anchor depends on its title. On the site
the link leads to the site's page.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from draw_architecture import draw_architecture
from figures import render_figures
from generate_api_subsets import api_subsets_table, derived_operations_table
from generate_findings_index import PAGES, anchor, table_by_clause, table_by_cost
from generate_formats import formats_table
from generate_results_tables import coverage_table, engines_table
from generate_spec_pages import chapters_table
from kvref_conformance.clauses import all_clauses

DOCS = Path(__file__).parents[1]
SPEC = DOCS.parent / "kvref/spec"
TABLES: dict[str, Callable[[], str]] = {
    "findings_by_cost": table_by_cost, "findings_by_clause": table_by_clause, "chapters": chapters_table,
    "coverage": coverage_table, "engines": engines_table, "api_subsets": api_subsets_table,
    "derived_operations": derived_operations_table, "formats": formats_table,
}  # fmt: skip
TABLE_PATTERN = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end generated -->)", re.DOTALL)
CLAUSE_LINK = re.compile(r"\]\((?:#|(?:(?:\.\./)*(?:kvref/)?spec/)?\w+\.md#)([A-Za-z]+(?:-[A-Za-z0-9]+)?-\d\d)(?:--[^)]*)?\)")


def handwritten_pages() -> list[Path]:
    """The pages that are written by hand: Markdown in docs and docs/*, not what the site's build generates; findings; READMEs."""
    generated = ("spec", "findings", "_build")
    written = [path for path in [*DOCS.glob("*.md"), *DOCS.glob("*/*.md")] if path.parent.name not in generated]
    return [*sorted(written), *sorted(PAGES.glob("*/findings.md")), DOCS.parent / "README.md", SPEC / "README.md"]


def generate_page(page: Path) -> str:
    """The text of a page with current tables and links to clauses. Raises KeyError for an unknown table or clause."""
    text = TABLE_PATTERN.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", page.read_text(encoding="utf-8"))
    return CLAUSE_LINK.sub(lambda found: f"]({_clause_link(found[1].upper(), page.parent)})", text)


def _clause_link(id: str, folder: Path) -> str:
    """The heading of a clause, relative to a folder, with the anchor that GitHub gives it. Raises KeyError."""
    clause = all_clauses()[id]
    return f"{os.path.relpath(SPEC / clause.path.name, folder)}#{anchor(f'{clause.id} · {clause.title}')}"


def update_all() -> list[Path]:
    """Write what is out of date, and return its paths."""
    texts = {page: generate_page(page) for page in handwritten_pages()}
    texts[DOCS / "_static/architecture.svg"] = draw_architecture()
    texts |= {DOCS / "_static/figures" / f"{name}.svg": text for name, text in render_figures()}
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    return changed


if __name__ == "__main__":
    changed = update_all()
    for path in changed:
        print(f"updated {path.relative_to(DOCS.parent)}: commit it")
    sys.exit(bool(changed))
