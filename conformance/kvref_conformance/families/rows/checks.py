"""Checks of FMT-LEVEL, FMT-INT8 and FMT-FP8-08 to FMT-FP8-10: rows with one scale each."""

from functools import partial

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject, narrow_dtype
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families.rows.input_rows import (
    NEAR,
    adversarial,
    formats_of_rows,
    largest,
    representable_rows,
    rows_containing,
    rows_of_allowed_width,
    toward_zero,
    widths,
)
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.adversarial import static_scale_rows
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    STATIC_FORMATS,
    SYMMETRIC_FORMATS,
    element_of,
    ggml,
    small_floats,
    static_scale,
)
from kvref_conformance.oracle.formats import per_row as oracle
from kvref_conformance.oracle.formats.stored_rows import StoredRows, round_to_float32
from kvref_conformance.testlib.assertions import (
    KeptResults,
    assert_equal,
    assert_read,
    assert_same,
    assert_shape,
    assert_true,
    assert_within,
    may_raise,
    raises,
)
from kvref_conformance.testlib.fixtures import round_to_input_dtype, strided_view
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.thread_stress import NUM_THREADS, assert_threads_do_not_interfere

FP8 = ("float8_e4m3fn", "float8_e5m2")
NEGATIVE_ZERO = 0x80  # the code of -0 in both
EVERY = (*SYMMETRIC_FORMATS, *AFFINE_FORMATS, *FORMATS_IN_GROUPS)
ORDINARY = np.ones((1, 2), np.float32)  # rows around the row under test: a wrong use of their scale shows


def quantize_and_read(subject: Subject, rows: NDArray, format: str) -> StoredRows:
    """Returns what the implementation stores, with codes unpacked and scales as float32, and the values it reads back."""
    family, width = subject.new("rows"), rows.shape[1]
    codes, scale, zero = family.quantize(rows, format)
    values = family.dequantize(codes, scale, zero, width, format)
    if format in GGML_FORMATS:
        per_row = width // 32 * ggml.LAYOUT[format].itemsize
        codes = assert_shape(codes, (len(codes), per_row), f"{format} bytes of rows of {width}")
    elif scale is None:
        raise NotOffered("scales separate from the codes")
    return oracle.as_read(codes, scale, zero, width, format, values)


def read_back(subject: Subject, rows: NDArray | OwnArray, width: int, format: str) -> NDArray:
    """Returns the values that rows read back as, whatever form they are stored in."""
    family = subject.new("rows")
    values: NDArray = family.dequantize(*family.quantize(rows, format), width, format)
    return values


def same_scale(subject: Subject, got: NDArray, want: NDArray, what: str, format: str = "") -> None:
    """Raises ClauseViolation unless scales are bit-identical, or within one unit in the last place at level tolerant
    (FMT-LEVEL-02).
    """
    if subject.level == "exact":
        assert_same(got, want, what)
    else:
        assert_within(got, want, oracle.ulp_of_scales(want, format), what)


def same_values(subject: Subject, got: NDArray, want: NDArray, what: str) -> None:
    """Raises ClauseViolation unless values are bit-identical; at level tolerant, 0 and -0 are equal."""
    if subject.level == "exact":
        assert_same(got, want, what)
    else:
        assert_same(got + np.float32(0), want + np.float32(0), what)


def assert_codes(subject: Subject, got: NDArray, rows: NDArray, format: str, scales: StoredRows | None = None) -> None:
    """Raises ClauseViolation unless codes are those of the definition, or admissible at level tolerant.

    scales: stored rows with the scales by which the numbers were divided; None for the scales of the definition.
    """
    scales = None if subject.level == "exact" else scales
    want = (oracle.store(rows, format, got) if scales is None else oracle.codes_for_scales(rows, scales, format)).codes
    differs = np.argwhere(got != want) if subject.level == "exact" else np.array(oracle.inadmissible(rows, got, format, scales))
    if len(differs):
        n, i = (int(index) for index in differs[0])
        kind = "" if subject.level == "exact" else " or another admissible code"
        what = f"{format} code {i} of row {n} ({float(rows[n, i])!r}; {len(differs)} of {got.size} wrong)"
        raise ClauseViolation(what, f"{want[n, i]}{kind}", str(got[n, i]))


