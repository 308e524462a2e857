"""The scaffold. It edits a checkout of the repository, prints what it wrote, and what is left to do."""

import argparse
import keyword
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill

from jinja2 import Environment, PackageLoader, StrictUndefined

import kvref_conformance
from kvref_conformance.clauses import CHAPTERS, all_clauses, spec
from kvref_conformance.families import all_families, names
from kvref_conformance.testlib.registry import all_checks

ROOT = Path(kvref_conformance.__file__).parents[2]
FAMILIES = "conformance/kvref_conformance/families"
BUGS = "conformance/tests/bugs"
ADAPTERS = "conformance/adapters"
LONGEST_NAME = 90  # characters of a check's name
TEMPLATES = Environment(
    loader=PackageLoader("kvref_conformance.new"), undefined=StrictUndefined, keep_trailing_newline=True,
    variable_start_string="<<", variable_end_string=">>", trim_blocks=True,
)  # fmt: skip

AFTER_CLAUSE = """
Next:
  1. Write the requirement, the reason and the example in {spec}. With several requirements, write a list
     "- (a) ...", "- (b) ..." and cite the letters: @check("{clause}ab", "{family}").
  2. Write the check in {checks}, and plant a bug that it must find in {bugs}.
  3. Make the reference satisfy it, and run:
       kvref check reference --family {family} --clause {clause}
       pytest kvref/spec conformance/tests/test_planted_bugs.py -k {clause}
If they apply:
  - {family}/model.py: predict the reply, name the clause, and list it in speaks_for, if a call sequence can show a violation.
  - {family}/state_machine.py: a state in which it is likely to be violated.
  - conformance/kvref_zoo/{family}.py: a public bug, as a wrong cache of a few lines.
At the end:
  kvref vectors -o conformance/vectors; python -m kvref_conformance.generate_protocol; nox -s docs; pytest"""

AFTER_FAMILY = """
The new family works: it is a list of tokens with a maximum length. Change it into yours. See that all is in place:
  kvref check reference --family {family}
  pytest kvref/spec/{family}.md conformance/tests/test_families.py
  pytest conformance/tests/test_planted_bugs.py -k {code}-
Next:
  1. kvref/spec/{family}.md: one clause per requirement (more: python -m kvref_conformance.new clause {code}-04 TITLE).
  2. families/{family}/__init__.py: the operations, their errors, the sizes, and a sample call of each operation.
  3. kvref/{family}.py: the reference. Other backends need no code of their own if it uses backend.xp.
  4. families/{family}/model.py: the expected replies, independently of the reference. checks.py: the checks.
  5. families/{family}/state_machine.py, and law_adapter.py, by which the laws run on the family.
  6. The numbers of clauses in README.md and CHANGELOG.md, and the names in docs/api.md: tests name what is missing.
Optional: derived_operations.py (operations that follow from others), soak_driver.py, diagnosis.py; the zoo; a page in docs/how.
At the end:
  kvref vectors -o conformance/vectors; python -m kvref_conformance.generate_protocol; nox -s docs; pytest"""

AFTER_ADAPTER = """
Next:
  1. {adapter}: call the project's cache. Operations that it lacks stay absent; sizes that it lacks go into `limits`.
  2. {install}: the commands that install the project.
  3. pip install -e conformance/adapters; kvref check {name}
  4. nox -s "others(project='{project}')" writes the results. Describe each failed clause in {findings}."""


class ScaffoldError(Exception):
    """A name or title is unusable, or exists. The message says what is expected."""


def render(template: str, values: Mapping[str, str]) -> str:
    return TEMPLATES.get_template(f"{template}.jinja").render(values)


