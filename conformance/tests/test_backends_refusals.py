"""Values that backends must reject, at any position among valid values."""

import numpy as np
import pytest
from test_backends import FAST, WIDTH, patterns, same_bits

import kvref
from kvref.errors import NonFinite


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("format", ["int8", "float8_e5m2", "q8", "q4", "float8_e4m3fn_static", "int8_hadamard"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_in_the_last_row_that_is_not_finite_is_refused(name, format, value):
    backend, rows = kvref.backend(name), patterns(1200, 1e35)
    rows[-1, 77] = value
    with pytest.raises(NonFinite):
        backend.quantize(backend.asarray(rows), kvref.get_format(format))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("most", [np.float32(2.0**126 / WIDTH), np.nextafter(np.float32(2.0**126 / WIDTH), np.float32(np.inf))])
def test_rows_are_rotated_up_to_where_their_sums_may_overflow(name, most):
    backend, rows, format = kvref.backend(name), patterns(1200, 1e35), kvref.get_format("int8_hadamard")
    rows[-1, 77] = -most
    if most <= 2.0**126 / WIDTH:
        want = kvref.reference.quantize(rows, format)
        got = backend.quantize(backend.asarray(rows), format)
        assert all(same_bits(backend.to_numpy(mine), right) for mine, right in zip(got[:2], want[:2], strict=True))
    else:
        with pytest.raises(NonFinite, match="expected magnitudes of at most"):
            backend.quantize(backend.asarray(rows), format)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("format", ["q4_0", "q4_1", "iq4_nl"])
@pytest.mark.parametrize("value", [1e8, -1e8])
def test_a_scale_beyond_float16_among_others_is_refused(name, format, value):
    backend, rows = kvref.backend(name), np.ones((40, WIDTH), np.float32)
    rows[7, 5] = value  # the scale of q4_0 has the opposite sign
    with pytest.raises(NonFinite):
        backend.quantize(backend.asarray(rows), kvref.get_format(format))
