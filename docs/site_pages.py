"""Generated pages of the site: one page per chapter of the specification, the matrix, and tables of results.

The build of the site writes `docs/spec/` from `kvref/spec` and from the results in `docs/results/checks`, and `docs/findings/`
from the pages beside the adapters of third-party projects.
"""

import os
import re
from functools import cache
from pathlib import Path

from findings_index import PAGES, by_failure, page_of
from kvref_conformance.checking.registry import all_checks
from kvref_conformance.clauses import CHAPTERS, Chapter, Clause, all_clauses, spec
from kvref_conformance.report.html import write_site
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.runs import Finding, Run

FOLDER = Path(__file__).parent
SPEC = Path(__file__).parents[1] / "kvref/spec"
OTHERS = ("protocol", "trace")  # chapters without clauses
SIGNS = {"passed": "Passed by", "failed": "Failed by"}
MARKS = {"passed": "✓", "failed": "**✗**", "not offered": "·"}


@cache
def runs() -> tuple[Run, ...]:
    """Return the committed results, kvref's own first."""
    found = [Run(path, read_json(path)) for path in sorted((FOLDER / "results/checks").glob("*.json"))]
    return tuple(sorted(found, key=lambda run: (run.project != "kvref", run.project, run.name)))


def write(folder: Path) -> None:
    """Write the chapters into folder/spec, the findings into folder/findings and the matrix into folder/_matrix."""
    told = {failure: [Finding(each.title, f"../{each.address}") for each in found] for failure, found in by_failure().items()}
    write_site(folder / "_matrix/matrix", list(runs()), told)
    results = {run.name: {clause: result["verdict"] for clause, result in run.verdicts.items()} for run in runs()}
    pages = {name: _chapter(chapter, results) for name, chapter in zip(CHAPTERS, spec(), strict=True)}
    pages |= {name: (SPEC / f"{name}.md").read_text(encoding="utf-8") for name in OTHERS}
    pages["index"] = _index()
    files = {f"spec/{name}.md": text for name, text in pages.items()}
    files |= {f"findings/{path.parent.name}.md": _findings(path) for path in PAGES.glob("*/findings.md")}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        # unchanged files keep their time, so that Sphinx does not rebuild their pages
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def chapters() -> str:
    """A table with a row per chapter."""
    lines = ["| chapter | code | clauses |", "|---|---|---|"]
    lines += [
        f"| [{chapter.title}]({name}.md) | {chapter.code} | {len(chapter.clauses)} |"
        for name, chapter in zip(CHAPTERS, spec(), strict=True)
    ]
    return "\n".join([*lines, f"| all | | {len(all_clauses())} |"]) + "\n"


def _index() -> str:
    """The specification's README, with the chapters in the site's table of contents."""
    return (
        (SPEC / "README.md").read_text(encoding="utf-8")
        + "\n```{toctree}\n:hidden:\n\n"
        + "\n".join((*CHAPTERS, *OTHERS))
        + "\n```\n"
    )


