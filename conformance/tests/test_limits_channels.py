"""KIVI caches with the limits of kernels: what is judged, and no false alarms."""

import pytest
from marks import half_long
from restricted import Restricted

from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

KIVI = {"format": "uint2_g32_float16", "dtype": ["float16"], "residual": 128, "head_dim": [64, 128]}
WIDE = {"format": "uint4_g128_bfloat16", "dtype": ["bfloat16"], "residual": 128, "head_dim": {"multiple_of": 128}}
DOORS = {  # limits, and the clauses that cannot be judged within them
    "as KIVI has it": ({"channels": KIVI | {"rollback": 0}}, set()),
    "groups of 64 alone": ({"channels": {"format": [f"uint{bits}_g64_float16" for bits in (4, 2)], "head_dim": 128}}, set()),
    "groups of 128 in bfloat16": ({"channels": WIDE}, set()),
    "one token and one head": ({"channels": {"num_kv_heads": 1, "tokens": {"most": 1}}}, {"KIVI-04", "LAW-06"}),
    "drafts are held": ({"channels": {"rollback": 8}}, set()),
    "room for one residual": ({"channels": {"max_tokens": {"most": 40}}}, {"KIVI-02", "KIVI-03", "KIVI-04", "KIVI-08"}),
    "sizes that no group goes into": ({"channels": {"head_dim": 80}}, {"*"}),
}


@pytest.mark.extended
@pytest.mark.parametrize("door", half_long(DOORS))
def test_what_is_judged_within_limits(door):
    limits, expected = DOORS[door]
    judge, lacking = CheckRunner(Restricted(limits, families=["channels"])), {}
    for clause, checks in select_checks(family="channels").items():
        written = [check for check in checks if check.run and not check.slow and not check.real]
        if written and clause.id != "LAW-18":
            outcomes = judge.judge_clause(written)
            assert verdict_of(outcomes) != "failed", (clause.id, outcomes)
            if verdict_of(outcomes) != "passed":
                lacking[clause.id] = judge.missing(written, outcomes)
    assert all(lacking.values())
    assert set(lacking) == expected or ("*" in expected and len(lacking) >= 30), lacking


@pytest.mark.parametrize("door", DOORS)
def test_no_sequence_of_calls_is_a_false_alarm(door):
    judge = CheckRunner(Restricted(DOORS[door][0], families=["channels"]), Effort(examples=4))
    assert judge.search("channels").findings == {}


@pytest.mark.parametrize("door", ["as KIVI has it", "groups of 64 alone"])
def test_real_sizes_are_judged(door):
    ((_, checks),) = select_checks("LAW-18", "channels").items()
    judge = CheckRunner(Restricted(DOORS[door][0], families=["channels"]))
    assert verdict_of(judge.judge_clause([check for check in checks if not check.real])) == "passed"
