"""Ctrl-C keeps the results found so far, at any moment, whatever the implementation catches; and no process remains."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest
from process_sessions import running_in

from kvref_conformance.calls import interrupts
from kvref_conformance.implementations import load_implementation
from kvref_conformance.json_schema import read_schema
from kvref_conformance.report.json_file import SCHEMA
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort

HERE = Path(__file__).parent
PROGRAM = f"{sys.executable} {HERE / 'misbehaving_program.py'}"
SOME = ("--clause", "[BC]*")  # the block pools' clauses are judged before those of the contiguous cache
INTERRUPTED = (130, "", "kvref: interrupted\n")


@pytest.fixture
def kvref(tmp_path):
    def run(*arguments, path=HERE):
        command = [sys.executable, "-m", "kvref_conformance.cli", *arguments]
        environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin", "COLUMNS": "100"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200, env=environment)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def left_running(tmp_path):
    """Return the processes that still run in the child's session, if there was a child."""

    def left_running():
        child = (tmp_path / "child").read_text()
        return running_in(int(child)) if child else []

    return left_running


@pytest.mark.parametrize(
    ("name", "isolate"),
    [
        ("Once", "--isolate"),
        ("Swallows", "--isolate"),
        ("SwallowsForGood", "--isolate"),
        ("Once", "--no-isolate"),
        ("Swallows", "--no-isolate"),
    ],
)
def test_what_was_found_is_kept(kvref, tmp_path, left_running, name, isolate):
    files = ("--json", "out.json", "--junit", "out.xml")
    done = kvref("check", f"interrupting:{name}", isolate, "--examples", "3", *SOME, *files)
    assert (done.returncode, done.stderr) == (130, "failed: BLOCK-06 · Utilization is used blocks over all blocks\n")
    assert done.stdout.count("BLOCK-06 · ") == 1
    assert "    blocks.utilization\n" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(document, read_schema(*SCHEMA))
    verdicts = {clause["clause"]: clause["verdict"] for clause in document["clauses"]}
    assert document["interrupted"]
    assert (verdicts["BLOCK-01"], verdicts["BLOCK-06"]) == ("passed", "failed")
    assert not [clause for clause in verdicts if clause.startswith("CONTIG")]
    cases = {case.get("name").partition("[")[0]: case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    (last,) = set(cases) - set(verdicts)
    assert cases[last].find("skipped").get("message") == "interrupted"
    table, *_ = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"]]
    assert table[1:3] == [str(len(verdicts) - 1), "1"]
    asked = len(select_checks(SOME[1]))
    assert done.stdout.splitlines()[-2:] == [
        "not conformant: breaks BLOCK-06",
        f"interrupted: {len(verdicts)} of {asked} clauses judged, 0 not offered, {asked - len(verdicts)} did not run",
    ]
    assert left_running() == []


LATE = """
import os, signal, sys
import kvref_conformance.commands.check as command
from kvref_conformance.cli import main
print_table = command.print_table
def press(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
    print_table(*arguments)
command.print_table = press
sys.exit(main(sys.argv[1:]))
"""


def test_an_interruption_after_the_last_check_loses_nothing(tmp_path):
    command = [sys.executable, "-c", LATE, "check", "numpy", "--clause", "BLOCK-01", "--json", "out.json", "--no-isolate"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "conformant for the selected clauses: 1 of 1 judged, all passed"
    assert "interrupted" not in json.loads((tmp_path / "out.json").read_text())


def test_what_ends_at_once_has_told_of_its_failures(kvref):
    done = kvref("check", "interrupting:SwallowsForGood", "--no-isolate", "--examples", "3", *SOME)
    assert done.returncode == 130
    assert "failed: BLOCK-06 · Utilization is used blocks over all blocks\n" in done.stderr
    assert "interrupted" not in done.stdout + done.stderr  # after the second Ctrl-C nothing is printed


def test_a_failure_that_is_being_made_smaller_is_told_as_it_was_found(monkeypatch):
    judge = CheckRunner(load_implementation("zoo:blocks-freed-twice"), Effort(examples=5))
    ((_, checks),) = select_checks("BLOCK-05").items()

    def hold(requests, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(judge, "replay", hold)
    with pytest.raises(KeyboardInterrupt):
        judge.judge_clause(checks)
    monkeypatch.setattr(interrupts, "interrupted", True)
    monkeypatch.setattr(interrupts, "raise_if_interrupted", lambda: None)  # earlier calls would raise it
    shown = [outcome for outcome in judge.judge_clause(checks) if outcome.trace]
    assert [outcome.verdict for outcome in shown] == ["failed"]
    assert shown[0].calls[0].startswith("blocks = blocks(")


@pytest.mark.parametrize("name", ["while_it_is_made", "whose_making_swallows"])
@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_while_the_implementation_is_made(kvref, left_running, name, isolate):
    done = kvref("check", f"interrupting:{name}", isolate)
    assert (done.returncode, done.stdout, done.stderr) == INTERRUPTED
    assert left_running() == []


@pytest.mark.parametrize("module", ["numpy", "rich", "pytest"])
def test_while_the_judge_itself_is_imported(kvref, tmp_path, module):
    """Ctrl-C is pressed during the first import of the judge."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / f"{module}.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = kvref("check", "numpy", path=tmp_path / "first")
    assert (done.returncode, done.stdout, done.stderr) == INTERRUPTED


@pytest.mark.parametrize(("way", "status"), [("interrupts", 130), ("terminates", -signal.SIGTERM)])
def test_a_program_and_what_it_started_end_with_the_judge(kvref, tmp_path, way, status):
    """With a shell wrapper, which would continue to run."""
    (tmp_path / "wrapper").write_text(f"#!/bin/sh\necho $$ > session\nJUDGE=$PPID {PROGRAM} {way}\nsleep 60\n")
    (tmp_path / "wrapper").chmod(0o755)
    done = kvref("check", "--exec", "./wrapper", "--examples", "3", "--clause", "BLOCK-*")
    assert (done.returncode, done.stderr) == (status, "")
    assert running_in(int((tmp_path / "session").read_text())) == []
