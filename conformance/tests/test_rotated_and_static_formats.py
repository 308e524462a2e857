"""Rotated rows compared with the matrix in exact fractions, and FP8 with a given scale compared with another library's casts."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import kvref
from kvref.errors import ConfigError
from kvref.formats.hadamard import hadamard
from kvref_conformance.oracle.formats import ROTATED_FORMATS, group_of, hadamard_rotation, inner_of, per_row

U = Fraction(1, 2**24)


def some_rows(width):
    rng = np.random.default_rng(width)
    plain = rng.normal(size=(4, width)) * 2.0 ** rng.integers(-12, 12, size=(4, width))
    plain[1] = 1 + rng.normal(size=width) * 1e-6  # all sums except one cancel
    plain[2, 0] = 1e4
    return plain.astype(np.float32)


@pytest.mark.parametrize("width", [4, 16, 64, 48])  # block sizes whose square root is an integer
def test_sums_are_as_far_from_the_matrix_as_was_derived(width):
    block = hadamard_rotation.block_of(width)
    stages, root = block.bit_length() - 1, round(block**0.5)
    for row in some_rows(width):
        exact = [each / root for each in hadamard_rotation.rotate_exactly(row)]
        off = [abs(Fraction(float(got)) - want) for got, want in zip(hadamard(row[None])[0], exact, strict=True)]
        for start in range(0, width, block):
            length = sum(Fraction(float(each)) ** 2 for each in row[start : start + block])
            assert sum(each**2 for each in off[start : start + block]) <= ((1 + U) ** (stages + 2) - 1) ** 2 * length


@pytest.mark.parametrize("name", ROTATED_FORMATS)
@pytest.mark.parametrize("width", [64, 96])
def test_both_bounds_say_the_same_and_hold(name, width):
    format, x = kvref.get_format(name), some_rows(width)
    stored = format.quantize(x)
    values, bound = format.dequantize(stored, width), format.bound(x, stored)
    assert (np.abs(values.astype(np.float64) - x) <= bound).all()
    assert bound == pytest.approx(
        per_row.bounds(x, per_row.store(x, name), name)[0], rel=1e-5
    )  # the bound counts one rounding more
    assert (per_row.bounds(x, per_row.store(x, name), name)[1] >= bound).all()


@pytest.mark.parametrize("name", ROTATED_FORMATS)
def test_a_product_with_the_matrix_is_within_what_is_tolerated(name):
    width = 4 * group_of(name) if group_of(name) > 1 else 64
    x, inner = some_rows(width), kvref.get_format(inner_of(name))
    index, block = np.arange(width), hadamard_rotation.block_of(width)
    signs = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in index.tolist()] for i in index.tolist()])
    matrix = (signs / block**0.5).astype(np.float32)
    values = inner.dequantize(inner.quantize(x @ matrix), width) @ matrix
    bound = per_row.bounds(x, per_row.store(x, name), name)[1]
    assert (lengths_of(values.astype(np.float64) - x, width) <= bound[:, 0]).all()


def matrix_of(width):
    index = range(width)
    return np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in index] for i in index]) / width**0.5


def stored_as_it_may_be(x, width, off, rounding):
    """Q4_0 of rows times the matrix, in float64: the scale off by a number of float16 units, halves rounded either way."""
    y = (x.astype(np.float64) @ matrix_of(width)).reshape(len(x), -1, 32)
    d = np.take_along_axis(y, np.abs(y).argmax(axis=2)[:, :, None], axis=2) / -8
    held = d.astype(np.float16)
    held = (held + off * np.spacing(held)).astype(np.float64)
    codes = np.clip(rounding(np.divide(y, d, out=np.zeros_like(y), where=d != 0)), -8, 7)
    return (codes * held).reshape(len(x), width) @ matrix_of(width)


def lengths_of(x, width):
    return np.linalg.norm(np.reshape(x, (-1, width)), axis=1)


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_the_length_of_what_is_off_tells_half_the_size_from_another_rounding(width):
    """Also for rows of one number, whose rotated numbers all have the largest magnitude: the scale may come from either sign."""
    rng = np.random.default_rng(width)
    x = np.concatenate([rng.normal(size=(50, width)), np.eye(width)[:8] * 3, some_rows(width)]).astype(np.float32)
    bound = per_row.bounds(x, per_row.store(x, "q4_0_hadamard"), "q4_0_hadamard")[1]
    assert (bound == bound[:, :1]).all()
    for off in (-1, 0, 1):
        for rounding in (np.rint, lambda q: np.floor(q + 0.5), lambda q: np.ceil(q - 0.5)):
            far = lengths_of(stored_as_it_may_be(x, width, off, rounding) - x, width)
            assert (far <= bound[:, 0]).all()
            assert (far[:50] >= bound[:50, 0] / 4).all()  # the bound is not many times larger than necessary
    right = stored_as_it_may_be(x[:50], width, 0, np.rint)
    for smaller in (0.0, 0.5, 0.8):
        assert (lengths_of(right * smaller - x[:50], width) > bound[:50, 0]).all() or smaller == 0.8
    assert (lengths_of(right * 0.5 - right, width) > per_row.read_as(x[:50], "q4_0_hadamard").slack[:, 0]).all()


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
    """With a scale of 1.0 in caches that have no argument for another scale."""
    for name in ("float8_e4m3fn_static", "int8_hadamard"):
        store = kvref.token_store.TokenStore(kvref.reference, kvref.get_format(name), 4, 2, 16)
        x = some_rows(32).reshape(4, 2, 16)
        store.write([3, 1, 0, 2], x, x)
        for part in store.read([3, 1, 0, 2]):
            assert (part == per_row.read_as(x, name).values).all()
