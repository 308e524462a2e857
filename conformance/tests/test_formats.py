"""Rounding, packing, rows and bounds, compared with fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kvref
from kvref.attention import attention_bound
from kvref.formats.packing import pack, unpack
from kvref.formats.rounding import round_half_away
from kvref_conformance.oracle import attention
from kvref_conformance.oracle.formats import per_row, small_floats
from kvref_conformance.oracle.formats.stored_rows import StoredRows

floats = st.floats(-(2.0**100), 2.0**100, width=32)
matrices = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=floats)


@given(st.lists(st.floats(-(2.0**25), 2.0**25, width=32), min_size=1))
def test_halves_go_away_from_zero(values):
    got = round_half_away(np.array(values, np.float32))
    for x, rounded in zip(values, got.tolist(), strict=True):
        exact = Fraction(x)
        away = (abs(exact) + Fraction(1, 2)).__floor__()
        assert rounded == (away if exact >= 0 else -away)


@given(st.sampled_from([1, 2, 4, 5, 6, 8]).flatmap(lambda bits: st.tuples(
    st.just(bits), st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=9),
)))  # fmt: skip
def test_packing_puts_low_bits_first_and_is_undone_by_unpacking(given_codes):
    bits, codes = given_codes
    packed = pack(np.array([codes], np.uint8), bits)
    whole = sum(code << (i * bits) for i, code in enumerate(codes))  # the row as one integer
    assert packed[0].tolist() == list(whole.to_bytes(-(-len(codes) * bits // 8), "little"))
    assert unpack(packed, bits, len(codes))[0].tolist() == codes


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2", "q8", "q4"])
@given(given_rows=matrices)
def test_rows_are_what_fractions_say(name, given_rows):
    format = kvref.get_format(name)
    stored, want = format.quantize(given_rows), per_row.store(given_rows, name)
    width = given_rows.shape[1]
    codes = per_row.unpacked(stored.codes, width, name)
    assert (codes.astype(int) == want.codes).all()
    assert (stored.scale == want.scale).all()
    values = format.dequantize(stored, width)
    assert values.tobytes() == want.values.tobytes()
    zero = np.zeros(len(given_rows)) if stored.zero is None else stored.zero
    bound = format.bound(given_rows, stored)
    as_stored = StoredRows(codes, stored.scale, zero, values)
    np.testing.assert_allclose(bound, per_row.bound(given_rows, as_stored, name), rtol=1e-12)
    for x, value, limit in zip(given_rows.flat, values.flat, bound.flat, strict=True):
        assert abs(Fraction(float(x)) - Fraction(float(value))) <= Fraction(float(limit)) * (1 + Fraction(1, 2**40))


def test_tolerance_admits_a_tie_either_way_and_nothing_else():
    row = np.array([[127.0, 63.5, 20.0]], np.float32)
    codes = per_row.store(row, "int8").codes
    assert codes.tolist() == [[127, 64, 20]]
    for change, wrong in (([0, -1, 0], []), ([0, 1, 0], [(0, 1)]), ([0, 0, 1], [(0, 2)]), ([1, 0, 0], [(0, 0)])):
        assert per_row.inadmissible(row, codes + change, "int8") == wrong


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@given(values=arrays(np.float32, 8, elements=st.floats(-60000, 60000, width=32)))
def test_casts_are_within_their_bound(name, values):
    format = kvref.get_format(name)
    stored = format.quantize(values)
    assert (np.abs(values.astype(np.float64) - format.dequantize(stored, 8)) <= format.bound(values, stored)).all()


def test_an_empty_row_has_the_least_scale():
    stored = kvref.get_format("int8").quantize(np.zeros((2, 0), np.float32))
    assert stored.codes.shape == (2, 0)
    assert stored.scale.tolist() == [2.0**-23] * 2
    with pytest.raises(kvref.errors.ShapeMismatch, match="at least one value"):
        kvref.get_format("q4").quantize(np.zeros((2, 0), np.float32))


@pytest.mark.parametrize("name", ["q4", "q8"])
def test_a_range_that_overflows_is_refused(name):
    wide = np.array([[3.4e38, -3.4e38]], np.float32)
    with pytest.raises(kvref.errors.NonFinite, match=f"{name} rows: expected values whose scale and"):
        kvref.get_format(name).quantize(wide)


def test_an_unknown_format_says_the_known_ones():
    with pytest.raises(kvref.errors.ConfigError, match=r"int8.*got 'int4'"):
        kvref.get_format("int4")
    with pytest.raises(kvref.errors.ConfigError, match=r"float8_e5m2.*got 'fp8'"):
        kvref.formats.element_format("fp8")


def test_both_attention_bounds_are_one_formula():
    rng = np.random.default_rng(0)
    query, keys, values = rng.normal(size=(3, 8)), rng.normal(size=(11, 8)), rng.normal(size=(11, 8))
    _, want = attention.attention(query[:, None], keys[:, None], values[:, None], scale=0.3)
    np.testing.assert_allclose(attention_bound(query, keys, values, 0.3), want[:, 0], rtol=1e-9)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_the_bound_of_a_cast_holds_and_is_reached(name):
    x = np.array([[0.0, 1.0, -3.0]], np.float32) if name == "float32" else small_floats.ties_and_neighbours(name)[None]
    x = x[:, np.abs(x[0]) < small_floats.MAX.get(name, np.inf)]
    format = kvref.get_format(name)
    off = np.abs(small_floats.round_to(x, name).astype(np.float64) - x)
    bound = format.bound(x, format.quantize(x))
    assert bound.dtype == np.float64
    assert bound.shape == x.shape
    assert (off <= bound).all()
    if name != "float32":
        ratio = (off / np.where(bound == 0, 1, bound))[0]
        least_normal = 2.0**-14 if name == "float16" else 2.0**-126
        for part in (np.abs(x[0]) < least_normal, (np.abs(x[0]) >= least_normal) & (off[0] > 0)):
            assert ratio[part].max() > 0.999
