"""The judge: the NumPy backend passes every clause, and the judge reads and runs what it reports."""

import ast
from functools import cache
from pathlib import Path

import pytest

import kvref
from kvref_conformance import clauses
from kvref_conformance.families import names
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check, CheckError, all_checks, validate_checks

ROOT = Path(kvref.__file__).parents[1]


@cache
def judge_of_numpy(name="numpy"):
    """One judge for all chapters, so that its state machines run once."""
    return CheckRunner(load_implementation(name), Effort(examples=3))


@pytest.mark.parametrize("chapter", [chapter.code for chapter in clauses.spec()])
def test_numpy_passes_every_clause(chapter):
    """Small sizes and few call sequences; `nox -s matrix` runs all of it, the reference and array_api_strict."""
    for clause, checks in select_checks(f"{chapter}-*").items():
        if clause.id not in ("KERN-06", "LAW-18"):
            judge = judge_of_numpy("numpy:token-hits") if clause.id == "PREFIX-19" else judge_of_numpy()
            outcomes = judge.judge_clause(checks)
            assert verdict_of(outcomes) == "passed", (clause.id, outcomes)


def test_every_family_is_checked():
    assert {check.family for check in all_checks()} == set(names())


def test_a_check_of_no_clause_is_an_error():
    def stray(subject):
        pass

    with pytest.raises(CheckError, match=r"check 'stray \(paged\)' names an unknown clause: PAGED-99"):
        validate_checks([*all_checks(), Check("PAGED-99", "paged", stray)])


def test_two_checks_of_a_clause_have_different_names():
    with pytest.raises(CheckError, match=r"checks of one clause with the same name: BUF-07 '.* \(buffers\)'"):
        validate_checks([*all_checks(), next(check for check in all_checks() if check.clause == "BUF-07" and check.run)])


def test_a_clause_without_a_check_is_an_error():
    with pytest.raises(CheckError, match="clauses without a check: BUF-07"):
        validate_checks([check for check in all_checks() if check.clause != "BUF-07"])


GOOD = """# Ring (RING)

Intro.

## RING-01 · A title

It MUST work.

*Why.* Because.

```python
>>> 1
1
```
"""


def test_a_chapter_is_read(tmp_path):
    path = tmp_path / "ring.md"
    path.write_text(GOOD + "\n*Differs from.* That.\n\n*Would have caught.* some/repo#12, other/repo#3.\n", encoding="utf-8")
    chapter = clauses.read_chapter(path)
    (clause,) = chapter.clauses
    assert (chapter.code, clause.id, clause.title, clause.text) == ("RING", "RING-01", "A title", "It MUST work.")
    assert (clause.why, clause.differs, clause.bugs) == ("Because.", "That.", ["some/repo#12", "other/repo#3"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# Ring (RING)", "# Ring"), r"ring.md:1: expected '# Title \(CODE\)', got '# Ring'"),
        (("## RING-01 · A title", "## RING-1 · A title"), r"ring.md:5: expected '## RING-NN · Title', got '## RING-1 · A title'"),
        (("## RING-01", "## OTHER-01"), r"ring.md:5: expected '## RING-NN · Title'"),
        (("MUST", "must"), "ring.md:5: RING-01 contains none of MUST, SHOULD and MAY"),
        (("*Why.* Because.", ""), r"ring.md:5: RING-01 has no '\*Why.\*' paragraph"),
        ((">>> 1", "1"), "ring.md:5: RING-01 has no example"),
    ],
)
def test_a_malformed_clause_is_reported_with_its_line(tmp_path, change, message):
    path = tmp_path / "ring.md"
    path.write_text(GOOD.replace(*change), encoding="utf-8")
    with pytest.raises(clauses.SpecError, match=message):
        clauses.read_chapter(path)


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("It MUST work.", "It\nMUST work.", False),
        ("Because.", "Because it must.", False),
        ("It MUST work.", "It MUST not work.", True),
        ("It MUST work.", "It MUST work.\n\nAlways.", True),
    ],
)
def test_the_digest_of_a_clause_changes_with_its_normative_words(tmp_path, old, new, changes):
    digests = set()
    for text in (GOOD, GOOD.replace(old, new)):
        (tmp_path / "ring.md").write_text(text, encoding="utf-8")
        digests.add(clauses.read_chapter(tmp_path / "ring.md").clauses[0].digest)
    assert len(digests) == 1 + changes


def test_an_empty_chapter_is_reported(tmp_path):
    (tmp_path / "ring.md").write_text("")
    with pytest.raises(clauses.SpecError, match="an empty file"):
        clauses.read_chapter(tmp_path / "ring.md")


def test_a_duplicate_clause_is_reported(tmp_path, monkeypatch):
    (tmp_path / "ring.md").write_text(GOOD, encoding="utf-8")
    (tmp_path / "again.md").write_text(GOOD, encoding="utf-8")
    monkeypatch.setattr(clauses, "CHAPTERS", ("ring", "again"))
    with pytest.raises(clauses.SpecError, match=r"again.md:5: RING-01 is already defined at ring.md:5"):
        clauses.read_spec(tmp_path)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("kvref", ("kvref_numpy", "kvref_conformance", "torch", "cupy")),
        ("backends", ("kvref_conformance",)),
        ("conformance/kvref_conformance/oracle", ("kvref.", "kvref_numpy", "array_api_compat")),
    ],
)
def test_imports_point_one_way(folder, forbidden):
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            assert not f"{name}.".startswith(tuple(f"{word.rstrip('.')}." for word in forbidden)), f"{path} imports {name}"


class WithoutFree(kvref.BlockPool):
    """Has a property where the interface has a method."""

    free = property()


class NoFree(OnBackend):
    def __init__(self):
        super().__init__(kvref.reference)

    def blocks(self, num_blocks):
        return WithoutFree(num_blocks)


def test_an_attribute_that_raises_costs_the_clauses_that_ask_for_it():
    judge = CheckRunner(NoFree(), Effort(examples=3))
    said = {clause.id: judge.judge_clause(checks) for clause, checks in select_checks("BLOCK-*", "blocks").items()}
    assert verdict_of(said["BLOCK-04"]) == "failed"
    assert any("free" in outcome.what and "AttributeError" in outcome.got for outcome in said["BLOCK-04"])
    assert verdict_of(said["BLOCK-01"]) != "failed"
