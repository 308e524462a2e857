"""Adapter of PyTorch's float8 dtypes: casts value by value on the CPU."""

from typing import Any

import torch

from kvref_conformance.interface import Level


class TorchFloat8:
    name = "torch-float8"
    version = str(torch.__version__)
    language = "c++"
    project = "torch"
    level: Level = "exact"
    formats = ("float8_e4m3fn", "float8_e5m2")

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()

    def elements(self) -> "TorchFloat8":
        return self

    def encode(self, values: Any, format: str) -> Any:
        return values.to(getattr(torch, format)).view(torch.uint8)

    def decode(self, codes: Any, format: str) -> Any:
        return codes.view(getattr(torch, format)).to(torch.float32)
