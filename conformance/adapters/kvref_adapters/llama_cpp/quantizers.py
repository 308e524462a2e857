"""Adapters of llama.cpp's quantizers for its cache types: the C functions in the library of the wheel xllamacpp.

`llama.cpp-rows` uses the functions that write the cache on a CPU: `quantize_row_*` from `ggml_get_type_traits_cpu`, in the
instructions of the machine. `llama.cpp-rows-ref` uses the portable `quantize_row_*_ref`. `dequantize_row_*` reads both. C accepts
only rows of float, and the caller has to reject a width that is not a multiple of 32.
"""

import ctypes
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import xllamacpp.xllamacpp

from kvref_adapters._shared.arrays import NumpyArrays
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

LIBRARY = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
BLOCK = 32
BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "iq4_nl": 18}  # bytes per block


class LlamaCppRows(NumpyArrays):
    name = "llama.cpp-rows"
    version = f"{version('xllamacpp')} (xllamacpp)"
    language = "c++"
    project = "llama.cpp"
    level: Level = "tolerant"  # rounds halves to even where AVX is available
    formats = tuple(BYTES)
    limits: ClassVar[Mapping[str, Any]] = {"rows": {"dtype": "float32", "width": {"multiple_of": BLOCK}}}
    quantizer = "quantize_row_{}"

    def rows(self) -> "LlamaCppRows":
        return self

    def quantize(self, rows: Any, format: str) -> tuple[Any, None, None]:
        if rows.dtype != np.float32:
            raise NotOffered("rows of another dtype than float32")
        codes = np.zeros((len(rows), rows.shape[1] // BLOCK * BYTES[format]), np.uint8)
        _call(self.quantizer.format(format), rows, codes, rows.size)
        return codes, None, None

    def dequantize(self, codes: Any, scale: None, zero: None, width: int, format: str) -> Any:
        values = np.zeros((len(codes), width), np.float32)
        _call(f"dequantize_row_{format}", codes, values, values.size)
        return values


class LlamaCppRowsPortable(LlamaCppRows):
    name = "llama.cpp-rows-ref"
    level: Level = "exact"
    quantizer = "quantize_row_{}_ref"


def _call(name: str, source: Any, target: Any, count: int) -> None:
    """Call a C function of the form void NAME(const void * source, void * target, int64_t count)."""
    pointers = (np.ascontiguousarray(source).ctypes.data_as(ctypes.c_void_p), target.ctypes.data_as(ctypes.c_void_p))
    getattr(LIBRARY, name)(*pointers, ctypes.c_int64(count))