@check("FMT-LEVEL-01", "rows")
def quantize_stores_the_codes_and_scales_of_the_definition(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    for name in formats_of_rows(subject, *EVERY):
        for width in widths(subject, 1, 5, 64, format=name):
            rows = adversarial(subject, width, name)
            got = quantize_and_read(subject, rows, name)
            want = oracle.store(rows, name, got.codes)
            for part in ("scale", "zero", "values"):
                assert_same(getattr(got, part), getattr(want, part), f"{name} {part} of rows of {width}")
            assert_codes(subject, got.codes, rows, name)


@check("FMT-LEVEL-02ab", "rows")
def quantize_stores_admissible_codes_and_scales_within_one_ulp(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        for width in widths(subject, 1, 5, 64, format=name):
            rows = adversarial(subject, width, name)
            got, want = quantize_and_read(subject, rows, name), oracle.store(rows, name)
            assert_within(got.scale, want.scale, oracle.ulp_of_scales(want.scale, name), f"{name} scale of rows of {width}")
            wrong = oracle.inadmissible(rows, got.codes, name, got if name in GROUP_FORMATS else None)
            if wrong:
                n, i = wrong[0]
                raise ClauseViolation(
                    f"{name} code of {float(rows[n, i])!r}", f"{want.codes[n, i]}, or admissible", str(got.codes[n, i])
                )


def assert_within_bound(subject: Subject, *formats: str) -> None:
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
            assert_within(values, rows, tolerant if subject.level == "tolerant" else exact, f"{name} values of rows of {width}")


@check("FMT-LEVEL-03a", "rows")
def dequantize_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *EVERY)


@check("FMT-LEVEL-03b", "rows")
def quantize_does_not_clip_a_row_to_an_earlier_scale(subject: Subject) -> None:
    for name in subject.formats(*SYMMETRIC_FORMATS):
        small, large = np.full((1, 4), 0.5), np.array([[100.0, -300.0, 7.0, 0.0]])
        family = subject.new("rows")
        for rows in (rows_of_allowed_width(subject, small), rows_of_allowed_width(subject, large)):
            got = family.dequantize(*family.quantize(rows, name), rows.shape[1], name)
            assert_within(got, rows, np.abs(rows).max() / 8, f"{name} values of {rows.tolist()}")


@check("FMT-LEVEL-05", "rows")
def dequantize_of_finite_rows_is_finite(subject: Subject) -> None:
    most = largest(subject)
    ends = [[most, most], [1e5, 1e5], [most, 0.0], [-most, 1.0], [most, NEAR[0] * most], [most, NEAR[1] * most], [-1.0, most]]
    near = toward_zero(subject, np.array([most])) * np.linspace(1, 0.999, 20, dtype=np.float32)
    for row in np.concatenate([np.array(ends), np.stack([near, near / 3], axis=1)])[:, None]:
        for name in formats_of_rows(subject, *EVERY):
            rows = rows_of_allowed_width(subject, np.concatenate([ORDINARY, row, ORDINARY]), name)
            with may_raise("NonFinite"):
                got = read_back(subject, rows, rows.shape[1], name)
                what = f"{row.tolist()} between rows of ones, in {name}"
                assert_true(np.isfinite(got).all(), what, "finite values, or NonFinite", got.tolist())


@check("FMT-LEVEL-04a", "rows")
def quantize_widens_float16(subject: Subject) -> None:
    assert_widened(subject, "float16")


@check("FMT-LEVEL-04a", "rows")
def quantize_widens_bfloat16(subject: Subject) -> None:
    assert_widened(subject, "bfloat16")


def assert_widened(subject: Subject, dtype: str) -> None:
    """Compares rows of a dtype with the same rows in float32, or with the expected values if it does not accept float32."""
    dtypes = subject.limits.dtypes("rows")
    if dtype not in dtypes:
        raise NotOffered(f"{dtype} arrays, where its limits say {' or '.join(dtypes)}")
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, 6, format=name)
        rows = subject.rng.normal(size=(3, width)).astype(narrow_dtype(dtype))
        try:
            own = subject.to_own_array(rows)
        except Exception as error:
            raise NotOffered(f"{dtype} arrays") from error
        got, wide = read_back(subject, own, width, name), rows.astype(np.float32)
        if "float32" in dtypes:
            assert_same(got, read_back(subject, wide, width, name), f"{name} values of {dtype} rows, compared with float32 rows")
        else:
            assert_read(subject, got, oracle.read_as(wide, name), f"{name} values of {dtype} rows")