def coverage() -> str:
    """A table with a row per implementation that is no engine: clauses with a verdict, and how many by derived operations."""
    lines = [
        "| implementation | project | families | judged | of these, by derived operations | failed |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs():
        if _is_engine(run):
            continue
        about, found = run.document["implementation"], run.conclusion
        derived = sum(bool(result.get("through")) for result in run.verdicts.values() if result["verdict"] in SIGNS)
        judged = f"{found.judged} of {found.of}" + (", **not judged**" if found.verdict == "not judged" else "")
        lines.append(
            f"| {run.name} | {_found(run.name, run.project)} {about['version']}, "
            f"{about['language']} | {', '.join(about['families'])} | {judged} | {derived or ''} | {run.broken or ''} |"
        )
    return "\n".join(lines) + "\n"


def engines() -> str:
    """A table with a row per engine and a column per clause of ENG."""
    clauses = next(chapter for chapter in spec() if chapter.code == "ENG").clauses
    lines = [
        f"| engine | {' | '.join(f'[{clause.id[4:]}](#{clause.id})' for clause in clauses)} |",
        f"|---|{'---|' * len(clauses)}",
    ]
    for run in sorted(filter(_is_engine, runs()), key=lambda run: run.name):
        about = run.document["implementation"]
        marks = [MARKS[run.verdicts[clause.id]["verdict"]] for clause in clauses]
        lines.append(f"| **{_found(run.name, run.name)}**<br>{about['version']}, {about['language']} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _is_engine(run: Run) -> bool:
    return bool(run.document["implementation"]["families"] == ["engine"])


def _chapter(chapter: Chapter, results: dict[str, dict[str, str]]) -> str:
    text = f"# {chapter.title} ({chapter.code})\n\n{chapter.intro}\n\n"
    return text + "\n".join(_clause(clause, results) for clause in chapter.clauses)


def _clause(clause: Clause, results: dict[str, dict[str, str]]) -> str:
    parts = [f"({clause.id})=", f"## {clause.id} · {clause.title}", clause.text, f"*Why.* {clause.why}"]
    parts.append(f"```python\n{clause.example}\n```")
    if clause.differs:
        parts.append(f"*Differs from.* {clause.differs}")
    if clause.caught:
        parts.append(f"*Would have caught.* {_linked(clause.caught)}")
    checks = [check for check in all_checks() if check.clause == clause.id]
    families = [check.family for check in checks if check.run is None]
    written = dict.fromkeys((check.name.rpartition(" (")[0], ", ".join(check.letters)) for check in checks if check.run)
    looked = [f"“{name}”{f' ({letters})' if letters else ''}" for name, letters in written] + (
        [f"random call sequences of {', '.join(families)}"] if families else []
    )
    parts.append(f"*Checked by* {'; '.join(looked)}.")
    for verdict, word in SIGNS.items():
        names = [name for name, verdicts in results.items() if verdicts.get(clause.id) == verdict]
        if names:
            parts.append(f"*{word}:* {', '.join(_found(name, name, '../../') for name in names)}.")
    return "\n\n".join(parts) + "\n"


def _found(name: str, said: str, up: str = "../") -> str:
    """Return the text `said`, as a link to the page of findings about this implementation if there is one.

    up: from the page with the link to the root of the repository.
    """
    page = page_of(name)
    return f"[{said}]({up}conformance/adapters/kvref_adapters/{page}/findings.md)" if page else said


def _findings(page: Path) -> str:
    """Return the text of a page of findings with links that start in `docs/findings`."""
    start = FOLDER / "findings"
    return re.sub(
        r"(?<=\]\()(?!https?:)[\w./-]+",
        lambda link: os.path.relpath(page.parent / link[0], start),
        page.read_text(encoding="utf-8"),
    )


def _linked(text: str) -> str:
    return re.sub(r"\b([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", text)


def _clauses_linked(text: str) -> str:
    """Turn clause ids in prose into links; ids in headings, code and links stay as they are."""
    known = "|".join(map(re.escape, all_clauses()))
    fenced = re.split(r"(^ *```.*?^ *```$|^#.*?$|^\(.*?\)=$|`[^`]+`|\[[^\]]*\]\([^)]*\))", text, flags=re.DOTALL | re.MULTILINE)
    fenced[::2] = [re.sub(rf"(?<![\w-])({known})(?![\w-])", r"[\1](#\1)", prose) for prose in fenced[::2]]
    return "".join(fenced)


def point_to_the_site(app: object, docname: str, source: list[str]) -> None:
    """Convert links that work in the repository: chapters are pages of the site, and files outside it are only named."""
    text = re.sub(
        r"\]\((?:\.\./)*kvref/spec/\w+\.md#([a-z0-9-]+-\d\d)--[^)]*\)", lambda link: f"](#{link[1].upper()})", source[0]
    )
    text = _clauses_linked(text)
    text = re.sub(r"\]\((?:\.\./)+kvref/spec/README\.md", rf"]({'../' * docname.count('/')}spec/index.md", text)
    text = re.sub(r"\]\((?:\.\./)+kvref/spec/(\w+)\.md", rf"]({'../' * docname.count('/')}spec/\1.md", text)
    pages = r"\]\((?:\.\./)+conformance/adapters/kvref_adapters/(\w+)/findings\.md"
    text = re.sub(pages, rf"]({'../' * docname.count('/')}findings/\1.md", text)
    if docname.startswith("spec/"):
        text = text.replace("](README.md)", "](index.md)")
    if docname.startswith("how/"):
        source[0] = _linked(text)
        return
    text = re.sub(r"\[([^\]]+)\]\(\.\./(?!\.)([^)]+)\)", _named, text)
    source[0] = re.sub(r"\[([^\]]+)\]\((\w+\.schema\.json)\)", r"`kvref/spec/\2`", text)


def _named(link: re.Match[str]) -> str:
    label, path = link.groups()
    return f"`{path}`" if label == path else f"{label} (`{path}`)"


def as_restructured_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Convert a docstring: backticks mark code, and all other characters that reStructuredText would interpret are escaped."""
    for number, line in enumerate(lines):
        pieces = re.split(r"(`[^`]+`)", line)
        lines[number] = "".join(
            f"`{piece}`" if piece.startswith("`") and len(piece) > 1 else re.sub(r"([*|_\\`])", r"\\\1", piece)
            for piece in pieces
        )
