"""The harnesses in other languages: each passes all clauses of its families, and its bug fails the clause that it breaks."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.replay import replay_saved_trace
from kvref_conformance.traces import format
from kvref_conformance.traces.paths import save_failure
from kvref_conformance.vectors.check import check_vectors

pytestmark = pytest.mark.harness
FOLDER = Path(__file__).parents[1] / "harnesses"
VECTORS = Path(__file__).parents[1] / "vectors"


def needs(*tools):
    for tool in tools:
        if not shutil.which(tool):
            pytest.skip(f"no {tool} here")


def build(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def javascript(folder):
    needs("node")
    return f"node {shlex.quote(str(FOLDER / 'javascript/harness.mjs'))}"


def cpp(folder):
    needs("cmake", "g++")
    build("cmake", "-S", str(FOLDER / "cpp"), "-B", str(folder))
    build("cmake", "--build", str(folder))
    return shlex.quote(str(folder / "harness"))


def rust(folder):
    needs("cargo")
    build(
        "cargo",
        "build",
        "--release",
        "--offline",
        "--manifest-path",
        str(FOLDER / "rust/Cargo.toml"),
        "--target-dir",
        str(folder),
    )
    return shlex.quote(str(folder / "release/harness"))


LANGUAGES = {"javascript": javascript, "cpp": cpp, "rust": rust}
BUGS = {
    "javascript": ("release-twice", "BUF-05"),
    "cpp": ("double-free", "BLOCK-05"),
    "rust": ("shared-scale", "LAW-04"),
}
# Clauses that must pass, so that a harness that declines everything fails the test.
PASSES = {
    "javascript": ("CONTIG-0[1-7]", "CONTIG-09", "CONTIG-1[1-3]", "WIN-0[1-7]", "BUF-0[1345679]", "LAW-0[124567]"),
    "cpp": ("BLOCK-*", "PAGED-0*", "PAGED-1[0-7]", "LAW-0[1-7]", "ATTN-10"),
    "rust": ("QUANT-0[1-8]", "QUANT-10", "FMT-[IFL]*", "FMT-SMALL-*", "FMT-GGML-*", "FMT-MX-*", "LAW-0[124567]"),
}


@pytest.fixture(scope="module", params=LANGUAGES)
def harness(request, tmp_path_factory):
    return request.param, LANGUAGES[request.param](tmp_path_factory.mktemp(request.param))


def test_it_passes_every_clause_of_its_families(harness, tmp_path):
    language = harness[0]
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "--exec", harness[1], "--json", "results.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    verdicts = {each["clause"]: each["verdict"] for each in json.loads((tmp_path / "results.json").read_text())["clauses"]}
    for clause in (clause.id for glob in PASSES[language] for clause in select_checks(glob)):
        assert verdicts[clause] == "passed", clause


def test_its_bug_is_caught_by_the_clause_that_names_it_in_calls_that_replay(harness, tmp_path):
    language, command = harness
    bug, clause = BUGS[language]
    judge = CheckRunner(load_implementation(f"exec:{command} --bug {bug}"), Effort(examples=30))
    ((found, checks),) = select_checks(clause).items()
    _, path = save_failure(judge.judge_clause(checks), tmp_path, found.id, language)
    trace = format.read_trace(path)
    assert trace.header.judge == "model"
    assert len(trace.requests) <= 6  # with a read before the wrong call: without it, the model would blame an earlier call
    replay = replay_saved_trace(trace, judge)
    assert replay.mismatch_line == trace.lines[-1]
    judge.close()
    for right in (f"exec:{command}", "numpy"):
        judge = CheckRunner(load_implementation(right))
        assert replay_saved_trace(trace, judge).mismatch_line is None
        judge.close()


def test_the_vectors_hold_for_it(harness):
    judge = CheckRunner(load_implementation(f"exec:{harness[1]}"))
    held = list(check_vectors(VECTORS, judge))
    judge.close()
    assert {each.verdict for each in held} == {"passed", "not offered"}
    assert len([each for each in held if each.verdict == "passed"]) >= 40


def test_the_first_harness_of_the_page_passes(tmp_path):
    needs("node")
    page = (FOLDER.parents[1] / "docs/write-a-harness.md").read_text(encoding="utf-8")
    (code,) = re.findall("```javascript\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "blocks.mjs").write_text(code)
    command = "node blocks.mjs"
    for asked in (["harness", "--selftest", command], ["check", "--exec", command, "--clause", "BLOCK-*"]):
        run = [sys.executable, "-m", "kvref_conformance.cli", *asked]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert ["all", "6", "0", "1"] in [line.split() for line in done.stdout.splitlines()]


def test_an_option_it_does_not_have_is_said(harness):
    _, command = harness
    done = subprocess.run([*shlex.split(command), "--bug", "none"], capture_output=True, text=True, check=False, input="")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
