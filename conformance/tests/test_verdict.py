"""The conclusion of a run: which share was judged, and no pass if nothing was judged."""

import json
import re

import pytest
from commandline import run_kvref

from kvref_conformance.clauses import all_clauses
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementations import load_implementation
from kvref_conformance.report.console import conclusion_text
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.verdict import overall_verdict

MINE = '''
import threading
import numpy as np
import kvref
from kvref_conformance.implementations.backends import OnBackend

class _Mine:
    name, version, language, level, formats = "mine", "1", "python", "exact", ("float16",)
    def asarray(self, values): return np.array(values)
    def to_numpy(self, array): return array

class NotOffered(Exception): pass

class HardlyAsked(_Mine):
    """Takes float16 only, and has few methods: the judge cannot see what was written."""
    def paged(self, **config):
        class Little:
            def __init__(self):
                cache = kvref.PagedCache(kvref.PagedConfig(**config))
                self.create, self.drop, self.length = cache.create, cache.drop, cache.length
        return Little()

class Nothing(_Mine):
    def paged(self, **config):
        raise NotOffered("caches of any size")

class OnlyKernels(_Mine):
    formats = ("float32",)
    def kernels(self): return kvref.backend("numpy")

class OnlyElements(_Mine):
    formats = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    def elements(self): return OnBackend(kvref.reference).elements()

class OnlyInt8Rows(_Mine):
    formats = ("int8",)
    def rows(self): return OnBackend(kvref.reference).rows()

class RowsOfNoFormat(_Mine):
    """Offers rows, and has no format of any. It has elements of float16."""
    def rows(self): return OnBackend(kvref.reference).rows()
    def elements(self): return OnBackend(kvref.reference).elements()

class NoStats(OnBackend):
    """A tiered cache without statistics."""
    name = "no-stats"
    def __init__(self): super().__init__(kvref.reference)
    def tiered(self, **config):
        cache = kvref.TieredCache(kvref.TieredConfig(**config))
        class Without:
            total_tokens = property(lambda self: cache.total_tokens)
            append, read, clear, attend = cache.append, cache.read, cache.clear, cache.attend
        return Without()
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine_of_conclusion.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "mine_of_conclusion"


@pytest.fixture
def kvref(tmp_path, mine):
    def run(*arguments):
        return run_kvref(*arguments, folder=tmp_path)

    return run


def results(*verdicts):
    given = zip(all_clauses(), verdicts, strict=False)
    missing = {"not offered": ["operation read"], "of other formats": ["format int8", "format q8 or q4"]}
    return [
        {
            "clause": clause, "verdict": "not offered" if verdict in missing else verdict, "offered": offered,
            "missing": missing.get(verdict, []),
        }
        for clause, (verdict, offered) in given
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verdicts", "least", "said", "judged", "of"),
    [
        ([("passed", True)], 50, "conformant", 1, 1),
        ([("passed", True), ("not offered", True)], 50, "conformant", 1, 2),
        ([("passed", True), ("not offered", True)], 51, "not judged", 1, 2),
        ([("passed", True), ("not offered", True), ("not offered", True)], 50, "not judged", 1, 3),
        ([("passed", True), ("not offered", True), ("not offered", True)], 0, "conformant", 1, 3),
        ([("passed", True), ("not offered", False), ("not offered", False)], 100, "conformant", 1, 1),
        ([("passed", True), ("not run", True), ("not run", True)], 100, "conformant", 1, 1),
        ([("not offered", True)], 0, "not judged", 0, 1),
        ([("passed", True), ("of other formats", True), ("of other formats", True)], 100, "conformant", 1, 1),
        ([("of other formats", True)], 0, "not judged", 0, 0),
        ([("not offered", False)], 0, "not judged", 0, 0),
        ([("not run", True)], 0, "not judged", 0, 0),
        ([], 0, "not judged", 0, 0),
        ([("failed", True), ("not offered", True), ("not offered", True)], 50, "not conformant", 1, 3),
        ([("xfailed", True), ("passed", True)], 50, "not conformant, as expected", 2, 2),
        ([("xfailed", True), ("not offered", True), ("not offered", True)], 50, "not judged", 1, 3),
        ([("xpassed", True)], 50, "conformant", 1, 1),
    ],
)
def test_what_follows_from_how_much(verdicts, least, said, judged, of):
    found = overall_verdict(results(*verdicts), least)
    assert (found.verdict, found.judged, found.of, found.least, found.whole) == (said, judged, of, least, False)


def test_a_part_is_not_taken_for_the_whole():
    counted = len(all_clauses())
    everything = results(*[("passed", True)] * counted)
    said = f"conformant: {counted} of {counted} clauses of its families judged, all passed"
    assert conclusion_text(overall_verdict(everything)) == said
    assert overall_verdict(everything).whole
    one_less = overall_verdict(everything[1:])
    assert (one_less.verdict, one_less.whole) == ("conformant", False)
    assert conclusion_text(one_less) == f"conformant for the selected clauses: {counted - 1} of {counted - 1} judged, all passed"


@pytest.mark.parametrize(("verdict", "said"), [("passed", "not judged"), ("xfailed", "not judged"), ("failed", "not conformant")])
def test_an_interrupted_run_proves_nothing_but_a_failure(verdict, said):
    found = overall_verdict(results((verdict, True)), 0, interrupted=True)
    assert found.verdict == said
    assert conclusion_text(found).startswith(f"{said}{': ' if said == 'not judged' else '; '}1 of 1 selected clauses")
    assert "less than" not in conclusion_text(found)


def test_a_cache_that_is_hardly_asked_anything_is_not_judged(kvref, mine, tmp_path):
    check = ("check", f"{mine}:HardlyAsked", "--examples", "5", "--json", "out.json")
    done = kvref(*check)
    assert done.returncode == 2, done.stdout
    last = done.stdout.splitlines()[-1]
    concluded = json.loads((tmp_path / "out.json").read_text())["conclusion"]
    assert concluded["verdict"] == "not judged"
    assert 0 < concluded["judged"] < concluded["of"] / 2
    share = f"{concluded['judged']} of {concluded['of']} clauses of its families"
    assert last == f"not judged: {share} have a verdict, less than 50 % (--least-judged)"
    assert "not offered: paged.write" in done.stdout
    assert done.stderr == ""
    done = kvref(*check, "--least-judged", "1")
    said = f"conformant: {share} judged, all passed"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, said)


def test_nothing_judged_is_never_conformant(kvref, mine):
    done = kvref("check", f"{mine}:Nothing", "--examples", "5", "--least-judged", "0", "--family", "paged")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("not judged: 0 of ")
    done = kvref("check", "numpy", "--clause", "KERN-06")
    assert (done.returncode, done.stderr) == (2, "kvref: numpy: nothing to test, KERN-06 runs with --slow\n")
    assert kvref("check", "numpy", "--least-judged", "101").stderr.startswith("kvref: --least-judged: expected a percentage")


@pytest.mark.parametrize("name", ["OnlyKernels", "OnlyElements"])
def test_all_of_one_family_is_conformant(mine, name):
    judge = CheckRunner(load_implementation(f"{mine}:{name}"))
    family = name.removeprefix("Only").lower()
    found = [
        {
            "clause": clause.id,
            "verdict": verdict_of(judge.judge_clause(checks)),
            "offered": any(check.family == family for check in checks),
            "missing": [],
        }
        for clause, checks in select_checks().items()
    ]
    concluded = overall_verdict(found)
    assert (concluded.verdict, concluded.judged) == ("conformant", concluded.of)
    assert concluded.of >= 6


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OnlyInt8Rows", r"conformant: (\d+) of \1 clauses of its families judged, all passed"),
        ("RowsOfNoFormat", r"not judged: 2 of \d+ clauses"),  # FMT-CAST-01 and LAW-15, by casts to float16
    ],
)
def test_formats_that_are_not_had_are_not_asked_for_but_rows_without_any_are(kvref, mine, name, said):
    done = kvref("check", f"{mine}:{name}")
    assert re.search(said, " ".join(done.stdout.split())), done.stdout


def test_updating_expected_failures_does_not_make_too_little_enough(kvref, mine, tmp_path):
    (tmp_path / "known.txt").write_text("PAGED-06  leaks\nPAGED-17\n")
    done = kvref("check", f"{mine}:HardlyAsked", "--examples", "5", "--xfails", "known.txt", "--update-xfails")
    assert done.returncode == 2
    assert (tmp_path / "known.txt").read_text() == "PAGED-06  leaks\nPAGED-17\n"  # neither of these was judged
    assert "known.txt: 2 expected failures, 2 before" in done.stdout


def test_clauses_may_be_named_one_by_one_or_together():
    def ids(*arguments):
        return [clause.id for clause in select_checks(*arguments)]

    assert ids("BUF-07,block-01") == ids("block-01, BUF-07") == ["BLOCK-01", "BUF-07"]
    assert ids("FMT-INT8-*,FMT-INT8-02") == ids("FMT-INT8-*")
    assert ids("TIER-01,LAW-01", "tiered") == ["LAW-01", "TIER-01"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("BUF-7",), "BUF-7: no clause matches: did you mean BUF-07?"),
        (("BUF-07,PAGD-*",), "PAGD-*: no clause matches: did you mean PAGED-*?"),
        (("PAGED",), "PAGED: no clause matches: did you mean PAGED-*?"),
        (("zebra",), "zebra: no clause matches"),
        (("TIER-02,TIER-01", "paged"), "TIER-02,TIER-01: no check in family paged, only in tiered"),
        (("TIER-*", "paged"), "TIER-*: no check in family paged, only in tiered"),
    ],
)
def test_a_clause_that_cannot_be_judged_is_said(arguments, message):
    with pytest.raises(CannotRun) as refused:
        select_checks(*arguments)
    assert str(refused.value) == message


def test_the_command_takes_several_clauses(kvref):
    done = kvref("check", "numpy", "--clause", "BLOCK-01", "--clause", "buf-07,BUF-08", "--examples", "3")
    assert done.stdout.splitlines()[-1] == "conformant for the selected clauses: 3 of 3 judged, all passed"
    done = kvref("check", "numpy", "--family", "paged", "--clause", "TIER-01")
    assert (done.returncode, done.stderr) == (2, "kvref: --clause TIER-01: no check in family paged, only in tiered\n")


def test_threads_that_meet_what_is_not_offered_do_not_fail(mine):
    judge = CheckRunner(load_implementation(f"{mine}:NoStats"))
    ((_, checks),) = select_checks("TIER-12").items()
    verdicts = {outcome.check: outcome for outcome in judge.judge_clause(checks)}
    beside = verdicts["read during appends returns whole tokens (tiered)"]
    assert (beside.verdict, beside.missing) == ("not offered", "tiered.stats")
    assert verdicts["appends from threads lose no token (tiered)"].verdict == "passed"


def test_what_is_missing_is_missing_of_a_family_that_is_offered(mine):
    judge = CheckRunner(load_implementation(f"{mine}:Nothing"))
    for clause in ("LAW-01", "LAW-03", "PAGED-07"):
        ((_, checks),) = select_checks(clause).items()
        outcomes = judge.judge_clause(checks)
        assert verdict_of(outcomes) == "not offered"
        reasons = judge.missing(checks, outcomes)
        assert reasons
        assert not [reason for reason in reasons if reason.startswith("family ")], reasons
        searched = [each for each in outcomes if each.check == "any sequence of calls (paged)"]
        assert [each for each in searched if each.missing.startswith("family ")] == []
    ((_, checks),) = select_checks("TIER-01").items()
    assert judge.missing(checks, judge.judge_clause(checks)) == ["family tiered"]