@check("FMT-LEVEL-04b", "rows")
def quantize_of_float64_raises(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, 6, format=name)
        with raises("DtypeMismatch"):
            subject.new("rows").quantize(subject.rng.normal(size=(3, width)), name)


@check("FMT-INT8-01", "rows")
def quantize_divides_the_maximum_by_127(subject: Subject) -> None:
    subject.formats("int8")
    maxima = np.concatenate([2.0 ** subject.rng.uniform(-30, 120, size=500), [0.0, 1e-6, 127 * 2.0**-23, 1.0, 127.0]])
    rows = rows_of_allowed_width(subject, np.stack([maxima * f for f in (0.25, -1.0, 0.5)], axis=1))
    same_scale(subject, quantize_and_read(subject, rows, "int8").scale, oracle.store(rows, "int8").scale, "scales")


@check("FMT-INT8-02ab", "rows")
def quantize_rounds_quotients_half_away_from_zero(subject: Subject) -> None:
    subject.formats("int8")
    ties = rows_containing(subject, [127.0], np.arange(-126, 126) + 0.5, 8)
    for rows in (ties, toward_zero(subject, ties), adversarial(subject, 64, "int8")):
        got = quantize_and_read(subject, rows, "int8")
        assert_true(got.codes.min() >= -127, "the smallest code", "at least -127", got.codes.min())
        assert_codes(subject, got.codes, rows, "int8")


def assert_values_are_codes_times_scales(subject: Subject, name: str) -> None:
    rows = adversarial(subject, 7, name)
    got = quantize_and_read(subject, rows, name)
    decoded = got.codes if name == "int8" else small_floats.decoded(name)[got.codes]
    want = round_to_float32(decoded * np.asarray(got.scale, dtype=np.float64)[:, None]).astype(np.float32)
    same_values(subject, got.values, want, f"{name} values, compared with codes * scale")


@check("FMT-INT8-03", "rows")
def dequantize_multiplies_code_and_scale(subject: Subject) -> None:
    subject.formats("int8")
    assert_values_are_codes_times_scales(subject, "int8")


@check("FMT-INT8-04ab", "rows")
def quantize_of_zeros_stores_zeros(subject: Subject) -> None:
    subject.formats("int8")
    rows = rows_of_allowed_width(subject, np.array([[0.0, -0.0, 0.0]]))
    got = quantize_and_read(subject, rows, "int8")
    assert_equal(got.codes.tolist(), [[0] * rows.shape[1]], "codes of a row of zeros")
    assert_equal(got.values.tolist(), [[0.0] * rows.shape[1]], "values of a row of zeros")


@check("FMT-INT8-05ab", "rows")
def quantize_of_a_negated_row_negates_its_codes(subject: Subject) -> None:
    subject.formats("int8")
    rows = adversarial(subject, 9, "int8")
    positive, negative = quantize_and_read(subject, rows, "int8"), quantize_and_read(subject, -rows, "int8")
    assert_same(negative.codes, -positive.codes, "codes of the negated rows")
    assert_same(negative.scale, positive.scale, "scales of the negated rows")


