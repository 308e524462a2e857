"""Verdicts about third-party caches and casts. If a result changes, update docs/findings.md."""

import pytest

from kvref_conformance.implementations import load_implementation
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of


def verdicts(name):
    judge = CheckRunner(load_implementation(name))
    return {clause.id: verdict_of(judge.judge_clause(checks)) for clause, checks in select_checks().items()}


def with_verdict(found, verdict):
    return {clause for clause, said in found.items() if said == verdict}


def test_ml_dtypes_makes_nan_of_e4m3fn_overflow():
    found = verdicts("kvref_adapters.ml_dtypes.adapter:MlDtypes")
    assert with_verdict(found, "failed") == {"FMT-FP8-03"}
    fp8 = {f"FMT-FP8-0{n}" for n in (1, 2, 4, 5, 6, 7)}
    assert with_verdict(found, "passed") == {"LAW-14", "LAW-15", "LAW-17", "LAW-21", "FMT-CAST-01"} | fp8


@pytest.mark.torch
def test_torch_saturates_even_infinity():
    found = verdicts("torch-float8")
    assert with_verdict(found, "failed") == {"LAW-14"}
    assert with_verdict(found, "passed") == {"LAW-15", "LAW-17", "LAW-21", *(f"FMT-FP8-0{n}" for n in range(1, 8))}


@pytest.mark.torch
def test_transformers_dynamic():
    found = verdicts("transformers-dynamic")
    assert with_verdict(found, "failed") == {"LAW-01", "LAW-10", "LAW-11", "FMT-LEVEL-04", "EDIT-02"}
    assert {"LAW-04", "LAW-06", "LAW-08", "CONTIG-02", "CONTIG-05", "CONTIG-13", "LAW-12"} <= with_verdict(found, "passed")
    assert {"CONTIG-04", "CONTIG-06", "CONTIG-09", "CONTIG-10"} <= with_verdict(found, "not offered")


@pytest.mark.torch
def test_transformers_static():
    found = verdicts("transformers-static")
    broken = {"LAW-01", "LAW-10", "LAW-11", "LAW-12", "FMT-LEVEL-04", "CONTIG-06", "EDIT-07"}
    assert with_verdict(found, "failed") == broken
    assert {"LAW-04", "LAW-06", "LAW-08", "CONTIG-02", "CONTIG-07", "CONTIG-08", "CONTIG-13"} <= with_verdict(found, "passed")


@pytest.mark.torch
def test_transformers_paged():
    pytest.importorskip("psutil")  # without it, the library finds no memory on a CPU
    found = verdicts("transformers-paged")
    assert with_verdict(found, "failed") == {"LAW-11", "LAW-12", "PREFIX-03", "PREFIX-15"}
    shared = {"SHARE-03", "SHARE-04", "SHARE-05", "SHARE-06", "SHARE-08"}
    assert shared | {"LAW-01", "PAGED-03", "PAGED-12", "PREFIX-01", "PREFIX-06", "PREFIX-12"} <= with_verdict(found, "passed")


@pytest.mark.torch
def test_transformers_generate_with_recurrent_state():
    found = verdicts("transformers-generate-qwen3.5")
    assert with_verdict(found, "failed") == set()
    assert {f"ENG-{number:02}" for number in (*range(1, 8), 12)} <= with_verdict(found, "passed")


@pytest.mark.torch
def test_transformers_generate():
    found = verdicts("transformers-generate")
    assert with_verdict(found, "failed") == set()
    judged = {f"ENG-{number:02}" for number in (*range(1, 8), 12, 13)}
    assert with_verdict(found, "passed") == {"LAW-12", "LAW-18", *judged}
    assert {"ENG-08", "ENG-09", "ENG-10", "ENG-11", "LAW-11"} <= with_verdict(found, "not offered")
