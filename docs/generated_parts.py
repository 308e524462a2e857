"""What is generated and committed, so that GitHub shows it too: tables in pages, links to clauses, figures.

`python docs/generated_parts.py` updates all of it and exits with 1 if anything was out of date, as `nox -s docs` does.

A table stands between `<!-- generated: NAME -->` and `<!-- end generated -->` in a page. A link to a clause is written
`[PAGED-07](#PAGED-07)` and becomes a link to the clause's heading in kvref/spec, whose anchor depends on its title. On the site
the link leads to the site's page.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pictures
from architecture import diagram
from findings_index import PAGES, anchor, by_clause, by_cost
from kvref_conformance.clauses import all_clauses
from site_pages import chapters, coverage, engines
from small_surfaces import derived_operations, small_surfaces
from stored_formats import formats_table

FOLDER = Path(__file__).parent
SPEC = FOLDER.parent / "kvref/spec"
PARTS: dict[str, Callable[[], str]] = {
    "findings_by_cost": by_cost, "findings_by_clause": by_clause, "chapters": chapters, "coverage": coverage, "engines": engines,
    "small_surfaces": small_surfaces, "derived_operations": derived_operations, "formats": formats_table,
}  # fmt: skip
TABLE = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end generated -->)", re.DOTALL)
CLAUSE_LINK = re.compile(r"\]\((?:#|(?:(?:\.\./)*(?:kvref/)?spec/)?\w+\.md#)([A-Za-z]+(?:-[A-Za-z0-9]+)?-\d\d)(?:--[^)]*)?\)")


def pages() -> list[Path]:
    """The pages that are written by hand: Markdown in docs and docs/*, not what the site's build generates; findings; READMEs."""
    generated = ("spec", "findings", "_build")
    written = [path for path in [*FOLDER.glob("*.md"), *FOLDER.glob("*/*.md")] if path.parent.name not in generated]
    return [*sorted(written), *sorted(PAGES.glob("*/findings.md")), FOLDER.parent / "README.md", SPEC / "README.md"]


def updated(page: Path) -> str:
    """The text of a page with current tables and links to clauses. Raises KeyError for an unknown table or clause."""
    text = TABLE.sub(lambda found: f"{found[1]}{found[2]}{PARTS[found[1]]()}", page.read_text(encoding="utf-8"))
    return CLAUSE_LINK.sub(lambda found: f"]({_address(found[1].upper(), page.parent)})", text)


def _address(id: str, folder: Path) -> str:
    """The heading of a clause, relative to a folder, with the anchor that GitHub gives it. Raises KeyError."""
    clause = all_clauses()[id]
    return f"{os.path.relpath(SPEC / clause.path.name, folder)}#{anchor(f'{clause.id} · {clause.title}')}"


def update() -> list[Path]:
    """Write what is out of date, and return its paths."""
    texts = {page: updated(page) for page in pages()}
    texts[FOLDER / "_static/architecture.svg"] = diagram()
    texts |= {FOLDER / "_static/pictures" / f"{name}.svg": text for name, text in pictures.drawn()}
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    return changed


if __name__ == "__main__":
    found = update()
    for path in found:
        print(f"updated {path.relative_to(FOLDER.parent)}: commit it")
    sys.exit(bool(found))
