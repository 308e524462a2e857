"""Latent caches with the limits of kernels: what is judged within them, and no false alarms."""

import pytest
from restricted import Restricted

from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

DEEPSEEK = {"rank": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128, "group_size": [2, 16, 64, 128]}
DOORS = {
    "packed rows of float16 arrays": {"latent": DEEPSEEK | {"dtype": ["float16", "packed"]}},
    "packed rows alone": {"latent": DEEPSEEK | {"dtype": "packed"}},
    "one head and one token at a time": {"latent": {"group_size": 1, "tokens": {"most": 1}, "nope_dim": 64, "value_dim": [1, 2]}},
    "few tokens": {"max_tokens": {"most": 12}},
    "odd sizes": {"latent": {"rank": [1, 7], "rope_dim": 1, "dtype": ["bfloat16"]}},
    "even ropes": {"rope_dim": {"multiple_of": 2}, "rank": {"multiple_of": 128}},
}
LACKING = {
    "packed rows of float16 arrays": {"MLA-06": "dtype int8 or"},
    "packed rows alone": {"MLA-06": "dtype int8 or"},
    "one head and one token at a time": {"LAW-06": "tokens 2"},
    "few tokens": {},
    "odd sizes": {"FMT-LEVEL-05": "dtype packed", "MLA-06": "dtype int8 or"},
    "even ropes": {},
}


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("door", DOORS)
def test_every_clause_is_judged_within_the_limits_of_kernels(door):
    judge, lacking = CheckRunner(Restricted(DOORS[door], families=["latent"])), {}
    for clause, checks in select_checks(family="latent").items():
        written = [check for check in checks if check.run and not check.slow and not check.real and clause.id != "LAW-18"]
        outcomes = judge.judge_clause(written)
        assert not written or verdict_of(outcomes) != "failed", (clause.id, outcomes)
        if written and verdict_of(outcomes) != "passed":
            lacking[clause.id] = judge.missing(written, outcomes)
    assert set(lacking) == set(LACKING[door]), lacking
    for clause, reason in LACKING[door].items():
        assert any(said.startswith(reason) for said in lacking[clause]), lacking


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("door", DOORS)
def test_no_sequence_of_calls_is_a_false_alarm_within_the_limits_of_kernels(door):
    judge = CheckRunner(Restricted(DOORS[door], families=["latent"]), Effort(examples=4))
    assert judge.search("latent").findings == {}


@pytest.mark.extended
@pytest.mark.parametrize("door", ["packed rows of float16 arrays", "few tokens", "odd sizes"])
def test_real_sizes_are_no_false_alarm_within_the_limits_of_kernels(door):
    ((_, checks),) = select_checks("LAW-18", "latent").items()
    outcomes = CheckRunner(Restricted(DOORS[door], families=["latent"])).judge_clause(
        [check for check in checks if not check.real]
    )
    assert verdict_of(outcomes) != "failed", outcomes
