"""A program at the other end of a pipe: judged like any implementation; each misbehavior costs one clause one plain failure."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commandline import run_kvref
from process_sessions import running_in

import kvref_zoo
from kvref_conformance.calls.messages import ObjectReference
from kvref_conformance.drivers import json_client, subprocess_pipe
from kvref_conformance.exceptions import NotOffered, ProcessDeath
from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort

HERE = Path(__file__).parent
PROGRAM = f"{sys.executable} {HERE / 'misbehaving_program.py'}"


@pytest.fixture
def kvref(tmp_path):
    def run(*arguments):
        done = run_kvref(*arguments, folder=tmp_path, environment={"PATH": "/usr/bin:/bin", "COLUMNS": "100"})
        assert "Traceback" not in done.stdout + done.stderr
        return done

    return run


def totals(done):
    (line,) = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == ["all"]]
    return [int(number) for number in line[1:]]


def test_a_program_is_judged_by_every_clause_it_has_the_families_for(kvref):
    done = kvref("check", "--exec", PROGRAM, "--examples", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert "pool 1 (python, exact)" in done.stdout
    assert totals(done) == [10, 0, 6]  # BLOCK-01 to 06, LAW-03, -12, -18, -19; BLOCK-07, LAW-01, -11, -17, SHARE-01, -02


def test_a_program_is_asked_for_what_its_limits_allow(kvref):
    done = kvref("check", "--exec", f"{PROGRAM} hello-limited", "--examples", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert totals(done)[:2] == totals(kvref("check", "--exec", PROGRAM, "--examples", "10"))[:2]


def test_an_operation_may_be_declined(kvref):
    done = kvref("check", "--exec", f"{PROGRAM} declines", "--examples", "10", "--clause", "BLOCK-*")
    assert (done.returncode, done.stderr) == (0, "")
    assert totals(done) == [5, 0, 2]


WAYS = [
    ("garbage", "a line of JSON", "'Segmentation fault (not really)'"),
    ("not-an-object", "an object", "'[1, 2]'"),
    ("half-a-line", "a reply within 2 s", """an incomplete line: '{"id": """),
    ("half-a-line-and-gone", "a reply", """none: an incomplete line: '{"id": """),
    ("wrong-id", '"id": ', '"id": '),
    ("no-id", '"id": ', "no id"),
    ("both", 'either "ok" or "error", besides the id', "error, ok"),
    ("nothing", 'either "ok" or "error", besides the id', "nothing"),
    ("error-without-kind", 'an error with a "kind", a string', """'"no"'"""),
    ("bad-array", "values as JSON", "array: "),
    ("exits", "a reply", "none: the process ended with exit code 3; last line of stderr: 'out of luck'"),
    ("killed", "a reply", "none: the process was killed by SIGSEGV"),
    ("closes-its-pipe", "a reply", "none: the process closed its pipe and kept running"),
    ("hangs", "a reply within 2 s", "none: the call was still running"),
    pytest.param(
        "allocates",
        "a reply",
        "none: the process ended with exit code 1; last line of stderr: 'MemoryError'",
        marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of another process"),
    ),
]


@pytest.mark.parametrize(
    ("way", "expected", "got"),
    WAYS,
)
def test_whatever_it_does_is_said_once_and_the_run_goes_on(way, expected, got):
    timeout = 2.0 if "within" in expected else 10.0
    judge = CheckRunner(load_implementation(f"exec:{PROGRAM} {way}"), Effort(examples=5, timeout=timeout))
    outcomes = [outcome for checks in select_checks("BLOCK-*").values() for outcome in judge.judge_clause(checks)]
    judge.close()
    failed = [outcome for outcome in outcomes if outcome.verdict == "failed"]
    assert any(outcome.expected.startswith(expected) and outcome.got.startswith(got) for outcome in failed)
    assert [outcome.verdict for outcome in outcomes].count("passed") >= 5
    assert any('"none": true' in outcome.trace[-1] for outcome in failed if outcome.trace)


def test_a_reply_that_the_pipe_cannot_transport_fails_no_clause():
    judge = CheckRunner(load_implementation(f"exec:{PROGRAM} long-line"), Effort())
    written = [[check for check in checks if check.run] for checks in select_checks("BLOCK-*").values()]
    outcomes = [outcome for checks in written for outcome in judge.judge_clause(checks)]
    judge.close()
    assert {outcome.verdict for outcome in outcomes} == {"passed", "not offered"}
    assert "arrays of more than 64 MiB over a pipe" in {outcome.missing for outcome in outcomes}


@pytest.fixture
def wrapper(tmp_path):
    """A command that runs the program as a child of a shell, which records its session: one line per start."""

    def wrapper(way, around="{} ; true"):
        script = tmp_path / "wrapper"
        script.write_text(f"#!/bin/sh\necho $$ >> {tmp_path / 'sessions'}\n{around.format(f'{PROGRAM} {way}')}\n")
        script.chmod(0o755)
        return f"exec:{script}"

    yield wrapper
    assert not [left for session in sessions(tmp_path) for left in running_in(session)]


