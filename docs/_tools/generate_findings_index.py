"""Read the findings from the page of each project (`findings.md` beside its adapters), and generate tables of them.

The tables are by cost, by clause and by implementation.

A finding is a heading followed by an empty line and a line of this form:

*Breaks* CLAUSES · *of* `IMPLEMENTATIONS` · *costs* one of COSTS · *right*: who [· [script](FILE)]

CLAUSES are separated by ", ", or are "no clause". The index shows the part of who before the first colon.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import kvref
from kvref_conformance.clauses import all_clauses

PAGES = Path(kvref.__file__).parents[1] / "conformance/adapters/kvref_adapters"
# What a finding costs the users of the judged project, the highest cost first. docs/findings.md explains them.
COSTS = (
    "another's tokens", "wrong tokens", "the service", "missing tokens", "another's tokens for crafted prompts",
    "wrong tokens in rare use", "wrong tokens after a mistake", "time or memory", "an error", "nothing",
)  # fmt: skip
NO_CLAUSE = "no clause"
LINE = re.compile(r"\*Breaks\* (.+?) · \*of\* (.+?) · \*costs\* (.+?) · \*right\*: (.+?)(?: · \[script\]\((.+?)\))?")


class FindingError(Exception):
    """A finding does not have the required form."""


@dataclass(frozen=True)
class Finding:
    page: str  # the folder of the project
    project: str
    title: str
    clauses: tuple[str, ...]
    of: tuple[str, ...]
    cost: str
    right: str
    script: str | None

    @property
    def link(self) -> str:
        """Return a link for a page in docs."""
        return f"[{self.title}](../conformance/adapters/kvref_adapters/{self.page}/findings.md#{anchor(self.title)})"

    @property
    def address(self) -> str:
        """Return the address of the finding on the site."""
        return f"findings/{self.page}.html#{anchor(self.title)}"


def anchor(title: str) -> str:
    """Return the anchor that MyST and GitHub give to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def findings() -> tuple[Finding, ...]:
    """Return the findings of all pages, the highest cost first. Raises FindingError."""
    found = [each for path in sorted(PAGES.glob("*/findings.md")) for each in read_page(path)]
    return tuple(sorted(found, key=lambda each: COSTS.index(each.cost)))


def read_page(path: Path) -> Iterator[Finding]:
    """Yield the findings of one page. Raises FindingError."""
    text, page = path.read_text(encoding="utf-8"), path.parent.name
    project = text.partition("\n")[0].removeprefix("# ")
    known = all_clauses()
    for title, line in re.findall(r"^##+ (.+)\n\n(\*Breaks\* .+)$", text, re.MULTILINE):
        match = LINE.fullmatch(line)
        if match is None:
            raise FindingError(f"{page}: {title}: expected *Breaks* ... · *of* ... · *costs* ... · *right*: ..., got {line}")
        breaks, of, cost, right, script = match.groups()
        clauses = () if breaks == NO_CLAUSE else tuple(breaks.split(", "))
        if unknown := [each for each in clauses if each not in known]:
            raise FindingError(f"{page}: {title}: no such clause: {', '.join(unknown)}")
        if cost not in COSTS:
            raise FindingError(f"{page}: {title}: expected a cost of {', '.join(COSTS)}, got {cost}")
        if script and not (path.parent / script).is_file():
            raise FindingError(f"{page}: {title}: no such script: {script}")
        yield Finding(page, project, title, clauses, tuple(re.findall("`(.+?)`", of)), cost, right, script)


def table_by_cost() -> str:
    """Return a table with a row per finding."""
    rows = [
        f"| {each.cost} | {each.link} | {each.project} | {', '.join(each.clauses) or NO_CLAUSE} "
        f"| {each.right.partition(':')[0]} |"
        for each in findings()
    ]
    return "\n".join(["| cost | finding | project | clauses | who is right |", "|---|---|---|---|---|", *rows]) + "\n"


def table_by_clause() -> str:
    """Return a table with a row per clause that an implementation fails, in the order of the specification."""
    found = findings()
    rows = []
    for id, clause in all_clauses().items():
        if broken := [each for each in found if id in each.clauses]:
            whose = "<br>".join(f"{without_version(each.project)}: {each.link}" for each in broken)
            rows.append(f"| {id} | {clause.title} | {whose} |")
    return "\n".join(["| clause | title | findings |", "|---|---|---|", *rows]) + "\n"


def without_version(project: str) -> str:
    """Return the name of a project: a page's title up to its version or a parenthesis."""
    return re.split(r" [(\d]", project)[0]


def findings_by_failure() -> dict[tuple[str, str], list[Finding]]:
    """Return the findings per implementation and clause."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for each in findings():
        for failure in product(each.of, each.clauses):
            found.setdefault(failure, []).append(each)
    return found


def page_of(implementation: str) -> str | None:
    """Return the page with the findings about an implementation, or None."""
    return next((each.page for each in findings() if implementation in each.of), None)


def findings_link(implementation: str, label: str, up: str = "../") -> str:
    """Return the label, as a link to the page of findings about this implementation if there is one.

    up: from the page with the link to the root of the repository.
    """
    page = page_of(implementation)
    return f"[{label}]({up}conformance/adapters/kvref_adapters/{page}/findings.md)" if page else label
