"""Adapter of LitGPT's KVCache for full attention as a contiguous cache of one layer, used as in `GPT.forward`.

The caller passes the positions (`input_pos`) and counts the tokens, so the count is not judged. The cache is created by its own
class with all its sizes and has its final size from the start. It takes the dtype of what is written.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from litgpt.model import KVCache

from kvref.errors import CapacityExceeded, ConfigError, DtypeMismatch, ShapeMismatch
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered


class Full:
    name = "litgpt-kv"
    version = version("litgpt")
    language = "python"
    project = "litgpt"
    level: Level = "exact"
    formats = ("float32",)
    # the capacity is always the maximum length
    limits: ClassVar[Mapping[str, Any]] = {"initial_capacity": {"least": 4096}, "max_seq_len": {"most": 4096}}

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()

    def contiguous(self, **config: Any) -> "OneLayer":
        return OneLayer(**config)


class OneLayer:
    def __init__(
        self, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> None:  # fmt: skip
        if type(initial_capacity) is not int or initial_capacity < 0:
            raise NotOffered("an initial_capacity argument")
        shape = batch_size, num_kv_heads, max_seq_len, head_dim
        try:
            self._cache = KVCache(shape, shape, dtype=getattr(torch, dtype))
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(str(error)) from error
        self._count = 0

    @property
    def capacity(self) -> int:
        return int(self._cache.k.shape[2])

    def append(self, keys: Any, values: Any) -> None:
        count = self._count + (keys.shape[-2] if keys.ndim > 1 else 1)
        try:
            self._cache(torch.arange(self._count, count), keys, values)
        except IndexError as error:
            raise (CapacityExceeded if "out of bounds" in str(error) else ShapeMismatch)(str(error)) from error
        except RuntimeError as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        self._count = count

    def read(self) -> tuple[Any, Any]:
        return self._cache.k[:, :, : self._count], self._cache.v[:, :, : self._count]

    def raw(self) -> tuple[Any, Any]:
        return self._cache.k, self._cache.v

    def reset(self) -> None:
        self._cache.reset_parameters()
        self._count = 0
