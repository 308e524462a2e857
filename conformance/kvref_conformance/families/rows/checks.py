"""Checks of FMT-LEVEL, FMT-INT8 and FMT-FP8-08 to FMT-FP8-10: rows with one scale each."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, may_raise, raises, read, same, shaped, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.calls import Own
from kvref_conformance.conversation.subject import Subject, narrow
from kvref_conformance.families.rows.handed import (
    NEAR,
    adversarial,
    formats_of_rows,
    largest,
    rows_of,
    spread,
    toward_zero,
    widths,
)
from kvref_conformance.oracle import elements, ggml
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import AFFINE, GGML, GROUPS, IN_GROUPS, SYMMETRIC
from kvref_conformance.oracle.stored import Stored, fl
from kvref_conformance.outcome import Broken, NotOffered

FP8 = ("float8_e4m3fn", "float8_e5m2")
NEGATIVE_ZERO = 0x80  # the code of -0 in both
EVERY = (*SYMMETRIC, *AFFINE, *IN_GROUPS)
ORDINARY = np.ones((1, 2), np.float32)  # rows around the row under test: a wrong use of their scale shows


def quantized(subject: Subject, rows: NDArray, format: str) -> Stored:
    """Returns what the implementation stores, with codes unpacked and scales as float32, and the values it reads back."""
    family, width = subject.new("rows"), rows.shape[1]
    codes, scale, zero = family.quantize(rows, format)
    values = family.dequantize(codes, scale, zero, width, format)
    if format in GGML:
        per_row = width // 32 * ggml.LAYOUT[format].itemsize
        codes = shaped(codes, (len(codes), per_row), f"{format} bytes of rows of {width}")
    elif scale is None:
        raise NotOffered("scales separate from the codes")
    return oracle.as_read(codes, scale, zero, width, format, values)


def read_back(subject: Subject, rows: NDArray | Own, width: int, format: str) -> NDArray:
    """Returns the values that rows read back as, whatever form they are stored in."""
    family = subject.new("rows")
    values: NDArray = family.dequantize(*family.quantize(rows, format), width, format)
    return values


def same_scale(subject: Subject, got: NDArray, want: NDArray, what: str, format: str = "") -> None:
    """Raises Broken unless scales are bit-identical, or within one unit in the last place at level tolerant (FMT-LEVEL-02)."""
    if subject.level == "exact":
        same(got, want, what)
    else:
        within(got, want, oracle.ulp_of_scales(want, format), what)


def same_values(subject: Subject, got: NDArray, want: NDArray, what: str) -> None:
    """Raises Broken unless values are bit-identical; at level tolerant, 0 and -0 are equal."""
    if subject.level == "exact":
        same(got, want, what)
    else:
        same(got + np.float32(0), want + np.float32(0), what)


def same_codes(subject: Subject, got: NDArray, rows: NDArray, format: str, made: Stored | None = None) -> None:
    """Raises Broken unless codes are those of the definition, or admissible at level tolerant.

    made: the stored rows whose scales the codes were made with; None for the scales of the definition.
    """
    made = None if subject.level == "exact" else made
    want = (oracle.store(rows, format, got) if made is None else oracle.as_made(rows, made, format)).codes
    differs = np.argwhere(got != want) if subject.level == "exact" else np.array(oracle.inadmissible(rows, got, format, made))
    if len(differs):
        n, i = (int(index) for index in differs[0])
        kind = "" if subject.level == "exact" else " or another admissible code"
        what = f"{format} code {i} of row {n} ({float(rows[n, i])!r}; {len(differs)} of {got.size} wrong)"
        raise Broken(what, f"{want[n, i]}{kind}", str(got[n, i]))


@check("FMT-LEVEL-01", "rows")
def codes_and_scales_equal_the_definition(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    for name in formats_of_rows(subject, *EVERY):
        for width in widths(subject, 1, 5, 64, format=name):
            rows = adversarial(subject, width, name)
            got = quantized(subject, rows, name)
            want = oracle.store(rows, name, got.codes)
            for part in ("scale", "zero", "values"):
                same(getattr(got, part), getattr(want, part), f"{name} {part} of rows of {width}")
            same_codes(subject, got.codes, rows, name)


@check("FMT-LEVEL-02ab", "rows")
def codes_are_admissible_and_scales_an_ulp_off_at_most(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        for width in widths(subject, 1, 5, 64, format=name):
            rows = adversarial(subject, width, name)
            got, want = quantized(subject, rows, name), oracle.store(rows, name)
            within(got.scale, want.scale, oracle.ulp_of_scales(want.scale, name), f"{name} scale of rows of {width}")
            wrong = oracle.inadmissible(rows, got.codes, name, got if name in GROUPS else None)
            if wrong:
                n, i = wrong[0]
                raise Broken(f"{name} code of {float(rows[n, i])!r}", f"{want.codes[n, i]}, or admissible", str(got.codes[n, i]))


def within_bound(subject: Subject, *formats: str) -> None:
    for name in formats_of_rows(subject, *formats):
        for width in widths(subject, 1, 5, 64, format=name):
            rows = adversarial(subject, width, name)
            family = subject.new("rows")
            codes, scale, zero = family.quantize(rows, name)
            values = family.dequantize(codes, scale, zero, width, name)
            want = oracle.store(rows, name)  # bound for the scale of the definition,
            if subject.level == "tolerant" and scale is not None:  # or for the scale that it chose within the tolerance
                want = oracle.with_scales(rows, oracle.as_read(codes, scale, zero, width, name, values), name)
            exact, tolerant = oracle.bounds(rows, want, name)
            within(values, rows, tolerant if subject.level == "tolerant" else exact, f"{name} values of rows of {width}")


@check("FMT-LEVEL-03a", "rows")
def every_value_read_is_within_the_bound(subject: Subject) -> None:
    within_bound(subject, *EVERY)


@check("FMT-LEVEL-03b", "rows")
def a_later_larger_row_is_not_clipped_to_an_earlier_scale(subject: Subject) -> None:
    for name in subject.formats(*SYMMETRIC):
        small, large = np.full((1, 4), 0.5), np.array([[100.0, -300.0, 7.0, 0.0]])
        family = subject.new("rows")
        for rows in (spread(subject, small), spread(subject, large)):
            got = family.dequantize(*family.quantize(rows, name), rows.shape[1], name)
            within(got, rows, np.abs(rows).max() / 8, f"{name} values of {rows.tolist()}")


@check("FMT-LEVEL-05", "rows")
def finite_rows_never_read_back_infinite(subject: Subject) -> None:
    most = largest(subject)
    ends = [[most, most], [1e5, 1e5], [most, 0.0], [-most, 1.0], [most, NEAR[0] * most], [most, NEAR[1] * most], [-1.0, most]]
    near = toward_zero(subject, np.array([most])) * np.linspace(1, 0.999, 20, dtype=np.float32)
    for row in np.concatenate([np.array(ends), np.stack([near, near / 3], axis=1)])[:, None]:
        for name in formats_of_rows(subject, *EVERY):
            rows = spread(subject, np.concatenate([ORDINARY, row, ORDINARY]), name)
            with may_raise("NonFinite"):
                got = read_back(subject, rows, rows.shape[1], name)
                true(
                    np.isfinite(got).all(),
                    f"{row.tolist()} between rows of ones, in {name}",
                    "finite values, or NonFinite",
                    got.tolist(),
                )


def _widened(subject: Subject, dtype: str) -> None:
    """Compares rows of a dtype with the same rows in float32, or with the expected values if it does not accept float32."""
    taken = subject.limits.dtypes("rows")
    if dtype not in taken:
        raise NotOffered(f"{dtype} arrays, where its limits say {' or '.join(taken)}")
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, 6, format=name)
        rows = subject.rng.normal(size=(3, width)).astype(narrow(dtype))
        try:
            own = subject.own(rows)
        except Exception as error:
            raise NotOffered(f"{dtype} arrays") from error
        got, wide = read_back(subject, own, width, name), rows.astype(np.float32)
        if "float32" in taken:
            same(got, read_back(subject, wide, width, name), f"{name} values of {dtype} rows, compared with float32 rows")
        else:
            read(subject, got, oracle.read_as(wide, name), f"{name} values of {dtype} rows")


@check("FMT-LEVEL-04a", "rows")
def float16_is_widened(subject: Subject) -> None:
    _widened(subject, "float16")


@check("FMT-LEVEL-04a", "rows")
def bfloat16_is_widened(subject: Subject) -> None:
    _widened(subject, "bfloat16")


@check("FMT-LEVEL-04b", "rows")
def float64_is_refused(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, 6, format=name)
        with raises("DtypeMismatch"):
            subject.new("rows").quantize(subject.rng.normal(size=(3, width)), name)


@check("FMT-INT8-01", "rows")
def the_scale_is_the_maximum_over_127(subject: Subject) -> None:
    subject.formats("int8")
    maxima = np.concatenate([2.0 ** subject.rng.uniform(-30, 120, size=500), [0.0, 1e-6, 127 * 2.0**-23, 1.0, 127.0]])
    rows = spread(subject, np.stack([maxima * f for f in (0.25, -1.0, 0.5)], axis=1))
    same_scale(subject, quantized(subject, rows, "int8").scale, oracle.store(rows, "int8").scale, "scales")


@check("FMT-INT8-02ab", "rows")
def codes_are_quotients_rounded_half_away(subject: Subject) -> None:
    subject.formats("int8")
    ties = rows_of(subject, [127.0], np.arange(-126, 126) + 0.5, 8)
    for rows in (ties, toward_zero(subject, ties), adversarial(subject, 64, "int8")):
        got = quantized(subject, rows, "int8")
        true(got.codes.min() >= -127, "the smallest code", "at least -127", got.codes.min())
        same_codes(subject, got.codes, rows, "int8")


def _value_is_decoded_times_scale(subject: Subject, name: str) -> None:
    rows = adversarial(subject, 7, name)
    got = quantized(subject, rows, name)
    decoded = got.codes if name == "int8" else elements.decoded(name)[got.codes]
    want = fl(decoded * np.asarray(got.scale, dtype=np.float64)[:, None]).astype(np.float32)
    same_values(subject, got.values, want, f"{name} values, compared with codes * scale")


@check("FMT-INT8-03", "rows")
def a_value_is_its_code_times_the_scale(subject: Subject) -> None:
    subject.formats("int8")
    _value_is_decoded_times_scale(subject, "int8")


@check("FMT-INT8-04ab", "rows")
def a_row_of_zeros_has_codes_of_zero(subject: Subject) -> None:
    subject.formats("int8")
    rows = spread(subject, np.array([[0.0, -0.0, 0.0]]))
    got = quantized(subject, rows, "int8")
    equal(got.codes.tolist(), [[0] * rows.shape[1]], "codes of a row of zeros")
    equal(got.values.tolist(), [[0.0] * rows.shape[1]], "values of a row of zeros")


@check("FMT-INT8-05ab", "rows")
def negating_a_row_negates_its_codes(subject: Subject) -> None:
    subject.formats("int8")
    rows = adversarial(subject, 9, "int8")
    one, other = quantized(subject, rows, "int8"), quantized(subject, -rows, "int8")
    same(other.codes, -one.codes, "codes of the negated rows")
    same(other.scale, one.scale, "scales of the negated rows")


@check("FMT-INT8-06", "rows")
def some_code_is_127(subject: Subject) -> None:
    subject.formats("int8")
    rows = adversarial(subject, 9, "int8")
    rows = rows[np.abs(rows).max(axis=1) > 127 * 2.0**-23]
    largest = np.abs(quantized(subject, rows, "int8").codes).max(axis=1)
    same(largest, np.full(len(rows), 127), "largest |code| of each row above the floor")


@check("FMT-INT8-07", "rows")
def scaling_by_a_power_of_two_keeps_the_codes(subject: Subject) -> None:
    subject.formats("int8")
    rows = held(subject, subject.rng.normal(size=(50, subject.size("width", 9))))
    codes = quantized(subject, rows, "int8").codes
    for power in (-10, -3, 1, 60):
        scaled = rows * np.float32(2.0**power)
        exact = (held(subject, scaled) == scaled).all(axis=1)  # rows without under- or overflow,
        exact &= np.abs(scaled).max(axis=1) > 127 * 2.0**-23  # also of the scale
        same(quantized(subject, scaled[exact], "int8").codes, codes[exact], f"codes of rows * 2^{power}")


def _requantizing_is_a_fixed_point(subject: Subject, name: str) -> None:
    once = quantized(subject, adversarial(subject, 9, name), name)
    values = np.asarray(once.values, dtype=np.float32)
    exact = (held(subject, values) == values).all(axis=1)  # values that the input dtype can represent
    twice = quantized(subject, values[exact], name)
    got, want = twice.codes, once.codes[exact]
    if name in FP8 and subject.level == "tolerant":  # a zero has either sign
        got, want = (np.where(part == NEGATIVE_ZERO, 0, part) for part in (got, want))
    same(got, want, f"{name} codes of requantized values")
    same_scale(subject, twice.scale, once.scale[exact], f"{name} scales of requantized values")


@check("FMT-INT8-08ab", "rows")
def requantizing_changes_nothing(subject: Subject) -> None:
    subject.formats("int8")
    _requantizing_is_a_fixed_point(subject, "int8")


@check("FMT-INT8-09", "rows")
def int8_values_are_within_half_a_step_and_rounding(subject: Subject) -> None:
    within_bound(subject, "int8")


@check("FMT-FP8-08abc", "rows")
def fp8_rows_are_scaled_clipped_and_encoded(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        for width in widths(subject, 1, 5, 64):
            rows = adversarial(subject, width, name)
            got = quantized(subject, rows, name)
            same_scale(subject, got.scale, oracle.store(rows, name).scale, f"{name} scales")
            same_codes(subject, got.codes, rows, name)
            true(np.isfinite(got.values).all(), f"{name} values of finite rows", "finite values", got.values.max())
        _value_is_decoded_times_scale(subject, name)


@check("FMT-FP8-09", "rows")
def fp8_values_are_within_half_a_unit_and_rounding(subject: Subject) -> None:
    within_bound(subject, *FP8)


@check("FMT-FP8-10ab", "rows")
def requantizing_fp8_changes_nothing(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        _requantizing_is_a_fixed_point(subject, name)
