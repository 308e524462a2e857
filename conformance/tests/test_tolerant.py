"""Level tolerant: the roundings in use pass, a wrong one fails, and none of them is exact."""

import dataclasses

import numpy as np
import pytest

from kvref.backend import ReferenceBackend
from kvref.formats import FORMATS, Quantized, ggml, group_scales, hadamard, row_scales, token_scales
from kvref.formats.base import finite_rows
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import Effort

ONE = np.float32(1)


def by_reciprocals(rounding):
    """Symmetric rows as a GPU kernel computes them: m * (1 / limit), x * (1 / s), any rounding."""

    def quantize(self, rows):
        rows = finite_rows(rows)
        largest = np.abs(rows).max(axis=-1, initial=0)
        scale = np.maximum(largest * (ONE / np.float32(self.limit)), np.float32(2.0**-23))
        quotient = np.clip(rows * (ONE / scale)[..., None], -np.float32(self.limit), np.float32(self.limit))
        if self.name != "int8":
            return Quantized(self.encode(quotient), scale)
        return Quantized(rounding(quotient).astype(np.int8), scale)

    return quantize


def failed(implementation, wanted):
    judge = CheckRunner(implementation, Effort(examples=5, shrinks=False))
    return {
        clause.id
        for clause, checks in select_checks(wanted).items()
        if any(isinstance(judge.judge_check(check), Failure) for check in checks)
    }


@pytest.fixture
def implementation(monkeypatch):
    def make(level, rounding=np.round):
        monkeypatch.setattr(row_scales.SymmetricRow, "quantize", by_reciprocals(rounding))
        for module in (token_scales, group_scales, ggml):
            monkeypatch.setattr(module, "round_half_away", rounding)
        made = OnBackend(ReferenceBackend())
        made.level = level
        return made

    return make


@pytest.mark.long
def test_half_even_and_reciprocals_are_tolerant(implementation):
    assert failed(implementation("tolerant"), "FMT-*,QUANT-*,TIER-*,POOL-*,KERN-*,LAW-0*,LAW-14,LAW-17") == set()


def test_half_even_and_reciprocals_are_not_exact(implementation):
    clauses = {"FMT-LEVEL-01", "FMT-INT8-01", "FMT-INT8-02", "FMT-AFF-02"}
    assert failed(implementation("exact"), ",".join(clauses)) == clauses


@pytest.mark.parametrize(
    "rounding", [np.floor, pytest.param(np.trunc, marks=pytest.mark.long), pytest.param(np.ceil, marks=pytest.mark.extended)]
)
def test_a_wrong_rounding_is_not_tolerant(implementation, rounding):
    clauses = {"FMT-LEVEL-02", "FMT-LEVEL-03", "FMT-INT8-02"}
    assert failed(implementation("tolerant", rounding), ",".join(clauses)) == clauses


@pytest.mark.extended
def test_a_scale_rounded_to_half_precision_is_not_tolerant(monkeypatch):
    quantize = row_scales.SymmetricRow.quantize

    def narrow(self, rows):
        stored = quantize(self, rows)
        with np.errstate(over="ignore"):
            return stored._replace(scale=stored.scale.astype(np.float16).astype(np.float32))

    monkeypatch.setattr(row_scales.SymmetricRow, "quantize", narrow)
    made = OnBackend(ReferenceBackend())
    made.level = "tolerant"
    assert failed(made, "FMT-LEVEL-02,FMT-INT8-01") == {"FMT-LEVEL-02", "FMT-INT8-01"}


@pytest.mark.extended
def test_another_limit_is_not_tolerant(monkeypatch):
    monkeypatch.setitem(FORMATS, "int8", dataclasses.replace(row_scales.int8, limit=128.0))
    made = OnBackend(ReferenceBackend())
    made.level = "tolerant"
    assert failed(made, "FMT-INT8-01") == {"FMT-INT8-01"}


ROTATED = "FMT-ROT-*,QUANT-10,PAGED-18,EDIT-10"


def rotated_by(monkeypatch, worth):
    """Rotations as a product with the matrix, and dequantized rows times a number."""

    def product(x):
        block = hadamard.block_of(x.shape[-1])
        signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(block)] for i in range(block)])
        terms = np.reshape(x, (-1, 1, block)) * (signs / block**0.5).astype(np.float32)
        return terms.sum(axis=2).reshape(x.shape)  # on some processors BLAS adds in another order if there are other rows

    monkeypatch.setattr(
        hadamard, "hadamard", lambda x: product(np.asarray(x)) if x.size and hadamard.block_of(x.shape[-1]) > 1 else x
    )
    read = hadamard.HadamardFormat.dequantize
    monkeypatch.setattr(hadamard.HadamardFormat, "dequantize", lambda self, *of: read(self, *of) * np.float32(worth(self.name)))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rotated keys that overflow are rejected
def test_a_rotation_with_other_sums_is_tolerant(implementation, monkeypatch):
    rotated_by(monkeypatch, lambda name: 1)
    assert failed(implementation("tolerant"), ROTATED) == set()


def test_half_the_size_is_not_tolerant(implementation, monkeypatch):
    rotated_by(monkeypatch, lambda name: 0.5 if name == "q4_0_hadamard" else 1)
    assert {"FMT-ROT-05", "PAGED-18"} <= failed(implementation("tolerant"), "FMT-ROT-05,PAGED-18")
