"""optimum-quanto's 8-bit quantizers with a scale a row: AbsmaxOptimizer's scales, `quantize_weight`, and `dequantize`.

Four bits are judged in the cache of transformers that is made of them: as rows they are packed another way (two rows in a byte).
"""

from importlib.metadata import version
from typing import Any

import torch
from optimum.quanto import AbsmaxOptimizer, WeightQBytesTensor, qfloat8_e4m3fn, qfloat8_e5m2, qint8, quantize_weight

from kvref_conformance.implementations.caches.torch_rows import E4M3FN, E5M2, INT8, Rows, as_codes, as_stored

QTYPES = {INT8: qint8, E4M3FN: qfloat8_e4m3fn, E5M2: qfloat8_e5m2}


class OptimumQuanto(Rows):
    name = "optimum-quanto"
    version = version("optimum-quanto")
    project = "optimum-quanto"
    formats = (INT8, E4M3FN, E5M2)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        scale = AbsmaxOptimizer()(rows, QTYPES[format], axis=0)
        stored = quantize_weight(rows, QTYPES[format], 0, scale)
        return as_codes(stored._data), scale.reshape(-1), None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        data = as_stored(codes, format)
        scales = scale[:, None] if len(scale) > 1 else scale[0]  # one row is quantized as a whole tensor
        stored = WeightQBytesTensor(QTYPES[format], 0, data.shape, data.stride(), data, scales, None)
        with torch.no_grad():
            return stored.dequantize()
