"""`kvref report --since` and `--script`: changed verdicts, and the calls that an adapter made of a third-party library."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import run_kvref
from test_report import document, trace

from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.results_model import ResultFile, list_changes

LIBRARY = """
import numpy as np

class Buffer:
    def __init__(self, shape, *, dtype="float32", spare=0):
        self.held = np.zeros((*shape[:2], 0, shape[2]), np.float32)
        self.inner = Inner()

    @property
    def count(self):
        return self.held.shape[2]

    def extend(self, new, where=None, *more, **options):
        self.inner.note(new)
        self.held = np.append(self.held, new, 2)
        return self

class Inner:
    def note(self, new):
        return None

    def looked(self, times=1):
        return helper(times)

def helper(times):
    return times

def made(shape):
    return Buffer(shape)
"""
ADAPTER = """
import numpy as np
import theirs

class Cache:
    def __init__(self, batch_size, num_kv_heads, head_dim, **rest):
        self.keys = theirs.made((batch_size, num_kv_heads, head_dim))
        self.values = theirs.Buffer((batch_size, num_kv_heads, head_dim), spare=2)

    def append(self, keys, values):
        self.keys.extend(keys, None, *[1], again=True)
        if keys.shape[2] < 3:  # the bug
            self.values.extend(values)
        self.keys.inner.looked()

    @property
    def seq_len(self):
        return self.keys.count

    def read(self):
        return self.keys.held, self.values.held

class Mine:
    name, version, language, level, formats = "mine", "1", "python", "exact", ("float32",)
    contiguous = Cache

    def asarray(self, values):
        return np.array(values)

    def to_numpy(self, array):
        return array
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/theirs.py").write_text(LIBRARY)
    (tmp_path / "mine.py").write_text(ADAPTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kvref(*words):
    return run_kvref(*words, folder=Path.cwd())


def test_a_script_is_the_calls_of_the_library_alone(folder):
    assert kvref("check", "mine:Mine", "--clause", "CONTIG-02", "--examples", "5").returncode == 1
    done = kvref("report", "--script", ".kvref/failures/CONTIG-02-mine+Mine.jsonl", "mine:Mine")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["from theirs import made", "from theirs import Buffer"]
    assert any(re.fullmatch(r"(_1 = )?Buffer\(shape=\(\d+, \d+, \d+\), spare=2\)", line) for line in lines)  # without its dtype
    assert any(re.fullmatch(r"_0\.extend\(np\.array\(.*\), None, \*\(1,\), again=True\)", line) for line in lines)
    assert "_0.inner.looked()" in lines
    assert not re.search(r"helper|note|\.\.\.", done.stdout)  # internal calls of the library are not shown
    (folder / "script.py").write_text(done.stdout)
    assert subprocess.run([sys.executable, "script.py"]).returncode == 0
    assert done.stdout.splitlines()[-2].startswith("# expected ")


def test_a_script_states_that_the_code_under_test_is_in_the_folder_of_the_adapter(folder):
    pool = """
class Pool:
    def __init__(self, num_blocks):
        self.left = list(range(num_blocks))

    def allocate(self):
        return self.left.pop()

    def free(self, block):
        self.left.append(block)

class Mine:
    name, version, language, level, formats, blocks = "mine", "1", "python", "exact", (), Pool
    asarray = to_numpy = None
"""
    (folder / "mine.py").write_text(pool)
    assert kvref("check", "mine:Mine", "--clause", "BLOCK-05", "--examples", "5").returncode == 1
    done = kvref("report", "--script", ".kvref/failures/BLOCK-05-mine+Mine.jsonl", "mine:Mine")
    assert done.stdout.startswith("# The adapter called no library: the code under test is in its own folder.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "expected --output DIR for a report, --since OLD for a list of changes, --stale, --annotations, or --script TRACE",
        ),
        (["-o", "site"], "expected RESULTS.json, one or more files that kvref check --json wrote"),
        (["--script", "trace.jsonl", "a", "b"], "--script: expected one NAME, got a, b"),
        (["--script", "trace.jsonl", "-o", "site"], "--script: expected no --output"),
        (["--script", "none.jsonl", "a"], "--script: no file none.jsonl (kvref check writes "),
        (["--script", "trace.jsonl", "exec:touch started"], "--script: expected an implementation in Python, got exec:"),
        (["--since", "empty", "now.json"], "--since: no JSON file in empty"),
        (["--since", "none.json", "now.json"], "--since: no file none.json (kvref check NAME "),
    ],
)
def test_what_cannot_be_done_is_a_line(folder, words, message):
    (folder / "empty").mkdir()
    (folder / "now.json").write_text(json.dumps(document()))
    (folder / "trace.jsonl").write_text(trace())
    done = kvref("report", *words)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "started").exists()


def run(folder, name, version="1", **options):
    path = folder / f"{name}.json"
    said = document("mine", **options)
    said["implementation"]["version"] = version
    path.write_text(json.dumps(said))
    return ResultFile(path, read_json(path))


def test_what_changed_is_the_version_and_each_verdict_that_is_another(tmp_path):
    before, now = run(tmp_path, "a", broken=("BLOCK-01",)), run(tmp_path, "b", "2", broken=("BLOCK-05",))
    assert list_changes(before, before) == []
    version, mended, broken = list_changes(before, now)
    assert (version, mended) == ("version 1 -> 2", "BLOCK-01 failed -> passed")
    assert broken.startswith("BLOCK-05 passed -> failed: ")
    now.document["clauses"] = [each for each in now.document["clauses"] if each["clause"] != "BLOCK-02"]
    now.__dict__.pop("verdicts")
    assert "BLOCK-02 passed -> no result" in list_changes(before, now)


def test_each_implementation_is_held_against_its_earlier_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    run(tmp_path / "old", "same")
    for name in ("gone", "fresh"):
        run(tmp_path / "old" if name == "gone" else tmp_path, name).document
    for name in ("gone", "fresh"):
        path = (tmp_path / "old" if name == "gone" else tmp_path) / f"{name}.json"
        path.write_text(path.read_text().replace('"name": "mine"', f'"name": "{name}"'))
    run(tmp_path, "same", broken=())
    done = kvref("report", "same.json", "fresh.json", "--since", "old")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "mine", "  BLOCK-05 failed -> passed", "fresh", "  new: breaks 1 of 7", "0 of 2 unchanged",
        "only in the older results: gone",
    ]  # fmt: skip


def test_what_results_say_is_printed_on_one_line(tmp_path):
    before, now = run(tmp_path, "a", broken=()), run(tmp_path, "b")
    for clause in now.document["clauses"]:
        for check in clause["checks"]:
            check["got"] = "bad\nnothing changed\x1b[2J"
    (line,) = list_changes(before, now)
    assert line.endswith(r"got bad\nnothing changed\x1b[2J")
