"""Parts of a search: seeds, failure shapes, scheduling, state that it keeps; and a run without Dask, unit by unit."""

import json
from dataclasses import replace

import pytest
from search_helpers import Here, exchange, explored, kept, seen, short

from kvref_conformance.calls.messages import CallRequest, Exchange
from kvref_conformance.fuzz import zoo_benchmark
from kvref_conformance.fuzz.corpus import Corpus, KnownFailure
from kvref_conformance.fuzz.deduplication import MAX_SHAPES, DistinctFailures
from kvref_conformance.fuzz.seed_scheduler import (
    CHECK_EVERY,
    CHECKS_PER_TURN,
    SOAK_EVERY,
    UNITS_IN_FIRST_TURN,
    UNITS_PER_TURN,
    SeedScheduler,
)
from kvref_conformance.fuzz.work_unit import SEED_BYTES, WorkUnit, neighbor_seed, seed_bytes
from kvref_conformance.fuzz.worker_tasks import check_indices, run_unit, shrink_result
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.subprocess_runner import SubprocessRunner
from kvref_conformance.traces.shape import is_subsequence, shape_of, shape_of_exchanges


def test_a_neighbour_begins_alike_and_goes_on_differently():
    first, other = seed_bytes("17"), seed_bytes("17+40:5")
    assert len(first) == len(other) == SEED_BYTES
    assert first[:40] == other[:40] and other[40:] == seed_bytes("5")[: SEED_BYTES - 40] != first[40:]
    assert seed_bytes("17+40:5+96:8") == other[:96] + seed_bytes("8")[: SEED_BYTES - 96]


def test_what_a_neighbour_would_overwrite_is_left_out_of_its_seed():
    assert neighbor_seed("17", 40, 5) == "17+40:5"
    assert neighbor_seed("17+40:5", 96, 8) == "17+40:5+96:8"
    assert neighbor_seed("17+40:5+96:8", 41, 9) == "17+40:5+41:9"
    assert neighbor_seed("17+40:5", 40, 9) == neighbor_seed("17+40:5", 12, 9).replace("12", "40") == "17+40:9"


@pytest.mark.parametrize("seed", ["", "x", "1+2", "1+:3", "1+5000:3", "1+-1:3"])
def test_what_is_no_seed_is_refused(seed):
    with pytest.raises(ValueError):  # noqa: PT011 - for any error in it
        seed_bytes(seed)


def test_a_shape_is_calls_and_which_of_them_raise():
    met = [exchange(1, "paged.new"), exchange(2, "paged.write", "OutOfBlocks"), Exchange(CallRequest(3, "paged.gather", 1, {}))]
    assert shape_of_exchanges(met) == ("paged.new", "paged.write!", "paged.gather")
    lines = [
        {"trace": 1}, {"id": 1, "op": "paged.new"}, {"id": 1, "any": True}, {"id": 2, "op": "paged.write"},
        {"id": 2, "error": {"kind": "OutOfBlocks"}}, {"id": 3, "op": "paged.gather"},
        {"id": 3, "ok": [], "got": {"error": {"kind": "ValueError"}}},
    ]  # fmt: skip
    assert shape_of([json.dumps(line) for line in lines]) == ("paged.new", "paged.write!", "paged.gather!")


def test_a_shape_lies_within_another_in_order():
    assert is_subsequence(("a", "c!"), ("a", "b", "c!"))
    assert not is_subsequence(("c!", "a"), ("a", "b", "c!"))
    assert not is_subsequence(("a", "c"), ("a", "b", "c!"))
    assert not is_subsequence(("a", "a"), ("a", "b"))


def test_a_failure_is_made_short_once_and_others_like_it_are_counted():
    failures = DistinctFailures(Corpus(None, ""))
    failures.add_failure(first := seen("1", "a", "b", "x"))
    failures.add_failure(seen("2", "a", "z", "x"))  # while the first one is being shrunk
    assert failures.next_to_shrink() is first and failures.next_to_shrink() is None and failures.is_shrinking
    known = kept(failures, short("1", "a", "x"))
    failures.finish_shrinking("PAGED-07", "paged", over=False)
    assert known.times == 2 and not failures.is_shrinking and failures.next_to_shrink() is None
    failures.add_failure(seen("3", "a", "y", "y", "x"))
    assert known.times == 3 and failures.known_failures == [known]


def test_a_check_of_a_clause_that_is_known_to_be_broken_is_counted():
    failures = DistinctFailures(Corpus(None, ""))
    failures.add_failure(seen("1", "a", "x"))
    failures.next_to_shrink()
    known = kept(failures, short("1", "a", "x"))
    failures.finish_shrinking("PAGED-07", "paged", over=False)
    failures.add_failure(replace(seen("2", "other", "calls"), unit=WorkUnit("paged", "check", "2")))
    assert known.times == 2 and failures.next_to_shrink() is None
    failures.add_failure(other := replace(seen("3", "a", "x", clause="PAGED-08"), unit=WorkUnit("paged", "check", "3")))
    assert failures.next_to_shrink() is other


