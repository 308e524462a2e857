"""Replayed traces and the self-test of a harness stay within an implementation's limits."""

import sys
from pathlib import Path

import pytest
from restricted import LIMITS, Restricted

from kvref_conformance.exceptions import NotOffered
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.harness_selftest import run_selftest
from kvref_conformance.runner.replay import replay_saved_trace
from kvref_conformance.traces.format import read_trace
from kvref_conformance.vectors.check import check_vectors

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors"
SOME = ("float16 only", "head_dim of 64 or 128", "one sequence at a time", "one token at a time")


@pytest.mark.extended
@pytest.mark.parametrize("name", [SOME[0], *(pytest.param(each, marks=pytest.mark.long) for each in SOME[1:])])
def test_vectors_beyond_the_limits_are_not_offered(name):
    checked = list(check_vectors(VECTORS, CheckRunner(Restricted(LIMITS[name]))))
    assert [each for each in checked if each.verdict == "failed"] == []
    assert ("passed" in [each.verdict for each in checked]) == (name != "float16 only")


def test_a_replay_says_which_limit_it_is_beyond():
    trace = read_trace(VECTORS / "machines" / "paged-0.jsonl")
    with pytest.raises(NotOffered, match=r"head_dim \d, where its limits say 64 or 128"):
        replay_saved_trace(trace, CheckRunner(Restricted({"head_dim": [64, 128]})))


@pytest.mark.parametrize("name", ["KERNELS", "ONE", "FLOAT16"])
def test_a_harness_is_asked_for_what_its_limits_allow(name):
    said = list(run_selftest([sys.executable, str(HERE / "serve.py"), f"restricted:{name}"], HERE, False, 20.0))
    assert {each.what: each.wrong for each in said if each.wrong} == {}
    assert {f"{family}.new" for family in ("paged", "quantized", "engine", "blocks")} <= {each.what for each in said}
    assert ("paged: all operations with rows of 128 numbers" in [each.what for each in said]) == (name == "KERNELS")
