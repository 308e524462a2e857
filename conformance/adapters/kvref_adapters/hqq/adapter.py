"""Adapter of HQQ's quantizer (`Quantizer.quantize` and `dequantize`) on a CPU, with groups along a row (axis 1).

`hqq` uses the defaults, where a solver adjusts each zero; `hqq-nearest` turns the solver off. HQQ's zeros are in units of codes:
value = (code - zero) * scale. A zero as FMT-GROUP defines it would have to be computed by the adapter, so each row is returned as
bytes (codes, scales, zeros), and its dequantized values are judged.
"""

from importlib.metadata import version
from typing import Any

import torch
from hqq.core.quantize import Quantizer

from kvref.errors import ConfigError
from kvref_adapters._shared.torch_arrays import TorchRows


class Hqq(TorchRows):
    name = "hqq"
    version = version("hqq")
    project = "hqq"
    formats = tuple(f"uint{bits}_g{group}_float32" for bits in (8, 4, 2) for group in (32, 64, 128))
    optimize = True

    def quantize(self, rows: Any, format: str) -> tuple[Any, None, None]:
        bits, group = _sizes(format)
        try:
            codes, meta = Quantizer.quantize(
                rows, bits, group_size=group, optimize=self.optimize, axis=1, bitpack=False, device="cpu"
            )  # fmt: skip
        except AssertionError as error:
            raise ConfigError(str(error)) if "group_size" in str(error) else error from error
        parts = (codes.to(torch.uint8), meta["scale"], meta["zero"])
        return torch.cat([part.reshape(1, -1).view(torch.uint8) for part in parts], dim=1), None, None

    def dequantize(self, codes: Any, scale: None, zero: None, width: int, format: str) -> Any:
        bits, group = _sizes(format)
        count = codes.numel() // (group + 8)  # number of groups; each has two float32 after all codes
        plain, *floats = codes[0].split([count * group, 4 * count, 4 * count])
        scales, zeros = (each.clone().view(torch.float32).reshape(-1, 1) for each in floats)
        meta = {
            "nbits": bits, "group_size": group, "axis": 1, "packing": None, "shape": (-1, width), "scale": scales, "zero": zeros,
            "compute_dtype": torch.float32,
        }  # fmt: skip
        return Quantizer.dequantize(plain.reshape(-1, group), meta)


class HqqNearest(Hqq):
    name = "hqq-nearest"
    optimize = False


def _sizes(format: str) -> tuple[int, int]:
    element, group, _ = format.split("_")
    return int(element.removeprefix("uint")), int(group[1:])