def test_every_check_of_a_family_has_its_number_and_what_fails_is_known_by_its_name():
    judge = SubprocessRunner("zoo:int8-truncates", Effort(timeout=20))
    try:
        count = len(check_indices("rows"))
        found = [
            each for number in range(count) if (each := run_unit(judge, WorkUnit("rows", "check", str(number)))).fuzz_failure
        ]
        assert "FMT-INT8-02" in {each.fuzz_failure.clause for each in found}
        assert len({shrink_result(judge, each).shape for each in found}) == len(found)
        again = run_unit(judge, WorkUnit("rows", "check", str(count + int(found[0].unit.seed))))  # with other random numbers
        assert again.fuzz_failure.clause == found[0].fuzz_failure.clause
    finally:
        judge.close()


def test_a_failure_of_another_clause_or_shape_is_another():
    failures = DistinctFailures(Corpus(None, ""))
    failures.add_failure(seen("1", "a", "x"))
    failures.next_to_shrink()
    failures.add_failure(other := seen("2", "a", "x", clause="PAGED-08"))
    failures.add_failure(waits := seen("3", "a", "x!"))
    assert failures.next_to_shrink() is other
    kept(failures, short("1", "a", "x"))
    failures.finish_shrinking("PAGED-07", "paged", over=False)
    assert failures.next_to_shrink() is waits
    kept(failures, short("3", "a", "x!"))
    assert [known.shape for known in failures.known_failures] == [("a", "x"), ("a", "x!")]
    assert failures.add_shrunk(short("4", "a", "x!")) is None and failures.known_failures[1].times == 2


def test_no_more_than_some_shapes_of_a_clause_are_made_short():
    failures = DistinctFailures(Corpus(None, ""))
    for number in range(MAX_SHAPES):
        kept(failures, short(str(number), f"call{number}"))
    failures.add_failure(seen("99", "something else"))
    assert failures.next_to_shrink() is None and failures.known_failures[0].times == 2


def test_what_no_time_was_left_for_is_known_by_its_unit():
    failures = DistinctFailures(Corpus(None, ""))
    failures.add_failure(seen("1+5:2", "a", "x"))
    failures.next_to_shrink()
    failures.store_unfinished()
    failures.store_unfinished()  # once is enough
    assert failures.known_failures == [KnownFailure("PAGED-07", (), WorkUnit("paged", "calls", "1+5:2"))]


def turns(steering, count):
    return [steering.next_turn() for _ in range(count)]


def test_every_family_has_its_first_turn_and_the_other_kinds_theirs():
    scheduler = SeedScheduler(["paged", "blocks"], {"rows": CHECKS_PER_TURN + 1, "paged": 2}, ["tiered"], 0)
    got = turns(scheduler, 3 * SOAK_EVERY)
    assert [(turn[0].family, len(turn)) for turn in got[:2]] == [("paged", UNITS_IN_FIRST_TURN), ("blocks", UNITS_IN_FIRST_TURN)]
    assert all(len(turn) == UNITS_PER_TURN for turn in got[2:] if turn[0].kind == "calls")
    others = [turn for turn in got if turn[0].kind != "calls"]
    assert others.count([WorkUnit("tiered", "soak", "0")]) == 1 and [WorkUnit("tiered", "soak", "2")] in others
    rows = [WorkUnit("rows", "check", str(number)) for number in range(CHECKS_PER_TURN + 1 + UNITS_PER_TURN)]
    paged = [WorkUnit("paged", "check", str(number)) for number in range(2 * 2)]
    of_checks = [turn for turn in others if turn[0].kind == "check"]
    assert of_checks[:2] == [rows[:CHECKS_PER_TURN], paged[:2]]
    # the last checks, and then the first with other random numbers
    assert of_checks[2:5] == [rows[CHECKS_PER_TURN:-UNITS_PER_TURN], paged[2:], rows[-UNITS_PER_TURN:]]
    assert sum(turn[0].kind == "check" for turn in others) == 3 * SOAK_EVERY // CHECK_EVERY - 3


def test_seeds_are_new_each_time_and_other_searches_have_others():
    scheduler = SeedScheduler(["blocks"], {}, [], 0)
    seeds = [each.seed for turn in turns(scheduler, 20) for each in turn]
    assert len(set(seeds)) == len(seeds)
    others = {each.seed for turn in turns(SeedScheduler(["blocks"], {}, [], 1), 20) for each in turn}
    assert not others & set(seeds)