@check("FMT-INT8-06", "rows")
def quantize_uses_the_code_127(subject: Subject) -> None:
    subject.formats("int8")
    rows = adversarial(subject, 9, "int8")
    rows = rows[np.abs(rows).max(axis=1) > 127 * 2.0**-23]
    largest = np.abs(quantize_and_read(subject, rows, "int8").codes).max(axis=1)
    assert_same(largest, np.full(len(rows), 127), "largest |code| of each row above the floor")


@check("FMT-INT8-07", "rows")
def quantize_of_rows_times_a_power_of_two_keeps_the_codes(subject: Subject) -> None:
    subject.formats("int8")
    rows = round_to_input_dtype(subject, subject.rng.normal(size=(50, subject.size("width", 9))))
    codes = quantize_and_read(subject, rows, "int8").codes
    for power in (-10, -3, 1, 60):
        scaled = rows * np.float32(2.0**power)
        exact = (round_to_input_dtype(subject, scaled) == scaled).all(axis=1)  # rows without under- or overflow,
        exact &= np.abs(scaled).max(axis=1) > 127 * 2.0**-23  # also of the scale
        assert_same(quantize_and_read(subject, scaled[exact], "int8").codes, codes[exact], f"codes of rows * 2^{power}")


def assert_requantized(subject: Subject, name: str) -> None:
    once = quantize_and_read(subject, adversarial(subject, 9, name), name)
    values = np.asarray(once.values, dtype=np.float32)
    exact = (round_to_input_dtype(subject, values) == values).all(axis=1)  # values that the input dtype can represent
    twice = quantize_and_read(subject, values[exact], name)
    got, want = twice.codes, once.codes[exact]
    if name in FP8 and subject.level == "tolerant":  # a zero has either sign
        got, want = (np.where(part == NEGATIVE_ZERO, 0, part) for part in (got, want))
    assert_same(got, want, f"{name} codes of requantized values")
    same_scale(subject, twice.scale, once.scale[exact], f"{name} scales of requantized values")


@check("FMT-INT8-08ab", "rows")
def quantize_of_int8_values_returns_their_codes(subject: Subject) -> None:
    subject.formats("int8")
    assert_requantized(subject, "int8")


@check("FMT-INT8-09", "rows")
def dequantize_of_int8_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, "int8")


@check("FMT-FP8-08abc", "rows")
def quantize_scales_clips_and_encodes_fp8_rows(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        for width in widths(subject, 1, 5, 64):
            rows = adversarial(subject, width, name)
            got = quantize_and_read(subject, rows, name)
            same_scale(subject, got.scale, oracle.store(rows, name).scale, f"{name} scales")
            assert_codes(subject, got.codes, rows, name)
            assert_true(np.isfinite(got.values).all(), f"{name} values of finite rows", "finite values", got.values.max())
        assert_values_are_codes_times_scales(subject, name)


@check("FMT-FP8-09", "rows")
def dequantize_of_fp8_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *FP8)


