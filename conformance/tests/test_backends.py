"""The NumPy kernels against the reference's, bit for bit, on inputs nobody chose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kvref
from kvref.errors import BackendNotFound, ShapeMismatch, SlotOutOfRange
from kvref_conformance.oracle.attention import attention as exact

NUMPY = kvref.backend("numpy")
finite = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e38)
anything = st.floats(width=32)


@pytest.mark.parametrize("name", list(kvref.FORMATS))
@given(rows=arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 9)), elements=finite))
def test_quantizing_gives_the_references_bits(name, rows):
    format, width = kvref.get_format(name), rows.shape[-1]
    got, want = NUMPY.quantize(rows, format), kvref.reference.quantize(rows, format)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype or name == "bfloat16"
            assert mine.tobytes() == theirs.tobytes()
    back = NUMPY.dequantize(got, width, format), kvref.reference.dequantize(want, width, format)
    assert back[0].tobytes() == back[1].tobytes()


@pytest.mark.parametrize("element", list(kvref.formats.small_float.ELEMENTS.values()), ids=lambda each: each.name)
@given(values=arrays(np.float32, 12, elements=anything))
def test_encoding_gives_the_references_codes(element, values):
    got, want = NUMPY.encode(values, element), kvref.reference.encode(values, element)
    number = ~np.isnan(values)
    assert (got[number] == want[number]).all()
    assert np.isnan(NUMPY.decode(got, element)[~number]).all()


@given(st.data())
def test_scattering_leaves_what_the_reference_leaves(data):
    slots = data.draw(st.lists(st.integers(-3, 9), max_size=6, unique=True))
    rows = np.arange(len(slots) * 4, dtype=np.float32).reshape(len(slots), 2, 2)
    stores = [np.full((8, 2, 2), -1, np.float32) for _ in range(2)]
    outcomes = []
    for backend, store in zip((NUMPY, kvref.reference), stores, strict=True):
        try:
            outcomes.append(backend.scatter(store, slots, rows).tolist())
        except SlotOutOfRange as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert (stores[0] == stores[1]).all()


@given(st.data())
def test_attention_is_within_the_bound_with_any_mask(data):
    queries, tokens, group = (data.draw(st.integers(low, high)) for low, high in ((1, 4), (1, 7), (1, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    query, keys, values = (
        rng.normal(size=(n, h, 4)).astype(np.float32) for n, h in ((queries, 2 * group), (tokens, 2), (tokens, 2))
    )
    mask = data.draw(arrays(np.bool_, (queries, tokens)))
    hidden = ~mask.any(axis=0)
    keys[hidden], values[hidden] = np.nan, np.inf
    for backend in (NUMPY, kvref.reference):
        got = backend.attend(query, keys, values, 0.5, mask)
        for i in range(queries):
            want, bound = exact(query[i : i + 1], keys[mask[i]], values[mask[i]], scale=0.5)
            assert (np.abs(got[i] - want[0]) <= bound[0]).all()


@pytest.mark.parametrize("backend", [NUMPY, kvref.reference], ids=lambda backend: backend.name)
def test_wrong_slots_and_rows_are_refused(backend):
    store = np.zeros((4, 2), np.float32)
    with pytest.raises(SlotOutOfRange, match="below 4, got 4"):
        backend.scatter(store, [0, 4], np.ones((2, 2), np.float32))
    with pytest.raises(ShapeMismatch, match=r"expected shape \[1, 2\], got \[2, 2\]"):
        backend.scatter(store, [0], np.ones((2, 2), np.float32))
    with pytest.raises(SlotOutOfRange, match="at least 0 to gather, got -1"):
        backend.gather(store, [-1])
    assert not store.any()


def test_numpy_memory_is_aligned():
    for shape in ((1,), (3, 5), (1, 1, 256, 1)):
        array = NUMPY.zeros(shape, "float32")
        assert array.shape == shape
        assert array.ctypes.data % 64 == 0


def test_an_unknown_backend_says_the_known_ones():
    with pytest.raises(BackendNotFound, match="one of reference, cupy, numpy, torch, torch-compiled, got 'nump'"):
        kvref.backend("nump")
    with pytest.raises(BackendNotFound, match="installed Array API library, got 'nolib'"):
        kvref.backend("reference:nolib")
