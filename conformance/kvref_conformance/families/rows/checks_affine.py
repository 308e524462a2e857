"""Checks of FMT-AFF: rows with a scale and a zero."""

import numpy as np

from kvref_conformance.checking.expect import equal, raises, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import quantized, same_codes, same_scale, same_values, within_bound
from kvref_conformance.families.rows.handed import adversarial, rows_of, spread, taken, widths
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import AFFINE
from kvref_conformance.oracle.stored import fl
from kvref_conformance.outcome import NotOffered


@check("FMT-AFF-01ab", "rows")
def scale_and_zero_span_the_row(subject: Subject) -> None:
    for name in subject.formats(*AFFINE):
        for width in widths(subject, 1, 6, 33):
            rows = adversarial(subject, width, name)
            got, want = quantized(subject, rows, name), oracle.store(rows, name)
            same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {width}")
            same(got.zero + np.float32(0), want.zero + np.float32(0), f"{name} zeros of rows of {width}")  # 0 and -0 are equal


@check("FMT-AFF-01bc", "rows")
def a_range_that_overflows_is_refused(subject: Subject) -> None:
    formats = subject.formats(*AFFINE)
    subject.need(width=3)
    if subject.dtype == "float16":
        raise NotOffered("float16 rows whose range overflows float32")
    for name in formats:
        widest = spread(subject, np.array([[1.69e38, -1.69e38, 0.0]]))
        same_scale(
            subject, quantized(subject, widest, name).scale, oracle.store(widest, name).scale, f"{name} scale of +-1.69e38"
        )
        for wide in ([3e38, -3e38, 0.0], [-1.8e38, 0.0, 1.8e38]):
            with raises("NonFinite"):
                subject.new("rows").quantize(spread(subject, np.array([[1.0, 2.0, 3.0], wide])), name)


@check("FMT-AFF-02", "rows")
def codes_are_rounded_half_away_and_clamped(subject: Subject) -> None:
    for name in subject.formats(*AFFINE):
        top = oracle.STEPS[name]
        ties = rows_of(subject, [0.0, top], np.arange(0, top) + 0.5, top + 2)
        for rows in (ties, held(subject, ties + np.float32(1024)), adversarial(subject, 33, name)):
            got = quantized(subject, rows, name)
            true(got.codes.min() >= 0 and got.codes.max() <= top, f"{name} codes", f"in [0, {top + 1})", got.codes.max())
            same_codes(subject, got.codes, rows, name)


@check("FMT-AFF-04", "rows")
def a_value_is_rounded_twice(subject: Subject) -> None:
    for name in subject.formats(*AFFINE):
        rows = adversarial(subject, 33, name)
        got = quantized(subject, rows, name)
        scale, zero = (np.asarray(part, dtype=np.float64)[:, None] for part in (got.scale, got.zero))
        want = fl(fl(got.codes * scale) + zero).astype(np.float32)
        same_values(subject, got.values, want, f"{name} values, compared with fl(fl(code * scale) + zero)")


@check("FMT-AFF-05", "rows")
def a_constant_row_reads_back_exactly(subject: Subject) -> None:
    for name in subject.formats(*AFFINE):
        constants = np.array([[0.0], [3.14159], [-1e-12], [1e30], [-7.0]])
        rows = taken(subject, np.repeat(constants, subject.size("width", 5), axis=1)) + np.float32(0)  # -0.0 reads back as 0.0
        got = quantized(subject, rows, name)
        same(got.values, rows, f"{name} values of constant rows")
        equal(int(got.codes.max()), 0, f"{name} codes of constant rows")


@check("FMT-AFF-06a", "rows")
def two_codes_share_a_byte_low_nibble_first(subject: Subject) -> None:
    subject.formats("q4")
    for width in widths(subject, 1, 2, 6, 80, 96):
        _packed(subject, width)


@check("FMT-AFF-06b", "rows")
def an_odd_row_is_padded(subject: Subject) -> None:
    subject.formats("q4")
    odd = [width for width in widths(subject, 1, 5, 33, 81) if width % 2]
    if not odd:
        raise NotOffered("rows of an odd width")
    for width in odd:
        _packed(subject, width)


def _packed(subject: Subject, width: int) -> None:
    family, rows = subject.new("rows"), subject.rng.integers(0, 16, size=(3, width)).astype(np.float32)
    if width > 1:
        rows[:, 0], rows[:, 1] = 0, 15
    codes, scale, zero = family.quantize(rows, "q4")
    want = oracle.store(rows, "q4").codes
    padded = np.concatenate([want, np.zeros((3, width % 2), np.int64)], axis=1)
    packed = (padded[:, 0::2] + 16 * padded[:, 1::2]).astype(np.uint8)
    same(codes, packed, f"bytes of q4 rows of {width}")
    same(family.dequantize(codes, scale, zero, width, "q4"), oracle.store(rows, "q4").values, f"q4 values of {width}")


@check("FMT-AFF-07", "rows")
def affine_values_are_within_half_a_step_and_rounding(subject: Subject) -> None:
    within_bound(subject, *AFFINE)


@check("FMT-AFF-08", "rows")
def no_padding_counts_in_the_range(subject: Subject) -> None:
    for name in subject.formats(*AFFINE):
        for width in widths(subject, 3, 5, 80, 96):
            for low in (100.0, -200.0):
                rows = held(subject, low + subject.rng.uniform(0, 1, size=(2, width)))
                got = quantized(subject, rows, name)
                same(got.zero + np.float32(0), rows.min(axis=1) + np.float32(0), f"{name} zeros of rows of {width} near {low}")
                same_scale(subject, got.scale, oracle.store(rows, name).scale, f"{name} scales of rows of {width} near {low}")