@check("FMT-FP8-10ab", "rows")
def quantize_of_fp8_values_returns_their_codes(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        assert_requantized(subject, name)


# Checks of FMT-AFF: rows with a scale and a zero.


@check("FMT-AFF-01ab", "rows")
def quantize_stores_a_scale_and_zero_that_span_the_row(subject: Subject) -> None:
    for name in subject.formats(*AFFINE_FORMATS):
        for width in widths(subject, 1, 6, 33):
            rows = adversarial(subject, width, name)
            got, want = quantize_and_read(subject, rows, name), oracle.store(rows, name)
            same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {width}")
            assert_within(got.zero, want.zero, 0, f"{name} zeros of rows of {width}")  # 0 and -0 are equal


@check("FMT-AFF-01bc", "rows")
def quantize_of_a_range_beyond_float32_raises(subject: Subject) -> None:
    formats = subject.formats(*AFFINE_FORMATS)
    subject.require_size(width=3)
    if subject.dtype == "float16":
        raise NotOffered("float16 rows whose range overflows float32")
    for name in formats:
        widest = rows_of_allowed_width(subject, np.array([[1.69e38, -1.69e38, 0.0]]))
        got, want = quantize_and_read(subject, widest, name), oracle.store(widest, name)
        same_scale(subject, got.scale, want.scale, f"{name} scale of +-1.69e38")
        for wide in ([3e38, -3e38, 0.0], [-1.8e38, 0.0, 1.8e38]):
            with raises("NonFinite"):
                subject.new("rows").quantize(rows_of_allowed_width(subject, np.array([[1.0, 2.0, 3.0], wide])), name)


@check("FMT-AFF-02", "rows")
def quantize_rounds_affine_codes_half_away_and_clamps_them(subject: Subject) -> None:
    for name in subject.formats(*AFFINE_FORMATS):
        top = oracle.STEPS[name]
        ties = rows_containing(subject, [0.0, top], np.arange(0, top) + 0.5, top + 2)
        for rows in (ties, round_to_input_dtype(subject, ties + np.float32(1024)), adversarial(subject, 33, name)):
            got = quantize_and_read(subject, rows, name)
            assert_true(got.codes.min() >= 0 and got.codes.max() <= top, f"{name} codes", f"in [0, {top + 1})", got.codes.max())
            assert_codes(subject, got.codes, rows, name)


@check("FMT-AFF-04", "rows")
def dequantize_of_affine_codes_rounds_twice(subject: Subject) -> None:
    for name in subject.formats(*AFFINE_FORMATS):
        rows = adversarial(subject, 33, name)
        got = quantize_and_read(subject, rows, name)
        scale, zero = (np.asarray(part, dtype=np.float64)[:, None] for part in (got.scale, got.zero))
        want = round_to_float32(round_to_float32(got.codes * scale) + zero).astype(np.float32)
        same_values(subject, got.values, want, f"{name} values, compared with fl(fl(code * scale) + zero)")


@check("FMT-AFF-05", "rows")
def dequantize_of_a_constant_row_is_exact(subject: Subject) -> None:
    for name in subject.formats(*AFFINE_FORMATS):
        constants = np.array([[0.0], [3.14159], [-1e-12], [1e30], [-7.0]])
        rows = representable_rows(subject, np.repeat(constants, subject.size("width", 5), axis=1))
        rows += np.float32(0)  # -0.0 reads back as 0.0
        got = quantize_and_read(subject, rows, name)
        assert_same(got.values, rows, f"{name} values of constant rows")
        assert_equal(int(got.codes.max()), 0, f"{name} codes of constant rows")


@check("FMT-AFF-06a", "rows")
def quantize_packs_two_codes_per_byte_low_nibble_first(subject: Subject) -> None:
    subject.formats("q4")
    for width in widths(subject, 1, 2, 6, 80, 96):
        assert_packed(subject, width)


@check("FMT-AFF-06b", "rows")
def quantize_pads_an_odd_row(subject: Subject) -> None:
    subject.formats("q4")
    odd = [width for width in widths(subject, 1, 5, 33, 81) if width % 2]
    if not odd:
        raise NotOffered("rows of an odd width")
    for width in odd:
        assert_packed(subject, width)


def assert_packed(subject: Subject, width: int) -> None:
    family, rows = subject.new("rows"), subject.rng.integers(0, 16, size=(3, width)).astype(np.float32)
    if width > 1:
        rows[:, 0], rows[:, 1] = 0, 15
    codes, scale, zero = family.quantize(rows, "q4")
    want = oracle.store(rows, "q4").codes
    padded = np.concatenate([want, np.zeros((3, width % 2), np.int64)], axis=1)
    packed = (padded[:, 0::2] + 16 * padded[:, 1::2]).astype(np.uint8)
    assert_same(codes, packed, f"bytes of q4 rows of {width}")
    assert_same(family.dequantize(codes, scale, zero, width, "q4"), oracle.store(rows, "q4").values, f"q4 values of {width}")


@check("FMT-AFF-07", "rows")
def dequantize_of_affine_codes_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *AFFINE_FORMATS)


