"""Adapters of optimum-quanto's quantizers: 8 bits with one scale per row; 4 and 2 bits in groups, each with a scale and a shift.

`optimum-quanto` is the scales of AbsmaxOptimizer, `quantize_weight`, and `dequantize`; `optimum-quanto-groups` is the same with
MaxOptimizer. transformers' cache that uses them is judged in transformers_quantized.
"""

from importlib.metadata import version
from typing import Any

import torch
from optimum.quanto import (
    AbsmaxOptimizer,
    MaxOptimizer,
    WeightQBitsTensor,
    WeightQBytesTensor,
    qfloat8_e4m3fn,
    qfloat8_e5m2,
    qint2,
    qint4,
    qint8,
    quantize_weight,
)

from kvref.errors import ConfigError
from kvref_adapters._shared.torch_arrays import E4M3FN, E5M2, INT8, TorchRows, bytes_as_fp8, fp8_as_bytes

QTYPES = {INT8: qint8, E4M3FN: qfloat8_e4m3fn, E5M2: qfloat8_e5m2}


class OptimumQuanto(TorchRows):
    name = "optimum-quanto"
    version = version("optimum-quanto")
    project = "optimum-quanto"
    formats = (INT8, E4M3FN, E5M2)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        scale = AbsmaxOptimizer()(rows, QTYPES[format], axis=0)
        stored = quantize_weight(rows, QTYPES[format], 0, scale)
        return fp8_as_bytes(stored._data), scale.reshape(-1), None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        data = bytes_as_fp8(codes, format)
        scales = scale[:, None] if len(scale) > 1 else scale[0]  # a single row is quantized per tensor
        stored = WeightQBytesTensor(QTYPES[format], 0, data.shape, data.stride(), data, scales, None)
        with torch.no_grad():
            return stored.dequantize()


class OptimumQuantoGroups(TorchRows):
    """Shifts are negated zeros. The library packs codes of different groups together; the adapter returns one byte per code."""

    name = "optimum-quanto-groups"
    version = version("optimum-quanto")
    project = "optimum-quanto"
    formats = tuple(f"uint{bits}_g{group}_float32" for bits in (4, 2) for group in (32, 64, 128))

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, Any]:
        qtype, group = _grouped(format)
        try:
            scale, shift = MaxOptimizer()(rows, qtype, axis=0, group_size=group)
        except ValueError as error:
            raise ConfigError(str(error)) if "Group size" in str(error) else error from error
        stored = quantize_weight(rows, qtype, 0, scale, shift, group)
        return stored._data.unpack().reshape(rows.shape), scale.reshape(len(rows), -1), -shift.reshape(len(rows), -1)

    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        qtype, group = _grouped(format)
        data = codes.reshape(-1, group)
        scales, shifts = scale.reshape(len(data), -1), -zero.reshape(len(data), -1)
        with torch.no_grad():
            return WeightQBitsTensor(qtype, 0, group, codes.shape, codes.stride(), data, scales, shifts).dequantize()


def _grouped(format: str) -> tuple[Any, int]:
    return qint4 if format.startswith("uint4") else qint2, int(format.split("_")[1][1:])
