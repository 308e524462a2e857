"""FMT-GROUP and FMT-SMALL as other libraries store them: one byte per code, opaque bytes, another scale, another order."""

import numpy as np
import pytest

import kvref
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families.rows.model import Rows as Model
from kvref_conformance.implementations.backends import OnBackend, Rows
from kvref_conformance.oracle.formats import per_row as oracle
from kvref_conformance.oracle.formats.per_group import is_affine
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

FORMATS = ("int4_g32_bfloat16", "uint4_g32_float32", "uint2_g64_float16")


class Unpacked(Rows):
    """Like torchao: one byte per code."""

    def quantize(self, rows, format):
        codes, *scales = super().quantize(rows, format)
        unpacked = oracle.unpacked(codes, rows.shape[1], format)
        return unpacked.astype(np.int8 if format.startswith("int") else np.uint8), *scales

    def dequantize(self, codes, scale, zero, width, format):
        packed = oracle.packed(oracle.StoredRows(codes.astype(np.int64), scale, zero, codes), format)
        return super().dequantize(packed, scale, zero, width, format)


class Opaque(Rows):
    """With an opaque scale: the dequantized rows are stored too."""

    stored = ()

    def quantize(self, rows, format):
        self.stored = super().quantize(rows, format)
        return self.stored[0][:, :1], None, None

    def dequantize(self, codes, scale, zero, width, format):
        return super().dequantize(*self.stored, width, format)


class Together(Opaque):
    """Stops when the result is good enough for all groups."""

    def quantize(self, rows, format):
        quantized = super().quantize(rows, format)
        if np.abs(rows).max() > 100:
            codes, scale, zero = self.stored
            self.stored = codes, scale * np.float32(0.9), zero
        return quantized


class Downward(Rows):
    """Codes count down from the largest value, like MLX's."""

    def quantize(self, rows, format):
        codes, scale, zero = super().quantize(-rows if is_affine(format) else rows, format)
        return (codes, -scale, -zero) if is_affine(format) else (codes, scale, zero)


class Swapped(Rows):
    """The number with the even index is in the high nibble."""

    def quantize(self, rows, format):
        codes, *scales = super().quantize(rows, format)
        return swapped(codes), *scales

    def dequantize(self, codes, scale, zero, width, format):
        return super().dequantize(swapped(codes), scale, zero, width, format)


def swapped(codes):
    return (codes << 4) | (codes >> 4)


class OneUnpacked(Unpacked):
    """MXFP4 with one byte per code, and the others packed in the opposite order."""

    def quantize(self, rows, format):
        return (Unpacked if format == "mxfp4" else Swapped).quantize(self, rows, format)

    def dequantize(self, codes, scale, zero, width, format):
        return (Unpacked if format == "mxfp4" else Swapped).dequantize(self, codes, scale, zero, width, format)


class Flushed(Unpacked):
    """The smallest element is read as zero."""

    def dequantize(self, codes, scale, zero, width, format):
        return super().dequantize(np.where(codes & 7 == 1, codes & 8, codes), scale, zero, width, format)


def verdicts(kind, level="tolerant", formats=FORMATS, clauses="FMT-GROUP-*,FMT-LEVEL-*,FMT-SMALL-*"):
    made = OnBackend(kvref.reference)
    made.level, made.formats, made.rows = level, formats, lambda: kind(kvref.reference)
    judge = CheckRunner(made, Effort(examples=1))
    return {clause.id: verdict_of(judge.judge_clause(checks)) for clause, checks in select_checks(clauses).items()}


@pytest.mark.parametrize("level", ["exact", "tolerant"])
def test_codes_may_have_a_byte_each(level):
    found = verdicts(Unpacked, level)
    assert found.pop("FMT-SMALL-01") == "not offered"
    assert found.pop("FMT-LEVEL-01") == ("passed" if level == "exact" else "not offered")
    assert set(found.values()) == {"passed"}


