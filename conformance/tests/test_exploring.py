"""Parts of a search: seeds, failure shapes, scheduling, state that it keeps; and a run without Dask, unit by unit."""

import json
from dataclasses import replace

import pytest
from explored import Here, exchange, explored, kept, seen, short

from kvref_conformance.calls.messages import CallRequest, Exchange
from kvref_conformance.fuzz import zoo_benchmark
from kvref_conformance.fuzz.corpus import Corpus, KnownFailure
from kvref_conformance.fuzz.deduplication import SHAPES, DistinctFailures
from kvref_conformance.fuzz.seed_scheduler import CHECK_EVERY, CHECKS, FIRST, SOAK_EVERY, TURN, SeedScheduler
from kvref_conformance.fuzz.work_unit import LENGTH, WorkUnit, drawn, neighbour, shape_as_met, shape_of, within
from kvref_conformance.fuzz.worker_tasks import checks_of, shrunk, unit
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.subprocess_runner import SubprocessRunner


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
    with pytest.raises(ValueError):  # noqa: PT011 - for any error in it
        drawn(seed)


def test_a_shape_is_calls_and_which_of_them_raise():
    met = [exchange(1, "paged.new"), exchange(2, "paged.write", "OutOfBlocks"), Exchange(CallRequest(3, "paged.gather", 1, {}))]
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


def test_a_failure_is_made_short_once_and_others_like_it_are_counted():
    failures = DistinctFailures(Corpus(None, ""))
    failures.met(first := seen("1", "a", "b", "x"))
    failures.met(seen("2", "a", "z", "x"))  # while the first one is being shrunk
    assert failures.next() is first and failures.next() is None and failures.busy
    known = kept(failures, short("1", "a", "x"))
    failures.go_on("PAGED-07", "paged", over=False)
    assert known.times == 2 and not failures.busy and failures.next() is None
    failures.met(seen("3", "a", "y", "y", "x"))
    assert known.times == 3 and failures.known == [known]


def test_a_check_of_a_clause_that_is_known_to_be_broken_is_counted():
    failures = DistinctFailures(Corpus(None, ""))
    failures.met(seen("1", "a", "x"))
    failures.next()
    known = kept(failures, short("1", "a", "x"))
    failures.go_on("PAGED-07", "paged", over=False)
    failures.met(replace(seen("2", "other", "calls"), unit=WorkUnit("paged", "check", "2")))
    assert known.times == 2 and failures.next() is None
    failures.met(other := replace(seen("3", "a", "x", clause="PAGED-08"), unit=WorkUnit("paged", "check", "3")))
    assert failures.next() is other


def test_every_check_of_a_family_has_its_number_and_what_fails_is_known_by_its_name():
    judge = SubprocessRunner("zoo:int8-truncates", Effort(timeout=20))
    try:
        count = len(checks_of("rows"))
        found = [each for number in range(count) if (each := unit(judge, WorkUnit("rows", "check", str(number)))).found]
        assert "FMT-INT8-02" in {each.found.clause for each in found}
        assert len({shrunk(judge, each).shape for each in found}) == len(found)
        again = unit(judge, WorkUnit("rows", "check", str(count + int(found[0].unit.seed))))  # with other random numbers
        assert again.found.clause == found[0].found.clause
    finally:
        judge.close()


def test_a_failure_of_another_clause_or_shape_is_another():
    failures = DistinctFailures(Corpus(None, ""))
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
    failures = DistinctFailures(Corpus(None, ""))
    for number in range(SHAPES):
        kept(failures, short(str(number), f"call{number}"))
    failures.met(seen("99", "something else"))
    assert failures.next() is None and failures.known[0].times == 2


def test_what_no_time_was_left_for_is_known_by_its_unit():
    failures = DistinctFailures(Corpus(None, ""))
    failures.met(seen("1+5:2", "a", "x"))
    failures.next()
    failures.keep_unfinished()
    failures.keep_unfinished()  # once is enough
    assert failures.known == [KnownFailure("PAGED-07", (), WorkUnit("paged", "calls", "1+5:2"))]


def turns(steering, count):
    return [steering.next() for _ in range(count)]


def test_every_family_has_its_first_turn_and_the_other_kinds_theirs():
    steering = SeedScheduler(["paged", "blocks"], {"rows": CHECKS + 1, "paged": 2}, ["tiered"], 0)
    got = turns(steering, 3 * SOAK_EVERY)
    assert [(turn[0].family, len(turn)) for turn in got[:2]] == [("paged", FIRST), ("blocks", FIRST)]
    assert all(len(turn) == TURN for turn in got[2:] if turn[0].kind == "calls")
    others = [turn for turn in got if turn[0].kind != "calls"]
    assert others.count([WorkUnit("tiered", "soak", "0")]) == 1 and [WorkUnit("tiered", "soak", "2")] in others
    rows = [WorkUnit("rows", "check", str(number)) for number in range(CHECKS + 1 + TURN)]
    paged = [WorkUnit("paged", "check", str(number)) for number in range(2 * 2)]
    of_checks = [turn for turn in others if turn[0].kind == "check"]
    assert of_checks[:2] == [rows[:CHECKS], paged[:2]]
    # the last checks, and then the first with other random numbers
    assert of_checks[2:5] == [rows[CHECKS:-TURN], paged[2:], rows[-TURN:]]
    assert sum(turn[0].kind == "check" for turn in others) == 3 * SOAK_EVERY // CHECK_EVERY - 3