class Changes:
    """New texts of files, by path in the repository. Nothing is written before `apply`."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def write(self, path: str, template: str, **values: str) -> None:
        self.texts[path] = render(template, values)

    def insert(self, path: str, text: str, before: str = "") -> None:
        """Inserts text before the first occurrence of a string in a file, or appends it."""
        old = self.texts.get(path) or (ROOT / path).read_text(encoding="utf-8")
        if before not in old:
            raise ScaffoldError(f"{path}: expected it to contain {before!r}")
        at = old.index(before) if before else len(old)
        self.texts[path] = old[:at] + text + old[at:]

    def apply(self) -> None:
        for path, text in self.texts.items():
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
        for path in self.texts:
            print(f"wrote   {path}")


def new_clause(clause: str, title: str, family: str | None) -> str:
    """Adds a section to the chapter, a check and a planted bug. Returns what is left to do."""
    if not re.fullmatch(r"[A-Z]+(-[A-Z0-9]+)?-\d\d", clause):
        raise ScaffoldError(f"clause: expected an id such as SHARE-10, got {clause!r}")
    if clause in all_clauses():
        raise ScaffoldError(f"clause: {clause} exists ({all_clauses()[clause].title})")
    prefix = clause.rpartition("-")[0]
    chapters = [chapter for chapter in spec() if any(each.id.rpartition("-")[0] == prefix for each in chapter.clauses)]
    if not chapters:
        known = sorted({id.rpartition("-")[0] for id in all_clauses()})
        raise ScaffoldError(f"clause: expected an id that begins with one of {', '.join(known)}, got {clause!r}")
    chapter = chapters[0].clauses[0].path.stem
    of_prefix = Counter(each.family for each in all_checks() if each.run and each.clause.startswith(f"{prefix}-"))
    family = family or of_prefix.most_common(1)[0][0]
    if family not in names():
        raise ScaffoldError(f"--family: expected one of {', '.join(names())}, got {family!r}")
    name = re.sub(r"\W+", "_", title.lower()).strip("_")
    if not name.isidentifier() or keyword.iskeyword(name) or len(name) > LONGEST_NAME:
        raise ScaffoldError(f"title: expected a sentence of at most {LONGEST_NAME} characters, got {title!r}")
    places = {
        "spec": f"kvref/spec/{chapter}.md",
        "checks": f"{FAMILIES}/{family}/checks.py",
        "bugs": _bugs_module(prefix, family),
    }
    if any(f"def {name}(" in path.read_text(encoding="utf-8") for path in (ROOT / FAMILIES / family).glob("*.py")):
        raise ScaffoldError(f"title: {family} has a check of this name: {name}")
    values = {"clause": clause, "title": title, "family": family, "name": name}
    changes = Changes()
    changes.insert(places["spec"], render("clause.md", values))
    changes.insert(places["checks"], render("check.py", values))
    if (ROOT / places["bugs"]).exists():
        changes.insert(places["bugs"], render("bug.py", values))
    else:
        changes.write(places["bugs"], "bug_module.py", **values)
    changes.apply()
    return AFTER_CLAUSE.format(clause=clause, family=family, **places)


def _bugs_module(prefix: str, family: str) -> str:
    """The module that has the most bugs of clauses with this prefix, or one named after the family."""
    counts = {path: path.read_text(encoding="utf-8").count(f'"{prefix}-') for path in sorted((ROOT / BUGS).glob("*.py"))}
    most = max(counts, key=lambda path: counts[path])
    return f"{BUGS}/{most.name}" if counts[most] else f"{BUGS}/{family}.py"


def new_family(family: str, title: str) -> str:
    """Adds a complete small family with a chapter of three clauses, and its reference. Returns what is left to do."""
    if not re.fullmatch(r"[a-z]+", family) or keyword.iskeyword(family):
        raise ScaffoldError(f"family: expected lower-case letters, as in 'windowed', got {family!r}")
    code = family.upper()
    if family in names() or family in CHAPTERS or find_spec(f"kvref.{family}") or (ROOT / "kvref" / family).exists():
        raise ScaffoldError(f"family: {family} exists, as a family, a chapter or a module of kvref")
    if any(id.startswith(f"{code}-") for id in all_clauses()):
        raise ScaffoldError(f"family: clauses {code}-* exist")
    values = {"family": family, "Family": family.capitalize(), "code": code, "title": title}
    changes = Changes()
    changes.write(f"kvref/spec/{family}.md", "family/chapter.md", **values)
    changes.write(f"kvref/{family}.py", "family/reference.py", **values)
    for part in ("__init__", "model", "checks", "state_machine", "law_adapter"):
        changes.write(f"{FAMILIES}/{family}/{part}.py", f"family/{part}.py", **values)
    changes.write(f"{BUGS}/{family}.py", "family/bugs.py", **values)
    changes.insert("conformance/kvref_conformance/clauses.py", f'"{family}", ', before='"attention", "kernels"')
    name = values["Family"]
    changes.insert(
        "conformance/kvref_conformance/implementations/backends.py",
        render("family/factory.py", values),
        before="    def offload(self",
    )
    changes.insert("kvref/__init__.py", f"from kvref.{family} import {name}Cache, {name}Config\n", before="\n__version__")
    changes.insert("kvref/__init__.py", f'    "{name}Cache",\n    "{name}Config",\n', before='    "attention",')
    changes.apply()
    subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--quiet", "--fix", "kvref", f"{FAMILIES}/{family}"], cwd=ROOT, check=False
    )
    return AFTER_FAMILY.format(family=family, code=code)


def new_adapter(project: str, family: str) -> str:
    """Adds a folder for a third-party project, with an adapter of one family. Returns what is left to do."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", project) or keyword.iskeyword(project):
        raise ScaffoldError(f"project: expected a Python module name such as mlx_lm, got {project!r}")
    if family not in names():
        raise ScaffoldError(f"--family: expected one of {', '.join(names())}, got {family!r}")
    folder = f"{ADAPTERS}/kvref_adapters/{project}"
    record, name = all_families()[family], project.replace("_", "-")
    entries = (ROOT / ADAPTERS / "pyproject.toml").read_text(encoding="utf-8")
    if (ROOT / folder).exists() or f"\n{name} = " in entries:
        raise ScaffoldError(f"project: {folder} or an implementation named {name} exists")
    operations = [each for each in vars(record.protocol) if not each.startswith("_") and callable(getattr(record.protocol, each))]
    values = {"project": project, "name": name, "family": family, "Project": project.title().replace("_", "")}
    changes = Changes()
    changes.write(
        f"{folder}/adapter.py",
        "adapter/adapter.py",
        operations=fill(", ".join(operations), 120, subsequent_indent=" " * 4),
        **values,
    )
    changes.write(f"{folder}/findings.md", "adapter/findings.md", **values)
    changes.write(f"{folder}/install.txt", "adapter/install.txt", **values)
    entry = f'{name} = "kvref_adapters.{project}.adapter:{values["Project"]}"\n'
    listed = [line for line in entries.splitlines() if '= "kvref_adapters.' in line]
    later = next((line for line in listed if line > entry), None)
    changes.insert(f"{ADAPTERS}/pyproject.toml", entry, before=later or entries.partition(listed[-1] + "\n")[2])
    changes.apply()
    places = {each: f"{folder}/{each}" for each in ("adapter.py", "findings.md", "install.txt")}
    return AFTER_ADAPTER.format(
        adapter=places["adapter.py"], findings=places["findings.md"], install=places["install.txt"], name=name, project=project
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvref_conformance.new", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    clause = kinds.add_parser("clause", help="a clause of an existing chapter, with a check and a planted bug")
    clause.add_argument("id", help="id of the clause: SHARE-10")
    clause.add_argument("title", help="title, an indicative sentence: 'Truncation frees blocks'")
    clause.add_argument("--family", help="family of the check (default: the one with most checks of the chapter)")
    family = kinds.add_parser("family", help="a family, with a chapter, a reference, and all parts that the judge needs")
    family.add_argument("name", help="name of the factory and of the folder: ring")
    family.add_argument("title", help="title of the chapter: 'Ring cache'")
    adapter = kinds.add_parser("adapter", help="an adapter of a third-party project")
    adapter.add_argument("project", help="name of the project as a Python module: mlx_lm")
    adapter.add_argument("--family", default="contiguous", help="family that the project implements (default contiguous)")
    asked = parser.parse_args(argv)
    if not (ROOT / "kvref/spec").is_dir() or not (ROOT / BUGS).is_dir():
        parser.error(f"expected kvref to be installed from a checkout (pip install -e .), got {ROOT}")
    try:
        if asked.kind == "clause":
            print(new_clause(asked.id, asked.title, asked.family))
        elif asked.kind == "family":
            print(new_family(asked.name, asked.title))
        else:
            print(new_adapter(asked.project, asked.family))
    except ScaffoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
