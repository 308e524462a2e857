"""Engines of hybrid canaries: a right one passes, and a fault of the recurrent state is found and named."""

import pytest
from fake_server import serving
from hybrid_engine import (
    BatchIsReordered,
    CancelAdvancesTheState,
    ChunkForgetsTheConvolution,
    CopiesShareTheMatrix,
    CopyHasTheDrafts,
    HybridEngine,
    HybridEngines,
    LoadedConvolutionIsEmpty,
    LoadedMatrixIsEmpty,
    NewSessionHasTheConvolutionOfTheLast,
    NewSessionHasTheMatrixOfTheLast,
    PrefillForgetsTheConvolution,
    TruncationKeepsTheMatrix,
)

from kvref.canary.hybrid import HYBRIDS, HybridCanary, engine_canary
from kvref.errors import ConfigError
from kvref_canary.files import huggingface
from kvref_canary.files.hybrid import make_hybrid_files
from kvref_canary.server.url import Address
from kvref_conformance.implementations.server import ServerImplementation
from kvref_conformance.limits import Limits
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

NOT_OFFERED = {"ENG-13"}  # windows


def verdicts(architecture, sessions, clauses="ENG-*", examples=3):
    judge = CheckRunner(HybridEngines(architecture, sessions), Effort(examples=examples, timeout=60))
    return {clause.id: judge.judge_clause(checks) for clause, checks in select_checks(clauses).items()}


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_right_engine_breaks_nothing(architecture):
    found = {clause: verdict_of(results) for clause, results in verdicts(architecture, HybridEngine).items()}
    assert {clause for clause, verdict in found.items() if verdict != "passed"} == NOT_OFFERED, found
    assert {found[clause] for clause in NOT_OFFERED} == {"not offered"}


@pytest.mark.parametrize(
    ("wrong", "clause", "cause"),
    [
        (CopiesShareTheMatrix, "ENG-08", ""),  # two sessions write in turn: no state that there was once
        (CopyHasTheDrafts, "ENG-09", "tokens that were removed afterwards"),
        (TruncationKeepsTheMatrix, "ENG-09", "tokens that were removed afterwards"),
        (LoadedMatrixIsEmpty, "ENG-10", "the matrix is zero, as in a new sequence"),
        (NewSessionHasTheMatrixOfTheLast, "ENG-05", "the state of the "),
        (CancelAdvancesTheState, "ENG-05", "too many: those of a cancelled answer"),
        (BatchIsReordered, "ENG-02", "the matrix is of session"),
        (ChunkForgetsTheConvolution, "ENG-03", "the state of the convolution"),
        (NewSessionHasTheConvolutionOfTheLast, "ENG-05", "the state of the convolution"),
        (LoadedConvolutionIsEmpty, "ENG-10", "the state of the convolution"),
        (PrefillForgetsTheConvolution, "ENG-01", ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("architecture", ["mamba2", "qwen3.5"])
def test_a_fault_of_the_state_is_found(architecture, wrong, clause, cause):
    """The cause is tested for the delta rule only: a cell of Mamba-2 can be a mixture, of which the oracle predicts nothing."""
    failed = [each for each in verdicts(architecture, wrong, clause)[clause] if each.verdict == "failed"]
    assert failed
    assert architecture == "mamba2" or any(cause in each.cause for each in failed)


@pytest.mark.parametrize(("wrong", "verdict"), [("", "passed"), ("a stale matrix", "failed")])
def test_a_server_is_judged_with_a_hybrid_canary(tmp_path, wrong, verdict):
    huggingface.write_folder(tmp_path, make_hybrid_files("qwen3.5"))
    with serving(HybridCanary("qwen3.5"), wrong) as fake:
        served = ServerImplementation(Address(fake.url, tmp_path))
        try:
            assert served.limits["engine"] == {"recurrent": 4, "recalls": 0, "window": 0, "context": 1024}
            ((_, checks),) = select_checks("ENG-07").items()
            outcomes = [CheckRunner(served, Effort(timeout=60)).judge_check(check) for check in checks if check.run]
        finally:
            served.close()
    assert verdict == ("failed" if any(isinstance(each, Failure) for each in outcomes) else "passed")


def test_sizes_select_the_canary():
    sizes = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 200, "period": 32}
    assert engine_canary(recurrent=2, **sizes) == HybridCanary("mamba2", 200)
    assert engine_canary(**sizes).context == 200
    for wrong in (-1, len(HYBRIDS) + 1, "1"):
        with pytest.raises(ConfigError, match="recurrent: expected"):
            engine_canary(recurrent=wrong, **sizes)


def test_hybrid_canaries_are_requested_only_if_declared():
    assert Limits({}).nearest("engine", "recurrent", 3) == 0
    assert Limits({"engine": {"recurrent": [2, 3]}}).nearest("engine", "recurrent", 0) == 2
