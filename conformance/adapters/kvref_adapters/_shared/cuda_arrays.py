"""Arrays of adapters that need a GPU: float16 on the first CUDA device. They were not run where there is no GPU."""

from typing import Any, ClassVar

import numpy as np
import torch

from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level


class CudaArrays:
    language = "cuda"
    level: Level = "exact"
    formats: tuple[str, ...] = ("float16",)
    limits: ClassVar[dict[str, Any]] = {
        "dtype": ["float16"], "rounded_weights": True, "tokens": {"least": 1}, "head_dim": {"multiple_of": 8, "most": 256},
    }  # fmt: skip

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("it needs a CUDA device, and PyTorch finds none")

    def asarray(self, values: Any) -> Any:
        return torch.tensor(np.asarray(values), device="cuda")

    def to_numpy(self, array: Any) -> Any:
        return array.cpu().numpy()


def pages_in_descending_order(tokens: Any, page: int) -> Any:
    """Return pages [pages, tokens of a page, num_kv_heads, head_dim], the last one first, filled up with zeros."""
    filled = tokens.new_zeros(-(-len(tokens) // page) * page, *tokens.shape[1:])
    filled[: len(tokens)] = tokens
    return filled.unflatten(0, (-1, page)).flip(0).contiguous()


def check_slots(store: Any, slots: Any) -> None:
    """Raise NotOffered for slots that a kernel does not check: an engine makes them from its own block tables."""
    integers = slots.ndim == 1 and not slots.is_floating_point() and slots.dtype != torch.bool
    numbers = slots.long()  # PyTorch compares few unsigned types
    if not integers or ((numbers < 0) | (numbers >= len(store))).any():
        raise NotOffered("slots outside the store, which the kernel does not check")
