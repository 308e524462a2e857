"""Small floats compared with ml_dtypes and NumPy on all critical values."""

import ml_dtypes
import numpy as np
import pytest

import kvref
from kvref.formats.small_float import BFLOAT16, E4M3FN, E5M2, FLOAT16, SmallFloat
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.formats import small_floats

UPPER_HALVES = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
BACKENDS = [load_implementation(name).backend for name in ("reference", "reference:strict", "numpy")]


def by_name(value):
    return value.name


def cases(element: SmallFloat) -> np.ndarray:
    """All upper halves of float32, each with lower half 0, 1 and all ones, and every tie with the numbers next to it."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.concatenate([bits | 1, bits | 0x7FFF, bits | 0x8000, bits | 0xFFFF]).view(np.float32)
    return np.concatenate([UPPER_HALVES, lower, small_floats.ties_and_neighbours(element.name)])


@pytest.mark.parametrize("backend", BACKENDS, ids=by_name)
@pytest.mark.parametrize("element", [E4M3FN, E5M2], ids=by_name)
def test_encode_equals_ml_dtypes_in_range(backend, element):
    values = cases(element)
    values = values[np.abs(values) <= element.max]
    got = backend.to_numpy(backend.encode(backend.asarray(values), element))
    assert (got == values.astype(getattr(ml_dtypes, element.name)).view(np.uint8)).all()


@pytest.mark.parametrize("backend", BACKENDS, ids=by_name)
@pytest.mark.parametrize("element", [E4M3FN, E5M2], ids=by_name)
def test_decode_equals_ml_dtypes_on_every_code(backend, element):
    codes = np.arange(256, dtype=np.uint8)
    got = backend.to_numpy(backend.decode(backend.asarray(codes), element))
    want = codes.view(getattr(ml_dtypes, element.name)).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("backend", BACKENDS, ids=by_name)
def test_past_the_range_the_specification_saturates_and_ml_dtypes_does_not(backend):
    past = np.array([464.0, 464.00003, 1e9, -1e9, np.inf, np.nan], np.float32)
    assert backend.to_numpy(backend.encode(backend.asarray(past), E4M3FN)).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F]
    assert past.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tolist()[1] == 0x7F


@pytest.mark.parametrize("backend", BACKENDS, ids=by_name)
@pytest.mark.parametrize(("element", "dtype"), [(FLOAT16, np.float16), (BFLOAT16, ml_dtypes.bfloat16)], ids=["half", "brain"])
def test_sixteen_bit_codes_are_the_casts_bits(backend, element, dtype):
    values = np.concatenate([cases(element)[::3], UPPER_HALVES])
    with np.errstate(over="ignore", invalid="ignore"):
        want = values.astype(dtype).view(np.uint16)
    got = backend.to_numpy(backend.encode(backend.asarray(values), element))
    number = ~np.isnan(values)
    assert (got[number] == want[number]).all()
    back = backend.to_numpy(backend.decode(backend.asarray(got), element))
    np.testing.assert_array_equal(back, got.view(dtype).astype(np.float32))


@pytest.mark.parametrize("element", [E4M3FN, E5M2, FLOAT16, BFLOAT16], ids=by_name)
def test_the_oracle_agrees_with_ml_dtypes_too(element):
    values = cases(element)
    values = values[np.abs(values) <= element.max]
    dtype = getattr(ml_dtypes, element.name, np.float16)
    want = values.astype(dtype).view(np.uint8 if element.bits == 8 else np.uint16)
    assert (small_floats.encode(values, element.name) == want).all()


@pytest.mark.parametrize("element", [E4M3FN, E5M2, FLOAT16, BFLOAT16], ids=by_name)
def test_the_oracles_values_are_those_of_the_definition(element):
    want = np.array([small_floats.exact_value(code, element.name) for code in range(2**element.bits)], dtype=np.float32)
    want[2 ** (element.bits - 1)] = -0.0  # fractions have no negative zero
    assert small_floats.decoded(element.name).tobytes() == want.tobytes()


def test_a_format_says_its_maximum():
    maxima = [float(ml_dtypes.finfo(getattr(ml_dtypes, each.name)).max) for each in (E4M3FN, E5M2, BFLOAT16)]
    assert [E4M3FN.max, E5M2.max, BFLOAT16.max] == maxima
    assert kvref.get_format("float8_e4m3fn").limit == 448.0