def test_a_family_that_still_meets_what_is_new_has_more_turns_and_seeds_that_met_it_more_neighbours():
    scheduler = SeedScheduler(["paged", "blocks"], {}, [], 0)
    count, asked = dict.fromkeys(scheduler.counts, 0), []
    for number in range(300):
        for each in scheduler.next_turn():
            count[each.family] += 1
            asked.append(each.seed)
            new = [f"state {number} {each.seed}"] if each.family == "paged" else []
            scheduler.counts[each.family].add_result(seen(each.seed, family=each.family, states=new))
    assert count["paged"] > 3 * count["blocks"] > 0
    rich, poor = SeedScheduler(["paged"], {}, [], 0), seen("900", states=["s"])
    rich.counts["paged"].add_result(poor)
    rich.counts["paged"].add_result(seen("901", states=[f"s{number}" for number in range(50)]))
    begun = [each.seed.partition("+")[0] for turn in turns(rich, 80 // UNITS_PER_TURN * 2) for each in turn if "+" in each.seed]
    assert begun.count("901") > 4 * begun.count("900") > 4 * 4  # and seeds with many get fewer


def test_a_check_or_a_soak_that_failed_is_not_asked_again():
    scheduler = SeedScheduler([], {"rows": 2, "paged": 3}, ["paged"], 0)
    assert {each.kind for turn in turns(scheduler, SOAK_EVERY) for each in turn} == {"check", "soak"}
    scheduler.exclude(WorkUnit("rows", "check", "7"))
    scheduler.exclude(WorkUnit("paged", "check", "3"))
    scheduler.exclude(WorkUnit("paged", "soak", "0"))
    left = {
        (each.family, each.kind, int(each.seed) % {"rows": 2, "paged": 3}[each.family])
        for turn in turns(scheduler, 50)
        for each in turn
    }
    assert left == {("rows", "check", 0), ("paged", "check", 1), ("paged", "check", 2)}
    for last in (WorkUnit("rows", "check", "0"), WorkUnit("paged", "check", "1"), WorkUnit("paged", "check", "2")):
        scheduler.exclude(last)
    assert turns(scheduler, SOAK_EVERY) == [[]] * SOAK_EVERY


def test_what_a_turn_brought_is_counted_once():
    met = SeedScheduler(["paged"], {}, [], 0).counts["paged"]
    assert met.add_result(seen("1", states=["s"], transitions=[("s", "paged.write", "ok")])) == 2
    assert met.add_result(seen("2", states=["s"], transitions=[("s", "paged.write", "OutOfBlocks")])) == 1
    assert met.add_result(seen("3", states=["s"])) == 0
    assert [(each.unit.seed, each.num_new) for each in met.seeds] == [("1", 2), ("2", 1)]


@pytest.fixture(scope="module")
def numpy_judge():
    judge = SubprocessRunner("numpy", Effort())
    yield judge
    judge.close()


@pytest.mark.long
def test_the_same_seed_and_one_worker_ask_the_same_and_find_the_same(numpy_judge, tmp_path):
    runs = [explored(Here(30, numpy_judge), Corpus(tmp_path, "numpy"), seed=seed) for seed in (4, 4, 5)]
    first, second, other = runs
    assert first.pool.asked == second.pool.asked != other.pool.asked
    assert first.calls == second.calls > 1000 and first.units == second.units
    for family, met in first.scheduler.counts.items():
        assert (met.states, met.transitions) == (
            second.scheduler.counts[family].states,
            second.scheduler.counts[family].transitions,
        )
    assert not first.corpus.failures and first.states > 20 and first.transitions > first.states
    assert any("+" in each.seed for each in first.corpus.seeds)


def test_the_states_that_a_unit_meets_are_those_that_the_oracle_sees(numpy_judge):
    from kvref_conformance.fuzz.state_registry import STATES

    came = [run_unit(numpy_judge, WorkUnit("paged", "calls", str(number))) for number in range(6)]
    assert came[0] == run_unit(numpy_judge, WorkUnit("paged", "calls", "0"))
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
        found = ["ATTN-07"] if seconds > zoo_benchmark.FIRST_TURN_SECONDS or name.startswith("int8") else []
        return {"found": found, "by": ["check"] * len(found), "calls": 5, "seconds": seconds}

    monkeypatch.setattr(zoo_benchmark, "search_member", turn)
    rows = zoo_benchmark.search_members(["int8-truncates", "attention-nan-past-the-end"], 3600, 2, tmp_path)
    assert sorted(asked) == [("attention-nan-past-the-end", 10.0), ("attention-nan-past-the-end", 30.0), ("int8-truncates", 10.0)]
    assert rows["attention-nan-past-the-end"]["seconds"] == 40 and rows["int8-truncates"]["calls"] == 5
    asked.clear()
    assert (
        not zoo_benchmark.search_members(["int8-truncates"], 1, 2, tmp_path)["int8-truncates"]["found"] and not asked
    )  # no time for a unit
