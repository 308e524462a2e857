"""The files and examples for CI systems: they satisfy the schemas of these systems, and name what exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commandline import kvref

from kvref_conformance.report.annotations import annotations
from kvref_conformance.report.results_model import ResultFile

__all__ = ["kvref"]

ROOT = Path(__file__).parents[2]
ISSUES = [
    (path.relative_to(ROOT).as_posix(), "github-issue-forms") for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
]
EXAMPLES = dict(zip(("github-workflows", "gitlab-ci", "pre-commit"), re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs/test-your-cache.md").read_text(encoding="utf-8"), re.DOTALL
), strict=True))  # fmt: skip


def require_valid(schema, *files):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "schema"), [("action.yml", "github-actions"), ("CITATION.cff", "citation-file-format"), *ISSUES]
)
def test_a_file_satisfies_its_schema(file, schema):
    require_valid(schema, ROOT / file)


@pytest.mark.parametrize("schema", ["github-workflows", "gitlab-ci"])
def test_an_example_of_the_documentation_satisfies_its_schema(schema, tmp_path):
    (tmp_path / "example.yml").write_text(EXAMPLES[schema], encoding="utf-8")
    require_valid(schema, tmp_path / "example.yml")


def test_pre_commit_accepts_the_hook_and_the_example(tmp_path):
    example, manifest = tmp_path / "config.yaml", ROOT / ".pre-commit-hooks.yaml"
    example.write_text(EXAMPLES["pre-commit"], encoding="utf-8")
    for command, file in (("validate-config", example), ("validate-manifest", manifest)):
        done = subprocess.run([sys.executable, "-m", "pre_commit", command, file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (hook,) = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    assert [each["id"] for each in yaml.safe_load(EXAMPLES["pre-commit"])["repos"][0]["hooks"]] == [hook["id"]]
    assert hook["entry"] == "kvref check"


def test_the_action_calls_the_command_with_options_that_exist(kvref):
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    options = {"check": kvref("check", "--help").stdout, "report": kvref("report", "--help").stdout}
    lines = re.findall(r"kvref (check|report) (.*)", text)
    assert len(lines) == 4  # three commands, and the name of the command in a description
    for command, arguments in lines:
        for option in re.findall(r"(?<!\S)--?[a-z]+", arguments):
            assert option in options[command], (command, option)


def test_annotations_have_the_line_and_no_characters_that_end_a_field(kvref, tmp_path):
    assert kvref("check", "mine:FreesTwice", "--clause", "BLOCK-*", "--json", "base.json").returncode == 1
    document = json.loads((tmp_path / "base.json").read_text())
    (shown,) = (each for each in document["clauses"] if each["clause"] == document["causes"][0][0])
    (check,) = (each for each in shown["checks"] if each["check"] == shown["shown"])
    check |= {"where": "my cache.py:12", "got": "100 %\nof it", "what": "a, b: c"}
    first, *_ = annotations(ResultFile(tmp_path / "base.json", document))
    assert first.startswith("::error file=my cache.py,line=12,title=BLOCK-05 · ")
    assert "\n" not in first and "a, b: c: expected BlockNotAllocated" in first and "100 %25%0Aof it" in first
    printed = kvref("report", "base.json", "--annotations").stdout
    assert printed.startswith("::error title=BLOCK-05 · ") and printed.count("::error") == len(document["causes"])


def test_results_that_were_written_by_something_else_give_no_annotation(tmp_path):
    document = {"implementation": {"name": "mine"}, "clauses": [], "causes": [["BLOCK-05"]]}
    assert list(annotations(ResultFile(tmp_path, document))) == []


def test_only_failures_that_are_not_in_earlier_results_fail_the_run(kvref, tmp_path):
    check = "check", "mine:FreesTwice", "--clause", "BLOCK-*"
    assert kvref(*check, "--json", "base.json").returncode == 1
    done = kvref(*check, "--since", "base.json")
    assert done.returncode == 0 and "expected failure: BLOCK-05" in done.stdout and "failed in base.json" in done.stdout
    document = json.loads((tmp_path / "base.json").read_text())
    for each in document["clauses"]:
        each["verdict"] = "passed"
    (tmp_path / "base.json").write_text(json.dumps(document))
    assert kvref(*check, "--since", "base.json").returncode == 1
    assert kvref(*check, "--since", "missing.json").stderr.startswith("kvref: --since: no file missing.json")
    assert "expected no --xfails" in kvref(*check, "--since", "base.json", "--xfails", "known.txt").stderr