def sessions(folder):
    return [int(line) for line in (folder / "sessions").read_text().split()]


@pytest.mark.parametrize("way", ["hangs", "half-a-line", "closes-its-pipe", "garbage"])
def test_what_is_ended_is_ended_whole(wrapper, tmp_path, way):
    judge = CheckRunner(load_implementation(wrapper(way)), Effort(examples=3, timeout=1))
    outcomes = [outcome for checks in select_checks("BLOCK-*").values() for outcome in judge.judge_clause(checks)]
    assert any(outcome.verdict == "failed" for outcome in outcomes)
    assert len(sessions(tmp_path)) > 1
    judge.close()


@pytest.mark.parametrize(
    ("way", "around", "code"),
    [
        ("well", "{} ; true", 0),
        ("well", "sleep 60 & {}", 0),  # this process outlives it
        ("stays", "{} ; true", None),
    ],
)
def test_what_ends_takes_along_what_it_started(wrapper, monkeypatch, way, around, code):
    monkeypatch.setattr(subprocess_pipe, "GRACE", 3.0 if code == 0 else 0.2)
    assert load_implementation(wrapper(way, around)).close() == code


def test_what_is_forgotten_ends_whole(wrapper):
    load_implementation(wrapper("well", "{} ; sleep 60"))
    gc.collect()


def test_after_garbage_the_next_conversation_is_clean():
    program = load_implementation(f"exec:{PROGRAM} chatter 1")
    for _ in range(3):
        program.send_hello()
        assert program.call("blocks.new", None, {"num_blocks": 2}) == (1, ObjectReference(1))
        assert program.call("blocks.allocate", 1, {})[1] == 0
        with pytest.raises(ProcessDeath, match="expected a line of JSON, got 'and another thing'"):
            program.call("blocks.free", 1, {"block": 0})
        with pytest.raises(ProcessDeath, match="the process has ended"):
            program.call("blocks.num_free", 1, {})
    program.close()


def test_a_program_that_hangs_at_hello_again_does_not_take_the_day(monkeypatch):
    monkeypatch.setattr(json_client, "START_TIMEOUT", 2.0)
    program = load_implementation(f"exec:{PROGRAM} hello-hangs-again")
    for patience in ("2 s", "1 s"):
        program.send_hello()  # a new process, which replies
        program.call("blocks.new", None, {"num_blocks": 2})
        program.send_hello()
        with pytest.raises(
            ProcessDeath, match=f"hello: expected a reply within {patience}, got none: the call was still running"
        ):
            program.call("blocks.new", None, {"num_blocks": 2})
    program.close()


def test_what_is_too_long_for_a_line_is_not_offered():
    program = load_implementation(f"exec:{PROGRAM}")
    with pytest.raises(NotOffered, match="arrays of more than 64 MiB over a pipe"):
        program.call("blocks.free", 1, {"block": np.zeros(2**24, np.float32)})
    program.close()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("hello-without-families", "hello: families: expected a list of strings, got nothing"),
        ("hello-odd-family", "hello: families: expected some of elements, rows, "),
        ("hello-odd-limits", "hello: limits: num_blocks: expected integers of at least 0, got 'many'"),
        ("hello-limits-of-the-wrong-type", "hello: limits: expected a mapping of names to limits, got ['num_blocks']"),
        ("hello-garbage", "hello: expected a line of JSON, got 'Welcome to pool 1.0!'"),
        (
            "hello-exits",
            "hello: expected a reply, got none: the process ended with exit code 1; last line of stderr: 'pool: no device'",
        ),
    ],
)
def test_a_program_that_does_not_say_who_it_is_cannot_be_judged(kvref, way, message):
    done = kvref("check", "--exec", f"{PROGRAM} {way}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvref: --exec {PROGRAM} {way}: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check",), "expected an implementation: NAME, --exec COMMAND"),
        (("check", "numpy", "--exec", "true"), "expected a NAME or --exec COMMAND, got both: numpy and true"),
        (("check", "--exec", "true", "--isolate", "--stderr"), "--stderr: expected no --isolate: a program already"),
        (("check", "--exec", ""), "--exec: expected a program and its arguments, got nothing"),
        (("check", "--exec", "it's"), "--exec it's: No closing quotation"),
        (("check", "--exec", "./absent --flag"), "--exec ./absent --flag: no program './absent' in "),
        (("check", "--exec", "true"), "--exec true: hello: expected a reply, got none: the process ended with exit code 0"),
    ],
)
def test_a_mistake_costs_one_line(kvref, arguments, message):
    done = kvref(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvref: {message}")


def test_a_file_that_cannot_be_executed_is_told_apart(kvref, tmp_path):
    (tmp_path / "harness").write_text("#!/bin/sh\n")
    done = kvref("check", "--exec", "./harness")
    assert done.stderr == (
        "kvref: --exec ./harness: ./harness is not executable: run chmod +x on it, or name its interpreter first\n"
    )
    (tmp_path / "harness").chmod(0o755)
    assert kvref("check", "--exec", "./harness").stderr == (
        "kvref: --exec ./harness: hello: expected a reply, got none: the process ended with exit code 0\n"
    )


def test_kvref_toml_names_programs_in_its_own_folder_and_below(kvref, tmp_path, monkeypatch):
    (tmp_path / "misbehaving_program.py").write_text((HERE / "misbehaving_program.py").read_text())
    command = json.dumps([sys.executable, "misbehaving_program.py"])
    (tmp_path / "kvref.toml").write_text(f"[implementations.mypool]\nexec = {command}\n")
    done = kvref("check", "mypool", "--examples", "3", "--clause", "BLOCK-0*")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "below").mkdir()
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "mypool", "--examples", "3", "--clause", "BLOCK-01"]
    assert subprocess.run(command, cwd=tmp_path / "below", capture_output=True, check=False).returncode == 0
    assert "mypool" in kvref("check", "mypol").stderr


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[implementations", "Expected ']'"),
        ('[implementations.mypool]\nexec = "./pool"\n', "[implementations.mypool]: expected exec = "),
        ('implementations = "pool"\n', "[implementations.]: expected exec = "),
    ],
)
def test_a_kvref_toml_that_is_wrong_costs_one_line(kvref, tmp_path, document, message):
    (tmp_path / "kvref.toml").write_text(document)
    done = kvref("check", "mypool")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert "kvref.toml" in done.stderr


