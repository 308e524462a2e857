"""Base classes of adapters on PyTorch, which convert arrays, and the codes of row quantizers as the judge reads them."""

from typing import Any

import numpy as np
import torch

from kvref_conformance.implementation_api import Level

INT8, E4M3FN, E5M2 = "int8", "float8_e4m3fn", "float8_e5m2"


class TorchArrays:
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32",)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class OneThreadTorch(TorchArrays):
    """For matrices so small that synchronizing threads costs more than they save."""

    def __init__(self) -> None:
        torch.set_num_threads(1)


class TorchRows:
    language = "python"
    level: Level = "tolerant"  # rounds halves to even, and multiplies by reciprocals

    def asarray(self, values: Any) -> Any:
        values = np.asarray(values)
        narrow = values.dtype.name == "bfloat16"  # torch does not accept ml_dtypes' bfloat16
        return torch.tensor(values.astype(np.float32)).bfloat16() if narrow else torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def rows(self) -> "TorchRows":
        return self


def fp8_as_bytes(data: Any) -> Any:
    """Return FP8 codes as bytes, because NumPy has no dtype for them."""
    return data.view(torch.uint8) if data.is_floating_point() else data


def bytes_as_fp8(codes: Any, format: str) -> Any:
    return codes if format == INT8 else codes.view(getattr(torch, format))
