"""`kvref check --jobs N`: several processes give the same verdicts as one, and no process remains."""

import json
import os
import time
from pathlib import Path

import pytest
from process_sessions import running_in

from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner import parallel
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import EXAMPLES, Effort, RunOptions
from kvref_conformance.runner.parallel import default_jobs, run_in_parallel

HERE = Path(__file__).parent
SOME = ("--clause", "BLOCK-*,SHARE-*", "--examples", "8")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Makes the tests' own implementations importable for the command."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.mark.parametrize("name", ["zoo:blocks-freed-twice", pytest.param("misbehaving:IsKilled", marks=pytest.mark.long)])
def test_several_processes_say_what_one_says(kvref, tmp_path, name):
    said = []
    for jobs in ("1", "2"):
        done = kvref("check", name, *SOME, "--jobs", jobs, "--json", "out.json")
        said.append((done.returncode, done.stdout, json.loads((tmp_path / "out.json").read_text())["clauses"]))
    assert said[0] == said[1]
    assert said[0][0] == 1
    assert "not conformant: breaks BLOCK-0" in said[0][1]


def test_each_clause_is_told_its_own_of_what_a_machine_found():
    judge = CheckRunner(load_implementation("zoo:blocks-freed-twice"), Effort(examples=10), "zoo:blocks-freed-twice")
    chosen = {clause: [check for check in checks if check.run is None] for clause, checks in select_checks("BLOCK-*").items()}
    with run_in_parallel(judge, chosen, 2):
        beside = {check.clause: isinstance(judge.judge_check(check), Failure) for checks in chosen.values() for check in checks}
    here = {check.clause: isinstance(judge.judge_check(check), Failure) for checks in chosen.values() for check in checks}
    assert beside == here
    assert {True, False} == {*here.values()}


def test_ctrl_c_ends_them_all(kvref, tmp_path):
    done = kvref("check", "interrupting:Once", "--examples", "3", "--jobs", "2")
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.splitlines()[-1].startswith("interrupted: ")
    assert running_in(int((tmp_path / "child").read_text())) == []


def test_what_cannot_be_loaded_there_is_said_in_a_line(monkeypatch):
    judge = CheckRunner(load_implementation("reference"), Effort(examples=2), "no-such-name")
    chosen = select_checks("BLOCK-01")
    with run_in_parallel(judge, chosen, 2), pytest.raises(CannotRun, match="no-such-name"):
        judge.judge_clause(*chosen.values())


def test_what_can_be_loaded_only_once_says_why(kvref, tmp_path):
    (tmp_path / "onlyone.py").write_text(
        "import pathlib\nfrom kvref_conformance.implementations import load_implementation\n"
        "def Made():\n    pathlib.Path('lock').mkdir()\n    return load_implementation('reference')\n"
    )
    done = kvref("check", "onlyone:Made", *SOME, "--jobs", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("kvref: onlyone:Made")
    assert "lock" in done.stderr


@pytest.mark.parametrize(("asked", "had"), [(None, "1"), ("3", "3")])
def test_arithmetic_has_one_thread_a_process_unless_somebody_says(kvref, tmp_path, monkeypatch, asked, had):
    """Two processes with two threads each made the reference on PyTorch more than ten times slower."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    (tmp_path / "threads.py").write_text(
        "import os, pathlib\nfrom kvref_conformance.implementations import load_implementation\n"
        "def Made():\n    pathlib.Path(str(os.getpid())).write_text(os.environ.get('OMP_NUM_THREADS', 'none'))\n"
        "    return load_implementation('reference')\n"
    )
    assert kvref("check", "threads:Made", "--clause", "BLOCK-*", "--examples", "3", "--jobs", "2").returncode == 0
    numbers = [place.read_text() for place in tmp_path.iterdir() if place.name.isdigit()]
    assert len(numbers) > 1
    assert {*numbers} - {"none"} == {had}  # "none": the process that distributes the work


def test_ctrl_c_ends_what_is_still_loading(kvref, tmp_path):
    """Loading takes five minutes in the second process, and Ctrl-C is pressed during it."""
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, signal, time\nfrom kvref_conformance.implementations import load_implementation\n"
        "def Made():\n    if pathlib.Path('one').exists():\n"
        "        if not pathlib.Path('two').exists():\n"
        "            pathlib.Path('two').mkdir()\n            os.kill(os.getppid(), signal.SIGINT)\n"
        "        time.sleep(300)\n    pathlib.Path('one').mkdir()\n    return load_implementation('reference')\n"
    )
    began = time.monotonic()
    done = kvref("check", "slow:Made", *SOME, "--jobs", "2")
    assert (done.returncode, done.stderr) == (130, "")
    assert time.monotonic() - began < 150


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--jobs", "0"), "--jobs: expected an integer of at least 1, got 0"),
        (("--jobs", "2", "--no-isolate"), "--jobs: expected no --no-isolate: "),
        (("--jobs", "2", "--stderr"), "--jobs: expected no --stderr: "),
        (("--timeout", "nan"), "--timeout: expected at least 0.01, got nan"),
    ],
)
def test_nonsense_is_refused(kvref, options, said):
    done = kvref("check", "numpy", *options)
    assert done.returncode == 2
    assert said in done.stderr


def test_several_where_they_pay_and_are_in_nobodys_way(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16), raising=False)
    all_of_it, little = Effort(), Effort(examples=EXAMPLES - 1)
    assert default_jobs(RunOptions("numpy", all_of_it), everything=True) == parallel.MAX_JOBS
    one = [
        (RunOptions("numpy", all_of_it), False),
        (RunOptions("numpy", little), True),
        (RunOptions("numpy", all_of_it, family="paged"), True),
        (RunOptions("numpy", all_of_it, isolate=True), True),
        (RunOptions("mine:Cache", all_of_it), True),
        (RunOptions("exec:./harness", all_of_it), True),
    ]
    assert [default_jobs(run_options, everything) for run_options, everything in one] == [1] * len(one)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(1), raising=False)
    assert default_jobs(RunOptions("numpy", all_of_it), everything=True) == 1
