"""What a search is made of: seeds, shapes, where it goes next, what it keeps; and a run without Dask, unit by unit."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from kvref_conformance.conversation.exchange import Error, Exchange, Reply, Request
from kvref_conformance.exploring.corpus import Corpus, Known, Point, Run, open_corpus
from kvref_conformance.exploring.failures import SHAPES, Failures
from kvref_conformance.exploring.page import plot, write_page
from kvref_conformance.exploring.run import POINTS, Exploring, Listener, Lost
from kvref_conformance.exploring.seen import Failed, Seen, shape_as_met, shape_of, within
from kvref_conformance.exploring.steering import FIRST, REAL_EVERY, SOAK_EVERY, TURN, Steering
from kvref_conformance.exploring.units import LENGTH, Unit, drawn, neighbour
from kvref_conformance.exploring.work import Again, unit
from kvref_conformance.judging.asked import Effort
from kvref_conformance.judging.isolated import IsolatedJudge
from kvref_conformance.outcome import Broken, CannotRun, Outcome
from kvref_conformance.searching.found import Finding


def test_a_neighbour_begins_alike_and_goes_on_differently():
    first, other = drawn("17"), drawn("17+40:5")
    assert len(first) == len(other) == LENGTH
    assert first[:40] == other[:40] and other[40:] == drawn("5")[: LENGTH - 40] != first[40:]
    assert drawn("17+40:5+96:8") == other[:96] + drawn("8")[: LENGTH - 96]


def test_what_a_neighbour_would_overwrite_is_left_out_of_its_seed():
    assert neighbour("17", 40, 5) == "17+40:5"
    assert neighbour("17+40:5", 96, 8) == "17+40:5+96:8"
    assert neighbour("17+40:5+96:8", 41, 9) == "17+40:5+41:9"
    assert neighbour("17+40:5", 40, 9) == neighbour("17+40:5", 12, 9).replace("12", "40") == "17+40:9"


@pytest.mark.parametrize("seed", ["", "x", "1+2", "1+:3", "1+5000:3", "1+-1:3"])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        drawn(seed)


def exchange(number, op, raised=""):
    return Exchange(Request(number, op, None, {}), Reply(error=Error(raised, "no")) if raised else Reply(3))


def test_a_shape_is_calls_and_which_of_them_raise():
    met = [exchange(1, "paged.new"), exchange(2, "paged.write", "OutOfBlocks"), Exchange(Request(3, "paged.gather", 1, {}))]
    assert shape_as_met(met) == ("paged.new", "paged.write!", "paged.gather")
    lines = [
        {"trace": 1}, {"id": 1, "op": "paged.new"}, {"id": 1, "any": True}, {"id": 2, "op": "paged.write"},
        {"id": 2, "error": {"kind": "OutOfBlocks"}}, {"id": 3, "op": "paged.gather"},
        {"id": 3, "ok": [], "got": {"error": {"kind": "ValueError"}}},
    ]  # fmt: skip
    assert shape_of([json.dumps(line) for line in lines]) == ("paged.new", "paged.write!", "paged.gather!")


def test_a_shape_lies_within_another_in_order():
    assert within(("a", "c!"), ("a", "b", "c!"))
    assert not within(("c!", "a"), ("a", "b", "c!"))
    assert not within(("a", "c"), ("a", "b", "c!"))
    assert not within(("a", "a"), ("a", "b"))


def seen(seed, *calls, family="paged", clause="PAGED-07", states=(), transitions=()):
    found = None
    if calls:
        conversation = [exchange(number, call.rstrip("!"), "X" * call.endswith("!")) for number, call in enumerate(calls, 1)]
        found = Finding(clause, conversation, Broken("", "", "", clause))
    return Seen(Unit(family, "calls", seed), 5, 100, frozenset(states), frozenset(transitions), found)


def short(seed, *shape, clause="PAGED-07"):
    return Failed(Unit("paged", "calls", seed), clause, shape, Outcome("any", "failed"))


def kept(failures, failed):
    """A failure that is short, and was written down."""
    known = failures.short(failed)
    known.trace = "a file"
    return known


def test_a_failure_is_made_short_once_and_others_like_it_are_counted():
    failures = Failures(Corpus(None, ""))
    failures.met(first := seen("1", "a", "b", "x"))
    failures.met(seen("2", "a", "z", "x"))  # while the first is made short
    assert failures.next() is first and failures.next() is None and failures.busy
    known = kept(failures, short("1", "a", "x"))
    failures.go_on("PAGED-07", "paged", over=False)
    assert known.times == 2 and not failures.busy and failures.next() is None
    failures.met(seen("3", "a", "y", "y", "x"))
    assert known.times == 3 and failures.known == [known]


def test_a_failure_of_another_clause_or_shape_is_another():
    failures = Failures(Corpus(None, ""))
    failures.met(seen("1", "a", "x"))
    failures.next()
    failures.met(other := seen("2", "a", "x", clause="PAGED-08"))
    failures.met(waits := seen("3", "a", "x!"))
    assert failures.next() is other
    kept(failures, short("1", "a", "x"))
    failures.go_on("PAGED-07", "paged", over=False)
    assert failures.next() is waits
    kept(failures, short("3", "a", "x!"))
    assert [known.shape for known in failures.known] == [("a", "x"), ("a", "x!")]
    assert failures.short(short("4", "a", "x!")) is None and failures.known[1].times == 2


def test_no_more_than_some_shapes_of_a_clause_are_made_short():
    failures = Failures(Corpus(None, ""))
    for number in range(SHAPES):
        kept(failures, short(str(number), f"call{number}"))
    failures.met(seen("99", "something else"))
    assert failures.next() is None and failures.known[0].times == 2


def test_what_no_time_was_left_for_is_known_by_its_unit():
    failures = Failures(Corpus(None, ""))
    failures.met(seen("1+5:2", "a", "x"))
    failures.next()
    assert failures.unfinished() == [Known("PAGED-07", (), Unit("paged", "calls", "1+5:2"))]


def turns(steering, count):
    return [steering.next() for _ in range(count)]


def test_every_family_has_its_first_turn_and_the_other_kinds_theirs():
    steering = Steering(["paged", "blocks"], ["rows", "paged"], ["tiered"], 0)
    got = turns(steering, 3 * SOAK_EVERY)
    assert [(turn[0].family, len(turn)) for turn in got[:2]] == [("paged", FIRST), ("blocks", FIRST)]
    assert all(len(turn) == TURN for turn in got[2:] if turn[0].kind == "calls")
    others = [turn[0] for turn in got if turn[0].kind != "calls"]
    assert others.count(Unit("tiered", "soak", "0")) == 1 and Unit("tiered", "soak", "2") in others
    assert others[:2] == [Unit("rows", "real", "0"), Unit("paged", "real", "0")]
    assert sum(each.kind == "real" for each in others) == 3 * SOAK_EVERY // REAL_EVERY - 3


def test_seeds_are_new_each_time_and_other_searches_have_others():
    steering = Steering(["blocks"], [], [], 0)
    seeds = [each.seed for turn in turns(steering, 20) for each in turn]
    assert len(set(seeds)) == len(seeds)
    others = {each.seed for turn in turns(Steering(["blocks"], [], [], 1), 20) for each in turn}
    assert not others & set(seeds)


def test_a_family_that_still_meets_what_is_new_has_more_turns_and_seeds_that_met_it_more_neighbours():
    steering = Steering(["paged", "blocks"], [], [], 0)
    count, asked = dict.fromkeys(steering.met, 0), []
    for number in range(300):
        for each in steering.next():
            count[each.family] += 1
            asked.append(each.seed)
            new = [f"state {number} {each.seed}"] if each.family == "paged" else []
            steering.met[each.family].add(seen(each.seed, family=each.family, states=new))
    assert count["paged"] > 3 * count["blocks"] > 0
    rich, poor = Steering(["paged"], [], [], 0), seen("900", states=["s"])
    rich.met["paged"].add(poor)
    rich.met["paged"].add(seen("901", states=[f"s{number}" for number in range(50)]))
    begun = [each.seed.partition("+")[0] for turn in turns(rich, 80 // TURN * 2) for each in turn if "+" in each.seed]
    assert begun.count("901") > 4 * begun.count("900") > 4 * 4  # and those that had many have fewer


def test_what_failed_at_real_sizes_or_in_a_soak_is_not_asked_again():
    steering = Steering([], ["rows"], ["paged"], 0)
    assert [turn[0].kind for turn in turns(steering, 4)] == ["real", "soak"] * 2
    steering.left_out.add(("rows", "real"))
    assert {turn[0].kind for turn in turns(steering, 4)} == {"soak"}
    steering.left_out.add(("paged", "soak"))
    assert turns(steering, 1) == [[]]


def test_what_a_turn_brought_is_counted_once():
    met = Steering(["paged"], [], [], 0).met["paged"]
    assert met.add(seen("1", states=["s"], transitions=[("s", "paged.write", "ok")])) == 2
    assert met.add(seen("2", states=["s"], transitions=[("s", "paged.write", "OutOfBlocks")])) == 1
    assert met.add(seen("3", states=["s"])) == 0
    assert [(each.unit.seed, each.brought) for each in met.kept] == [("1", 2), ("2", 1)]


class Here:
    """A worker in this process, with a judge or with a function instead, that works at most so many times."""

    count = 1

    def __init__(self, most, judge=None, answer: Callable | None = None):
        self.judge, self.answer, self.most, self.asked, self.waiting = judge, answer, most, [], []

    @property
    def idle(self):
        return 1 - len(self.waiting)

    def ask(self, about, work, *arguments):
        self.asked.append((work.__name__, *arguments))
        self.waiting.append((about, work, arguments))

    def next(self, seconds):
        if len(self.asked) > self.most:
            raise KeyboardInterrupt
        if not self.waiting:
            return None
        about, work, arguments = self.waiting.pop()
        return about, self.answer(work, *arguments) if self.answer else work(self.judge, *arguments)


def explored(team, corpus, families=("blocks", "buffers", "contiguous"), seed=0, **listener):
    """A run, and all that it asked."""
    steering = Steering(list(families), [], [], seed)
    exploring = Exploring(team, corpus, steering, Run("now", seed, 1), Listener(**listener))
    with pytest.raises(KeyboardInterrupt):
        exploring.go(1000.0)
    return exploring


@pytest.fixture(scope="module")
def numpy_judge():
    judge = IsolatedJudge("numpy", Effort())
    yield judge
    judge.close()


def test_the_same_seed_and_one_worker_ask_the_same_and_find_the_same(numpy_judge, tmp_path):
    runs = [explored(Here(30, numpy_judge), Corpus(tmp_path, "numpy"), seed=seed) for seed in (4, 4, 5)]
    first, second, other = runs
    assert first.team.asked == second.team.asked != other.team.asked
    assert first.calls == second.calls > 1000 and first.units == second.units
    for family, met in first.steering.met.items():
        assert (met.states, met.transitions) == (second.steering.met[family].states, second.steering.met[family].transitions)
    assert not first.corpus.failures and first.states > 20 and first.transitions > first.states
    assert any("+" in each.seed for each in first.corpus.seeds)


def test_the_states_that_a_unit_meets_are_those_that_the_oracle_sees(numpy_judge):
    from kvref_conformance.searching.states import STATES

    came = [unit(numpy_judge, Unit("paged", "calls", str(number))) for number in range(6)]
    assert came[0] == unit(numpy_judge, Unit("paged", "calls", "0"))
    states = set().union(*(each.states for each in came))
    from kvref_conformance.searching import met  # which registers what STATES has

    assert met and states <= set(STATES["paged"]) and len(states) > 15
    transitions = set().union(*(each.transitions for each in came))
    assert {at for at, _, _ in transitions} - {"nothing was met"} <= states
    assert {"ok", "SequenceNotFound"} <= {outcome for _, _, outcome in transitions}
    assert not any(op == "paged.num_free_blocks" for _, op, _ in transitions)  # which is only looked at


def test_a_corpus_is_what_was_written(tmp_path):
    corpus = Corpus(tmp_path / "new" / "corpus", "numpy", [Unit("paged", "calls", "3+4:5")], handed={"calls": 9})
    corpus.failures.append(Known("PAGED-07", ("paged.new", "paged.gather!"), Unit("paged", "real", "2"), 3, ""))
    points = [Point(float(number), number, 3, 4, 5, 6, {"paged": [4, 5]}) for number in range(3)]
    corpus.runs.append(Run("now", 3, 2, points, lost=1, mended=["PAGED-01"]))
    corpus.write()
    again = open_corpus(corpus.folder, "numpy")
    assert again.runs.pop() == replace(corpus.runs[0], points=points[-1:])  # the others have a file of their own
    assert again == replace(corpus, runs=[])
    assert {str(each.relative_to(corpus.folder)) for each in corpus.folder.rglob("*.*")} == {"corpus.json", "runs/0001.json"}
    assert len(json.loads((corpus.folder / "runs/0001.json").read_text())["points"]) == 3


def test_points_over_time_are_no_more_than_are_drawn(tmp_path):
    exploring = Exploring(Here(0), Corpus(tmp_path, ""), Steering([], [], [], 0), Run("", 0, 1))
    exploring._limit = 1000.0
    for second in range(1000):
        exploring.began = time.monotonic() - second
        exploring.units = second
        exploring._point()
    points = exploring.run.points
    assert POINTS / 2 < len(points) < 1.1 * POINTS and points[-1].units == 999 and points[0].seconds == 0.0
    assert all(one.seconds < other.seconds for one, other in pairwise(points))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("not JSON", "JSONDecodeError"),
        ({"corpus": 2}, "expected version 1, got 2"),
        ({"seeds": [["paged", "calls", "x"]]}, "ValueError"),
        ({"seeds": [["paged", "walks", "1"]]}, "expected one of calls, real, soak, got 'walks'"),
        ({"failures": [{"clause": "A"}]}, "KeyError"),
        ({"runs": [{"nonsense": 1, "points": []}]}, "TypeError"),
        ({"failures": [{"clause": "A", "shape": [], "unit": ["paged", "calls", "1"], "times": 1, "trace": "../../x"}]}, "a file"),
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
    with pytest.raises(CannotRun, match="is of numpy, expected one of mine:Cache"):
        open_corpus(tmp_path / "one", "mine:Cache")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/notes.txt").write_text("")
    with pytest.raises(CannotRun, match=r"which has no corpus\.json"):
        open_corpus(tmp_path / "two", "numpy")
    with pytest.raises(CannotRun, match="expected a folder, got the file"):
        open_corpus(tmp_path / "two/notes.txt", "numpy")


def test_failures_of_before_come_first_and_those_that_are_mended_go(tmp_path):
    corpus = Corpus(tmp_path, "numpy", [Unit("paged", "calls", "7"), Unit("gone", "calls", "8")])
    for clause in ("PAGED-01", "PAGED-02", "PAGED-03"):
        corpus.failures.append(Known(clause, ("paged.new",), Unit("paged", "calls", "1"), 1, f"{clause}.jsonl"))
        (tmp_path / "failures").mkdir(exist_ok=True)
        (tmp_path / f"failures/{clause}.jsonl").write_text("line\n")
    unfinished = Known("PAGED-04", (), Unit("paged", "calls", "5"))
    corpus.failures.append(unfinished)
    said = {"PAGED-01": Again("broken"), "PAGED-02": Again("mended"), "PAGED-03": Again("not offered", "paged.new")}

    def answer(work, *about):
        return said[about[0]] if work.__name__ == "again" else [seen(each.seed) for each in about[0]]

    heard = []
    exploring = explored(
        Here(6, answer=answer), corpus, ["paged"], of_before=lambda known, came: heard.append((known.clause, came))
    )
    assert [each[0] for each in exploring.team.asked[:3]] == ["again"] * 3
    assert exploring.team.asked[3:5] == [("units", [unfinished.unit]), ("units", [Unit("paged", "calls", "7")])]
    assert heard == list(said.items())
    assert [known.clause for known in corpus.failures] == ["PAGED-01"] and exploring.run.mended == ["PAGED-02"]


def test_seeds_of_before_that_were_not_run_again_are_kept(tmp_path):
    corpus = Corpus(tmp_path, "numpy", [Unit("paged", "calls", str(number)) for number in range(3 * TURN)])
    explored(Here(1, answer=lambda work, turn: [seen(each.seed) for each in turn]), corpus, ["paged"])
    assert corpus.seeds == [Unit("paged", "calls", str(number)) for number in range(TURN, 3 * TURN)]


def test_a_failure_that_was_not_made_short_in_time_is_kept_by_its_unit(tmp_path):
    def answer(work, turn):
        return [seen(each.seed, "a", "x") for each in turn]

    corpus = explored(Here(1, answer=answer), Corpus(tmp_path, ""), ["paged"]).corpus
    assert [(known.clause, known.shape, known.trace) for known in corpus.failures] == [("PAGED-07", (), "")]


def test_a_lost_turn_is_counted_and_another_exception_is_not_swallowed(tmp_path):
    exploring = explored(Here(4, answer=lambda work, turn: Lost("killed")), Corpus(tmp_path, ""), ["paged"])
    assert exploring.run.lost == 2 + 2 * 0 + TURN * 2 + TURN and exploring.units == 0
    broken = Exploring(
        Here(4, answer=lambda *_: RuntimeError("ours")), Corpus(tmp_path, ""), Steering(["paged"], [], [], 0), Run("", 0, 1)
    )
    with pytest.raises(RuntimeError, match="ours"):
        broken.go(1000.0)


def test_figures_over_time_are_drawn_and_names_are_escaped(tmp_path):
    points = [SimpleNamespace(seconds=0.0), SimpleNamespace(seconds=5.0), SimpleNamespace(seconds=10.0)]
    drawn = plot("states", points, [0, 5, 20])
    assert drawn.line == "0.0,90.0 160.0,67.5 320.0,0.0" and (drawn.first, drawn.last) == (0, 20)
    corpus = Corpus(tmp_path, "<script>alert(1)</script>")
    exploring = explored(
        Here(3, answer=lambda work, turn: [seen(each.seed, states=["some"]) for each in turn]), corpus, ["paged"]
    )
    corpus.failures.append(Known("PAGED-07", ("<b>",), Unit("paged", "calls", "1"), 3, "a b.jsonl"))
    corpus.runs.append(exploring.run)
    write_page(exploring, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;" in page and "<b>" not in page
    assert page.count("<polyline") == page.count("aria-label=") - 1 == 6
    assert "met</dt><dd>3 times, first by paged calls 1" in page and 'href="failures/a%20b.jsonl"' in page
