"""Checks of FMT-ROT: rows that are rotated before quantization, and rotated back when they are read."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, may_raise, raises, same, true, within, within_lengths
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.handed import adversarial, formats_of_rows, largest, taken, widths
from kvref_conformance.oracle import elements, ggml, rotated
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import GGML, ROTATED, group_of, inner_of
from kvref_conformance.oracle.stored import Stored, fl
from kvref_conformance.outcome import NotOffered

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def each(subject: Subject, *wanted: int) -> Iterator[tuple[str, int]]:
    """Yields (format, allowed width nearest to a wanted one). Raises NotOffered if no width has a block to rotate."""
    found = [(name, width) for name in formats_of_rows(subject, *ROTATED) for width in widths(subject, *wanted, format=name)]
    turning = [(name, width) for name, width in found if rotated.block_of(width) > 1]
    if not turning:
        raise NotOffered("rows of an even width")
    yield from turning


def telling(subject: Subject, width: int) -> NDArray:
    """Returns rows that distinguish matrices: one random row, and four rows with one number, which become its columns."""
    rows = np.concatenate([held(subject, subject.rng.normal(size=(1, width))), np.zeros((4, width), np.float32)])
    rows[np.arange(1, 5), subject.rng.choice(width, 4, replace=width < 4)] = 3
    return rows


def in_blocks(subject: Subject, *wanted: int) -> Iterator[tuple[str, int, NDArray]]:
    """Yields (format, width, rows): adversarial rows at the wanted widths, and a few rows at every block size."""
    yield from ((name, width, adversarial(subject, width, name)) for name, width in each(subject, *wanted))
    yield from ((name, width, telling(subject, width)) for name, width in each(subject, *BLOCKS))


def quantized(subject: Subject, rows: NDArray, format: str) -> Stored:
    """Returns what is stored of rotated rows, and the values the rows read back as."""
    family, inner = subject.new("rows"), inner_of(format)
    codes, scale, zero = family.quantize(rows, format)
    values = family.dequantize(codes, scale, zero, rows.shape[1], format)
    if scale is None and inner not in GGML:
        raise NotOffered("scales separate from the codes")
    return oracle.as_read(codes, scale, zero, rows.shape[1], inner, values)


def in_between(stored: Stored, format: str) -> NDArray:
    """Returns float32 [n, width]: the dequantized values before they are rotated back."""
    inner = inner_of(format)
    if inner in GGML:
        return np.asarray(ggml.read(oracle.packed(stored, inner), inner).values)
    decoded = elements.decoded(inner)[stored.codes] if inner in elements.MAX else stored.codes
    return fl(decoded * oracle.each_of(stored.scale, stored.codes.shape[1])).astype(np.float32)


@check("FMT-ROT-01", "rows")
def what_is_stored_is_the_row_times_the_matrix(subject: Subject) -> None:
    """Compares with exact arithmetic, with a bound for sums in any order."""
    for name, width in each(subject, *BLOCKS, 96):
        block, rows = rotated.block_of(width), telling(subject, width)
        got, inner = in_between(quantized(subject, rows, name), name), inner_of(name)
        want = np.array([[float(each) for each in rotated.exactly_turned(row)] for row in rows]) / block**0.5
        between = oracle.store(rotated.turned(rows), inner)
        off = rotated.in_between(rows, between, oracle.bounds(rotated.turned(rows), between, inner)[1], name)
        within(got, want, off, f"{name} rotated numbers of rows of {width}")


@check("FMT-ROT-02", "rows")
def codes_and_scales_are_those_of_the_rotated_row(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    for name, width, rows in in_blocks(subject, 64, 12):
        inner, got = inner_of(name), quantized(subject, rows, name)
        want = oracle.store(rotated.turned(rows), inner, got.codes)
        same(got.scale, want.scale, f"{name} scales of rows of {width}")
        equal(np.argwhere(got.codes != want.codes)[:3].tolist(), [], f"indices of wrong {name} codes in rows of {width}")


@check("FMT-ROT-03", "rows")
def what_is_read_is_rotated_back(subject: Subject) -> None:
    for name, width, rows in in_blocks(subject, 64, 96):
        stored = quantized(subject, rows, name)
        between = in_between(stored, name)
        if subject.level == "exact":
            same(stored.values, rotated.turned(between), f"{name} values of stored rows of {width}")
        else:
            within(stored.values, rotated.turned(between), 2 * rotated.any_order(between), f"{name} values of rows of {width}")


@check("FMT-ROT-05ab", "rows")
def rotated_values_are_within_the_bound(subject: Subject) -> None:
    for name, width in each(subject, 64, 96):
        rows = adversarial(subject, width, name)
        family = subject.new("rows")
        values = family.dequantize(*family.quantize(rows, name), width, name)
        exact, tolerant = oracle.bounds(rows, oracle.store(rows, name), name)
        what = f"{name} values of rows of {width}"
        within(values, rows, tolerant if subject.level == "tolerant" else exact, what)
        within_lengths(values, rows, tolerant, what)


@check("FMT-ROT-06c", "rows")
def rows_whose_sums_may_overflow_never_read_back_infinite(subject: Subject) -> None:
    for name, width in each(subject, 64):
        reach = min(largest(subject), rotated.REACH / rotated.block_of(width))
        near = reach * np.array([[1.0], [1 + 2**-20], [1.5], [3.9], [1e3]])
        for row in taken(subject, np.minimum(near, largest(subject)) * np.ones(width))[:, None]:
            family = subject.new("rows")
            with may_raise("NonFinite"):
                values = family.dequantize(*family.quantize(row, name), width, name)
                true(np.isfinite(values).all(), f"a row of {row[0, 0]} in {name}", "finite values, or NonFinite", values)


@check("FMT-ROT-06ab", "rows")
def the_largest_number_that_is_taken_is_a_power_of_two(subject: Subject) -> None:
    if subject.level != "exact":
        raise NotOffered("level exact")
    some = [(name, width) for name, width in each(subject, 64) if group_of(name) == 1]
    if not some or largest(subject) < 1e38:
        raise NotOffered("rows of float32 with float32 scales")
    for name, width in some:
        row, most = np.zeros((1, width), np.float32), np.float32(rotated.REACH / rotated.block_of(width))
        row[0, -1] = -most
        same(quantized(subject, row, name).values, oracle.store(row, name).values, f"{name} values of a row of {-most}")
        row[0, -1] = -most * np.float32(1 + (2.0**-7 if subject.dtype == "bfloat16" else 2.0**-23))  # next larger magnitude
        with raises("NonFinite"):
            subject.new("rows").quantize(row, name)
