"""HQQ's quantizer, in groups of a row's neighbours (axis 1), on a CPU: `Quantizer.quantize` and `dequantize`.

`hqq` is what it does unless it is told otherwise: its solver moves each zero. `hqq-nearest` is without the solver. Zeros are
counted in codes, (code - zero) * scale: a zero of FMT-GROUP would be the adapter's product. So rows are bytes of its own, codes,
scales and zeros, and what they read back as is judged.
"""

from importlib.metadata import version
from typing import Any

import torch
from hqq.core.quantize import Quantizer

from kvref.errors import ConfigError
from kvref_conformance.implementations.caches.torch_rows import Rows


class Hqq(Rows):
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
        count = codes.numel() // (group + 8)  # of groups, each with two float32 behind all codes
        plain, *floats = codes[0].split([count * group, 4 * count, 4 * count])
        scales, zeros = (each.clone().view(torch.float32).reshape(-1, 1) for each in floats)
        meta = {
            "nbits": bits, "group_size": group, "axis": 1, "packing": None, "shape": (-1, width), "scale": scales, "zero": zeros,
            "compute_dtype": torch.float32,
        }  # fmt: skip
        return Quantizer.dequantize(plain.reshape(-1, group), meta)


class Nearest(Hqq):
    name = "hqq-nearest"
    optimize = False


def _sizes(format: str) -> tuple[int, int]:
    element, group, _ = format.split("_")
    return int(element.removeprefix("uint")), int(group[1:])
