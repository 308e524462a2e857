"""An implementation that misbehaves gets one failure with a plain reason for the clause under test, and the run continues."""

import contextlib
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from commandline import run_kvref
from process_sessions import running_in

from kvref_conformance import implementations
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import SubprocessRunner, make_runner, runs_in_subprocess
from kvref_conformance.vectors import check as vectors

HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": str(HERE), "PATH": "/usr/bin:/bin", "COLUMNS": "100"}
SOME = "BLOCK-0[1245]"  # pools misbehave in BLOCK-04, which frees two blocks; each death costs the start of a child
MADE = "an object, because its sizes are valid and within the limits (LAW-12)"


@pytest.fixture
def check(tmp_path):
    def check(name, *arguments):
        quick = "--examples", "8", *(("--timeout", "2") if "Hangs" in name else ())
        done = run_kvref("check", f"misbehaving:{name}", *quick, *arguments, folder=tmp_path, environment=ENVIRONMENT)
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return check


@pytest.fixture
def beside(monkeypatch):
    """Makes the module importable here and in the judge's children."""
    monkeypatch.syspath_prepend(HERE)


def totals(done):
    """Clauses passed, failed and not offered."""
    (line,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"]]
    return [int(number) for number in line[1:]]


WAYS = [
    ("HangsInPython", "a reply within 2 s", "none: the call was still running"),
    ("HangsAndSwallows", "a reply within 2 s", "none: the call was still running"),
    ("ExitsPolitely", "a result or an error", "SystemExit: 3"),
    ("RaisesSomethingOdd", "no error", "Unprintable: an exception that cannot be printed"),
    ("AllocatesWithoutEnd", "no error", "MemoryError"),
]


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize("isolate", ["--no-isolate", "--isolate"])
@pytest.mark.parametrize(("name", "expected", "got"), WAYS)
def test_what_python_can_stop_costs_a_clause_anywhere(check, name, expected, got, isolate):
    done = check(name, "--clause", SOME, isolate)
    assert done.returncode == 1, done.stderr
    assert f"expected {expected}" in done.stdout
    assert f"got      {got}" in done.stdout
    passed, failed, *_ = totals(done)
    assert failed >= 1
    assert passed >= 3  # the run continued


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("IsKilled", "none: the process was killed by SIGSEGV"),
        extended("WritesALittleAndHangs", "none: the implementation wrote to a file descriptor that it did not open"),
        extended("HangsInC", "none: the call was still running"),
        pytest.param("Leaves", "none: the process ended with exit code 7", marks=pytest.mark.long),
        pytest.param("LeavesAsIfAllWereWell", "none: the process ended with exit code 0", marks=pytest.mark.long),
        extended("LeavesToAChild", "none: the process ended with exit code 0"),
        pytest.param(
            "WritesEverywhere",
            "none: the implementation wrote to a file descriptor that it did not open",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_takes_the_process_down_costs_a_clause(check, name, got, tmp_path):
    done = check(name, "--clause", SOME)
    assert done.returncode == 1, done.stderr
    assert f"got      {got}" in done.stdout
    passed, failed, *_ = totals(done)
    assert failed >= 1
    assert passed >= 2  # the run continued; the judge reads the garbage one or two calls after it was written
    assert list((tmp_path / ".kvref" / "failures").iterdir())


@pytest.mark.parametrize(
    ("name", "clause", "expected", "got"),
    [
        ("WrongType", "PAGED-12", "2 arrays", "str 'no arrays'"),
        ("WrongNumber", "PAGED-09", "an integer", "str '"),
        ("WrongShape", "PAGED-12", r"shape \[", r"shape \["),
        ("WrongDtype", "PAGED-12", "float32 or a narrower float", "float64"),
        ("IntegersForFloats", "PAGED-12", "float32 or a narrower float", "int32"),
        ("AsarrayRaises", "PAGED-12", "an array with the values ", "RuntimeError: no memory on the device"),
        ("ToNumpyRaises", "PAGED-12", "a result that to_numpy can read", "RuntimeError: the device is gone"),
        ("ToNumpyHangs", "PAGED-12", "a reply within 2 s", "none: the call was still running"),
        ("ViewThatChanges", "LAW-17", "", ""),
        ("ChangesItsInputs", "LAW-16", "", ""),
    ],
)
def test_what_it_answers_wrongly_is_said_plainly(check, name, clause, expected, got):
    done = check(name, "--clause", clause, "--no-isolate")
    assert done.returncode == 1, done.stderr
    assert re.search(f"expected {expected}", done.stdout)
    assert re.search(f"got      {got}", done.stdout)


def test_what_it_prints_is_not_ours(check):
    done = check("Prints", "--clause", "BLOCK-*")
    assert done.returncode == 0
    assert "noise" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "how"),
    [("dies_when_made", "was killed by SIGKILL"), ("leaves_when_made", "ended with exit code 0")],
)
def test_what_dies_while_it_is_loaded_cannot_be_judged(check, name, how):
    done = check(name)
    assert done.returncode == 2
    assert done.stderr == f"kvref: misbehaving:{name}: loading it ended the process: the process {how}\n"


