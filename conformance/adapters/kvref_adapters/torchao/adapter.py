"""Adapters of torchao's quantized tensors, by their own constructors and `dequantize`.

Adapters of torchao's tensors with one scale per row, Int8Tensor and Float8Tensor, by `from_hp` and `dequantize`.

`torchao-range` is the same INT8 by the primitives below them, `choose_qparams_affine` and `quantize_affine`, with the range -127
to 127, which their caller can select. `torchao-groups` is groups of a row by the same primitives, symmetric, in 8, 4 and 2 bits,
with a scale dtype per format and one byte per code. Rows of one number raise in the tensors with one scale per row, so they are
excluded.

Adapters of torchao's prototypes: MX (`MXTensor.to_mx`, scales rounded down) and NVFP4 (`NVFP4Tensor.to_nvfp4`).

FP6 is not included: torchao stores one byte per code, so the adapter would have to pack the codes.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import Float8Tensor, Int8Tensor, PerRow
from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, dequantize_affine, quantize_affine

from kvref.errors import ConfigError, DtypeMismatch
from kvref_adapters._shared.torch_arrays import E4M3FN, E5M2, INT8, TorchRows, bytes_as_fp8, fp8_as_bytes
from kvref_conformance.implementation_api import Level
from kvref_conformance.oracle.formats import PLAIN_FORMATS

LIMITS: Mapping[str, Any] = {"width": {"least": 2}}


class TorchAo(TorchRows):
    name = "torchao"
    version = version("torchao")
    project = "torchao"
    formats = (INT8, E4M3FN, E5M2)
    limits: ClassVar[Mapping[str, Any]] = LIMITS

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        if format == INT8:
            stored = _taken(Int8Tensor.from_hp, rows, PerRow())
        else:
            stored = Float8Tensor.from_hp(rows, getattr(torch, format), PerRow())
        return fp8_as_bytes(stored.qdata), stored.scale[:, 0], None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        of = Int8Tensor if format == INT8 else Float8Tensor
        stored = of(bytes_as_fp8(codes, format), scale[:, None], block_size=[1, width], dtype=torch.float32)
        return stored.dequantize()


class TorchAoRange(TorchRows):
    name = "torchao-range"
    version = version("torchao")
    project = "torchao"
    formats = (INT8,)
    limits: ClassVar[Mapping[str, Any]] = LIMITS

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        block = (1, rows.shape[1])
        scale, zero = _taken(
            choose_qparams_affine, rows, MappingType.SYMMETRIC, block, torch.int8, -127, 127, eps=2.0**-23,
            scale_dtype=torch.float32, keepdim=True,
        )  # fmt: skip
        return _taken(quantize_affine, rows, block, scale, zero, torch.int8, -127, 127), scale[:, 0], None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        return dequantize_affine(codes, (1, width), scale, None, torch.int8, -127, 127)


class TorchAoGroups(TorchRows):
    name = "torchao-groups"
    version = version("torchao")
    project = "torchao"
    formats = tuple(f"int{bits}_g{group}_{scale}" for bits in (8, 4, 2) for group in (32, 64, 128) for scale in PLAIN_FORMATS)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        block, top, dtype = _grouped(format)
        scale, zero = _taken(
            choose_qparams_affine, rows, MappingType.SYMMETRIC, block, torch.int8, -top, top, eps=LEAST[dtype],
            scale_dtype=dtype, keepdim=True,
        )  # fmt: skip
        return _taken(quantize_affine, rows, block, scale, zero, torch.int8, -top, top), scale, None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        block, top, dtype = _grouped(format)
        return dequantize_affine(codes, block, scale.to(dtype), None, torch.int8, -top, top)


LEAST = {torch.float32: 2.0**-23, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-23}


def _grouped(format: str) -> tuple[tuple[int, int], int, torch.dtype]:
    """Return the group size, the largest code, and the dtype of the scales."""
    element, group, scale = format.split("_")
    return (1, int(group[1:])), int(2 ** (int(element[3:]) - 1) - 1), getattr(torch, scale)


def _taken(call: Any, *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except AssertionError as error:
        if "divisible" in str(error):
            raise ConfigError(str(error)) from error
        raise DtypeMismatch(str(error)) if "dtype" in str(error) else error from error


ELEMENTS = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2, "mxfp4": torch.float4_e2m1fn_x2}
NVFP4 = "nvfp4"


class TorchAoMx(TorchRows):
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
