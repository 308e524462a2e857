"""The `kvref` command as a user sees it: verdicts, exit codes, and a one-line message for every mistake."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvref_conformance.calls.messages import to_call_error
from kvref_conformance.clauses import all_clauses
from kvref_conformance.exceptions import ClauseViolation, NotOffered, printable
from kvref_conformance.runner.check_runner import select_checks


def test_a_conformant_backend_exits_0_with_a_table_by_chapter(kvref):
    count = sum(clause.startswith(("PAGED-", "KERN-")) for clause in all_clauses()) - 1
    done = kvref("check", "numpy", "--clause", "PAGED-*,KERN-*", "--examples", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert "numpy 0.1.0 (python, exact)" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["PAGED", "Paged", "cache", "18", "·", "·", "·"] in lines
    assert ["all", str(count), "0", "0", "1"] in lines
    assert done.stdout.splitlines()[-2:] == [
        "not run: KERN-06 (needs gigabytes of memory; --slow includes it)",
        f"conformant for the selected clauses: {count} of {count} judged, all passed",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_broken_one_exits_1_and_says_what_how_and_again(kvref):
    done = kvref("check", "mine:FreesTwice", "--family", "blocks")
    assert done.returncode == 1
    start = done.stdout.index("BLOCK-05 · A block cannot be freed twice   (mine:FreesTwice)")
    made, freed, *rest = done.stdout[start:].splitlines()[1:9]
    assert made.startswith("  blocks = blocks(num_blocks=")
    assert freed.startswith("  blocks.free(")  # the shrunk trace has two calls
    assert rest == [
        "    blocks.free",
        "    expected BlockNotAllocated to be raised",
        "    got      no error",
        "  found by free twice raises (blocks): BLOCK-05 (a); "
        "free of a block that was not allocated raises (blocks): BLOCK-05 (b); any sequence of calls (blocks)",
        "  replay   kvref replay .kvref/failures/BLOCK-05-mine+FreesTwice.jsonl mine:FreesTwice",
        "  again    kvref check mine:FreesTwice --clause BLOCK-05 --family blocks",
    ]
    count = len(select_checks(family="blocks"))
    said = f"not conformant: breaks LAW-19, BLOCK-05, SHARE-01; {count} of {count} selected clauses judged"
    assert done.stdout.splitlines()[-1] == said
    assert "noise" not in done.stdout + done.stderr
    assert "frees[bold]twice 0.1.0" in done.stdout  # markup in an implementation's name is shown as text


def test_a_failure_is_replayed_by_the_command_it_prints(kvref, tmp_path):
    kvref("check", "mine:FreesTwice", "--clause", "BLOCK-05")
    trace = ".kvref/failures/BLOCK-05-mine+FreesTwice.jsonl"
    done = kvref("replay", trace, "mine:FreesTwice")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"first mismatch at line 5 of {trace}, the same reply as recorded"
    assert kvref("replay", trace).stdout == done.stdout  # the trace contains the name of its implementation
    done = kvref("replay", trace, "numpy")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "every reply is as expected"
    done = kvref("replay", trace, "mine:OnlyKernels")
    assert (done.returncode, done.stderr) == (2, "kvref: mine:OnlyKernels does not offer family blocks\n")
    (tmp_path / "bad.jsonl").write_text("{}")
    done = kvref("replay", "bad.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith("kvref: bad.jsonl:1: ")
    said = "kvref: FILE: no file absent.jsonl (kvref check writes the traces of failures to .kvref/failures)\n"
    assert kvref("replay", "absent.jsonl").stderr == said


@pytest.mark.parametrize("change", [{"num_blocks": "six"}, {"surprise": 1}, {"sequences": 5}])
def test_a_trace_that_asks_for_what_no_model_knows_costs_one_line(kvref, tmp_path, change):
    kvref("check", "mine:FreesTwice", "--clause", "BLOCK-05")
    lines = (tmp_path / ".kvref/failures/BLOCK-05-mine+FreesTwice.jsonl").read_text().splitlines()
    made = json.loads(lines[1])
    lines[1] = json.dumps(made | {"args": made["args"] | change})
    (tmp_path / "odd.jsonl").write_text("\n".join(lines))
    done = kvref("replay", "odd.jsonl", "numpy")
    assert "Traceback" not in done.stderr
    if "num_blocks" not in change:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith("kvref: odd.jsonl: no model can predict the reply to blocks.new with these arguments")


def test_expected_failures_are_expected_and_kept_up(kvref, tmp_path):
    check = ("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--xfails", "known.txt")
    done = kvref(*check)
    assert (done.returncode, done.stderr) == (2, "kvref: --xfails: no file known.txt (--update-xfails writes it)\n")
    done = kvref(*check, "--update-xfails")
    assert done.returncode == 0
    assert (tmp_path / "known.txt").read_text() == "BLOCK-05\n"
    (tmp_path / "known.txt").write_text("BLOCK-05  the list has no guard\nBLOCK-01  no longer\n")
    done = kvref(*check, "--json", "out.json", "--junit", "out.xml")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-3:] == [
        "expected failure: BLOCK-05 · A block cannot be freed twice: the list has no guard",
        "expected to fail, but passed: BLOCK-01 (--update-xfails removes them from the file)",
        "not conformant, as expected: only expected failures; 7 of 7 selected clauses judged",
    ]
    verdicts = {clause["clause"]: clause["verdict"] for clause in json.loads((tmp_path / "out.json").read_text())["clauses"]}
    assert (verdicts["BLOCK-05"], verdicts["BLOCK-01"], verdicts["BLOCK-02"]) == ("xfailed", "xpassed", "passed")
    assert ElementTree.parse(tmp_path / "out.xml").find(".//failure") is None
    (tmp_path / "known.txt").write_text("BLOCK-01\n")
    assert kvref(*check).returncode == 1  # BLOCK-05 is not an expected failure
    (tmp_path / "known.txt").write_text("BLOCK-1\n")
    assert kvref(*check).stderr == "kvref: known.txt:1: no clause 'BLOCK-1': did you mean BLOCK-01?\n"


def test_traces_of_what_passes_are_kept_on_request(kvref, tmp_path):
    done = kvref("check", "numpy", "--clause", "BLOCK-04", "--traces", "kept")
    assert done.returncode == 0
    names = sorted(path.name for path in (tmp_path / "kept" / "numpy").iterdir())
    assert names == [
        "BLOCK-04-any-sequence-of-calls-blocks.jsonl",
        "BLOCK-04-free-makes-a-block-available-again-blocks.jsonl",
    ]
    assert kvref("replay", f"kept/numpy/{names[1]}", "reference").returncode == 0


def test_more_examples_are_tried_when_asked_for(kvref):
    assert kvref("check", "numpy", "--clause", "BLOCK-0*", "--examples", "3").returncode == 0
    assert kvref("check", "numpy", "--clause", "BLOCK-0*", "--examples", "3", "--deep").returncode == 0


def test_the_zoo_is_shown_with_what_caught_each(kvref):
    done = kvref("zoo", "blocks-freed-twice", "zoo:int8-truncates")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["member", "clause", "found", "by", "calls", "modelled", "on"]
    assert lines[1][:2] == ["blocks-freed-twice", "BLOCK-05"]
    assert lines[1][-1] == "LMCache/LMCache#5005"
    assert done.stdout.splitlines()[-1] == "2 of 2 found by the clause that they name"
    assert kvref("zoo", "unicorn").stderr == "kvref: no member of the zoo 'unicorn' (kvref zoo lists all)\n"


def test_the_command_it_prints_reruns_just_that_one(kvref):
    done = kvref("check", "mine:FreesTwice", "--clause", "BLOCK-05", "--family", "blocks")
    assert done.returncode == 1
    assert ["all", "0", "1", "0"] in [line.split() for line in done.stdout.splitlines()]


def test_the_command_it_prints_asks_for_slow_checks_and_the_seed_too():
    from kvref_conformance.runner.options import Effort, RunOptions

    run_options = RunOptions("a name", Effort(seed=3, slow=True, examples=7, timeout=2.5), isolate=True)
    assert (
        run_options.repeat_command("KERN-06")
        == "kvref check 'a name' --clause KERN-06 --seed 3 --examples 7 --timeout 2.5 --slow --isolate"
    )


def test_a_misspelled_operation_is_named(kvref):
    said = " ".join(kvref("check", "mine:MisspeltOperation", "--clause", "BLOCK-0*").stdout.split())
    assert "not offered: blocks.free (the object has freee) (BLOCK-04" in said


def test_what_is_not_offered_is_not_passed(kvref):
    done = kvref("check", "mine:OnlyKernels")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())  # lines are wrapped at 80 columns
    found = re.search("chapters without a clause that applies: (.*) not run", said)
    assert found
    assert set(found[1].split(", ")) == {id.partition("-")[0] for id in all_clauses()} - {"LAW", "KERN"}
    assert "Paged cache" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nump"],
            "no implementation 'nump': did you mean 'numpy'? write your own as module:object, or run this where its kvref.toml "
            "is; kvref list shows the names",
        ),
        (["mine.py:Cache"], "no implementation 'mine.py:Cache': expected a module, got a file: write mine:Cache"),
        (["mine:Missing"], "mine has no 'Missing'"),
        (["mine"], "no implementation 'mine': did you mean 'mine:OBJECT'? "),
        (["a" * 300], "write your own as module:object, or "),
        (["mine:nameles"], "mine has no 'nameles': did you mean 'Nameless'?"),
        (["mine:"], "expected module:object"),
        (["absent:X"], "absent cannot be imported: ModuleNotFoundError: No module named 'absent'"),
        (["syntax:X"], "syntax cannot be imported: SyntaxError: "),
        (["refuses:X"], "refuses cannot be imported: ValueError: no device (refuses.py:2)"),
        (["mine:NoTuple"], "formats: expected a tuple of names, got the string 'float32'"),
        (["mine:explodes"], "mine:explodes cannot be created: RuntimeError: no device"),
        (["mine:Nothing"], "mine:Nothing: nothing to test, it has none of the families elements, "),
        (["mine:Misspelt"], "attention, kernels, engine: did you mean paged?"),
        (["mine:Instance"], "mine:Instance: paged: expected a class or a function that creates the cache, got "),
        (["mine:Sloppy"], "level: expected 'exact' or 'tolerant', got 'roughly'"),
        (["mine:Odd"], "formats: expected names from float32, "),
        (["mine:Nameless"], "missing attributes name, version, language, level, "),
        (["mine:OnlyKernels", "--family", "paged"], "nothing to test, it does not offer the family paged"),
        (["mine:OnlyKernels", "--clause", "PAGED-*"], "nothing to test, it offers no family of the selected clauses"),
        (["reference:nolib"], "expected an installed Array API library, got 'nolib'"),
        (["numpy", "--family", "page"], "got 'page': did you mean paged?"),
        (["numpy", "--clause", "PAGED-7"], "--clause PAGED-7: no clause matches: did you mean PAGED-07?"),
        (["numpy", "--seed", "-1"], "--seed: expected an integer of at least 0, got -1"),
        (["numpy", "--examples", "0"], "--examples: expected an integer of at least 1, got 0"),
        (["numpy", "--timeout", "0"], "--timeout: expected at least 0.01, got 0.0"),
        (["numpy", "--update-xfails"], "--update-xfails: expected also --xfails FILE, the file to write"),
        (["numpy", "--clause", "BUF-07", "--traces", "mine.py"], "--traces: expected a folder, got the file mine.py"),
        (["zoo:blocks-freed-twise"], "no member of the zoo 'blocks-freed-twise': did you mean 'blocks-freed-twice'?"),
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


def test_list_names_implementations_and_what_is_missing(kvref):
    done = kvref("list")
    assert done.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith(("reference ", "numpy ")))
    assert {name: said.strip() for name, said in lines.items()} == {"reference": "ready", "numpy": "ready"}
    assert "reference:cupy" in done.stdout


def test_explain_shows_text_why_bugs_and_checks(kvref):
    done = kvref("explain", "block-05")
    assert done.returncode == 0
    for words in ("MUST raise", "Why.", "LMCache/LMCache#5005", "free twice raises (blocks)"):
        assert words in done.stdout
    assert "PAGED-07" in kvref("explain", "PAGED").stdout and "paged.write(" not in kvref("explain", "PAGED").stdout
    said = kvref("explain", "contiguous").stdout
    assert "CONTIG-01" in said and "contiguous.reorder(rows: integers) -> null\n    raises RowOutOfRange" in said
    done = kvref("explain", "PAGED-7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean PAGED-07?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["check", "numpy"], "pytest"), (["check", "numpy"], "hypothesis"), (["replay", "x"], "jsonschema"),
        (["replay", "x"], "jsonschema_rs"),
        (["report", "x", "-o", "y"], "jinja2"), (["soak", "numpy"], "rich"), (["zoo"], "rich"), (["bench"], "rich"),
        (["harness", "--selftest", "x"], "rich"), (["vectors", "numpy"], "safetensors"), (["list"], "rich"),
        (["explain", "PAGED"], "rich"),
    ],
)  # fmt: skip
def test_without_its_extra_the_command_says_what_to_install(arguments, needed):
    hidden = f"import sys; sys.modules[{needed!r}] = None; from kvref_conformance.cli import main; sys.exit(main({arguments}))"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"kvref: {arguments[0]} needs {needed}[a-z.]* \(in a clone: pip install '.\[conformance\]'\)\n", done.stderr
    )


def test_the_version_names_the_size_of_the_specification(kvref):
    chapters = [file.read_text() for file in Path("kvref/spec").glob("*.md")]
    counts = [len(re.findall(r"^## [A-Z0-9-]+-\d+ · ", text, re.MULTILINE)) for text in chapters]
    done = kvref("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"kvref \S+: {sum(counts)} clauses in {sum(map(bool, counts))} chapters\n", done.stdout)


def test_help_fits_a_terminal(kvref, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], *([name, "--help"] for name in ("check", "replay", "report", "zoo", "explain"))):
        done = kvref(*arguments)
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_in_the_judges_process_there_is_a_debugger_and_what_is_printed_is_seen(kvref):
    one = ("--clause", "BLOCK-01", "--examples", "1")
    done = kvref("check", "mine:FreesTwice", *one, "--no-isolate")
    assert "noise on stdout" in done.stdout and "noise on stderr" in done.stderr
    done = kvref("check", "mine:Debugged", *one, "--no-isolate", typed="p 6 * 7\n" + "c\n" * 1000)
    assert "(Pdb) 42" in done.stdout
    assert "not conformant: breaks" not in done.stdout


def test_a_command_that_does_not_exist_is_corrected(kvref):
    assert kvref("chek", "numpy").stderr.endswith("'explain'): did you mean check?\n")


CRASH = """
import sys
import kvref_conformance.commands.spec_info as command
from kvref_conformance.cli import main
command.list_implementations = lambda options: 1 // 0
sys.exit(main(["list"]))
"""


def test_an_error_in_the_judge_names_its_line_and_the_report(tmp_path):
    done = subprocess.run([sys.executable, "-c", CRASH], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvref: an error in kvref itself: ZeroDivisionError: ")
    assert ", line 5, in <lambda>); please report it with .kvref/crash.txt" in done.stderr
    assert "Traceback" in (tmp_path / ".kvref/crash.txt").read_text()


def test_escape_sequences_do_not_reach_the_terminal():
    assert printable("a\x1b[31mb\x07\nc") == "a\\x1b[31mb\\x07\nc"
    violation = ClauseViolation("", "no error", "RuntimeError: \x1b[31m")
    assert violation.got == "RuntimeError: \\x1b[31m" and "\x1b" not in str(violation)
    assert str(NotOffered("\x1b]0;title\x07")) == "\\x1b]0;title\\x07"
    assert to_call_error(RuntimeError("\x1b[2J")).message == "\\x1b[2J"
