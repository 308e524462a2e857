"""Checks of FMT-GGML: the cache types of llama.cpp, byte for byte."""

import numpy as np

from kvref_conformance.checking.expect import same
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import quantized, same_codes, same_scale, same_values, within_bound
from kvref_conformance.families.rows.handed import adversarial, formats_of_rows, spread, taken, widths
from kvref_conformance.oracle import ggml
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import GGML


@check("FMT-GGML-01", "rows")
def blocks_read_as_their_bytes_say(subject: Subject) -> None:
    for name in formats_of_rows(subject, *GGML):
        (width,) = widths(subject, 64, format=name)
        size = ggml.LAYOUT[name].itemsize
        stored = subject.rng.integers(0, 256, size=(80, width // 32 * size)).astype(np.uint8)
        halves = stored.reshape(-1, size)[:, 1 : 4 if name.endswith("_1") else 2 : 2]
        halves &= 0xBF  # every float16 except the largest, infinities and NaNs
        got = subject.new("rows").dequantize(stored, None, None, width, name)
        same_values(subject, got, ggml.read(stored, name).values, f"{name} values of random bytes")


def _as_ggml_makes_them(subject: Subject, *names: str) -> None:
    for name in formats_of_rows(subject, *names):
        for width in widths(subject, 32, 128, format=name):
            rows = adversarial(subject, width, name)
            got, want = quantized(subject, rows, name), oracle.store(rows, name)
            same_scale(subject, got.scale, want.scale, f"{name} scales of rows of {width}", name)
            if name in ("q4_1", "q5_1"):
                same_scale(subject, got.zero, want.zero, f"{name} least values of rows of {width}", name)
            same_codes(subject, got.codes, rows, name)


@check("FMT-GGML-02ab", "rows")
def q8_0_is_made_with_the_reciprocal_of_its_scale(subject: Subject) -> None:
    _as_ggml_makes_them(subject, "q8_0")


@check("FMT-GGML-03ab", "rows")
def the_largest_magnitude_has_the_least_code(subject: Subject) -> None:
    _as_ggml_makes_them(subject, "q4_0", "q5_0")


@check("FMT-GGML-04abc", "rows")
def codes_count_from_the_least_value(subject: Subject) -> None:
    _as_ggml_makes_them(subject, "q4_1", "q5_1")


@check("FMT-GGML-05ab", "rows")
def iq4_nl_takes_the_nearest_of_its_table(subject: Subject) -> None:
    _as_ggml_makes_them(subject, "iq4_nl")


@check("FMT-GGML-06", "rows")
def values_of_blocks_are_within_the_bound(subject: Subject) -> None:
    within_bound(subject, *GGML)


@check("FMT-GGML-07", "rows")
def a_block_of_zeros_reads_back_as_zeros(subject: Subject) -> None:
    for name in formats_of_rows(subject, *GGML):
        rows = spread(subject, taken(subject, np.array([[0.0, -0.0, 0.0], [1e-40, -1e-40, 0.0]])), name)
        values = quantized(subject, rows, name).values
        same(np.abs(values), np.zeros_like(rows), f"{name} values of zeros and of numbers below every scale")
        if name in ("q4_1", "q5_1"):
            rows = spread(subject, taken(subject, np.array([[5.0], [-3.0]])), name)
            same(quantized(subject, rows, name).values, rows, f"{name} values of rows of equal numbers, whose scale is 0")