@check("FMT-AFF-08", "rows")
def quantize_excludes_padding_from_the_range(subject: Subject) -> None:
    for name in subject.formats(*AFFINE_FORMATS):
        for width in widths(subject, 3, 5, 80, 96):
            for low in (100.0, -200.0):
                rows = round_to_input_dtype(subject, low + subject.rng.uniform(0, 1, size=(2, width)))
                got = quantize_and_read(subject, rows, name)
                assert_within(got.zero, rows.min(axis=1), 0, f"{name} zeros of rows of {width} near {low}")
                same_scale(subject, got.scale, oracle.store(rows, name).scale, f"{name} scales of rows of {width} near {low}")


# Checks of LAW-16 for this family.


@check("LAW-16", "rows")
def quantize_does_not_modify_its_argument(subject: Subject) -> None:
    subject.require_same_process()
    for name in formats_of_rows(subject, *EVERY):
        rows = round_to_input_dtype(subject, subject.rng.normal(size=(3, *widths(subject, 5, format=name))))
        own = subject.to_own_array(rows)
        subject.new("rows").quantize(own, name)
        assert_same(subject.numpy(own.array), rows, f"the input rows after quantize to {name}")


# Checks of LAW-18: rows as long as all heads of a token together, and as many rows as the tokens of a prompt.


@check("LAW-15", "rows")
def quantize_accepts_views(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        kernels = subject.new("rows")
        rows = rows_of_allowed_width(subject, subject.rng.normal(size=(3, 7)).astype(np.float32), name)
        got, want = kernels.quantize(strided_view(subject, rows), name), kernels.quantize(rows, name)
        for part, one, other in zip(("codes", "scales", "zeros"), got, want, strict=True):
            if other is not None:
                assert_same(one, other, f"{part} of a strided view of rows, compared with a copy, in {name}")


@check("LAW-15", "rows")
def dequantize_accepts_views(subject: Subject) -> None:
    for name in formats_of_rows(subject, *EVERY):
        kernels = subject.new("rows")
        rows = rows_of_allowed_width(subject, subject.rng.normal(size=(3, 7)).astype(np.float32), name)
        stored, width = kernels.quantize(rows, name), rows.shape[1]
        views = (None if part is None else strided_view(subject, np.asarray(part), cast=False) for part in stored)
        got, want = kernels.dequantize(*views, width, name), kernels.dequantize(*stored, width, name)
        bound = 0.0 if subject.level == "exact" else 2.0**-16 * float(np.abs(want).max())
        assert_within(got, want, bound, f"{name} values of strided views of codes and scales, compared with copies")


@check("LAW-17", "rows")
def quantize_and_dequantize_results_stay_after_later_calls(subject: Subject) -> None:
    kept, kernels = KeptResults(subject), subject.new("rows")
    for name in formats_of_rows(subject, *EVERY):
        for number in range(2):
            rows = rows_of_allowed_width(subject, subject.rng.normal(size=(3, 7)).astype(np.float32), name)
            stored = kernels.quantize(rows, name)
            made = kernels.as_is("quantize", rows, name)
            kept.add(f"quantize to {name}, call {number}", tuple(part for part in made if part is not None))
            kept.add(f"dequantize of {name}, call {number}", kernels.as_is("dequantize", *stored, rows.shape[1], name))
    kept.assert_unchanged()


@check("LAW-21a", "rows")
def quantize_and_dequantize_in_threads_return_what_they_return_alone(subject: Subject) -> None:
    kernels, formats = subject.new("rows"), formats_of_rows(subject, *EVERY)

    def quantize_and_dequantize(numbers: NDArray, name: str) -> list[NDArray]:
        rows = rows_of_allowed_width(subject, numbers, name)
        stored = kernels.quantize(rows, name)
        return [*(part for part in stored if part is not None), kernels.dequantize(*stored, rows.shape[1], name)]

    given = [subject.rng.normal(size=(5, 64)).astype(np.float32) for _ in range(NUM_THREADS)]
    calls = [[partial(quantize_and_dequantize, each, name) for name in formats] for each in given]
    assert_threads_do_not_interfere(subject, calls, "quantized rows")


def assert_quantized(subject: Subject, count: int, wanted: int) -> None:
    """Checks every format at the allowed width nearest to `wanted`. The largest number of each row is its last."""
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, wanted, format=name)
        rows = round_to_input_dtype(subject, subject.rng.normal(size=(count, width)))
        rows[:, -1] = 7
        got, want = quantize_and_read(subject, rows, name), oracle.store(rows, name)
        same_scale(subject, got.scale, want.scale, f"{name} scales of {count} rows of {width}", name)
        assert_codes(subject, got.codes, rows, name, got if name in GROUP_FORMATS else None)
        if subject.level == "exact":
            assert_same(got.values, want.values, f"{name} values of {count} rows of {width}")
        else:
            bound = oracle.bounds(rows, oracle.with_scales(rows, got, name), name)[1]
            assert_within(got.values, rows, bound, f"{name} values of {count} rows of {width}")


