"""Adapters of torchao's prototypes: MX (`MXTensor.to_mx`, scales rounded down) and NVFP4 (`NVFP4Tensor.to_nvfp4`).

FP6 is not included: torchao stores one byte per code, so the adapter would have to pack the codes.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from kvref.errors import ConfigError, DtypeMismatch
from kvref_conformance.implementations.caches.torch_rows import Rows
from kvref_conformance.interface import Level

ELEMENTS = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
NVFP4 = "nvfp4"


class TorchAoMx(Rows):
    name = "torchao-mx"
    version = version("torchao")
    project = "torchao"
    level: Level = "tolerant"  # NVFP4 multiplies by a reciprocal
    formats = (*ELEMENTS, NVFP4)
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float32", "bfloat16"]}

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        try:
            stored = NVFP4Tensor.to_nvfp4(rows) if format == NVFP4 else _to_mx(rows, ELEMENTS[format])
        except AssertionError as error:
            raise (ConfigError if "divisible" in str(error) else DtypeMismatch)(str(error)) from error
        return stored.qdata.view(torch.uint8), stored.scale.view(torch.uint8), None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        if format == NVFP4:
            return NVFP4Tensor(codes, scale.view(torch.float8_e4m3fn), 16, torch.float32).dequantize()
        element = ELEMENTS[format]
        data = codes if format == "mxfp4" else codes.view(element)
        held = MXTensor(data, scale.view(torch.float8_e8m0fnu), element, 32, torch.float32, None, None, False)
        return held.dequantize()


def _to_mx(rows: Any, element: Any) -> Any:
    return MXTensor.to_mx(rows, element, scaling_mode=ScaleCalculationMode.FLOOR)
