"""Checks of FMT-STATIC: FP8 with a given scale."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import raises, shaped, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import same_values
from kvref_conformance.families.rows.handed import largest, taken, widths
from kvref_conformance.oracle import elements, static
from kvref_conformance.oracle.adversarial import given
from kvref_conformance.oracle.formats import STATIC, element_of
from kvref_conformance.oracle.stored import Stored
from kvref_conformance.outcome import Broken, NotOffered

SCALES = (1.0, 0.25, 0.037, 0.0011, 2.9)


def handed(subject: Subject, format: str, scale: float) -> NDArray:
    (width,) = widths(subject, 64)
    rows = taken(subject, given(subject.rng, width, format, scale))
    if not len(rows):
        raise NotOffered(f"rows in a dtype with the range of a scale of {scale}")
    return rows


def quantized(subject: Subject, rows: NDArray, format: str, scale: float | None) -> Stored:
    """Returns the codes and the values that they read back as."""
    family = subject.new("rows") if scale is None else subject.new("rows", given_scale=scale)
    codes, _, _ = family.quantize(rows, format)
    values = family.dequantize(codes, None, None, rows.shape[1], format)
    codes = shaped(codes, rows.shape, f"{format} codes").astype(np.int64)
    none = np.zeros(0, np.float32)
    return Stored(codes, none, none, values)


def same_codes(subject: Subject, got: NDArray, rows: NDArray, format: str, scale: float) -> None:
    want = static.store(rows, format, scale).codes
    exact = subject.level == "exact"
    wrong = np.argwhere(got != want).tolist() if exact else static.inadmissible(rows, got, format, scale)
    if wrong:
        n, i = wrong[0]
        what = f"{format} code of {float(rows[n, i])!r} with a scale of {scale} ({len(wrong)} of {got.size} wrong)"
        raise Broken(what, str(want[n, i]) + ("" if exact else " or another admissible code"), str(got[n, i]))


@check("FMT-STATIC-01", "rows")
def codes_are_quotients_by_the_scale_that_is_given(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        for scale in SCALES:
            rows = handed(subject, name, scale)
            same_codes(subject, quantized(subject, rows, name, scale).codes, rows, name, scale)


@check("FMT-STATIC-02", "rows")
def what_lies_beyond_the_range_is_clipped(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        for scale in (1.0, 0.0011):
            most = np.float32(elements.MAX[element_of(name)]) * np.float32(scale)
            ends = np.minimum(most * np.array([1.0, 1.01, 1.2, 2.0, 1e3, 1e30], np.float32), np.float32(largest(subject)))
            (width,) = widths(subject, 12)
            rows = held(subject, np.resize(np.concatenate([ends, -ends]), (-(-12 // width), width)))
            got, want = quantized(subject, rows, name, scale), static.store(rows, name, scale)
            true(np.isfinite(got.values).all(), f"{name} values of {rows.tolist()}", "finite values", got.values)
            beyond = np.abs(rows.astype(np.float64)) >= most
            what = f"{name} values of magnitudes from {most} on, with a scale of {scale}"
            same_values(subject, got.values[beyond], want.values[beyond], what)


@check("FMT-STATIC-03", "rows")
def a_value_is_its_code_times_the_scale_that_is_given(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        worth = elements.decoded(element_of(name))
        codes = np.flatnonzero(np.isfinite(worth)).astype(np.uint8)
        (width,) = widths(subject, 64)
        codes = np.resize(codes, (-(-len(codes) // width), width))
        for scale in SCALES:
            got = subject.new("rows", given_scale=scale).dequantize(codes, None, None, width, name)
            same_values(subject, got, static.said(codes, name, scale), f"{name} values of every code with a scale of {scale}")


@check("FMT-STATIC-04", "rows")
def nothing_is_learned_from_the_rows(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        family, (width,) = subject.new("rows", given_scale=0.5), widths(subject, 8)
        quiet, loud = (held(subject, subject.rng.normal(size=(2, width)) * factor) for factor in (0.01, 100.0))
        for rows in (quiet, np.concatenate([loud, quiet]), loud, quiet):
            codes, _, _ = family.quantize(rows, name)
            values = family.dequantize(codes, None, None, width, name)
            want = static.store(rows, name, 0.5)
            bound = 0.0 if subject.level == "exact" else 2 * static.bound(rows, want, name)
            within(values, want.values, bound, f"{name} values of rows next to, or after, rows of another magnitude")


@check("FMT-STATIC-05a", "rows")
def a_scale_that_is_none_is_refused(subject: Subject) -> None:
    subject.formats(*STATIC)
    for wrong in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf")))):
        with raises("ConfigError"):
            subject.new("rows", given_scale=wrong)


@check("FMT-STATIC-05c", "rows")
def a_scale_that_is_not_given_is_one(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        rows = handed(subject, name, 1.0)
        rows = rows[np.abs(rows).max(axis=1) <= elements.MAX[element_of(name)]]  # larger numbers belong to FMT-STATIC-02
        got = quantized(subject, rows, name, None)
        same_codes(subject, got.codes, rows, name, 1.0)
        same_values(subject, got.values, static.said(got.codes, name, 1.0), f"{name} values of codes without a given scale")


@check("FMT-STATIC-07", "rows")
def static_values_are_within_the_bound(subject: Subject) -> None:
    for name in subject.formats(*STATIC):
        for scale in SCALES:
            rows = handed(subject, name, scale)
            values = quantized(subject, rows, name, scale).values
            bound = static.bound(rows, static.store(rows, name, scale), name)
            if subject.level == "tolerant":
                bound = bound * (1 + 2.0**-22) + 2.0**-22 * np.abs(rows.astype(np.float64))
            within(values, rows, bound, f"{name} values of rows with a scale of {scale}")