@check("LAW-18", "rows")
def quantize_stores_long_and_many_rows(subject: Subject) -> None:
    for count, width in ((2, 1023), (2, 1025), (2, 4096), (2, 8193), (1025, 16), (4097, 16)):
        assert_quantized(subject, count, width)


@check("LAW-18", "rows", real=True)
def quantize_stores_rows_of_the_sizes_of_models(subject: Subject) -> None:
    assert_quantized(subject, 3, 70_001)
    assert_quantized(subject, 70_001, 8)


# Checks of FMT-STATIC: FP8 with a given scale.

SCALES = (1.0, 0.25, 0.037, 0.0011, 2.9)


def rows_for_scale(subject: Subject, format: str, scale: float) -> NDArray:
    (width,) = widths(subject, 64)
    rows = representable_rows(subject, static_scale_rows(subject.rng, width, format, scale))
    if not len(rows):
        raise NotOffered(f"rows in a dtype with the range of a scale of {scale}")
    return rows


def quantize_with_static_scale(subject: Subject, rows: NDArray, format: str, scale: float | None) -> StoredRows:
    """Returns the codes and the values that they read back as."""
    family = subject.new("rows") if scale is None else subject.new("rows", given_scale=scale)
    codes, _, _ = family.quantize(rows, format)
    values = family.dequantize(codes, None, None, rows.shape[1], format)
    codes = assert_shape(codes, rows.shape, f"{format} codes").astype(np.int64)
    none = np.zeros(0, np.float32)
    return StoredRows(codes, none, none, values)


def assert_static_codes(subject: Subject, got: NDArray, rows: NDArray, format: str, scale: float) -> None:
    want = static_scale.store(rows, format, scale).codes
    exact = subject.level == "exact"
    wrong = np.argwhere(got != want).tolist() if exact else static_scale.inadmissible(rows, got, format, scale)
    if wrong:
        n, i = wrong[0]
        what = f"{format} code of {float(rows[n, i])!r} with a scale of {scale} ({len(wrong)} of {got.size} wrong)"
        raise ClauseViolation(what, str(want[n, i]) + ("" if exact else " or another admissible code"), str(got[n, i]))


