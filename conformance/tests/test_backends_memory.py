"""Rows, codes and results at any memory address and with any strides."""

import numpy as np
import pytest
from test_backends import FAST, NUMPY, WIDTH, patterns, same_bits, some_of_each

import kvref


def beside(array, count):
    """Return a copy that begins a number of bytes after an aligned address."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64 + count
    moved = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


@pytest.mark.parametrize("name", FAST[:2])
@pytest.mark.parametrize("format", [each for each in some_of_each() if each.granularity != "element"], ids=lambda each: each.name)
@pytest.mark.parametrize("count", [1, 50])
def test_where_memory_lies_changes_nothing(name, format, count):
    backend, rows = kvref.backend(name), np.linspace(-1, 1, count * WIDTH, dtype=np.float32).reshape(count, WIDTH)
    want = kvref.reference.quantize(rows, format)
    back = kvref.reference.dequantize(want, WIDTH, format)
    mine = backend.quantize(backend.asarray(beside(rows, 4)), format)
    for offset in (1, 2, 3):
        held = mine._replace(codes=backend.asarray(beside(want.codes, offset)))
        out = backend.asarray(beside(np.zeros_like(rows), 4))
        assert same_bits(backend.to_numpy(backend.dequantize(held, WIDTH, format, out)), back)
        codes = backend.asarray(beside(np.zeros_like(want.codes), offset))
        backend.quantize(backend.asarray(rows), format, mine._replace(codes=codes))
        assert same_bits(backend.to_numpy(codes), want.codes)
    apart = mine._replace(codes=backend.asarray(np.repeat(want.codes, 2, axis=-1))[..., ::2])
    assert same_bits(backend.to_numpy(backend.dequantize(apart, WIDTH, format)), back)


@pytest.mark.torch
@pytest.mark.parametrize("format", [each for each in some_of_each() if each.granularity != "element"], ids=lambda each: each.name)
def test_what_has_a_gradient_is_stored_without(format):
    torch, rows = kvref.backend("torch"), patterns(3, 3e4)
    want = torch.quantize(torch.asarray(rows), format)
    got = torch.quantize(torch.asarray(rows).requires_grad_(), format)
    for mine, right in zip(got, want, strict=True):
        assert (mine is None and right is None) or (bool((mine == right).all()) and not mine.requires_grad)


@pytest.mark.torch
@pytest.mark.parametrize("format", [each for each in some_of_each() if each.granularity != "element"], ids=lambda each: each.name)
def test_what_is_read_by_scales_with_a_gradient_has_none(format):
    torch, rows = kvref.backend("torch"), patterns(3, 3e4)
    stored = torch.quantize(torch.asarray(rows), format)
    learned = type(stored)(*(part.requires_grad_() if part is not None and part.is_floating_point() else part for part in stored))
    values = torch.dequantize(learned, WIDTH, format)
    assert not values.requires_grad and same_bits(torch.to_numpy(values), torch.to_numpy(torch.dequantize(stored, WIDTH, format)))


@pytest.mark.torch
@pytest.mark.parametrize("default", ["bfloat16", "float64"])
@pytest.mark.parametrize(("name", "formats"), [("torch", some_of_each()), ("torch-compiled", [kvref.get_format("iq4_nl")])])
def test_what_numbers_are_by_default_changes_nothing(name, formats, default):
    torch, backend = pytest.importorskip("torch"), kvref.backend(name)
    rows = patterns(3, 3e4)
    torch.set_default_dtype(getattr(torch, default))  # as programs do that load a model in it
    try:
        for format in formats:
            if format.granularity != "element":
                want, got = kvref.reference.quantize(rows, format), backend.quantize(backend.asarray(rows), format)
                assert same_bits(backend.to_numpy(got.codes), want.codes), format.name
                back = kvref.reference.dequantize(want, WIDTH, format)
                assert same_bits(backend.to_numpy(backend.dequantize(got, WIDTH, format)), back), format.name
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["int8", "float8_e5m2_static", "int8_hadamard"])
def test_an_array_that_would_be_filled_in_a_copy_is_refused(name):
    rows, format = patterns(6, 1e35).reshape(3, 2, WIDTH), kvref.get_format(name)
    stored = NUMPY.quantize(rows, format)
    values, codes = (np.zeros((2, 3, WIDTH), part.dtype).swapaxes(0, 1) for part in (rows, stored.codes))
    with pytest.raises(ValueError, match=r"C-contiguous|creating a copy"):
        NUMPY.dequantize(stored, WIDTH, format, values)
    with pytest.raises(ValueError, match=r"C-contiguous|creating a copy"):
        NUMPY.quantize(rows, format, stored._replace(codes=codes))
    assert not values.any() and not codes.any()
