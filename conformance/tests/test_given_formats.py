"""Rotated rows against the matrix in exact fractions, and FP8 with a scale that is given against another library's casts."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import kvref
from kvref.errors import ConfigError
from kvref.formats.rotated import hadamard
from kvref_conformance.oracle import rotated, rows
from kvref_conformance.oracle.formats import ROTATED, group_of, inner_of

U = Fraction(1, 2**24)


def some_rows(width):
    rng = np.random.default_rng(width)
    plain = rng.normal(size=(4, width)) * 2.0 ** rng.integers(-12, 12, size=(4, width))
    plain[1] = 1 + rng.normal(size=width) * 1e-6  # all but one of its sums cancel
    plain[2, 0] = 1e4
    return plain.astype(np.float32)


@pytest.mark.parametrize("width", [4, 16, 64, 48])  # of blocks whose square root is a whole number
def test_sums_are_as_far_from_the_matrix_as_was_derived(width):
    block = rotated.block_of(width)
    stages, root = block.bit_length() - 1, round(block**0.5)
    for row in some_rows(width):
        exact = [each / root for each in rotated.exactly_turned(row)]
        off = [abs(Fraction(float(got)) - want) for got, want in zip(hadamard(row[None])[0], exact, strict=True)]
        for start in range(0, width, block):
            length = sum(Fraction(float(each)) ** 2 for each in row[start : start + block])
            assert sum(each**2 for each in off[start : start + block]) <= ((1 + U) ** (stages + 2) - 1) ** 2 * length


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("width", [64, 96])
def test_both_bounds_say_the_same_and_hold(name, width):
    format, x = kvref.get_format(name), some_rows(width)
    stored = format.quantize(x)
    values, bound = format.dequantize(stored, width), format.bound(x, stored)
    assert (np.abs(values.astype(np.float64) - x) <= bound).all()
    assert bound == pytest.approx(rows.bounds(x, rows.store(x, name), name)[0], rel=1e-5)  # of roundings one is counted more
    assert (rows.bounds(x, rows.store(x, name), name)[1] >= bound).all()


@pytest.mark.parametrize("name", ROTATED)
def test_a_product_with_the_matrix_is_within_what_is_tolerated(name):
    width = 4 * group_of(name) if group_of(name) > 1 else 64
    x, inner = some_rows(width), kvref.get_format(inner_of(name))
    index, block = np.arange(width), rotated.block_of(width)
    signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in index.tolist()] for i in index.tolist()])
    matrix = (signs / block**0.5).astype(np.float32)
    values = inner.dequantize(inner.quantize(x @ matrix), width) @ matrix
    assert (np.abs(values.astype(np.float64) - x) <= rows.bounds(x, rows.store(x, name), name)[1]).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.037, 3e-6, 1e-42, 1e30])
def test_codes_are_those_of_another_librarys_cast(name, scale):
    dtype = getattr(ml_dtypes, name)
    most, held = float(ml_dtypes.finfo(dtype).max), np.float32(scale)
    x = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32) * held * np.float32(most / 2)
    with np.errstate(over="ignore"):
        want = np.clip(x / np.full_like(x, held), -most, most).astype(dtype)
    format = kvref.get_format(f"{name}_static", scale=scale)
    stored = format.quantize(x)
    assert (stored.codes == want.view(np.uint8)).all()
    values = format.dequantize(stored, 64)
    assert (values == want.astype(np.float32) * held).all()
    assert (np.abs(values.astype(np.float64) - x) <= format.bound(x, stored)).all()


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), 1e-60, 1e37, "1", True, None])
def test_a_scale_that_is_none(scale):
    if scale is None:
        assert kvref.get_format("float8_e5m2_static", scale=scale).scale == 1.0
        return
    with pytest.raises(ConfigError, match=r"scale of float8_e5m2_static: expected .*, got"):
        kvref.get_format("float8_e5m2_static", scale=scale)


def test_a_store_of_any_cache_holds_them():
    """With a scale of 1.0, where a cache has no field for another."""
    for name in ("float8_e4m3fn_static", "int8_hadamard"):
        store = kvref.slots.TokenStore(kvref.reference, kvref.get_format(name), 4, 2, 16)
        x = some_rows(32).reshape(4, 2, 16)
        store.write([3, 1, 0, 2], x, x)
        for part in store.read([3, 1, 0, 2]):
            assert (part == rows.read_as(x, name).values).all()
