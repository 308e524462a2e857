"""The folders of families: each has all parts that the judge needs; exceptions are listed here."""

import ast
import re
import subprocess
import sys
from dataclasses import MISSING, fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvref_conformance
from kvref_conformance.clauses import all_clauses
from kvref_conformance.families import Family, all_families, folders, names
from kvref_conformance.oracle.reference_model import FunctionModel
from kvref_conformance.testlib.registry import all_checks

ROOT = Path(kvref_conformance.__file__).parent


@pytest.mark.parametrize(
    "field", [each.name for each in fields(Family) if each.default is not MISSING or each.default_factory is not MISSING]
)
def test_every_optional_field_of_a_record_is_used_by_some_family(field):
    bare = Family("bare", "bare")
    assert any(getattr(record, field) != getattr(bare, field) for record in all_families().values())


@pytest.mark.parametrize("family", names())
def test_a_family_has_the_parts_that_its_record_calls_for(family):
    record = all_families()[family]
    assert (record.state_machine is not None) == bool(record.small)
    assert (record.law_adapter is not None) == bool(record.appending)
    assert record.part("model")


@pytest.mark.parametrize("family", names())
def test_a_record_says_everything(family):
    record = all_families()[family]
    assert bool(record.speaks_for) == (record.state_machine is not None)
    assert list(record.checks())
    assert set(record.formats) <= set(record.small)
    assert set(record.may_be_zero) <= set(record.small)
    assert issubclass(record.model, FunctionModel) == (record.state_machine is None)
    assert record.name == record.model.family == family


def test_every_folder_is_a_family_or_the_laws():
    assert set(folders()) == {*names(), "laws"}


def test_every_family_has_checks_and_the_laws_run_on_all_that_have_a_stream():
    checked = {(check.clause, check.family) for check in all_checks() if check.run}
    assert {family for _, family in checked} == set(names())
    for family in all_families().values():
        assert family.law_adapter is None or ("LAW-04", family.name) in checked


def test_no_circle_of_imports():
    modules = {_name(path): path for path in ROOT.rglob("*.py")}
    imported = {name: set(_imports(path, modules)) - {name} for name, path in modules.items()}
    assert len(imported) > 100
    list(TopologicalSorter(imported).static_order())  # raises CycleError with the cycle


def _name(path):
    return ".".join(["kvref_conformance", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


def _imports(path, modules):
    """The judge's modules that a module imports anywhere, without imports for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen = {id(each) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
              for each in ast.walk(node)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unseen and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from (each for each in (full if full in modules else node.module,) if each in modules)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)


@pytest.mark.parametrize("first", ["windowed.checks", "prefix.checks_eviction", "laws.checks"])
def test_the_order_of_checks_does_not_hang_on_who_imports_them_first(first):
    said = "print(*(f'{each.clause} {each.name}' for each in all_checks()), sep='\\n')"
    code = f"import kvref_conformance.families.{first}\nfrom kvref_conformance.testlib.registry import all_checks\n{said}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [f"{each.clause} {each.name}" for each in all_checks()]


def test_the_chapter_of_laws_lists_the_sizes_that_can_be_0():
    table = all_clauses()["LAW-12"].path.read_text("utf-8").partition("*sizes that can be 0*")[2].partition("## LAW-01")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    listed = {
        (family, size)
        for sizes, families in rows
        for size in re.findall(r"`(\w+)`", sizes)
        for family in re.findall(r"\w+", families)
    }
    assert listed == {(family.name, size) for family in all_families().values() for size in family.may_be_zero}
