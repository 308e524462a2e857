"""Adapter of gguf's quantizers in NumPy: the cache types of llama.cpp for which gguf has both `quantize` and `dequantize`.

IQ4_NL is not included: gguf has only its `dequantize`, and a row is judged together with its quantization.
"""

from importlib.metadata import version
from typing import Any

from gguf import GGMLQuantizationType
from gguf.quants import QuantError, dequantize, quantize

from kvref.errors import ConfigError
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_conformance.implementation_api import Level


class Gguf(NumpyArrays):
    name = "gguf"
    version = version("gguf")
    language = "python"
    project = "gguf"
    level: Level = "exact"  # the source promises "bit-exact same results as reference implementation"
    formats = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")

    def rows(self) -> "Gguf":
        return self

    def quantize(self, rows: Any, format: str) -> tuple[Any, None, None]:
        try:
            return quantize(rows, GGMLQuantizationType[format.upper()]), None, None
        except QuantError as error:
            raise ConfigError(str(error)) from error

    def dequantize(self, codes: Any, scale: None, zero: None, width: int, format: str) -> Any:
        return dequantize(codes, GGMLQuantizationType[format.upper()])
