"""Production sizes: the option that selects more of them, and traces too large to keep, shortened or written completely."""

import json
from itertools import islice

import numpy as np
import pytest
from restricted import Restricted

import kvref
from kvref_conformance.calls.messages import ArraySummary, format_value
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks, verdict_of
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.soak.cache_soak import SoakStatistics, count_calls, run_event
from kvref_conformance.soak.cache_workload import Workload, WorkloadEvent
from kvref_conformance.soak.drivers import make_driver
from kvref_conformance.testlib.registry import Check, all_checks
from kvref_conformance.traces import shrinking


def of_law_18():
    return select_checks("LAW-18").popitem()[1]


def test_every_family_with_a_state_is_looked_at():
    looked_at = {check.family for check in of_law_18() if not check.real}
    with_state = {family.name for family in all_families().values() if family.small}
    assert looked_at >= with_state | {"kernels", "attention"}


def test_larger_ones_run_when_asked_for():
    larger = next(check for check in all_checks() if check.real)
    judge = CheckRunner(load_implementation("numpy"), Effort())
    said = judge.judge_check(larger)
    assert (said.verdict, said.missing) == ("not run", "--real")
    assert Effort(real=True).includes(larger.option) and not Effort(slow=True).includes(larger.option)
    assert "--real" in RunOptions("numpy", Effort(real=True)).repeat_command("LAW-18")


def test_the_clause_passes_with_what_ran():
    checks = [check for check in of_law_18() if check.family == "kernels"]
    assert (
        verdict_of(
            CheckRunner(load_implementation("numpy")).judge_clause([*checks, *(check for check in of_law_18() if check.real)][:4])
        )
        == "passed"
    )


def test_long_lists_are_shown_by_their_beginning():
    assert format_value(list(range(40))) == "[0, 1, 2, 3, 4, 5, 6, 7, ... 40 in all]"


class Halves(OnBackend):
    """Reads beyond token 200 return another token."""

    name = "halves"

    def __init__(self):
        super().__init__(kvref.backend("numpy"))

    def pooled(self, **config):
        cache = super().pooled(**config)
        read = cache.read

        def wrong():
            keys, values = (np.array(part) for part in read())
            keys[200:] = values[: len(keys[200:])]
            return keys, values

        cache.read = wrong
        return cache


@pytest.fixture
def check():
    return next(check for check in of_law_18() if check.name == "appends at powers of two keep every token (pooled)")


def test_a_failure_is_named_made_short_and_kept(check):
    (outcome,) = CheckRunner(Halves()).judge_clause([check])
    assert outcome.verdict == "failed"
    assert "which is values[0, 0] of pooled.append" in outcome.got
    header = json.loads(outcome.trace[0])
    assert header["judge"] == "model" and len(outcome.trace) < 20


def test_what_cannot_be_made_short_in_time_is_kept_as_it_was_found(check, monkeypatch):
    monkeypatch.setattr("kvref_conformance.runner.check_runner.SHRINK_SECONDS", 0.0)
    monkeypatch.setattr(shrinking, "SHRINK_SECONDS", 0.0)
    monkeypatch.setattr("kvref_conformance.traces.format.MAX_ARRAY_BYTES", 2**10)
    (outcome,) = CheckRunner(Halves()).judge_clause([check])
    assert outcome.got.startswith("the row of sequence 0, position 0, layer 0, head 0, values")
    assert json.loads(outcome.trace[0])["judge"] == "check"
    assert sum(map(len, outcome.trace)) < 50_000


def test_a_conversation_keeps_so_many_arrays_and_no_more(monkeypatch):
    monkeypatch.setattr("kvref_conformance.calls.recorder.MAX_RECORDED_TOTAL", 10_000)
    subject = Subject(load_implementation("numpy"), np.random.default_rng(0), family="pooled")
    cache = subject.new("pooled", num_kv_heads=1, head_dim=64, tokens_per_block=16, max_tokens=4096)
    for _ in range(9):
        cache.append(*np.ones((2, 16, 1, 64), np.float32))
    assert len(cache.read()[0]) == 144
    first, last = subject.call_trace[1], subject.call_trace[-1]
    assert isinstance(first.request.args["keys"], np.ndarray)
    assert last.reply.ok == (ArraySummary("float32[144, 1, 64]"),) * 2
    failure = Failure(Check("LAW-18", "pooled", None), subject.call_trace, ClauseViolation("", "", ""))
    assert shrinking.shrink_trace(failure.call_trace, "LAW-18", lambda requests: pytest.fail("it cannot be held again")) is None


