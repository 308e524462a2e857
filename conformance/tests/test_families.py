"""The folders of families: each has all parts that the judge needs; exceptions are listed here."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvref_conformance
from kvref_conformance.clauses import all_clauses
from kvref_conformance.families import PARTS, Family, all_families, folders, names
from kvref_conformance.oracle.reference_model import FunctionModel
from kvref_conformance.testlib.registry import all_checks

ROOT = Path(kvref_conformance.__file__).parent
STATELESS = "a function has no state: no calls lead up to anything, and no tokens are appended"
NO_TOKENS = "no tokens are appended to a pool"
ONE_BY_ONE = "its stream serves one request after the other, and there is nothing to serve where there is none"
TWO_WIDTHS = "a workload is of keys and values of one width, and a row's two parts are of two"
SHOWN = "what came says whose it is by itself"
PLAIN = "none of its operations can be derived from others"
FUNCTIONS = ("elements", "rows", "kernels", "attention")
MOVED = ("hosted", "offload")
ABSENT = {
    **{(family, part): STATELESS for family in FUNCTIONS for part in ("state_machine", "law_adapter")},
    **{(family, "law_adapter"): NO_TOKENS for family in ("blocks", "buffers", "offload")},
    ("hosted", "law_adapter"): "blocks are written as a whole, and no tokens are appended to a block",
    ("engine", "law_adapter"): "its tokens are words, which are not read as keys and values",
    **{(family, "soak_driver"): ONE_BY_ONE for family in names() if family not in ("paged", "prefix")},
    ("latent", "soak_driver"): TWO_WIDTHS,
    **{(family, "diagnosis"): SHOWN for family in names() if family != "engine"},
    **{(family, "derived_operations"): PLAIN for family in (*FUNCTIONS, "buffers", *MOVED)},
}  # fmt: skip

CACHES = (
    "contiguous", "paged", "prefix", "windowed", "grouped", "quantized", "channels", "tiered", "pooled", "latent", "sharded",
)  # fmt: skip
EMPTY = {
    "small": (FUNCTIONS, STATELESS),
    "speaks_for": (FUNCTIONS, STATELESS),
    "gives": ((*FUNCTIONS, "contiguous", "channels", "pooled", "sharded", *MOVED), "no later call refers to it"),
    "several": ((*FUNCTIONS, *CACHES, "blocks", "buffers", *MOVED), "no argument is a list of what it gave"),
    "formats": ((*FUNCTIONS, "blocks", "buffers", "pooled", "engine", "offload"), "none of its sizes is a format"),
    "may_be_zero": (
        (*FUNCTIONS, "quantized", "buffers", "pooled", "latent", "sharded"), "with a size of zero it would be nothing",
    ),
    "holds": (
        (*FUNCTIONS, *(each for each in CACHES if each not in ("tiered", "pooled")), "blocks", "buffers", "engine", *MOVED),
        "no size is a part of another",
    ),
    "multiples": (tuple(name for name in names() if name != "grouped"), "no size is a multiple of another"),
    "appending": ((*FUNCTIONS, "blocks", "buffers", "engine", *MOVED), "no arrays of tokens are appended"),
    "whole": (tuple(name for name in names() if name != "grouped"), "several calls leave what one does"),
    "counted_as": (tuple(names()), "its counts are the specification's, whatever the limits say"),
    "token_axis": (tuple(names()), "tokens come before heads and head_dim"),
    "encodes": (tuple(names()), "its formats are what it stores, and what it is handed"),
}  # fmt: skip
FULL = {
    "several": {"paged", "prefix"},
    "counted_as": {"paged", "prefix"},
    "token_axis": {"contiguous", "latent"},
    "encodes": {"elements", "rows"},
}  # families above that name nearly all parts


@pytest.mark.parametrize("field", EMPTY)
def test_a_record_has_every_field_or_a_reason(field):
    families, why = EMPTY[field]
    default = -3 if field == "token_axis" else None
    empty = {name for name, record in all_families().items() if (getattr(record, field) or None) == default}
    assert empty == set(families) - FULL.get(field, set()), why


def test_every_field_of_a_record_is_looked_at():
    assert set(EMPTY) == {each.name for each in fields(Family)} - {"name", "chapter", "fits", "goes"}


@pytest.mark.parametrize("family", names())
@pytest.mark.parametrize("part", PARTS)
def test_a_family_has_every_part_or_a_reason(family, part):
    assert (all_families()[family].part(part) is None) == ((family, part) in ABSENT), ABSENT.get((family, part))


@pytest.mark.parametrize("family", names())
def test_a_record_says_everything(family):
    record = all_families()[family]
    assert bool(record.small) == (family not in FUNCTIONS)
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


def test_law_12_lists_the_sizes_that_may_be_0():
    (listed,) = [part for part in all_clauses()["LAW-12"].text.split("\n\n") if "permitted to be 0" in part]
    assert {*re.findall(r"`(\w+)`", listed)} == {name for family in all_families().values() for name in family.may_be_zero}
