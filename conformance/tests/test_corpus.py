"""State that a search keeps: its corpus, earlier failures, and figures over time."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from search_helpers import Here, explored, seen, short

from kvref_conformance.exceptions import CannotRun
from kvref_conformance.fuzz.campaign import MAX_POINTS, Campaign, CampaignListener, WorkersLost
from kvref_conformance.fuzz.corpus import CampaignRun, Corpus, KnownFailure, ProgressPoint, lock_corpus, open_corpus
from kvref_conformance.fuzz.html_report import make_plot, write_page
from kvref_conformance.fuzz.seed_scheduler import UNITS_PER_TURN, SeedScheduler
from kvref_conformance.fuzz.work_unit import WorkUnit
from kvref_conformance.fuzz.worker_tasks import RecheckResult
from kvref_conformance.results import CheckResult
from kvref_conformance.traces.format import Header
from kvref_conformance.traces.paths import save_failure


def test_a_corpus_is_what_was_written(tmp_path):
    corpus = Corpus(tmp_path / "new" / "corpus", "numpy", [WorkUnit("paged", "calls", "3+4:5")], handed={"calls": 9})
    corpus.failures.append(KnownFailure("PAGED-07", ("paged.new", "paged.gather!"), WorkUnit("paged", "check", "2"), 3, ""))
    points = [ProgressPoint(float(number), number, 3, 4, 5, 6, {"paged": [4, 5]}) for number in range(3)]
    corpus.runs.append(CampaignRun("now", 3, 2, points, lost=1, mended=["PAGED-01"]))
    corpus.write()
    again = open_corpus(corpus.folder, "numpy")
    assert again.runs.pop() == replace(corpus.runs[0], points=points[-1:])  # the other runs have files of their own
    assert again == replace(corpus, runs=[])
    assert {str(each.relative_to(corpus.folder)) for each in corpus.folder.rglob("*.*")} == {"corpus.json", "runs/0001.json"}
    assert len(json.loads((corpus.folder / "runs/0001.json").read_text())["points"]) == 3


def test_points_over_time_are_no_more_than_are_drawn(tmp_path):
    campaign = Campaign(Here(0), Corpus(tmp_path, ""), SeedScheduler([], [], [], 0), CampaignRun("", 0, 1))
    campaign._limit = 1000.0
    for second in range(1000):
        campaign.began = time.monotonic() - second
        campaign.units = second
        campaign._add_point()
    points = campaign.run.points
    assert MAX_POINTS / 2 < len(points) < 1.1 * MAX_POINTS and points[-1].units == 999 and points[0].seconds == 0.0
    assert all(one.seconds < other.seconds for one, other in pairwise(points))


RUN = {"began": "now", "seed": 0, "workers": 1, "lost": 0, "mended": []}
POINT = {"seconds": 1, "units": 1, "calls": 1, "states": 1, "transitions": 1, "failures": 0, "families": {}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("not JSON", "JSONDecodeError"),
        ({"corpus": 2}, "expected version 1, got 2"),
        ({"seeds": [["paged", "calls", "x"]]}, "ValueError"),
        ({"seeds": [["paged", "walks", "1"]]}, "expected one of calls, check, soak, got 'walks'"),
        ({"failures": [{"clause": "A"}]}, "KeyError"),
        ({"runs": [{"nonsense": 1, "points": []}]}, "KeyError"),
        ({"runs": [{**RUN, "points": []}]}, "expected points of a run, got none"),
        ({"runs": [{**RUN, "points": [{**POINT, "seconds": "x"}]}]}, "expected seconds, got 'x'"),
        ({"runs": [{**RUN, "points": [{**POINT, "calls": 1.5}]}]}, "expected a non-negative integer, got 1.5"),
        ({"seeds": [["paged", "check", "1+2:3"]]}, "expected a number, got '1+2:3'"),
        ({"seeds": [["paged", "soak", "-5"]]}, "expected a number, got '-5'"),
        ({"seeds": [["paged", "calls", "9" * 5000]]}, "ValueError"),
        ({"seeds": [[["paged"], "calls", "3"]]}, "expected text, got ['paged']"),
        ({"seeds": [["\ud800", "calls", "3"]]}, "UnicodeEncodeError"),
        ({"seeds": 5}, "expected a list, got 5"),
        ({"handed": {"calls": float("inf")}}, "expected a non-negative integer, got inf"),
        ({"handed": {"calls": -1}}, "expected a non-negative integer, got -1"),
        ("[" * 200000, "RecursionError"),
        ({"failures": [{"clause": "A", "shape": [], "unit": ["paged", "calls", "1"], "times": 1, "trace": "../../x"}]}, "a file"),
        ({"failures": [{"clause": "A", "shape": [], "unit": ["paged", "calls", "1"], "times": 1, "trace": ".."}]}, "a file"),
        ([], "TypeError"),
    ],
)
def test_a_corpus_that_cannot_be_read_says_why(tmp_path, changed, said):
    corpus = Corpus(tmp_path, "numpy")
    corpus.write()
    text = corpus.path.read_text()
    whole = (
        changed if isinstance(changed, str) else json.dumps(json.loads(text) | changed if isinstance(changed, dict) else changed)
    )
    corpus.path.write_text(whole)
    with pytest.raises(CannotRun, match=r"^--corpus: .*corpus\.json cannot be read: ") as caught:
        open_corpus(tmp_path, "numpy")
    assert said in str(caught.value)


def test_a_folder_of_something_else_is_no_corpus(tmp_path):
    Corpus(tmp_path / "one", "numpy").write()
    with pytest.raises(CannotRun, match="expected the corpus of mine:Cache, got that of numpy"):
        open_corpus(tmp_path / "one", "mine:Cache")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/notes.txt").write_text("")
    with pytest.raises(CannotRun, match=r"which has no corpus\.json"):
        open_corpus(tmp_path / "two", "numpy")
    with pytest.raises(CannotRun, match="expected a folder, got the file"), lock_corpus(tmp_path / "two/notes.txt"):
        pass
    (tmp_path / "three").mkdir()
    (tmp_path / "three/corpus.new").write_text("{")  # from a search that was killed while it started
    assert open_corpus(tmp_path / "three", "numpy") == Corpus(tmp_path / "three", "numpy")


def test_one_search_at_a_time_has_a_corpus(tmp_path):
    folder = tmp_path / "new/corpus"
    with lock_corpus(folder):
        assert not open_corpus(folder, "numpy").runs  # a folder with only the lock file counts as empty
        with pytest.raises(CannotRun, match=r"^--corpus: .*corpus: in use by another search"), lock_corpus(folder):
            pass
    assert not folder.parent.exists()  # nothing was written
    with lock_corpus(folder):
        Corpus(folder, "numpy").write()
    holding = "import sys; from pathlib import Path; from kvref_conformance.fuzz.corpus import lock_corpus\n"
    holding += "with lock_corpus(Path(sys.argv[1])): print('has it', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holding, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(CannotRun, match="in use by another search"), lock_corpus(folder):
            pass
        other.kill()
    with lock_corpus(folder):
        assert open_corpus(folder, "numpy") == Corpus(folder, "numpy")


def test_failures_of_before_come_first_and_those_that_are_mended_go(tmp_path):
    corpus = Corpus(tmp_path, "numpy", [WorkUnit("paged", "calls", "7"), WorkUnit("gone", "calls", "8")])
    for clause in ("PAGED-01", "PAGED-02", "PAGED-03"):
        corpus.failures.append(KnownFailure(clause, ("paged.new",), WorkUnit("paged", "calls", "1"), 1, f"{clause}.jsonl"))
        trace_of(corpus, corpus.failures[-1])
    unfinished = KnownFailure("PAGED-04", (), WorkUnit("paged", "calls", "5"))
    corpus.failures.append(unfinished)
    said = {
        "PAGED-01": RecheckResult("broken"),
        "PAGED-02": RecheckResult("mended"),
        "PAGED-03": RecheckResult("not offered", "paged.new"),
    }

    def answer(work, *about):
        return said[about[0]] if work.__name__ == "recheck_failure" else [seen(each.seed) for each in about[0]]

    heard = []
    exploring = explored(
        Here(6, answer=answer), corpus, ["paged"], of_before=lambda known, came: heard.append((known.clause, came))
    )
    assert [each[0] for each in exploring.pool.asked[:3]] == ["recheck_failure"] * 3
    assert exploring.pool.asked[3:5] == [("run_units", [unfinished.unit]), ("run_units", [WorkUnit("paged", "calls", "7")])]
    assert heard == [*said.items(), ("PAGED-04", RecheckResult("mended"))]
    assert [known.clause for known in corpus.failures] == ["PAGED-01"] and exploring.run.mended == ["PAGED-02", "PAGED-04"]


def trace_of(corpus, known, *lines):
    """A trace file with these lines, or with a trace that needs no calls."""
    path = corpus.folder / "failures" / f"{known.clause}.jsonl"
    path.parent.mkdir(exist_ok=True)
    who = dict.fromkeys(("name", "version", "language", "load"), "x") | {"level": "exact"}
    header = Header(known.clause, "any", "check", who).line()
    path.write_text("".join(f"{line}\n" for line in lines or (header,)))
    known.trace = path.name
    return path


def test_a_failure_without_a_trace_stays_until_its_unit_has_answered(tmp_path):
    unfinished = KnownFailure("PAGED-04", (), WorkUnit("paged", "calls", "5"))
    corpus = Corpus(tmp_path, "numpy", failures=[unfinished])
    explored(Here(0, answer=lambda *_: []), corpus, ["paged"])  # the worker was called, and the run ended
    assert corpus.failures == [unfinished]
    explored(Here(1, answer=lambda *_: WorkersLost("killed")), corpus, ["paged"])
    assert corpus.failures == [unfinished]
    came = {
        "run_units": lambda turn: [seen(turn[0].seed, "a", "x", clause="PAGED-04")],
        "shrink_result": lambda _: WorkersLost("killed"),
    }
    explored(Here(2, answer=lambda work, about: came[work.__name__](about)), corpus, ["paged"])
    assert corpus.failures == [unfinished]


@pytest.mark.parametrize("kind", ["calls", "check", "soak"])
@pytest.mark.parametrize("trace", [False, True])
def test_a_failure_of_a_family_that_is_not_offered_any_more_stays(tmp_path, kind, trace):
    known = KnownFailure("PAGED-04", (), WorkUnit("paged", kind, "5"))
    corpus, heard = Corpus(tmp_path, "numpy", failures=[known]), []
    if trace:
        trace_of(corpus, known)
    answer = Here(2, answer=lambda work, turn: [seen(each.seed, family=each.family) for each in turn])
    exploring = explored(answer, corpus, ["blocks"], of_before=lambda known, came: heard.append(came))
    assert heard == [RecheckResult("not offered", f"paged {kind}")] and corpus.failures == [known] and exploring.units > 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "FileNotFoundError"),
        (['{"trace": 1'], "not JSON"),
        (["hello"], "not JSON"),
        ([], "contains no wrong reply"),
    ],
)
def test_where_a_trace_is_spoiled_its_unit_is_asked(tmp_path, lines, said):
    known = KnownFailure("PAGED-04", ("a", "x"), WorkUnit("paged", "calls", "5"), 3)
    corpus, heard = Corpus(tmp_path, "numpy", failures=[known]), []
    path = trace_of(corpus, known, *(lines or ()))
    if lines is None:
        path.unlink()
    if lines == []:
        path.write_text(path.read_text().replace('"judge": "check"', '"judge": "model"'))
    answer = {
        "run_units": lambda turn: [seen(turn[0].seed, "a", "x", clause="PAGED-04")],
        "shrink_result": lambda _: short("5", "a", "x"),
    }
    team = Here(2, answer=lambda work, about: answer[work.__name__](about))
    explored(team, corpus, ["paged"], spoiled=lambda known, why: heard.append((known.clause, why)))
    assert team.asked[0] == ("run_units", [known.unit])
    ((clause, why),) = heard
    assert clause == "PAGED-04" and said in why and str(path) in why


def test_seeds_of_before_that_were_not_run_again_are_kept(tmp_path):
    corpus = Corpus(tmp_path, "numpy", [WorkUnit("paged", "calls", str(number)) for number in range(3 * UNITS_PER_TURN)])
    explored(Here(1, answer=lambda work, turn: [seen(each.seed) for each in turn]), corpus, ["paged"])
    assert corpus.seeds == [WorkUnit("paged", "calls", str(number)) for number in range(UNITS_PER_TURN, 3 * UNITS_PER_TURN)]


def test_a_failure_that_was_not_made_short_in_time_is_kept_by_its_unit(tmp_path):
    def answer(work, turn):
        return [seen(each.seed, "a", "x") for each in turn]

    corpus = explored(Here(1, answer=answer), Corpus(tmp_path, ""), ["paged"]).corpus
    assert [(known.clause, known.shape, known.trace) for known in corpus.failures] == [("PAGED-07", (), "")]


def test_what_is_under_way_when_time_ends_is_told(tmp_path):
    answer = {
        "run_units": lambda turn: [seen(each.seed, "a", "x") for each in turn],
        "shrink_result": lambda _: short("0", "a", "x"),
    }
    team, corpus, told = Here(100, answer=lambda work, about: answer[work.__name__](about)), Corpus(tmp_path, ""), []
    listener = CampaignListener(failed=lambda known, failed: told.append(failed.clause))
    campaign = Campaign(team, corpus, SeedScheduler(["paged"], {}, [], 0), CampaignRun("", 0, 1), listener)
    campaign._submit_task(over=False)
    campaign.run_for(0.0)
    assert told == ["PAGED-07"] and [each[0] for each in team.asked] == ["run_units", "shrink_result"]
    gone = Here(100)
    gone.count, gone.waiting = 0, [None]
    Campaign(gone, corpus, SeedScheduler(["paged"], {}, [], 0), CampaignRun("", 0, 1)).run_for(0.0)  # no workers are left


def test_a_lost_turn_is_counted_and_another_exception_is_not_swallowed(tmp_path):
    exploring = explored(Here(4, answer=lambda work, turn: WorkersLost("killed")), Corpus(tmp_path, ""), ["paged"])
    assert exploring.run.lost == 2 + 2 * 0 + UNITS_PER_TURN * 2 + UNITS_PER_TURN and exploring.units == 0
    broken = Campaign(
        Here(4, answer=lambda *_: RuntimeError("ours")),
        Corpus(tmp_path, ""),
        SeedScheduler(["paged"], [], [], 0),
        CampaignRun("", 0, 1),
    )
    with pytest.raises(RuntimeError, match="ours"):
        broken.run_for(1000.0)


def test_figures_over_time_are_drawn_and_names_are_escaped(tmp_path):
    points = [SimpleNamespace(seconds=0.0), SimpleNamespace(seconds=5.0), SimpleNamespace(seconds=10.0)]
    drawn = make_plot("states", points, [0, 5, 20])
    assert drawn.line == "0.0,90.0 160.0,67.5 320.0,0.0" and (drawn.first, drawn.last) == (0, 20)
    corpus = Corpus(tmp_path, "<script>alert(1)</script>")
    exploring = explored(
        Here(3, answer=lambda work, turn: [seen(each.seed, states=["some"]) for each in turn]), corpus, ["paged"]
    )
    corpus.failures.append(KnownFailure("PAGED-07", ("<b>",), WorkUnit("paged", "calls", "1"), 3, "a b.jsonl"))
    corpus.runs.append(exploring.run)
    write_page(exploring, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;" in page and "<b>" not in page
    assert page.count("<polyline") == page.count("aria-label=") - 1 == 6
    assert "found</dt><dd>3 times, first by paged calls 1" in page and 'href="failures/a%20b.jsonl"' in page


def test_a_trace_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    save_failure([failed := CheckResult("any", "failed", trace=["before"])], tmp_path, "PAGED-07", "numpy")

    def full(path, *_, **__):
        path.touch()
        raise OSError("no room")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no room"):
        save_failure([replace(failed, trace=["after"])], tmp_path, "PAGED-07", "numpy")
    assert (tmp_path / "PAGED-07-numpy.jsonl").read_text() == "before\n"
