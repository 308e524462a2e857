"""Checks of formats with one scale per group: FMT-GGML (byte for byte), FMT-GROUP, FMT-SMALL, FMT-MX and FMT-ROT."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.rows.checks import (
    assert_codes,
    assert_within_bound,
    quantize_and_read,
    read_back,
    same_scale,
    same_values,
)
from kvref_conformance.families.rows.input_rows import (
    adversarial,
    all_formats_of_rows,
    formats_of_rows,
    largest,
    representable_rows,
    rows_of_allowed_width,
    widths,
)
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    bits_of,
    ggml,
    group_of,
    hadamard_rotation,
    inner_of,
    mx,
    small_floats,
)
from kvref_conformance.oracle.formats import per_row as oracle
from kvref_conformance.oracle.formats.per_group import is_affine, top_of
from kvref_conformance.oracle.formats.stored_rows import StoredRows, round_to_float32
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_same,
    assert_true,
    assert_within,
    assert_within_norm,
    may_raise,
    raises,
)
from kvref_conformance.testlib.fixtures import round_to_input_dtype
from kvref_conformance.testlib.registry import check


@check("FMT-GGML-01", "rows")
def dequantize_reads_the_bytes_of_ggml_blocks(subject: Subject) -> None:
    for name in formats_of_rows(subject, *GGML_FORMATS):
        (width,) = widths(subject, 64, format=name)
        size = ggml.LAYOUT[name].itemsize
        stored = subject.rng.integers(0, 256, size=(80, width // 32 * size)).astype(np.uint8)
        halves = stored.reshape(-1, size)[:, 1 : 4 if name.endswith("_1") else 2 : 2]
        halves &= 0xBF  # every float16 except the largest, infinities and NaNs
        got = subject.new("rows").dequantize(stored, None, None, width, name)
        same_values(subject, got, ggml.read(stored, name).values, f"{name} values of random bytes")


def assert_stored_as_ggml(subject: Subject, *names: str) -> None:
    for name in formats_of_rows(subject, *names):
        for width in widths(subject, 32, 128, format=name):
            rows = adversarial(subject, width, name)
            got, want = quantize_and_read(subject, rows, name), oracle.store(rows, name)
            same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {width}", name)
            if name in ("q4_1", "q5_1"):
                same_scale(subject, got.zero, want.zero, f"{name} least values of rows of {width}", name)
            assert_codes(subject, got.codes, rows, name)


@check("FMT-GGML-02ab", "rows")
def quantize_to_q8_0_multiplies_by_the_reciprocal_of_the_scale(subject: Subject) -> None:
    assert_stored_as_ggml(subject, "q8_0")


@check("FMT-GGML-03ab", "rows")
def quantize_gives_the_largest_magnitude_the_least_code(subject: Subject) -> None:
    assert_stored_as_ggml(subject, "q4_0", "q5_0")


@check("FMT-GGML-04abc", "rows")
def quantize_counts_codes_from_the_least_value(subject: Subject) -> None:
    assert_stored_as_ggml(subject, "q4_1", "q5_1")


@check("FMT-GGML-05ab", "rows")
def quantize_to_iq4_nl_uses_the_nearest_number_of_its_table(subject: Subject) -> None:
    assert_stored_as_ggml(subject, "iq4_nl")


@check("FMT-GGML-06", "rows")
def dequantize_of_ggml_blocks_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *GGML_FORMATS)


@check("FMT-GGML-07", "rows")
def dequantize_of_a_block_of_zeros_returns_zeros(subject: Subject) -> None:
    for name in formats_of_rows(subject, *GGML_FORMATS):
        rows = rows_of_allowed_width(subject, np.array([[0.0, -0.0, 0.0], [1e-40, -1e-40, 0.0]]), name)
        values = quantize_and_read(subject, rows, name).values
        assert_same(np.abs(values), np.zeros_like(rows), f"{name} values of zeros and of numbers below every scale")
        if name in ("q4_1", "q5_1"):
            rows = rows_of_allowed_width(subject, np.array([[5.0], [-3.0]]), name)
            values = quantize_and_read(subject, rows, name).values
            assert_same(values, rows, f"{name} values of rows of equal numbers, whose scale is 0")


# Checks of FMT-GROUP and FMT-SMALL: scales of groups along head_dim, and codes of less than a byte.

SMALL = tuple(name for name in (*GROUP_FORMATS, *MX_FORMATS, *NVFP4_FORMATS) if bits_of(name) < 8)


@check("FMT-GROUP-01ab", "rows")
def quantize_rounds_the_scale_and_zero_of_each_group_once(subject: Subject) -> None:
    for name in all_formats_of_rows(subject, *GROUP_FORMATS):
        rows = adversarial(subject, 128, name)
        got, want = quantize_and_read(subject, rows, name), oracle.store(rows, name)
        same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {rows.shape[1]}", name)
        if is_affine(name):
            alike = assert_same if subject.level == "exact" else partial(assert_within, bound=0)  # 0 and -0 are both right
            alike(got.zero, want.zero, what=f"{name} zeros of rows of {rows.shape[1]}")


@check("FMT-GROUP-02", "rows")
def quantize_divides_by_the_stored_scale_of_the_group(subject: Subject) -> None:
    for name in all_formats_of_rows(subject, *GROUP_FORMATS):
        rows = adversarial(subject, 128, name)
        got = quantize_and_read(subject, rows, name)
        least = 0 if is_affine(name) else -top_of(name)
        inside = got.codes.min() >= least and got.codes.max() <= top_of(name)
        assert_true(inside, f"{name} codes", f"in [{least}, {top_of(name) + 1})", got.codes)
        assert_codes(subject, got.codes, rows, name, got)


@check("FMT-GROUP-03", "rows")
def quantize_of_a_width_that_is_not_a_multiple_of_the_group_raises(subject: Subject) -> None:
    tried = [
        (name, width)
        for name in formats_of_rows(subject, *FORMATS_IN_GROUPS)
        for width in (group_of(name) + 1, group_of(name) // 2, 2 * group_of(name) - 8)
        if subject.size("width", width) == width
    ]
    if not tried:
        raise NotOffered("rows of a width that is not a multiple of a group")
    for name, width in tried:
        with raises("ConfigError"):
            subject.new("rows").quantize(round_to_input_dtype(subject, subject.rng.normal(size=(2, width))), name)


@check("FMT-GROUP-04", "rows")
def dequantize_multiplies_the_code_and_the_scale_of_its_group(subject: Subject) -> None:
    for name in all_formats_of_rows(subject, *GROUP_FORMATS):
        rows = adversarial(subject, 256, name)
        got = quantize_and_read(subject, rows, name)
        scale, zero = (oracle.each_of(part, rows.shape[1]) for part in (got.scale, got.zero))
        want = round_to_float32(got.codes * scale)
        want = round_to_float32(want + zero) if is_affine(name) else want
        what = f"{name} values, compared with code * scale{' + zero' * is_affine(name)}"
        same_values(subject, got.values, want.astype(np.float32), what)


@check("FMT-GROUP-05", "rows")
def dequantize_of_groups_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *GROUP_FORMATS)


@check("FMT-GROUP-06", "rows")
def quantize_of_a_group_is_independent_of_other_groups(subject: Subject) -> None:
    found = [
        (name, widths(subject, 4 * group_of(name), format=name)[0]) for name in all_formats_of_rows(subject, *FORMATS_IN_GROUPS)
    ]
    found = [(name, wide) for name, wide in found if wide > group_of(name)]
    if not found:
        raise NotOffered("rows of several groups")
    for name, wide in found:
        rows, group = round_to_input_dtype(subject, subject.rng.normal(size=(3, wide))), group_of(name)
        beside = rows.copy()
        beside[:, group - 1] = 1000  # an outlier at the end of its group
        plain, values = (read_back(subject, part, wide, name) for part in (rows, beside))  # not one call: its rows may interact
        assert_same(values[:, group:], plain[:, group:], f"{name} values of groups next to a group with an outlier")
        stored, stored_beside = (subject.new("rows").quantize(part, name) for part in (rows, beside))
        for what, one, other in zip(("codes", "scales", "zeros"), stored, stored_beside, strict=True):
            if stored[1] is not None and one is not None and one.ndim == 2:  # without scales, codes are in an encoding of its own
                first = one.shape[1] * group // wide  # of the second group: a group has a whole number of bytes
                assert_same(other[:, first:], one[:, first:], f"{name} {what} of groups next to a group with an outlier")


@check("FMT-SMALL-01", "rows")
def quantize_packs_small_codes_low_bits_first(subject: Subject) -> None:
    missing, checked = "", False
    for name in formats_of_rows(subject, *SMALL):
        (width,) = widths(subject, 128, format=name)
        family, rows = subject.new("rows"), exactly_representable_rows(subject, name, width)
        codes, scale, zero = family.quantize(rows, name)
        if scale is None:
            missing = "scales separate from the codes"
            continue
        if oracle.a_byte_each(codes, width, name):
            missing = "packed codes: it stores one code per byte"
            continue
        checked = True
        want, values = oracle.store(rows, name), family.dequantize(codes, scale, zero, width, name)
        if subject.level == "exact":
            assert_same(codes, oracle.packed(want, name), f"bytes of {name} rows of {width}")
            assert_same(values, want.values, f"{name} values of {width}")
        else:  # its scale can differ, which FMT-GROUP-01, FMT-MX-02 and FMT-MX-06 judge
            said = oracle.said(codes, scale, zero, width, name)
            assert_within(values, said, 2.0**-7 * np.abs(said).max(), f"{name} values of {width}, from its bytes, low bits first")
    if not checked:
        raise NotOffered(missing)


def exactly_representable_rows(subject: Subject, format: str, width: int) -> NDArray:
    """Returns rows of exactly representable numbers, with both ends of the range in each group: every code is unambiguous."""
    if format in GROUP_FORMATS:
        top = top_of(format)
        rows = subject.rng.integers(0 if is_affine(format) else -top, top + 1, size=(3, width)).astype(np.float32)
        rows[:, :: group_of(format)], rows[:, 1 :: group_of(format)] = top, 0
    else:
        worth = np.unique(mx.numbers(format))
        rows = subject.rng.choice(worth, size=(3, width)).astype(np.float32)
        rows[:, :: group_of(format)] = worth[-1]
    return representable_rows(subject, rows)


# Checks of FMT-MX: groups whose scale is a power of two or a small float.


@check("FMT-MX-01", "rows")
def dequantize_multiplies_every_element_and_every_scale(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX_FORMATS, *NVFP4_FORMATS):
        group, worth = group_of(name), mx.numbers(name)
        codes = np.resize(np.arange(len(worth)), (-(-len(worth) // group), group)).astype(np.int64)
        scales = np.arange(256 if name in MX_FORMATS else 128, dtype=np.uint8)  # NVFP4: the positive ones, and NaN
        (width,) = widths(subject, group, format=name)
        byte_per_code = stores_a_byte_per_code(subject, width, name)
        for part in codes:
            every = np.tile(part, (len(scales), width // group))
            of_each = np.repeat(scales[:, None], width // group, axis=1)
            stored = StoredRows(every, mx.scales(of_each, name).astype(np.float32), np.zeros(of_each.shape, np.float32), every)
            given = every.astype(np.uint8) if byte_per_code else oracle.packed(stored, name)
            got = subject.new("rows").dequantize(given, of_each, None, width, name)
            with np.errstate(over="ignore", invalid="ignore"):
                want = (worth[every] * np.repeat(mx.scales(of_each, name), group, axis=1)).astype(np.float32)
            same_values(subject, got, want, f"{name} values of codes {part[0]} to {part[-1]} with every scale")


def stores_a_byte_per_code(subject: Subject, width: int, format: str) -> bool:
    """Returns whether it stores one code per byte. Raises NotOffered if its scales are not separate from the codes."""
    try:
        codes, scale, _ = subject.new("rows").quantize(np.zeros((1, width), np.float32), format)
    except NotOffered:
        return False
    if scale is None:
        raise NotOffered("scales separate from the codes")
    return oracle.a_byte_each(codes, width, format)


@check("FMT-MX-02", "rows")
def quantize_uses_the_power_of_two_of_the_largest_number(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX_FORMATS):
        powers = np.float32(2.0) ** np.arange(-126, 127, 5, dtype=np.float32)
        ends = np.concatenate([powers, np.nextafter(powers, np.float32(0)), powers * np.float32(1.9999999)])
        rows = rows_of_allowed_width(subject, ends[:, None] * np.array([[0.25, -1.0, 0.5]], np.float32), name)
        same_scale(subject, quantize_and_read(subject, rows, name).scale, oracle.store(rows, name).scale, f"{name} scales", name)


@check("FMT-MX-03abc", "rows")
def quantize_rounds_elements_to_the_nearest_and_saturates(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX_FORMATS):
        rows = adversarial(subject, 64, name)
        assert_codes(subject, quantize_and_read(subject, rows, name).codes, rows, name)


@check("FMT-MX-04abc", "rows")
def dequantize_of_zeros_and_tiny_numbers_is_near_zero(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX_FORMATS, *NVFP4_FORMATS):
        rows = rows_of_allowed_width(subject, np.array([[0.0, -0.0, 0.0], [1e-40, -1e-40, 0.0]]), name)
        want = oracle.store(rows, name)
        got = quantize_and_read(subject, rows, name)
        assert_same(got.scale, want.scale, f"{name} scales of zeros and of numbers below every scale")
        same_values(subject, got.values, want.values, f"{name} values of zeros and of numbers below every scale")


@check("FMT-MX-05", "rows")
def dequantize_of_microscaled_rows_is_within_the_bound(subject: Subject) -> None:
    assert_within_bound(subject, *MX_FORMATS, *NVFP4_FORMATS)


@check("FMT-MX-06ab", "rows")
def quantize_to_nvfp4_divides_the_largest_number_by_six(subject: Subject) -> None:
    for name in formats_of_rows(subject, *NVFP4_FORMATS):
        halfway = 6 * 2.0 ** np.arange(-9, 6)[:, None] * (np.arange(8, 16) + 0.5)  # midpoints of scales, up to beyond the largest
        ends = [0.0, 2688.0, 2689.0, 1e6, 6 * 2.0**-6]
        largest = np.concatenate([2.0 ** subject.rng.uniform(-12, 14, size=300), ends, halfway.ravel()])
        rows = rows_of_allowed_width(subject, largest[:, None] * np.array([[0.25, -1.0, 0.5]]), name)
        same_scale(subject, quantize_and_read(subject, rows, name).scale, oracle.store(rows, name).scale, "scales", name)
        rows = adversarial(subject, 64, name)
        assert_codes(subject, quantize_and_read(subject, rows, name).codes, rows, name)


@check("FMT-MX-07ab", "rows")
def quantize_of_rows_times_a_power_of_two_changes_only_the_scale(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX_FORMATS):
        (width,) = widths(subject, 64, format=name)
        rows = round_to_input_dtype(subject, subject.rng.normal(size=(8, width)))
        once = quantize_and_read(subject, rows, name)
        for power in (-10, 1, 9):
            scaled = rows * np.float32(2.0**power)
            if not np.array_equal(round_to_input_dtype(subject, scaled), scaled):
                continue
            got = quantize_and_read(subject, scaled, name)
            assert_same(got.codes, once.codes, f"{name} codes of rows * 2^{power}")
            assert_same(got.scale, once.scale * np.float32(2.0**power), f"{name} scales of rows * 2^{power}")


# Checks of FMT-ROT: rows that are rotated before quantization, and rotated back when they are read.

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def rotated_formats(subject: Subject, *wanted: int) -> Iterator[tuple[str, int]]:
    """Yields (format, allowed width nearest to a wanted one). Raises NotOffered if no width has a block to rotate."""
    found = [
        (name, width) for name in formats_of_rows(subject, *ROTATED_FORMATS) for width in widths(subject, *wanted, format=name)
    ]
    rotatable = [(name, width) for name, width in found if hadamard_rotation.block_of(width) > 1]
    if not rotatable:
        raise NotOffered("rows of an even width")
    yield from rotatable


def rows_that_distinguish_matrices(subject: Subject, width: int) -> NDArray:
    """Returns rows that distinguish matrices: one random row, and four rows with one number, which become its columns."""
    rows = np.concatenate([round_to_input_dtype(subject, subject.rng.normal(size=(1, width))), np.zeros((4, width), np.float32)])
    rows[np.arange(1, 5), subject.rng.choice(width, 4, replace=width < 4)] = 3
    return rows


def adversarial_and_block_rows(subject: Subject, *wanted: int) -> Iterator[tuple[str, int, NDArray]]:
    """Yields (format, width, rows): adversarial rows at the wanted widths, and a few rows at every block size."""
    for name, width in rotated_formats(subject, *wanted):
        yield name, width, adversarial(subject, width, name)
    for name, width in rotated_formats(subject, *BLOCKS):
        yield name, width, rows_that_distinguish_matrices(subject, width)


def quantize_rotated(subject: Subject, rows: NDArray, format: str) -> StoredRows:
    """Returns what is stored of rotated rows, and the values the rows read back as."""
    family, inner = subject.new("rows"), inner_of(format)
    codes, scale, zero = family.quantize(rows, format)
    values = family.dequantize(codes, scale, zero, rows.shape[1], format)
    if scale is None and inner not in GGML_FORMATS:
        raise NotOffered("scales separate from the codes")
    return oracle.as_read(codes, scale, zero, rows.shape[1], inner, values)


def rotated_values(stored: StoredRows, format: str) -> NDArray:
    """Returns float32 [n, width]: the dequantized values before they are rotated back."""
    inner = inner_of(format)
    if inner in GGML_FORMATS:
        return np.asarray(ggml.read(oracle.packed(stored, inner), inner).values)
    decoded = small_floats.decoded(inner)[stored.codes] if inner in small_floats.MAX else stored.codes
    return round_to_float32(decoded * oracle.each_of(stored.scale, stored.codes.shape[1])).astype(np.float32)


@check("FMT-ROT-01", "rows")
def quantize_stores_the_row_times_the_matrix(subject: Subject) -> None:
    """Compares with exact arithmetic, with a bound for sums in any order."""
    for name, width in rotated_formats(subject, *BLOCKS, 96):
        block, rows = hadamard_rotation.block_of(width), rows_that_distinguish_matrices(subject, width)
        got, inner = rotated_values(quantize_rotated(subject, rows, name), name), inner_of(name)
        want = np.array([[float(each) for each in hadamard_rotation.rotate_exactly(row)] for row in rows]) / block**0.5
        between = oracle.store(hadamard_rotation.rotate_rows(rows), inner)
        off = hadamard_rotation.stored_tolerance(
            rows, between, oracle.bounds(hadamard_rotation.rotate_rows(rows), between, inner)[1], name
        )
        assert_within(got, want, off, f"{name} rotated numbers of rows of {width}")


@check("FMT-ROT-02", "rows")
def quantize_stores_the_codes_and_scales_of_the_rotated_row(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    for name, width, rows in adversarial_and_block_rows(subject, 64, 12):
        inner, got = inner_of(name), quantize_rotated(subject, rows, name)
        want = oracle.store(hadamard_rotation.rotate_rows(rows), inner, got.codes)
        assert_same(got.scale, want.scale, f"{name} scales of rows of {width}")
        assert_equal(np.argwhere(got.codes != want.codes)[:3].tolist(), [], f"indices of wrong {name} codes in rows of {width}")


@check("FMT-ROT-03", "rows")
def dequantize_rotates_back(subject: Subject) -> None:
    for name, width, rows in adversarial_and_block_rows(subject, 64, 96):
        stored = quantize_rotated(subject, rows, name)
        between = rotated_values(stored, name)
        if subject.level == "exact":
            assert_same(stored.values, hadamard_rotation.rotate_rows(between), f"{name} values of stored rows of {width}")
        else:
            bound = 2 * hadamard_rotation.summation_error(between)
            assert_within(stored.values, hadamard_rotation.rotate_rows(between), bound, f"{name} values of rows of {width}")


@check("FMT-ROT-05ab", "rows")
def dequantize_of_rotated_rows_is_within_the_bound(subject: Subject) -> None:
    for name, width in rotated_formats(subject, 64, 96):
        rows = adversarial(subject, width, name)
        values = read_back(subject, rows, width, name)
        exact, tolerant = oracle.bounds(rows, oracle.store(rows, name), name)
        what = f"{name} values of rows of {width}"
        assert_within(values, rows, tolerant if subject.level == "tolerant" else exact, what)
        assert_within_norm(values, rows, tolerant, what)


@check("FMT-ROT-06c", "rows")
def dequantize_of_rows_with_large_sums_is_finite(subject: Subject) -> None:
    for name, width in rotated_formats(subject, 64):
        reach = min(largest(subject), hadamard_rotation.MAX_MAGNITUDE / hadamard_rotation.block_of(width))
        near = reach * np.array([[1.0], [1 + 2**-20], [1.5], [3.9], [1e3]])
        for row in representable_rows(subject, np.minimum(near, largest(subject)) * np.ones(width))[:, None]:
            with may_raise("NonFinite"):
                values = read_back(subject, row, width, name)
                assert_true(np.isfinite(values).all(), f"a row of {row[0, 0]} in {name}", "finite values, or NonFinite", values)


@check("FMT-ROT-06ab", "rows")
def quantize_accepts_rotated_rows_up_to_a_power_of_two(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    found = [(name, width) for name, width in rotated_formats(subject, 64) if group_of(name) == 1]
    if not found or largest(subject) < 1e38:
        raise NotOffered("rows of float32 with float32 scales")
    for name, width in found:
        row, most = (
            np.zeros((1, width), np.float32),
            np.float32(hadamard_rotation.MAX_MAGNITUDE / hadamard_rotation.block_of(width)),
        )
        row[0, -1] = -most
        got, want = quantize_rotated(subject, row, name), oracle.store(row, name)
        assert_same(got.values, want.values, f"{name} values of a row of {-most}")
        row[0, -1] = -most * np.float32(1 + (2.0**-7 if subject.dtype == "bfloat16" else 2.0**-23))  # next larger magnitude
        with raises("NonFinite"):
            subject.new("rows").quantize(row, name)