def test_what_it_writes_to_its_standard_error_is_shown_when_asked_for(kvref):
    asked = ("check", "--exec", f"{PROGRAM} exits", "--examples", "2", "--clause", "BLOCK-04")
    assert "out of luck" not in kvref(*asked).stderr
    assert "out of luck" in kvref(*asked, "--stderr").stderr


def test_a_failure_over_a_pipe_is_shrunk_and_replayed(kvref, tmp_path):
    kvref("check", "--exec", f"{PROGRAM} exits", "--examples", "10", "--clause", "BLOCK-04")
    (path,) = (tmp_path / ".kvref/failures").iterdir()
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["judge"] == "model"
    assert len(lines) // 2 <= 5  # new, allocate, free, allocate, free
    done = kvref("replay", str(path))
    assert done.returncode == 1
    assert "did not return" in done.stdout
    assert kvref("replay", str(path), "--exec", PROGRAM).returncode == 0
    assert kvref("replay", str(path), "numpy").returncode == 0


SEEN = [
    "fp8-rounds-twice", "kernels-write-padding", "attention-heads-interleaved", "contiguous-rejects-the-last-token",
    "blocks-freed-twice", "buffers-released-twice", "pooled-block-grows",
]  # fmt: skip
SEEN_LATER = [
    pytest.param("int8-reciprocal", marks=pytest.mark.extended),
    pytest.param("quantized-drops-its-scale", marks=pytest.mark.extended),
    pytest.param("tiered-ratio-of-the-tail", marks=pytest.mark.extended),
    pytest.param("paged-reads-past-the-length", marks=pytest.mark.long),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("member", [*SEEN, *SEEN_LATER])
def test_the_judge_sees_through_a_pipe_what_it_sees_in_its_process(member):
    family = kvref_zoo.member(member).clause.partition("-")[0]
    seen = {}
    for name in (f"zoo:{member}", f"exec:{sys.executable} {HERE / 'serve.py'} zoo:{member}"):
        judge = CheckRunner(load_implementation(name), Effort(examples=4))
        seen[name] = {
            (clause.id, outcome.check): outcome
            for clause, checks in select_checks(f"{family}-*").items()
            for outcome in judge.judge_clause(checks)
        }
        judge.close()
    here, there = seen.values()
    assert any(outcome.verdict == "failed" for outcome in there.values())
    for check, outcome in there.items():
        if "through a pipe" not in outcome.missing and check[0] != "LAW-16":  # changes of an array cannot be observed either
            assert (outcome.verdict, outcome.what, outcome.expected, outcome.got, outcome.calls) == (
                here[check].verdict, here[check].what, here[check].expected, here[check].got, here[check].calls,
            )  # fmt: skip


REPLIES_WITH_BFLOAT16 = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["op"] == "hello":
        names = {"name": "half", "version": "1", "language": "python", "level": "exact"}
        ok = names | {"formats": ["bfloat16"], "families": ["contiguous"]}
    elif asked["op"] == "contiguous.new":
        ok = {"handle": asked["id"]}
    else:
        ok = {"dtype": "bfloat16", "shape": [1], "base64": "gD8="}
    print(json.dumps({"id": asked["id"], "ok": ok}), flush=True)
"""


def test_arrays_that_the_judge_cannot_read_are_not_blamed_on_the_program(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(REPLIES_WITH_BFLOAT16)
    program = load_implementation(f"exec:{sys.executable} {tmp_path}/program.py")
    cache = program.contiguous(batch_size=1, num_kv_heads=1, head_dim=1, initial_capacity=1, max_seq_len=1, dtype="bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(NotOffered, match="the judge needs ml_dtypes"):
        cache.raw()
    monkeypatch.undo()
    assert float(cache.raw()[0]) == 1.0  # the program was not ended
    program.close()