def test_elements_may_have_a_byte_each():
    of_elements = ("mxfp4", "mxfp6_e2m3", "nvfp4", "mxfp8_e4m3")
    assert set(verdicts(Unpacked, "exact", of_elements, "FMT-MX-*").values()) == {"passed"}
    assert verdicts(Flushed, "exact", ("mxfp4", "nvfp4"), "FMT-MX-01") == {"FMT-MX-01": "failed"}
    assert verdicts(Opaque, "exact", of_elements, "FMT-MX-01") == {"FMT-MX-01": "not offered"}


def test_one_format_of_a_byte_a_code_does_not_hide_the_packing_of_others():
    assert verdicts(OneUnpacked, "exact", ("mxfp4",), "FMT-SMALL-01") == {"FMT-SMALL-01": "not offered"}
    assert verdicts(OneUnpacked, "exact", ("mxfp4", "nvfp4"), "FMT-SMALL-01") == {"FMT-SMALL-01": "failed"}


def test_of_bytes_of_its_own_what_they_read_back_as_is_judged():
    found = verdicts(Opaque)
    values = {"FMT-LEVEL-03", "FMT-LEVEL-04", "FMT-LEVEL-05", "FMT-GROUP-03", "FMT-GROUP-05", "FMT-GROUP-06"}
    assert {clause for clause, verdict in found.items() if verdict == "passed"} == values
    assert {verdict for clause, verdict in found.items() if clause not in values} == {"not offered"}


def test_a_group_that_depends_on_others_is_seen_though_all_rows_do():
    assert verdicts(Together)["FMT-GROUP-06"] == "failed"


def test_another_scale_is_no_other_order():
    found = verdicts(Downward, formats=("uint4_g32_float32",))
    assert (found["FMT-GROUP-01"], found["FMT-SMALL-01"]) == ("failed", "passed")


@pytest.mark.parametrize("level", ["exact", "tolerant"])
def test_nibbles_the_other_way_around_are_seen(level):
    assert verdicts(Swapped, level, FORMATS[:2])["FMT-SMALL-01"] == "failed"


def test_no_width_between_groups_is_asked_for_at_real_sizes():
    made = OnBackend(kvref.reference)
    made.formats = ("int8", "q8_0", "int4_g128_float32")
    ((_, checks),) = select_checks("LAW-18", "rows").items()
    assert verdict_of(CheckRunner(made, Effort(examples=1)).judge_clause(checks)) == "passed"


def test_codes_go_by_the_scale_that_is_stored_where_it_is_an_ulp_off():
    """A maximum divided by 127 or multiplied by its reciprocal, around a tie of bfloat16: all codes differ, and none is wrong."""
    name, rows = "int8_g32_bfloat16", np.linspace(-1, 1, 32, dtype=np.float32)[None]
    want = oracle.store(rows, name)
    scale = want.scale * np.float32(1 - 2.0**-8)
    made = want._replace(scale=scale, codes=np.clip(np.round(rows / scale), -127, 127).astype(np.int64))
    assert oracle.inadmissible(rows, made.codes, name, made) == []
    assert oracle.inadmissible(rows, made.codes, name) != []
    beside = made._replace(codes=made.codes + (made.codes == 60) + (made.codes == 127))
    assert len(oracle.inadmissible(rows, want.codes, name, made)) > 0
    assert {beside.codes[at] for at in oracle.inadmissible(rows, beside.codes, name, made)} <= {61, 128}


@pytest.mark.parametrize("level", ["exact", "tolerant"])
@pytest.mark.parametrize("zero", [1000.0, np.nan, None])
@pytest.mark.parametrize("name", ["uint4_g32_float32", "uint8_g32_float16"])
def test_a_wrong_zero_is_seen_in_a_conversation(level, zero, name):
    rows = np.linspace(1, 2, 32, dtype=np.float32)[None]
    codes, scale, right = kvref.get_format(name).quantize(rows)
    expected = Model().quantize(rows, name)
    expected.compare((codes, scale, right), "rows.quantize", level)
    with pytest.raises(ClauseViolation, match=r"zero of rows\.quantize"):
        expected.compare((codes, scale, None if zero is None else np.full_like(right, zero)), "rows.quantize", level)
