"""Pages of the site that its build generates: a page per chapter of the specification, the findings, and the matrix.

Their contents are the chapters in `kvref/spec`, the results in `docs/results/checks`, and the pages beside the adapters of
third-party projects.
"""

import os
import re
from pathlib import Path

from generate_findings_index import PAGES, findings_by_failure, findings_link
from generate_results_tables import committed_runs
from kvref_conformance.clauses import CHAPTERS, Chapter, Clause, all_clauses, spec
from kvref_conformance.report.html import write_site
from kvref_conformance.report.results_model import FindingLink
from kvref_conformance.testlib.registry import all_checks
from sphinx_ext.rewrite_sources import link_issues

SPEC = Path(__file__).parents[2] / "kvref/spec"
CHAPTERS_WITHOUT_CLAUSES = ("protocol", "trace")
LABELS = {"passed": "Passed by", "failed": "Failed by"}


def write_pages(docs: Path) -> None:
    """Write the chapters into docs/spec, the findings into docs/findings and the matrix into docs/_matrix."""
    links = {
        failure: [FindingLink(each.title, f"../{each.address}") for each in found]
        for failure, found in findings_by_failure().items()
    }
    write_site(docs / "_matrix/matrix", list(committed_runs()), links)
    results = {run.name: {clause: result["verdict"] for clause, result in run.verdicts.items()} for run in committed_runs()}
    pages = {name: _chapter_page(chapter, results) for name, chapter in zip(CHAPTERS, spec(), strict=True)}
    pages |= {name: (SPEC / f"{name}.md").read_text(encoding="utf-8") for name in CHAPTERS_WITHOUT_CLAUSES}
    pages["index"] = _index_page()
    files = {docs / f"spec/{name}.md": text for name, text in pages.items()}
    files |= {docs / f"findings/{page.parent.name}.md": _findings_page(page, docs) for page in PAGES.glob("*/findings.md")}
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        # unchanged files keep their time, so that Sphinx does not rebuild their pages
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def chapters_table() -> str:
    """A table with a row per chapter."""
    lines = ["| chapter | code | clauses |", "|---|---|---|"]
    lines += [
        f"| [{chapter.title}]({name}.md) | {chapter.code} | {len(chapter.clauses)} |"
        for name, chapter in zip(CHAPTERS, spec(), strict=True)
    ]
    return "\n".join([*lines, f"| all | | {len(all_clauses())} |"]) + "\n"


def _findings_page(page: Path, docs: Path) -> str:
    """The text of a page of findings, with links that start in `docs/findings`."""
    return re.sub(
        r"(?<=\]\()(?!https?:)[\w./-]+",
        lambda link: os.path.relpath(page.parent / link[0], docs / "findings"),
        page.read_text(encoding="utf-8"),
    )


def _index_page() -> str:
    """The specification's README, with the chapters in the site's table of contents."""
    return (
        (SPEC / "README.md").read_text(encoding="utf-8")
        + "\n```{toctree}\n:hidden:\n\n"
        + "\n".join((*CHAPTERS, *CHAPTERS_WITHOUT_CLAUSES))
        + "\n```\n"
    )


def _chapter_page(chapter: Chapter, results: dict[str, dict[str, str]]) -> str:
    text = f"# {chapter.title} ({chapter.code})\n\n{chapter.intro}\n\n"
    return text + "\n".join(_clause_section(clause, results) for clause in chapter.clauses)


def _clause_section(clause: Clause, results: dict[str, dict[str, str]]) -> str:
    # the target of links to the clause, and the entry by which the search finds its id
    parts = [f"```{{index}} ! {clause.id}\n:name: {clause.id.lower()}\n```"]
    parts += [f"## {clause.id} · {clause.title}", clause.text, f"*Why.* {clause.why}"]
    parts.append(f"```python\n{clause.example}\n```")
    if clause.differs:
        parts.append(f"*Differs from.* {clause.differs}")
    if clause.caught:
        parts.append(f"*Would have caught.* {link_issues(clause.caught)}")
    checks = [check for check in all_checks() if check.clause == clause.id]
    families = [check.family for check in checks if check.run is None]
    written = dict.fromkeys((check.name.rpartition(" (")[0], ", ".join(check.letters)) for check in checks if check.run)
    methods = [f"“{name}”{f' ({letters})' if letters else ''}" for name, letters in written] + (
        [f"random call sequences of {', '.join(families)}"] if families else []
    )
    parts.append(f"*Checked by* {'; '.join(methods)}.")
    for verdict, label in LABELS.items():
        names = [name for name, verdicts in results.items() if verdicts.get(clause.id) == verdict]
        if names:
            parts.append(f"*{label}:* {', '.join(findings_link(name, name, '../../') for name in names)}.")
    return "\n\n".join(parts) + "\n"
