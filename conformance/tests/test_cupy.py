"""The CuPy backend without a GPU: every clause, with its CUDA kernels compiled for the host."""

import importlib
import shutil
import sys

import array_api_compat.numpy
import numpy as np
import pytest
from host_cupy import module
from marks import half_long

import kvref
from kvref.formats.hadamard import HadamardFormat
from kvref_conformance.families import names
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

NUMPY = kvref.backend("numpy")
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", module(tmp_path_factory.mktemp("cupy")))
        patch.setitem(sys.modules, "array_api_compat.cupy", array_api_compat.numpy)
        patch.delitem(sys.modules, "kvref_cupy", raising=False)
        kvref_cupy = importlib.import_module("kvref_cupy")

        class OnHost(kvref_cupy.CuPyBackend):
            """NumPy's memory (a device's is aligned to 256 bytes), and overflow without NumPy's warning."""

            def zeros(self, shape, dtype):
                return NUMPY.zeros(shape, dtype)

            def address(self, array):
                return array.ctypes.data

            def _cast(self, *arguments):
                with np.errstate(over="ignore"):
                    return super()._cast(*arguments)

        yield OnHost()
        sys.modules.pop("kvref_cupy")


@pytest.mark.extended
@pytest.mark.parametrize("family", half_long(names()))
def test_it_breaks_no_clause(backend, family):
    judge = CheckRunner(OnBackend(backend), Effort(examples=10))
    chosen = {clause.id: checks for clause, checks in select_checks(family=family).items() if clause.id != "LAW-18"}  # nox -s gpu
    verdicts = {clause: verdict_of(judge.judge_clause(checks)) for clause, checks in chosen.items()}
    assert "passed" in verdicts.values()
    assert [clause for clause, verdict in verdicts.items() if verdict == "failed"] == []


@pytest.mark.parametrize("name", list(kvref.FORMATS))
def test_quantizing_gives_the_references_bits(backend, name):
    format = kvref.get_format(name)
    width, most = (128, 3e4) if format.granularity == "group" else (33, 1e38)  # some groups have float16 scales
    width = 32 if name == "int8_hadamard" else width  # a width with blocks to rotate
    most = min(most, 1e36) if isinstance(format, HadamardFormat) else most  # keeps the sums finite
    patterns = np.random.default_rng(0).integers(0, 2**32, size=(500, 4, width), dtype=np.uint32)
    rows = patterns.view(np.float32)
    rows[~np.isfinite(rows) | (np.abs(rows) > most)] = 1.5
    got, want = backend.quantize(rows, format), kvref.reference.quantize(rows, format)
    for mine, theirs in zip(got, want, strict=True):
        assert mine is theirs is None or mine.tobytes() == theirs.tobytes()
    assert backend.dequantize(got, width, format).tobytes() == kvref.reference.dequantize(want, width, format).tobytes()


@pytest.mark.parametrize("element", list(kvref.formats.small_float.ELEMENTS.values()), ids=lambda each: each.name)
def test_single_values_are_the_references(backend, element):
    patterns = np.arange(0, 2**32, 4099, dtype=np.uint32)  # a prime step: every exponent, and varied lower bits
    values = patterns.view(np.float32)
    values = values[~np.isnan(values)]
    assert (backend.encode(values, element) == kvref.reference.encode(values, element)).all()
    codes = np.arange(2**element.bits, dtype=element.code_dtype)
    got, want = backend.decode(codes, element), kvref.reference.decode(codes, element)
    assert np.array_equal(got, want, equal_nan=True)