def test_seeds_are_new_each_time_and_other_searches_have_others():
    steering = SeedScheduler(["blocks"], {}, [], 0)
    seeds = [each.seed for turn in turns(steering, 20) for each in turn]
    assert len(set(seeds)) == len(seeds)
    others = {each.seed for turn in turns(SeedScheduler(["blocks"], {}, [], 1), 20) for each in turn}
    assert not others & set(seeds)


def test_a_family_that_still_meets_what_is_new_has_more_turns_and_seeds_that_met_it_more_neighbours():
    steering = SeedScheduler(["paged", "blocks"], {}, [], 0)
    count, asked = dict.fromkeys(steering.met, 0), []
    for number in range(300):
        for each in steering.next():
            count[each.family] += 1
            asked.append(each.seed)
            new = [f"state {number} {each.seed}"] if each.family == "paged" else []
            steering.met[each.family].add(seen(each.seed, family=each.family, states=new))
    assert count["paged"] > 3 * count["blocks"] > 0
    rich, poor = SeedScheduler(["paged"], {}, [], 0), seen("900", states=["s"])
    rich.met["paged"].add(poor)
    rich.met["paged"].add(seen("901", states=[f"s{number}" for number in range(50)]))
    begun = [each.seed.partition("+")[0] for turn in turns(rich, 80 // TURN * 2) for each in turn if "+" in each.seed]
    assert begun.count("901") > 4 * begun.count("900") > 4 * 4  # and seeds with many get fewer


def test_a_check_or_a_soak_that_failed_is_not_asked_again():
    steering = SeedScheduler([], {"rows": 2, "paged": 3}, ["paged"], 0)
    assert {each.kind for turn in turns(steering, SOAK_EVERY) for each in turn} == {"check", "soak"}
    steering.leave_out(WorkUnit("rows", "check", "7"))
    steering.leave_out(WorkUnit("paged", "check", "3"))
    steering.leave_out(WorkUnit("paged", "soak", "0"))
    left = {
        (each.family, each.kind, int(each.seed) % {"rows": 2, "paged": 3}[each.family])
        for turn in turns(steering, 50)
        for each in turn
    }
    assert left == {("rows", "check", 0), ("paged", "check", 1), ("paged", "check", 2)}
    for last in (WorkUnit("rows", "check", "0"), WorkUnit("paged", "check", "1"), WorkUnit("paged", "check", "2")):
        steering.leave_out(last)
    assert turns(steering, SOAK_EVERY) == [[]] * SOAK_EVERY


def test_what_a_turn_brought_is_counted_once():
    met = SeedScheduler(["paged"], {}, [], 0).met["paged"]
    assert met.add(seen("1", states=["s"], transitions=[("s", "paged.write", "ok")])) == 2
    assert met.add(seen("2", states=["s"], transitions=[("s", "paged.write", "OutOfBlocks")])) == 1
    assert met.add(seen("3", states=["s"])) == 0
    assert [(each.unit.seed, each.brought) for each in met.kept] == [("1", 2), ("2", 1)]


@pytest.fixture(scope="module")
def numpy_judge():
    judge = SubprocessRunner("numpy", Effort())
    yield judge
    judge.close()


@pytest.mark.extended
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
    from kvref_conformance.fuzz.state_registry import STATES

    came = [unit(numpy_judge, WorkUnit("paged", "calls", str(number))) for number in range(6)]
    assert came[0] == unit(numpy_judge, WorkUnit("paged", "calls", "0"))
    states = set().union(*(each.states for each in came))
    from kvref_conformance.fuzz import state_coverage  # registers the state counters of STATES

    assert state_coverage and states <= set(STATES["paged"]) and len(states) > 15
    transitions = set().union(*(each.transitions for each in came))
    assert {at for at, _, _ in transitions} - {"nothing was met"} <= states
    assert {"ok", "SequenceNotFound"} <= {outcome for _, _, outcome in transitions}
    assert not any(op == "paged.num_free_blocks" for _, op, _ in transitions)  # only observed


def test_members_of_the_zoo_go_on_in_longer_turns_until_something_is_found(monkeypatch, tmp_path):
    asked = []

    def turn(folder, seconds, name):
        asked.append((name, seconds))
        found = ["ATTN-07"] if seconds > zoo_benchmark.FIRST_TURN or name.startswith("int8") else []
        return {"found": found, "by": ["check"] * len(found), "calls": 5, "seconds": seconds}

    monkeypatch.setattr(zoo_benchmark, "turn", turn)
    rows = zoo_benchmark.searched(["int8-truncates", "attention-nan-past-the-end"], 3600, 2, tmp_path)
    assert sorted(asked) == [("attention-nan-past-the-end", 10.0), ("attention-nan-past-the-end", 30.0), ("int8-truncates", 10.0)]
    assert rows["attention-nan-past-the-end"]["seconds"] == 40 and rows["int8-truncates"]["calls"] == 5
    asked.clear()
    assert (
        not zoo_benchmark.searched(["int8-truncates"], 1, 2, tmp_path)["int8-truncates"]["found"] and not asked
    )  # no time for a unit