@check("FMT-STATIC-01", "rows")
def quantize_divides_by_the_static_scale(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        for scale in SCALES:
            rows = rows_for_scale(subject, name, scale)
            assert_static_codes(subject, quantize_with_static_scale(subject, rows, name, scale).codes, rows, name, scale)


@check("FMT-STATIC-02", "rows")
def quantize_clips_to_the_range_of_the_static_scale(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        for scale in (1.0, 0.0011):
            most = np.float32(small_floats.MAX[element_of(name)]) * np.float32(scale)
            ends = np.minimum(most * np.array([1.0, 1.01, 1.2, 2.0, 1e3, 1e30], np.float32), np.float32(largest(subject)))
            (width,) = widths(subject, 12)
            rows = round_to_input_dtype(subject, np.resize(np.concatenate([ends, -ends]), (-(-12 // width), width)))
            got, want = quantize_with_static_scale(subject, rows, name, scale), static_scale.store(rows, name, scale)
            assert_true(np.isfinite(got.values).all(), f"{name} values of {rows.tolist()}", "finite values", got.values)
            beyond = np.abs(rows.astype(np.float64)) >= most
            what = f"{name} values of magnitudes from {most} on, with a scale of {scale}"
            same_values(subject, got.values[beyond], want.values[beyond], what)


@check("FMT-STATIC-03", "rows")
def dequantize_multiplies_code_and_static_scale(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        numbers = small_floats.decoded(element_of(name))
        codes = np.flatnonzero(np.isfinite(numbers)).astype(np.uint8)
        (width,) = widths(subject, 64)
        codes = np.resize(codes, (-(-len(codes) // width), width))
        for scale in SCALES:
            got = subject.new("rows", given_scale=scale).dequantize(codes, None, None, width, name)
            want = static_scale.decode_values(codes, name, scale)
            same_values(subject, got, want, f"{name} values of every code with a scale of {scale}")


@check("FMT-STATIC-04", "rows")
def quantize_with_a_static_scale_is_independent_of_other_rows(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        family, (width,) = subject.new("rows", given_scale=0.5), widths(subject, 8)
        quiet, loud = (round_to_input_dtype(subject, subject.rng.normal(size=(2, width)) * factor) for factor in (0.01, 100.0))
        for rows in (quiet, np.concatenate([loud, quiet]), loud, quiet):
            codes, _, _ = family.quantize(rows, name)
            values = family.dequantize(codes, None, None, width, name)
            want = static_scale.store(rows, name, 0.5)
            bound = 0.0 if subject.level == "exact" else 2 * static_scale.bound(rows, want, name)
            assert_within(values, want.values, bound, f"{name} values of rows next to, or after, rows of another magnitude")


@check("FMT-STATIC-05a", "rows")
def new_with_an_invalid_static_scale_raises(subject: Subject) -> None:
    subject.formats(*STATIC_FORMATS)
    for wrong in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf")))):
        with raises("ConfigError"):
            subject.new("rows", given_scale=wrong)


@check("FMT-STATIC-05c", "rows")
def new_without_a_static_scale_uses_one(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        rows = rows_for_scale(subject, name, 1.0)
        rows = rows[np.abs(rows).max(axis=1) <= small_floats.MAX[element_of(name)]]  # larger numbers belong to FMT-STATIC-02
        got = quantize_with_static_scale(subject, rows, name, None)
        assert_static_codes(subject, got.codes, rows, name, 1.0)
        same_values(
            subject, got.values, static_scale.decode_values(got.codes, name, 1.0), f"{name} values of codes without a given scale"
        )


@check("FMT-STATIC-07", "rows")
def dequantize_with_a_static_scale_is_within_the_bound(subject: Subject) -> None:
    for name in subject.formats(*STATIC_FORMATS):
        for scale in SCALES:
            rows = rows_for_scale(subject, name, scale)
            values = quantize_with_static_scale(subject, rows, name, scale).values
            bound = static_scale.bound(rows, static_scale.store(rows, name, scale), name)
            if subject.level == "tolerant":
                bound = bound * (1 + 2.0**-22) + 2.0**-22 * np.abs(rows.astype(np.float64))
            assert_within(values, rows, bound, f"{name} values of rows with a scale of {scale}")
