"""What README and docs show is what happens."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import kvref

ROOT = Path(kvref.__file__).parents[1]


def test_the_readmes_example_runs():
    failures, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (failures, tried > 8) == (0, True)


def test_the_thirty_line_adapter_passes(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/test-your-cache.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "mycache.py").write_text(code)
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "mycache:MyCache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ["BLOCK", "Blocks", "6", "·", "·"] in [line.split() for line in done.stdout.splitlines()]


def test_the_backend_of_one_kernel_at_a_time_passes(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/write-a-backend.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "mybackend.py").write_text(code)
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "mybackend:implementation", "--examples", "5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ["all", "140", "0", "0", "1"] in [line.split() for line in done.stdout.splitlines()]


def test_the_number_of_clauses_is_right():
    from kvref_conformance.clauses import all_clauses

    for page in ("README.md", "CHANGELOG.md"):
        (number,) = re.findall(r"(\d+) (?:numbered )?clauses", (ROOT / page).read_text(encoding="utf-8"))
        assert int(number) == len(all_clauses())


def test_the_number_of_vectors_is_right():
    (number,) = re.findall(r"(\d+) conversations", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(number) == len(json.loads((ROOT / "conformance/vectors/manifest.json").read_text())["traces"])


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!http)([^)#]+)", prose):
            of_the_site = target.startswith("spec/") and (ROOT / "kvref" / target).exists()  # written when it is built
            assert of_the_site or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_clause_named_in_the_code_exists():
    from kvref_conformance.clauses import all_clauses

    known = set(all_clauses())
    for folder in ("kvref", "backends", "conformance/kvref_conformance", "docs"):
        for page in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            named = re.findall(
                r"\b(?:LAW|FMT-[A-Z0-9]+|CONTIG|BLOCK|PAGED|QUANT|TIER|BUF|POOL|ATTN|KERN)-\d\d\b", page.read_text("utf-8")
            )
            assert set(named) <= known, f"{page.name} names {sorted(set(named) - known)}"


def test_the_number_of_the_zoo_is_right():
    import kvref_zoo

    (number,) = re.findall(r"(\d+) caches that are wrong on purpose", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(number) == len(kvref_zoo.names())


def test_the_failure_the_readme_shows_is_real():
    import kvref_zoo
    from kvref_conformance.judge import select
    from kvref_conformance.zoo import judge_of

    ((_, checks),) = select("PAGED-07").items()
    shown = next(outcome for outcome in judge_of(kvref_zoo.member("paged-leaks-a-block"), 100).clause(checks) if outcome.trace)
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for line in [*shown.calls, f"expected {shown.expected}", f"got      {shown.got}"]:
            assert line in text
