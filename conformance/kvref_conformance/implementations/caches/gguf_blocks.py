"""gguf's own quantizers, in NumPy: `quantize` and `dequantize` of the cache types of llama.cpp that it has both of.

IQ4_NL is not among the formats: there `dequantize` alone exists, and rows are judged from what was quantized.
"""

from importlib.metadata import version
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import QuantError, dequantize, quantize

from kvref.errors import ConfigError
from kvref_conformance.interface import Level


class Gguf:
    name = "gguf"
    version = version("gguf")
    language = "python"
    project = "gguf"
    level: Level = "exact"  # "bit-exact same results as reference implementation", as its source says
    formats = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array

    def rows(self) -> "Gguf":
        return self

    def quantize(self, rows: Any, format: str) -> tuple[Any, None, None]:
        try:
            return quantize(rows, GGMLQuantizationType[format.upper()]), None, None
        except QuantError as error:
            raise ConfigError(str(error)) from error

    def dequantize(self, codes: Any, scale: None, zero: None, width: int, format: str) -> Any:
        return dequantize(codes, GGMLQuantizationType[format.upper()])
