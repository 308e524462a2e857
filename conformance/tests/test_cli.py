"""The `kvref` command as a user meets it: verdicts, exit codes, and one clear line for every mistake."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

BROKEN = """
from kvref_conformance.implementations.backends import OnBackend
import kvref, sys

class Pool(kvref.BlockPool):
    def free(self, block):
        self._free.append(block)
        self._used.discard(block)

class FreesTwice(OnBackend):
    name = "frees[bold]twice"
    def __init__(self):
        self.backend = kvref.reference
    def blocks(self, num_blocks):
        print("noise on stdout")
        print("noise on stderr", file=sys.stderr)
        return Pool(num_blocks)

class OnlyKernels:
    name, version, language, level, formats = "only-kernels", "1", "python", "exact", ()
    def asarray(self, values): return values
    def to_numpy(self, array): return array
    def kernels(self): return kvref.backend("numpy")

def explodes():
    raise RuntimeError("no device\\nand a second line")

class Nothing:
    name, version, language, level, formats = "nothing", "1", "python", "exact", ()
    def asarray(self, values): return values
    def to_numpy(self, array): return array

class Sloppy(Nothing):
    level = "roughly"

class Odd(Nothing):
    formats = ("int3",)

class Nameless: pass
"""


@pytest.fixture
def kvref(tmp_path):
    """Run the command in a folder that has a module `mine` with implementations."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # the user's own tests, not ours

    def run(*arguments, **environment):
        command = [sys.executable, "-m", "kvref_conformance.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    return run


def test_a_conformant_backend_exits_0_with_a_table_by_chapter(kvref):
    done = kvref("check", "numpy")
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy 0.1.0 (python, exact)" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["PAGED", "Paged", "cache", "15", "·", "·", "·"] in lines
    assert ["all", "136", "0", "0", "1"] in lines
    assert done.stdout.splitlines()[-2:] == [
        "not run: KERN-06 (takes gigabytes; --slow runs it)",
        "conformant in all that it offers",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_broken_one_exits_1_and_says_what_how_and_again(kvref):
    done = kvref("check", "mine:FreesTwice", "--family", "blocks")
    assert done.returncode == 1
    assert "BLOCK-05 · A block cannot be freed twice   (mine:FreesTwice)" in done.stdout
    assert "expected BlockNotAllocated to be raised" in done.stdout
    assert "got      no error" in done.stdout
    assert "blocks1.free(0)" in done.stdout
    assert "again    kvref check mine:FreesTwice --clause BLOCK-05 --family blocks" in done.stdout
    assert done.stdout.splitlines()[-1] == "not conformant: breaks BLOCK-05"
    assert "noise" not in done.stdout + done.stderr
    assert "frees[bold]twice 0.1.0" in done.stdout  # markup from an implementation is text


def test_the_command_it_prints_reruns_just_that_one(kvref):
    done = kvref("check", "mine:FreesTwice", "--clause", "BLOCK-05", "--family", "blocks")
    assert done.returncode == 1
    assert ["all", "0", "1", "0"] in [line.split() for line in done.stdout.splitlines()]


def test_the_command_it_prints_asks_for_slow_checks_and_the_seed_too():
    from kvref_conformance.report.text import Asked

    asked = Asked("a name", seed=3, family=None, slow=True)
    assert asked.again("KERN-06") == "kvref check 'a name' --clause KERN-06 --seed 3 --slow"


def test_what_is_not_offered_is_not_passed(kvref):
    done = kvref("check", "mine:OnlyKernels")
    assert done.returncode == 0
    assert ["PAGED", "Paged", "cache", "·", "·", "15", "·"] in [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nump"], "no implementation 'nump': did you mean 'numpy'? known are reference, "),
        (["mine:Missing"], "mine has no 'Missing'"),
        (["mine:"], "expected module:object"),
        (["absent:X"], "absent cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        (["syntax:X"], "syntax cannot be imported: SyntaxError: "),
        (["mine:explodes"], "mine:explodes cannot be made: RuntimeError: no device"),
        (["mine:Nothing"], "mine:Nothing: nothing to test, it offers none of elements, "),
        (["mine:Sloppy"], "level must be 'exact' or 'tolerant', got 'roughly'"),
        (["mine:Odd"], "formats must be of float32, "),
        (["mine:Nameless"], "an implementation needs 'name'"),
        (["mine:OnlyKernels", "--family", "paged"], "nothing to test, it does not offer the family paged"),
        (["mine:OnlyKernels", "--clause", "PAGED-*"], "nothing to test, it offers nothing these clauses are about"),
        (["reference:nolib"], "expected an installed Array API library, got 'nolib'"),
        (["numpy", "--family", "page"], "--family: expected one of elements, "),
        (["numpy", "--clause", "PAGED-77"], "--clause PAGED-77: no clause matches; did you mean PAGED-07?"),
        (["numpy", "--seed", "-1"], "--seed: expected an integer of at least 0, got -1"),
        (["numpy", "--json", "no/such/folder/x.json"], "--json: no folder "),
        (["numpy", "--clause", "BUF-07", "--json", "."], "--json: "),
    ],
)
def test_a_mistake_costs_one_line_and_exits_2(kvref, arguments, message):
    done = kvref("check", *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvref: ")
    assert message in line


def test_json_holds_the_verdicts(kvref, tmp_path):
    done = kvref("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--json", "out.json", "--seed", "5")
    document = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 1
    assert (document["format"], document["seed"], document["implementation"]["language"]) == (1, 5, "python")
    verdicts = {clause["clause"]: clause["verdict"] for clause in document["clauses"]}
    assert verdicts == {f"BLOCK-0{n}": "failed" if n == 5 else "passed" for n in range(1, 7)}
    (failed,) = [clause for clause in document["clauses"] if clause["verdict"] == "failed"]
    assert {"expected", "got", "what", "calls"} <= set(failed["checks"][0])
    assert document["environment"]["packages"]["numpy"]


def test_junit_holds_the_verdicts(kvref, tmp_path):
    kvref("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--junit", "out.xml")
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    assert len(cases) == 6
    assert "expected BlockNotAllocated" in cases["BLOCK-05[frees[bold]twice]"].find("failure").text


def test_list_shows_the_checks_without_running_them(kvref):
    done = kvref("check", "mine:FreesTwice", "--clause", "BLOCK-05", "--list")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "BLOCK-05 · A block cannot be freed twice"
    assert "  a block cannot be freed twice (blocks)" in done.stdout


def test_list_names_implementations_and_what_is_missing(kvref):
    done = kvref("list")
    assert done.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("reference ", "numpy ")))
    assert {name: said.strip() for name, said in lines.items()} == {"reference": "ready", "numpy": "ready"}
    assert "reference:cupy" in done.stdout


def test_explain_shows_text_why_bugs_and_checks(kvref):
    done = kvref("explain", "block-05")
    assert done.returncode == 0
    for words in ("MUST raise", "Why.", "LMCache/LMCache#5005", "a block cannot be freed twice (blocks)"):
        assert words in done.stdout
    assert "PAGED-07" in kvref("explain", "paged").stdout
    done = kvref("explain", "PAGED-7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean PAGED-07?" in done.stderr


def test_without_its_extra_the_command_says_what_to_install():
    hidden = "import sys; sys.modules['pytest'] = None; from kvref_conformance.cli import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kvref: list needs pytest (pip install 'kvref[conformance]')\n"


def test_help_fits_a_terminal(kvref, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], ["check", "--help"], ["explain", "--help"]):
        done = kvref(*arguments)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
