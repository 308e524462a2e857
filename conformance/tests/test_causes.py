"""Which failure a run shows first, and which failures it takes for the same fault."""

import io
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from commandline import kvref
from rich.console import Console

from kvref_conformance.calls.messages import CallReply, CallRequest, Exchange
from kvref_conformance.exceptions import CallTimeout, ClauseViolation
from kvref_conformance.report.console import causes_text, print_failures
from kvref_conformance.runner.causes import failure_kind, probable_causes
from kvref_conformance.runner.options import Effort, RunOptions

__all__ = ["kvref"]

COPY = "paged.new", "paged.create", "paged.write", "paged.fork", "paged.write", "paged.gather"


def failed(clause, calls, shape=(), root=None, root_clause=None, kind="contents", numbers=10):
    """The result of a failed clause. Unless `root` is given, the calls are minimal."""
    root = shape if root is None else root
    evidence = {
        "calls": calls, "numbers": numbers, "shape": tuple(shape), "root": tuple(root), "kind": kind,
        "root_clause": (root_clause or clause) if root else "",
    }  # fmt: skip
    check = {
        "check": "a check", "verdict": "failed", "what": "paged.gather", "expected": "1.0", "got": "2.0", "where": "",
        "calls": [], "through": [], "trace": None, "evidence": evidence,
    }  # fmt: skip
    return {"clause": clause, "title": "A title", "verdict": "failed", "checks": [check]}


def clauses(*results):
    return [cause.clauses for cause in probable_causes(results)]


def test_the_failure_with_the_fewest_calls_is_the_first_of_its_cause():
    law = failed("LAW-01", 31, (*COPY[:3], *["paged.write"] * 20, *COPY[3:]))
    edit = failed("EDIT-05", 7, (*COPY[:5], "paged.truncate", "paged.gather"), root=COPY, root_clause="SHARE-05")
    assert clauses(law, edit, failed("SHARE-05", 6, COPY)) == [["SHARE-05", "LAW-01", "EDIT-05"]]


def test_a_check_that_failed_before_it_reached_its_subject_is_not_the_first():
    early = failed("PAGED-18", 5, ("paged.new", "paged.remove", "paged.gather"), root_clause="EDIT-10")
    late = failed("EDIT-10", 6, COPY)
    assert clauses(early, late) == [["EDIT-10", "PAGED-18"]]
    assert "\n  model    these calls break EDIT-10 · `remove` closes the gap and rotates keys\n" in printed(early)
    assert "these calls" not in printed(early, late)


def test_a_law_is_the_first_only_if_it_is_clearly_shorter():
    shape = "tiered.new", "tiered.append", "tiered.read"
    assert clauses(failed("LAW-04", 3, shape), failed("TIER-01", 4, shape)) == [["TIER-01", "LAW-04"]]
    assert clauses(failed("LAW-04", 3, shape), failed("TIER-01", 6, shape)) == [["LAW-04", "TIER-01"]]


def test_contents_come_before_counts_and_reproduced_failures_before_others():
    counts = failed("PAGED-15", 6, COPY, kind="counts")
    threads = failed("LAW-17", 3, COPY, root=())
    production = failed("LAW-18", 2, COPY)
    assert clauses(production, threads, counts, failed("SHARE-05", 6, COPY)) == [["SHARE-05", "PAGED-15", "LAW-17", "LAW-18"]]


def test_failures_with_different_calls_and_roots_have_different_causes():
    read = failed("PAGED-12", 4, ("paged.new", "paged.create", "paged.write", "paged.gather"))
    save = failed("MOVE-02", 3, ("paged.new", "paged.save", "paged.load!"), kind="no error")
    assert clauses(read, save) == [["MOVE-02"], ["PAGED-12"]]


def test_an_accepted_invalid_argument_comes_after_a_wrong_reply_with_more_calls():
    argument = failed("LAW-11", 2, ("paged.new", "paged.ensure_capacity"), kind="no error")
    argument["checks"][0]["expected"] = "PositionOutOfRange to be raised"
    assert clauses(argument, failed("SHARE-05", 6, COPY)) == [["SHARE-05"], ["LAW-11"]]
    argument["checks"][0]["expected"] = "OutOfBlocks to be raised"  # for a valid call
    assert clauses(argument, failed("SHARE-05", 6, COPY)) == [["LAW-11"], ["SHARE-05"]]


def test_a_failure_at_production_sizes_is_a_cause_only_if_no_other_clause_fails():
    production = failed("LAW-18", 900)
    assert clauses(production, failed("SHARE-05", 6, COPY)) == [["SHARE-05", "LAW-18"]]
    assert clauses(production) == [["LAW-18"]]


def test_calls_that_accept_different_invalid_arguments_have_different_causes():
    """Their calls are the same, but the missing validations are not."""
    dtype = failed("FMT-LEVEL-04", 2, ("contiguous.new", "contiguous.append"), kind="no error")
    room = failed("CONTIG-06", 2, ("contiguous.new", "contiguous.append"), kind="no error")
    dtype["checks"][0]["expected"], room["checks"][0]["expected"] = "DtypeMismatch", "CapacityExceeded"
    assert clauses(dtype, room) == [["CONTIG-06"], ["FMT-LEVEL-04"]]


def test_two_observables_of_one_wrong_state_have_one_cause():
    edits = "paged.new", "paged.create", "paged.write", "paged.drop"
    free, used = failed("PAGED-07", 5, (*edits, "paged.num_free_blocks")), failed("PAGED-15", 5, (*edits, "paged.utilization"))
    assert clauses(free, used) == [["PAGED-07", "PAGED-15"]]
    alone = (
        failed("PAGED-02", 2, ("paged.new", "paged.num_free_blocks")),
        failed("PAGED-15", 2, ("paged.new", "paged.utilization")),
    )
    assert clauses(*alone) == [["PAGED-02"], ["PAGED-15"]]  # everything contains `new`, which explains nothing