WITHIN = {
    "one layer": {"num_layers": 1},
    "four layers": {"num_layers": 4},
    "layers of a large model": {"num_layers": 32},
    "few blocks": {"num_blocks": {"most": 64}},
    "blocks": {"num_blocks": {"most": 1024}},
    "fewer blocks than a sequence takes": {"num_blocks": {"most": 4}},
    "a block": {"num_blocks": 1, "num_layers": 1},
    "one sequence": {"sequences": {"most": 1}},
    "three sequences": {"sequences": {"most": 3}},
    "one token": {"tokens": 1},
    "few of everything": {"num_layers": 4, "num_blocks": {"most": 64}, "sequences": {"most": 1}, "tokens": {"most": 1}},
}


def served(limits, operations=None, count=60):
    """The first failure in a workload of this many events that ends with a read of all live sequences; and what was compared."""
    subject, figures = CheckRunner(Restricted(limits, operations, ("paged",))).begin_family("paged"), SoakStatistics("paged")
    running = make_driver(subject, "paged", 1, 8)
    for event in islice(Workload(running, np.random.default_rng(0)).events(), count):
        if violation := run_event(running, event, figures):
            return violation, figures
        count_calls(subject, figures)
        subject.clear_trace()
    assert len(running.running_requests()) <= running.max_sequences
    looks = [run_event(running, WorkloadEvent("look", (number,)), figures) for number in running.running_requests()]
    return next(filter(None, looks), None), figures


@pytest.mark.parametrize("limits", WITHIN.values(), ids=WITHIN)
def test_a_right_cache_of_any_limits_is_served(limits):
    broken, figures = served(limits)
    assert broken is None and figures.tokens_checked


def test_a_pool_of_no_block_for_each_layer_is_not_offered():
    with pytest.raises(NotOffered, match="one block per layer, where its limits say num_blocks 1"):
        served({"num_blocks": 1})


SHORT = ("blocks are told", "layers may", "rows of any")  # the fastest of them


@pytest.mark.parametrize("limits", WITHIN.values(), ids=WITHIN)
def test_a_right_cache_of_any_limits_is_right_at_real_sizes(limits):
    judge = CheckRunner(Restricted(limits, families=("paged",)))
    checks = [check for check in of_law_18() if check.family == "paged" and check.name.startswith(SHORT)]
    outcomes = judge.judge_clause(checks)
    assert [outcome for outcome in outcomes if outcome.verdict == "failed"] == []
    assert verdict_of(outcomes) == "passed" or all(judge.missing(checks, outcomes))


@pytest.mark.long
def test_hundreds_of_sequences_of_many_layers_are_as_many_as_fit():
    checks = [check for check in of_law_18() if "hundreds of sequences" in check.name]
    for limits in ({"num_layers": 32, "num_blocks": {"most": 64}}, {"sequences": {"most": 3}, "tokens": 1}):
        assert verdict_of(CheckRunner(Restricted(limits)).judge_clause(checks)) == "passed"


def test_a_cache_without_counts_is_served():
    """Also one that appends one token per call, through append alone."""
    for names in (("create", "drop", "write", "gather"), ("create", "drop", "append", "length", "read")):
        broken, figures = served({"num_blocks": {"most": 256}}, {f"paged.{name}" for name in names}, 200)
        assert broken is None and figures.tokens_checked and figures.refused


def test_what_is_not_offered_is_no_matter_of_an_option():
    checks = [check for check in of_law_18() if check.family == "paged" and ("thousands of blocks" in check.name or check.real)]
    judge = CheckRunner(Restricted({"num_blocks": {"most": 64}}))
    outcomes = judge.judge_clause(checks)
    assert verdict_of(outcomes) == "not offered"
    assert judge.missing(checks, outcomes) == ["block 256 and above: the pool has 64 blocks"]
