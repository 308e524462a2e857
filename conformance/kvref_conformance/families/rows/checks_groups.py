"""Checks of FMT-GROUP and FMT-SMALL: scales of groups along head_dim, and codes of less than a byte."""

from functools import partial

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import raises, same, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import quantized, read_back, same_codes, same_scale, same_values, within_bound
from kvref_conformance.families.rows.handed import adversarial, formats_of_rows, taken, widths
from kvref_conformance.oracle import mx
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import GROUPS, IN_GROUPS, MX, NVFP4, bits_of, group_of
from kvref_conformance.oracle.groups import is_affine, top_of
from kvref_conformance.oracle.stored import fl
from kvref_conformance.outcome import NotOffered

SMALL = tuple(name for name in (*GROUPS, *MX, *NVFP4) if bits_of(name) < 8)


def every(subject: Subject) -> list[str]:
    """Returns all formats of FMT-GROUP that it provides with an allowed width."""
    found = [name for name in subject.formats(*GROUPS) if subject.size("width", group_of(name)) % group_of(name) == 0]
    if not found:
        raise NotOffered("rows of a width that is a multiple of a group")
    return found


@check("FMT-GROUP-01ab", "rows")
def scales_and_zeros_are_of_their_group_and_rounded_once(subject: Subject) -> None:
    for name in every(subject):
        rows = adversarial(subject, 128, name)
        got, want = quantized(subject, rows, name), oracle.store(rows, name)
        same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {rows.shape[1]}", name)
        if is_affine(name):
            alike = same if subject.level == "exact" else partial(within, bound=0)  # 0 and -0 are both right
            alike(got.zero, want.zero, what=f"{name} zeros of rows of {rows.shape[1]}")


@check("FMT-GROUP-02", "rows")
def codes_are_made_with_the_scale_that_is_stored(subject: Subject) -> None:
    for name in every(subject):
        rows = adversarial(subject, 128, name)
        got = quantized(subject, rows, name)
        least = 0 if is_affine(name) else -top_of(name)
        true(
            got.codes.min() >= least and got.codes.max() <= top_of(name), f"{name} codes", f"{least} to {top_of(name)}", got.codes
        )
        same_codes(subject, got.codes, rows, name, got)


@check("FMT-GROUP-03", "rows")
def a_width_that_is_no_multiple_of_the_group_is_refused(subject: Subject) -> None:
    tried = [
        (name, width)
        for name in formats_of_rows(subject, *IN_GROUPS)
        for width in (group_of(name) + 1, group_of(name) // 2, 2 * group_of(name) - 8)
        if subject.size("width", width) == width
    ]
    if not tried:
        raise NotOffered("rows of a width that is not a multiple of a group")
    for name, width in tried:
        with raises("ConfigError"):
            subject.new("rows").quantize(held(subject, subject.rng.normal(size=(2, width))), name)


@check("FMT-GROUP-04", "rows")
def a_value_is_its_code_times_its_groups_scale(subject: Subject) -> None:
    for name in every(subject):
        rows = adversarial(subject, 256, name)
        got = quantized(subject, rows, name)
        scale, zero = (oracle.each_of(part, rows.shape[1]) for part in (got.scale, got.zero))
        want = fl(got.codes * scale)
        want = fl(want + zero) if is_affine(name) else want
        what = f"{name} values, compared with code * scale{' + zero' * is_affine(name)}"
        same_values(subject, got.values, want.astype(np.float32), what)


@check("FMT-GROUP-05", "rows")
def values_in_groups_are_within_the_bound(subject: Subject) -> None:
    within_bound(subject, *GROUPS)


@check("FMT-GROUP-06", "rows")
def a_group_is_stored_as_if_it_were_alone(subject: Subject) -> None:
    several = [(name, widths(subject, 4 * group_of(name), format=name)[0]) for name in formats_of_rows(subject, *IN_GROUPS)]
    several = [(name, wide) for name, wide in several if wide > group_of(name)]
    if not several:
        raise NotOffered("rows of several groups")
    for name, wide in several:
        rows, group = held(subject, subject.rng.normal(size=(3, wide))), group_of(name)
        beside = rows.copy()
        beside[:, group - 1] = 1000  # an outlier at the end of its group
        plain, values = (
            read_back(subject, each, wide, name) for each in (rows, beside)
        )  # one call each, because rows of one call can affect each other
        same(values[:, group:], plain[:, group:], f"{name} values of groups next to a group with an outlier")


@check("FMT-SMALL-01", "rows")
def codes_lie_low_bits_first(subject: Subject) -> None:
    lacking, judged = "", False
    for name in formats_of_rows(subject, *SMALL):
        (width,) = widths(subject, 128, format=name)
        family, rows = subject.new("rows"), telling(subject, name, width)
        codes, scale, zero = family.quantize(rows, name)
        if scale is None:
            lacking = "scales separate from the codes"
            continue
        if oracle.a_byte_each(codes, width, name):
            lacking = "packed codes: it stores one code per byte"
            continue
        judged = True
        want, values = oracle.store(rows, name), family.dequantize(codes, scale, zero, width, name)
        if subject.level == "exact":
            same(codes, oracle.packed(want, name), f"bytes of {name} rows of {width}")
            same(values, want.values, f"{name} values of {width}")
        else:  # its scale can differ, which FMT-GROUP-01, FMT-MX-02 and FMT-MX-06 judge
            said = oracle.said(codes, scale, zero, width, name)
            within(values, said, 2.0**-7 * np.abs(said).max(), f"{name} values of {width}, from its bytes, low bits first")
    if not judged:
        raise NotOffered(lacking)


def telling(subject: Subject, format: str, width: int) -> NDArray:
    """Returns rows of exactly representable numbers, with both ends of the range in each group: every code is unambiguous."""
    if format in GROUPS:
        top = top_of(format)
        rows = subject.rng.integers(0 if is_affine(format) else -top, top + 1, size=(3, width)).astype(np.float32)
        rows[:, :: group_of(format)], rows[:, 1 :: group_of(format)] = top, 0
    else:
        worth = np.unique(mx.numbers(format))
        rows = subject.rng.choice(worth, size=(3, width)).astype(np.float32)
        rows[:, :: group_of(format)] = worth[-1]
    return taken(subject, rows)