def test_expected_failures_and_passed_clauses_have_no_cause():
    assert probable_causes([failed("PAGED-07", 5, COPY) | {"verdict": "xfailed"}, failed("PAGED-15", 5) | {"checks": []}]) == []


@pytest.mark.parametrize(
    ("violation", "kind"),
    [
        (ClauseViolation("", "[1.0]", "[2.0]"), "contents"),
        (ClauseViolation("", "no error", "IndexError: 3"), "unexpected error"),
        (ClauseViolation("", "7", "OutOfBlocks: out of blocks"), "unexpected error"),
        (ClauseViolation("", "OutOfBlocks", "7"), "no error"),
        (CallTimeout("paged.gather", "a reply", "none"), "no reply"),
    ],
)
def test_the_kind_of_a_failure(violation, kind):
    reply = CallReply((np.ones(1, np.float32), np.ones(1, np.float32)))
    assert failure_kind(violation, [Exchange(CallRequest(1, "paged.gather", 1, {}), reply)]) == kind


def test_the_kind_of_a_wrong_count():
    assert (
        failure_kind(ClauseViolation("", "1", "2"), [Exchange(CallRequest(1, "paged.length", 1, {}), CallReply(2))]) == "counts"
    )


def printed(*results, show_all=False):
    console = Console(file=io.StringIO(), width=80)
    print_failures(console, list(results), RunOptions("mine:Cache", Effort()), show_all)
    return console.file.getvalue()


def test_one_failure_per_cause_is_printed_in_full_and_the_others_in_a_line():
    others = [failed(f"SHARE-{number:02}", 7 + number, (*COPY, "paged.gather")) for number in (1, 2, 3, 4, 6, 7, 8, 9)]
    said = printed(*others, failed("SHARE-05", 6, COPY))
    assert said.startswith("SHARE-05 · A title   (mine:Cache)\n") and said.count("expected 1.0") == 1
    assert "    SHARE-07 (14 calls) · A title\n    and SHARE-08, SHARE-09\n" in said
    assert printed(*others, show_all=True).count("expected 1.0") == 8


def test_causes_after_the_third_have_a_line_each():
    shapes = [("paged.new", f"paged.{name}") for name in ("save", "load", "fork", "drop", "read")]
    results = [failed(f"PAGED-{number:02}", 2, shape) for number, shape in enumerate(shapes, 1)]
    others = [failed(clause, 3, (*shapes[4], "paged.length")) for clause in ("PAGED-06", "PAGED-07")]
    said = printed(*results, *others)
    assert said.count("expected 1.0") == 3
    assert (
        "\nPAGED-05 (2 calls) · A title\n    also PAGED-06, PAGED-07\nshown by kvref check mine:Cache --clause PAGED-04" in said
    )
    assert causes_text(probable_causes(results)) == (
        "5 probable causes: PAGED-01 (2 calls), PAGED-02 (2 calls), PAGED-03 (2 calls), PAGED-04 (2 calls), PAGED-05 (2 calls)"
    )


def test_a_second_cause_has_a_line_only_if_both_would_not_fit_on_a_screen():
    long, short = (
        failed(f"PAGED-0{number}", 2, ("paged.new", name)) for number, name in enumerate(("paged.save", "paged.load"), 1)
    )
    assert printed(long, short).count("expected 1.0") == 2
    (check,) = long["checks"]
    check["calls"] = [f"paged.length({number})" for number in range(30)]
    said = printed(long, short)
    assert said.count("expected 1.0") == 1 and said.count("paged.length(") == 30
    assert "PAGED-02 (2 calls) · A title" in said


def test_a_long_message_is_cut():
    result = failed("PAGED-12", 2, ("paged.new", "paged.gather"), kind="unexpected error")
    (check,) = result["checks"]
    check["got"] = "RuntimeError: no\n" + "  File\n" * 30
    said = printed(result)
    assert said.count("  File\n") == 4 and "    ... 26 more lines, which the trace has\n" in said


def test_a_block_that_leaks_is_one_cause_on_one_screen(kvref, tmp_path):
    """It breaks more than ten clauses; the output was longer than two hundred lines."""
    name = "zoo:paged-leaks-a-block"
    done = kvref("check", name, "--clause", "PAGED-*,SHARE-*,EDIT-*", "--json", "results.json", "--junit", "junit.xml")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("PAGED-07 · ") and len(lines) <= 50
    assert lines[-2].startswith("1 probable cause: PAGED-07 (5 calls). 1") and lines[-2].endswith("; --all shows every failure")
    (cause,) = json.loads((tmp_path / "results.json").read_text())["causes"]
    assert cause[0] == "PAGED-07" and {"SHARE-06", "EDIT-04", "PAGED-15"} < set(cause)
    cases = {case.get("name").partition("[")[0]: case for case in ElementTree.parse(tmp_path / "junit.xml").iter("testcase")}
    named = {case.find("properties/property").get("value") for clause, case in cases.items() if clause in cause}
    assert named == {"PAGED-07"} and cases["PAGED-01"].find("properties") is None
    page = kvref("report", "results.json", "-o", "site")
    assert page.returncode == 0
    assert "Probable causes" in (tmp_path / "site/implementations/zoo+paged-leaks-a-block.html").read_text()
