"""An implementation that misbehaves costs the clause under test one failure with a plain reason, and the run goes on."""

import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def check(tmp_path):
    def check(name, *arguments):
        command = [sys.executable, "-m", "kvref_conformance.cli", "check", f"misbehaving:{name}", "--timeout", "0.5"]
        environment = {"PYTHONPATH": str(HERE), "PATH": "/usr/bin:/bin", "COLUMNS": "100"}
        done = subprocess.run(
            [*command, "--examples", "8", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
            env=environment,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return check


def totals(done):
    """Clauses passed, failed and not offered, of those that were looked at."""
    (line,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"]]
    return [int(number) for number in line[1:]]


WAYS = [
    ("HangsInPython", "an answer within 0.5 s", "none: it was still running"),
    ("HangsAndSwallows", "an answer within 0.5 s", "none: it was still running"),
    ("ExitsPolitely", "a result or an error", "SystemExit: 3"),
    ("RaisesSomethingOdd", "no error", "Unprintable: an exception that cannot be printed"),
    ("AllocatesWithoutEnd", "no error", "MemoryError"),
]


@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["in process", "isolated"])
@pytest.mark.parametrize(("name", "expected", "got"), WAYS)
def test_what_python_can_stop_costs_a_clause_anywhere(check, name, expected, got, isolate):
    done = check(name, "--clause", "BLOCK-*", *isolate)
    assert done.returncode == 1, done.stderr
    assert f"expected {expected}" in done.stdout
    assert f"got      {got}" in done.stdout
    passed, failed, *_ = totals(done)
    assert failed >= 1
    assert passed >= 3  # the run went on


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("HangsInC", "none: it was still running"),
        ("IsKilled", "none: the process was killed by SIGSEGV"),
        ("Leaves", "none: the process ended with exit code 7"),
    ],
)
def test_what_takes_the_process_down_costs_a_clause_in_a_child(check, name, got, tmp_path):
    done = check(name, "--clause", "BLOCK-*", "--isolate")
    assert done.returncode == 1, done.stderr
    assert f"got      {got}" in done.stdout
    passed, failed, *_ = totals(done)
    assert failed >= 1
    assert passed >= 3
    assert list((tmp_path / ".kvref" / "failures").iterdir())


@pytest.mark.parametrize(
    ("name", "clause", "expected", "got"),
    [
        ("WrongType", "PAGED-12", "2 arrays", "str 'no arrays'"),
        ("WrongNumber", "PAGED-09", "an integer", "str '"),
        ("WrongShape", "PAGED-12", r"shape \[", r"shape \["),
        ("WrongDtype", "PAGED-12", "float32 or a narrower float", "float64"),
        ("IntegersForFloats", "PAGED-12", "float32 or a narrower float", "int32"),
        ("AsarrayRaises", "PAGED-12", "an array, from ", "RuntimeError: no memory on the device"),
        ("ToNumpyRaises", "PAGED-12", "a result that to_numpy can read", "RuntimeError: the device is gone"),
        ("ToNumpyHangs", "PAGED-12", "an answer within 0.5 s", "none: it was still running"),
        ("ViewThatChanges", "LAW-17", "", ""),
        ("ChangesItsInputs", "LAW-16", "", ""),
    ],
)
def test_what_it_answers_wrongly_is_said_plainly(check, name, clause, expected, got):
    done = check(name, "--clause", clause)
    assert done.returncode == 1, done.stderr
    assert re.search(f"expected {expected}", done.stdout)
    assert re.search(f"got      {got}", done.stdout)


@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["in process", "isolated"])
def test_what_it_prints_is_not_ours(check, isolate):
    done = check("Prints", "--clause", "BLOCK-*", *isolate)
    assert done.returncode == 0
    assert "noise" not in done.stdout + done.stderr


def test_what_dies_while_it_is_loaded_cannot_be_judged(check):
    done = check("dies_when_made", "--isolate")
    assert done.returncode == 2
    assert done.stderr == "kvref: misbehaving:dies_when_made: loading it ended the process: the process was killed by SIGKILL\n"


def test_a_name_that_is_not_there_is_said_the_same_in_a_child(check):
    done = check("Missing", "--isolate")
    assert (done.returncode, done.stderr) == (2, "kvref: misbehaving has no 'Missing'\n")


def test_nothing_is_left_behind(monkeypatch):
    from kvref_conformance.asked import Effort
    from kvref_conformance.isolated import IsolatedJudge
    from kvref_conformance.judge import select

    monkeypatch.syspath_prepend(HERE)
    judge = IsolatedJudge("misbehaving:IsKilled", Effort(examples=5, timeout=1))
    for checks in select("BLOCK-0*").values():
        judge.clause(checks)
    judge.close()
    assert multiprocessing.active_children() == []