@pytest.mark.long
def test_what_writes_everywhere_is_told_with_the_calls_before(check):
    done = check("WritesEverywhere", "--clause", "BLOCK-04")
    assert "got      none: the implementation wrote to a file descriptor" in done.stdout
    assert "  blocks = blocks(num_blocks=" in done.stdout


def test_what_writes_everywhere_while_it_is_loaded_cannot_be_judged(check):
    done = check("writes_when_made")
    said = "while it was loaded, the implementation wrote to a file descriptor that it did not open"
    assert (done.returncode, done.stderr) == (2, f"kvref: misbehaving:writes_when_made: {said}\n")


def test_a_name_that_is_not_there_is_said_the_same_in_a_child(check):
    for isolate in ("--isolate", "--no-isolate"):
        done = check("Missing", isolate)
        assert (done.returncode, done.stderr) == (2, "kvref: misbehaving has no 'Missing'\n")


def test_a_debugger_may_have_it_in_the_judges_process(check):
    done = check("Leaves", "--clause", "BLOCK-04", "--no-isolate")
    assert (done.returncode, done.stdout) == (7, "")


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("reference", False), ("reference:strict", False), ("numpy", False), ("torch:cuda", False),
        ("zoo:blocks-freed-twice", False), ("exec:./harness", False), ("mine:Cache", True), ("nowhere", False),
    ],
)  # fmt: skip
def test_code_that_is_not_kvrefs_gets_a_process_of_its_own(name, foreign):
    assert runs_in_subprocess(RunOptions(name, Effort())) == foreign
    for isolate in (True, False):
        assert runs_in_subprocess(RunOptions(name, Effort(), isolate=isolate)) == (isolate and not name.startswith("exec:"))


@pytest.mark.parametrize("group", ["kvref.backends", "kvref.implementations"])
def test_an_entry_point_is_of_whoever_brought_it(monkeypatch, group):
    class Theirs:
        name, dist = "theirs", type("Distribution", (), {"name": "their-cache"})

    monkeypatch.setattr(implementations, "entry_points", lambda group, name: [Theirs] if group == asked else [])
    asked = group
    assert implementations.runs_foreign_code("theirs")
    for own in ("kvref", implementations.ADAPTERS_PACKAGE):
        Theirs.dist.name = own
        assert not implementations.runs_foreign_code("theirs")


