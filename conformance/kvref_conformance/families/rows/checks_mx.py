"""Checks of FMT-MX: groups whose scale is a power of two or a small float."""

import numpy as np

from kvref_conformance.checking.expect import equal, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import quantized, same_codes, same_scale, same_values, within_bound
from kvref_conformance.families.rows.handed import adversarial, formats_of_rows, spread, taken, widths
from kvref_conformance.oracle import mx
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import MX, NVFP4, group_of
from kvref_conformance.oracle.stored import Stored
from kvref_conformance.outcome import NotOffered


@check("FMT-MX-01", "rows")
def every_element_with_every_scale_reads_as_their_product(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX, *NVFP4):
        group, worth = group_of(name), mx.numbers(name)
        codes = np.resize(np.arange(len(worth)), (-(-len(worth) // group), group)).astype(np.int64)
        scales = np.arange(256 if name in MX else 127, dtype=np.uint8)  # NVFP4: the positive ones
        (width,) = widths(subject, group, format=name)
        a_byte_each = holds_a_byte_each(subject, width, name)
        for part in codes:
            every = np.tile(part, (len(scales), width // group))
            of_each = np.repeat(scales[:, None], width // group, axis=1)
            stored = Stored(every, mx.scales(of_each, name).astype(np.float32), np.zeros(of_each.shape, np.float32), every)
            given = every.astype(np.uint8) if a_byte_each else oracle.packed(stored, name)
            got = subject.new("rows").dequantize(given, of_each, None, width, name)
            with np.errstate(over="ignore", invalid="ignore"):
                want = (worth[every] * np.repeat(mx.scales(of_each, name), group, axis=1)).astype(np.float32)
            same_values(subject, got, want, f"{name} values of codes {part[0]} to {part[-1]} with every scale")


def holds_a_byte_each(subject: Subject, width: int, format: str) -> bool:
    """Returns whether it stores one code per byte. Raises NotOffered if its scales are not separate from the codes."""
    try:
        codes, scale, _ = subject.new("rows").quantize(np.zeros((1, width), np.float32), format)
    except NotOffered:
        return False
    if scale is None:
        raise NotOffered("scales separate from the codes")
    return oracle.a_byte_each(codes, width, format)


@check("FMT-MX-02", "rows")
def the_scale_is_the_power_of_two_of_the_largest(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX):
        powers = np.float32(2.0) ** np.arange(-126, 127, 5, dtype=np.float32)
        ends = np.concatenate([powers, np.nextafter(powers, np.float32(0)), powers * np.float32(1.9999999)])
        rows = spread(subject, ends[:, None] * np.array([[0.25, -1.0, 0.5]], np.float32), name)
        same_scale(subject, quantized(subject, rows, name).scale, oracle.store(rows, name).scale, f"{name} scales", name)


@check("FMT-MX-03abc", "rows")
def elements_are_the_nearest_and_saturate(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX):
        rows = adversarial(subject, 64, name)
        same_codes(subject, quantized(subject, rows, name).codes, rows, name)


@check("FMT-MX-04abc", "rows")
def zeros_and_what_is_tiny_read_back_as_near_zero(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX, *NVFP4):
        rows = spread(subject, np.array([[0.0, -0.0, 0.0], [1e-40, -1e-40, 0.0]]), name)
        want = oracle.store(rows, name)
        got = quantized(subject, rows, name)
        same(got.scale, want.scale, f"{name} scales of zeros and of numbers below every scale")
        same_values(subject, got.values, want.values, f"{name} values of zeros and of numbers below every scale")


@check("FMT-MX-05", "rows")
def microscaled_values_are_within_the_bound(subject: Subject) -> None:
    within_bound(subject, *MX, *NVFP4)


@check("FMT-MX-06ab", "rows")
def nvfp4_scales_are_the_largest_over_six_in_e4m3(subject: Subject) -> None:
    for name in formats_of_rows(subject, *NVFP4):
        halfway = 6 * 2.0 ** np.arange(-9, 6)[:, None] * (np.arange(8, 16) + 0.5)  # midpoints of scales, up to beyond the largest
        ends = [0.0, 2688.0, 2689.0, 1e6, 6 * 2.0**-6]
        largest = np.concatenate([2.0 ** subject.rng.uniform(-12, 14, size=300), ends, halfway.ravel()])
        rows = spread(subject, taken(subject, largest[:, None] * np.array([[0.25, -1.0, 0.5]])), name)
        same_scale(subject, quantized(subject, rows, name).scale, oracle.store(rows, name).scale, "scales", name)
        rows = adversarial(subject, 64, name)
        same_codes(subject, quantized(subject, rows, name).codes, rows, name)


@check("FMT-MX-07ab", "rows")
def a_power_of_two_moves_the_scale_alone(subject: Subject) -> None:
    for name in formats_of_rows(subject, *MX):
        (width,) = widths(subject, 64, format=name)
        rows = held(subject, subject.rng.normal(size=(8, width)))
        once = quantized(subject, rows, name)
        for power in (-10, 1, 9):
            scaled = rows * np.float32(2.0**power)
            if not np.array_equal(held(subject, scaled), scaled):
                continue
            got = quantized(subject, scaled, name)
            equal(np.array_equal(got.codes, once.codes), True, f"whether {name} codes of rows * 2^{power} are those of the rows")
            same(got.scale, once.scale * np.float32(2.0**power), f"{name} scales of rows * 2^{power}")
