"""The kernels of the backends against the reference's, bit for bit, on random inputs."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import kvref
from kvref.errors import BackendNotFound, DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref.formats.ggml import GGML
from kvref.formats.group_scales import GroupFormat
from kvref.formats.hadamard import HadamardFormat
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.attention import attention as exact
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

NUMPY = kvref.backend("numpy")
FAST = ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("torch-compiled", marks=pytest.mark.torch)]
WIDTH = 128
finite = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: abs(x) < 1e38)
anything = st.floats(width=32)


@pytest.mark.parametrize("name", [name for name, format in kvref.FORMATS.items() if format.granularity != "group"])
@given(rows=arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 9)), elements=finite))
def test_quantizing_gives_the_references_bits(name, rows):
    format, width = kvref.get_format(name), rows.shape[-1]
    rows = rows / np.float32(16) if isinstance(format, HadamardFormat) else rows  # keeps the sums finite
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


def same_bits(mine, theirs):
    return np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def some_of_each():
    """All formats, except group formats that differ from another one in a single parameter."""
    among = {
        "int8_g32_bfloat16",
        "int4_g64_float16",
        "int2_g128_float32",
        "uint8_g128_float16",
        "uint4_g32_float32",
        "uint2_g64_bfloat16",
    }
    return [each for name, each in kvref.FORMATS.items() if name in among or not isinstance(each, GroupFormat)]


def patterns(count, most=1e38):
    """Random float32 bit patterns of every exponent, whose rows are finite in every format."""
    values = np.random.default_rng(7).integers(0, 2**32, size=count * WIDTH, dtype=np.uint32).view(np.float32)
    values[~(np.abs(values) < most)] = 0.4375
    return values.reshape(count, WIDTH)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("format", some_of_each(), ids=lambda each: each.name)
def test_many_pieces_are_the_same_as_one_and_go_where_they_are_told(name, format, monkeypatch):
    monkeypatch.setattr("kvref.hadamard_kernels.PIECE", 500 * WIDTH)
    if name == "torch-compiled":  # whose tiles are larger
        monkeypatch.setattr("kvref_torch.COMPILED_ONCE", 2**16)
        monkeypatch.setattr("kvref_torch.COMPILED_OFTEN", 2**16)
    backend = kvref.backend(name)
    plain, most = (format.inner, 1e35) if isinstance(format, HadamardFormat) else (format, 1e38)  # keeps the sums finite
    halves = plain.name.endswith("_float16") or isinstance(plain, GGML)  # whose numbers must be in the range of float16
    rows = patterns(1200, 3e4 if halves else most)  # more than two tiles, and a remainder
    want = kvref.reference.quantize(rows, format)
    back = kvref.reference.dequantize(want, WIDTH, format)
    mine = backend.asarray(rows)
    fresh = backend.quantize(mine, format)
    out = kvref.Quantized(*(None if part is None else backend.xp.zeros_like(part) for part in fresh))
    for stored in (fresh, backend.quantize(mine, format, out)):
        for part, right in zip(stored, want, strict=True):
            if part is not None and "bfloat16" not in f"{part.dtype} {format.name.partition('_g')[0]}":  # NumPy has no bfloat16
                assert same_bits(backend.to_numpy(part), right)
        values = backend.zeros(rows.shape, "float32")
        assert backend.dequantize(stored, WIDTH, format, values) is values
        assert same_bits(backend.to_numpy(values), back)
        assert same_bits(backend.to_numpy(backend.dequantize(stored, WIDTH, format)), back)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("element", list(kvref.formats.small_float.ELEMENTS.values()), ids=lambda each: each.name)
def test_every_upper_half_with_any_lower_half_is_encoded_right(name, element):
    backend = kvref.backend(name)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        values = values[~np.isnan(values)]
        out = backend.encode(backend.asarray(values[:0]), element)
        out = backend.xp.zeros(values.shape, dtype=out.dtype)
        assert backend.encode(backend.asarray(values), element, out) is out
        got, right, finite = backend.to_numpy(out), kvref.reference.encode(values, element), np.isfinite(values)
        assert same_bits(got[finite], right[finite])  # an infinity may become any NaN
        read = backend.decode(out, element, backend.zeros(values.shape, "float32"))
        assert np.array_equal(backend.to_numpy(read), kvref.reference.decode(np.asarray(out), element), equal_nan=True)


@pytest.mark.parametrize("name", FAST)
def test_a_scale_halfway_between_two_of_nvfp4_is_the_even_one(name):
    backend, format = kvref.backend(name), kvref.get_format("nvfp4")
    scales = kvref.reference.decode(np.arange(8, 127, dtype=np.uint8), kvref.formats.small_float.E4M3FN)  # the normal numbers
    halfway = (scales[1:] + scales[:-1]) / np.float32(2)
    rows = np.zeros((3 * len(halfway), 16), np.float32)
    rows[:, 5] = 6 * np.concatenate([halfway, np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, np.float32(999))])
    got, want = backend.quantize(backend.asarray(rows), format), kvref.reference.quantize(rows, format)
    assert all(same_bits(backend.to_numpy(mine), right) for mine, right in zip(got[:2], want[:2], strict=True))
    assert (want.scale[: len(halfway), 0] % 2 == 0).all()


@pytest.mark.parametrize("name", FAST[:2])
def test_rows_are_gathered_into_the_array_that_is_given(name):
    backend = kvref.backend(name)
    store = backend.asarray(patterns(9))
    out = backend.zeros((3, WIDTH), "float32")
    assert backend.gather(store, [8, 0, 8], out) is out
    assert same_bits(backend.to_numpy(out), patterns(9)[[8, 0, 8]])


def test_threads_have_scratch_of_their_own():
    rows = [patterns(1500) * np.float32(scale) for scale in (1, 1e-3, 0.25, 0.5)]
    int8 = kvref.get_format("int8")
    with ThreadPoolExecutor(4) as pool:
        for got, mine in zip(pool.map(lambda each: NUMPY.quantize(each, int8), rows * 4), rows * 4, strict=True):
            assert all(same_bits(*each) for each in zip(got[:2], kvref.reference.quantize(mine, int8)[:2], strict=True))


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


STRETCH = st.tuples(st.integers(-3, 7), st.integers(1, 4)).map(lambda of: list(range(of[0], min(8, sum(of)))))


@pytest.mark.parametrize("name", ["reference", "reference:array_api_strict", "reference, where arrays are immutable"])
@given(st.lists(STRETCH, max_size=4).map(lambda parts: [slot for part in parts for slot in part]))
def test_the_reference_scatters_slots_that_follow_each_other_as_if_one_by_one(name, slots):
    backend, rows = kvref.backend(name.partition(",")[0]), np.arange(2.0 * len(slots), dtype=np.float32).reshape(-1, 2)
    store = backend.asarray(np.full((8, 2), -1, np.float32))
    want = np.full((8, 2), -1, np.float32)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            want[slot] = row
    if "immutable" in name:
        store.flags.writeable = False
    assert backend.to_numpy(backend.scatter(store, slots, backend.asarray(rows))).tolist() == want.tolist()


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


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", FAST)
def test_hidden_tokens_whose_scores_overflow_have_no_effect(name):
    backend = kvref.backend(name)
    keys, values = np.full((4, 1, 2), 0.5, np.float32), np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    keys[2:] = [[[1e38, 1e38]], [[-1e38, 3e38]]]
    query, mask = np.array([[[9, 9]], [[0, 0]]], np.float32), np.array([[1, 1, 0, 0], [1, 0, 1, 0]], np.bool_)
    got = backend.attend(*map(backend.asarray, (query, keys, values)), 0.5, backend.asarray(mask))
    np.testing.assert_allclose(np.asarray(got)[:, 0], [[1, 2], [2, 3]])


@pytest.mark.torch
def test_torch_differentiates_attention_with_hidden_tokens():
    import torch

    query, keys, values = (torch.ones(2, 1, 2, requires_grad=True) for _ in range(3))
    kvref.backend("torch").attend(query, keys, values, 0.5, torch.tensor([[True, False], [True, True]])).sum().backward()
    assert values.grad[:, 0, 0].tolist() == [1.5, 0.5]


@pytest.mark.parametrize("backend", [NUMPY, kvref.reference], ids=lambda backend: backend.name)
def test_wrong_slots_and_rows_are_refused(backend):
    store = np.zeros((4, 2), np.float32)
    with pytest.raises(SlotOutOfRange, match="below 4, got 4"):
        backend.scatter(store, [0, 4], np.ones((2, 2), np.float32))
    with pytest.raises(ShapeMismatch, match=r"new: expected shape \[1, 2\], got \[2, 2\]"):
        backend.scatter(store, [0], np.ones((2, 2), np.float32))
    with pytest.raises(SlotOutOfRange, match="at least 0 to gather, got -1"):
        backend.gather(store, [-1])
    assert not store.any()


EVERYWHERE = ["reference", "numpy", "reference:strict", *FAST[1:2]]


def on(name):
    return load_implementation(name).kernels()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_slots_are_integers_from_wherever_they_come(name):
    backend = on(name)
    store = backend.asarray(np.arange(8, dtype=np.float32).reshape(8, 1))
    several = [[3, 4, 5], (3, 4, 5), range(3, 6), [np.int8(3), 4, np.uint64(5)], memoryview(np.array([3, 4, 5]))]
    several += [np.array([3, 4, 5], dtype) for dtype in (np.int64, np.int32, np.uint8, np.uint64, ">i8")]
    several += [backend.asarray(np.array([3, 4, 5], dtype)) for dtype in (np.int64, np.int32, np.uint8)]
    for slots in several:
        assert backend.to_numpy(backend.gather(store, slots)).tolist() == [[3.0], [4.0], [5.0]]
    for nothing in ([], (), range(0), np.zeros(0, np.int32)):
        assert backend.gather(store, nothing).shape == (0, 1)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_slots_that_are_not_integers_in_a_row_are_refused(name):
    backend = on(name)
    store, new = backend.asarray(np.zeros((8, 1), np.float32)), backend.asarray(np.ones((2, 1), np.float32))
    types = [[1.0, 2.0], [1.9, 2], [True, False], [1, True], [1, np.True_], [0, np.array(True)], ["1", "2"], [None, 1]]
    types += [np.array([1.0, 2.0]), np.array([True, False]), np.zeros(0)]
    types += [backend.asarray(np.array([1.0, 2.0], np.float32)), backend.asarray(np.array([True, False]))]
    shapes = [1, None, "12", {1, 2}, [[1, 2]], [[1], [2]], [[1], [2, 3]], np.array(1), np.int64(1), np.zeros((2, 1), np.int64)]
    shapes += [backend.asarray(np.zeros((1, 2), np.int64)), backend.asarray(np.array(1))]
    past = [[0, 8], [0, 2**70], [2**63, 1], [0, -(2**70)], np.array([0, 2**64 - 1], np.uint64)]
    for several, error in ((types, DtypeMismatch), (shapes, ShapeMismatch), (past, SlotOutOfRange)):
        for slots in several:
            with pytest.raises(error, match="slot"):
                backend.scatter(store, slots, new)
            with pytest.raises(error, match="slot"):
                backend.gather(store, slots)
    assert not backend.to_numpy(store).any()


def test_numpy_memory_is_aligned():
    for shape in ((1,), (3, 5), (1, 1, 256, 1)):
        array = NUMPY.zeros(shape, "float32")
        assert array.shape == shape
        assert array.ctypes.data % 64 == 0


def test_an_unknown_backend_says_the_known_ones():
    with pytest.raises(BackendNotFound, match="one of reference, cupy, numpy, torch, torch-compiled, got 'nump'"):
        kvref.backend("nump")
    with pytest.raises(BackendNotFound, match=r"'numpy:cuda': expected options that numpy accepts, got .'device': 'cuda'"):
        kvref.backend("numpy:cuda")
    with pytest.raises(BackendNotFound, match="installed Array API library, got 'nolib'"):
        kvref.backend("reference:nolib")
    with pytest.raises(BackendNotFound, match="installed Array API library, got 3"):
        kvref.backend("reference", namespace=3)
    for wrong in ({"speed": "fast"}, {"namespace": "numpy"}):
        with pytest.raises(BackendNotFound, match="backend 'reference:numpy': expected options that reference accepts, got"):
            kvref.backend("reference:numpy", **wrong)
    assert kvref.backend("reference", device="cpu").name == "reference"


@pytest.mark.torch
def test_a_device_that_is_not_here_is_said_in_one_line():
    with pytest.raises(BackendNotFound, match="backend torch: expected an available device, got 'nowhere': ") as refused:
        kvref.backend("torch:nowhere")
    assert "\n" not in str(refused.value)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["torch", "torch-compiled"])
def test_what_torch_does_itself_breaks_no_clause(name):
    """Clauses that kvref_torch implements with torch alone.

    `nox -s theirs` judges eager PyTorch completely; compiled, each new shape takes long.
    """
    judge = CheckRunner(load_implementation(name), Effort(examples=10, timeout=300.0))
    for family in ("rows", "elements", "kernels"):
        verdicts = {clause.id: verdict_of(judge.judge_clause(checks)) for clause, checks in select_checks(family=family).items()}
        assert "passed" in verdicts.values()
        assert [clause for clause, verdict in verdicts.items() if verdict == "failed"] == []


@pytest.mark.torch
def test_attention_in_torch_is_within_the_bound_at_length():
    torch = kvref.backend("torch")
    rng = np.random.default_rng(0)
    for tokens, outliers in ((3000, 1.0), (700, 30.0)):
        keys, values = (rng.standard_normal((tokens, 2, 64), np.float32) for _ in range(2))
        keys[:, :, :3] *= outliers  # like real keys: a few channels have far larger numbers
        query = rng.standard_normal((2, 4, 64), np.float32)
        mask = np.ones((2, tokens), bool)
        got = torch.attend(*map(torch.asarray, (query, keys, values)), 0.125, torch.asarray(mask)).numpy()
        want, bound = exact(query, keys, values, scale=0.125)
        assert (np.abs(got - want) <= bound).all()