@pytest.mark.extended
def test_a_replay_outlives_it_too(check, tmp_path):
    check("LeavesAsIfAllWereWell", "--clause", "BLOCK-04")
    (trace,) = (tmp_path / ".kvref" / "failures").iterdir()
    done = run_kvref("replay", str(trace), folder=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 1
    lines = trace.read_text().splitlines()
    assert done.stdout.splitlines()[-2:] == [
        "    got      none: the process ended with exit code 0",
        f"first mismatch at line {len(lines)} of {trace}, the same reply as recorded",
    ]


@pytest.mark.long
def test_vectors_outlive_it_too(beside):
    judge = make_runner(RunOptions("misbehaving:LeavesAsIfAllWereWell", Effort()))
    held = [each for each in vectors.check_vectors(HERE.parent / "vectors", judge) if each.group == "blocks"]
    judge.close()
    failed = [each for each in held if each.verdict == "failed"]
    assert failed
    assert all(each.violation.got == "none: the process ended with exit code 0" for each in failed)
    assert all(each.calls[each.line // 2 - 1].endswith("did not return") for each in failed)
    assert any(each.verdict == "passed" for each in held)


@pytest.mark.long
def test_what_pytest_judges_cannot_end_pytest(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    quick = ("-p", "no:cacheprovider", "--kvref-examples", "5", "--kvref-clause", SOME)
    asked = ("--pyargs", "kvref_conformance", *quick, "--kvref", "misbehaving:LeavesAsIfAllWereWell")
    for workers in ("0", "2"):
        outcomes = pytester.runpytest_subprocess(*asked, "-n", workers).parseoutcomes()
        assert outcomes["failed"] >= 1
        assert outcomes["failed"] + outcomes["passed"] == len(select_checks(SOME))
    gone = pytester.runpytest_subprocess(*asked, "--no-kvref-isolate")  # for a debugger
    assert (gone.ret, "passed" in gone.stdout.str()) == (0, False)


@pytest.mark.parametrize(
    ("name", "expected", "got", "at"),
    [
        ("FactoryRaises", MADE, "RuntimeError: no device", 'raise RuntimeError("no device")'),
        ("FactoryReturnsNone", "an object with operations of paged: ", "NoneType None", "def paged(self, **config):"),
        ("FactoryReturnsOther", "an object with operations of paged: ", "int 7", "def paged(self, **config):"),
    ],
)
def test_a_factory_that_makes_nothing_is_told_once_and_by_its_line(check, name, expected, got, at):
    done = check(name, "--family", "paged")
    assert done.returncode == 1
    failed = totals(done)[1]
    assert (totals(done)[0], failed > 25) == (0, True)
    assert done.stdout.count(f"    expected {expected}") == 1
    assert done.stdout.count(f"    got      {got}") == 1
    file, line = re.search("    at       (.*):([0-9]+)\n", done.stdout).groups()
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == at
    (told,) = re.findall(r"^(\S+) · .*\(misbehaving:", done.stdout, re.MULTILINE)
    assert f"1 probable cause: {told} (1 call). {failed - 1} more clauses fail" in done.stdout


def test_a_factory_that_accepts_no_sizes_is_reported_before_the_run(check):
    done = check("FactoryTakesNothing", "--family", "paged")
    assert (done.returncode, done.stdout) == (2, "")
    expected = "num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype"
    assert done.stderr == (
        f"kvref: misbehaving:FactoryTakesNothing: paged: expected a factory that accepts arguments named {expected}; "
        "got an unexpected keyword argument 'num_blocks'\n"
    )


@pytest.mark.parametrize("name", ["AsarrayDeclines", "ToNumpyDeclines"])
def test_a_call_that_was_declined_is_not_in_the_conversation(beside, name):
    subject = CheckRunner(load_implementation(f"misbehaving:{name}")).begin()
    paged = subject.new("paged", num_blocks=4, block_size=2, num_layers=1, num_kv_heads=1, head_dim=3, dtype="float32")
    sequence = paged.create()
    keys = np.ones((1, 1, 3), np.float32)
    for call in (lambda: paged.append([sequence], 0, keys, keys), lambda: paged.gather(sequence, 0)):
        with contextlib.suppress(NotOffered):
            call()
    assert paged.length(sequence, 0) in (0, 1)
    assert len(subject.call_trace) == 4  # new, create, length, and the accepted one of the two
    assert all(exchange.reply is not None for exchange in subject.call_trace)


def test_an_array_that_cannot_be_made_is_a_reply(beside):
    subject = CheckRunner(load_implementation("misbehaving:AsarrayRaises")).begin()
    paged = subject.new("paged", num_blocks=4, block_size=2, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    keys = np.ones((1, 1, 1), np.float32)
    with pytest.raises(ClauseViolation, match="no memory on the device") as broken:
        paged.append([paged.create()], 0, keys, keys)
    assert subject.call_trace[-1].reply.error.kind == "RuntimeError"
    assert broken.value.where.endswith("misbehaving.py:" + broken.value.where.rpartition(":")[2])


@pytest.mark.extended
def test_nothing_is_left_behind(beside):
    judge = SubprocessRunner("misbehaving:LeavesAChildBehind", Effort(examples=5))
    sessions = set()
    for checks in select_checks(SOME).values():
        judge.judge_clause(checks)
        if judge._session:
            sessions.add(judge._session.process.pid)
    judge.close()
    assert len(sessions) >= 2  # one died and was replaced
    assert not any(running_in(session) for session in sessions)


def test_a_child_that_is_not_needed_any_more_puts_in_order_what_it_has(beside, monkeypatch):
    judge = SubprocessRunner("misbehaving:TidiesUp", Effort())
    folder = Path(judge.implementation.version)
    assert folder.exists()
    judge.close()
    assert not folder.exists()
    monkeypatch.setenv("SLOW", "yes")
    judge = SubprocessRunner("misbehaving:TidiesUp", Effort())
    session, began = judge._session.process.pid, time.monotonic()
    judge.close()
    assert not running_in(session) and time.monotonic() - began < 100
    shutil.rmtree(judge.implementation.version)
