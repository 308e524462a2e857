"""Adapter of torchtune's KVCache as a contiguous cache of one layer: `update`, `size` and `reset`, and its two buffers.

Only the file of the cache is loaded: the whole package needs an old torchao, the cache only torch. A cache has its final size
from kvref_adapters._shared.torch_arrays import OneThreadTorch
from the start, so `capacity` is the size of its buffers. Its `update` raises ValueError and AssertionError, which are mapped to
the specification's errors.
"""

from collections.abc import Mapping
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, ClassVar

import torch

from kvref.errors import CapacityExceeded, ConfigError, DtypeMismatch, ShapeMismatch
from kvref_adapters._shared.torch_arrays import OneThreadTorch
from kvref_conformance.exceptions import NotOffered


def _loaded(file: str) -> Any:
    spec = spec_from_file_location("torchtune_kv_cache", str(distribution("torchtune").locate_file(file)))
    if spec is None or spec.loader is None:
        raise ImportError(f"torchtune has no {file}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KVCache = _loaded("torchtune/modules/kv_cache.py").KVCache


class TorchtuneKV(OneThreadTorch):
    name = "torchtune"
    version = version("torchtune")
    language = "python"
    project = "torchtune"
    # the capacity is always the maximum length
    limits: ClassVar[Mapping[str, Any]] = {"initial_capacity": {"least": 4096}, "max_seq_len": {"most": 4096}}

    def contiguous(self, **config: Any) -> "TorchtuneLayer":
        return TorchtuneLayer(**config)


class TorchtuneLayer:
    def __init__(
        self, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> None:  # fmt: skip
        if type(initial_capacity) is not int or initial_capacity < 0:
            raise NotOffered("an initial_capacity argument")
        try:
            self._cache = KVCache(batch_size, max_seq_len, num_kv_heads, head_dim, getattr(torch, dtype))
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(str(error)) from error

    @property
    def seq_len(self) -> int:
        return int(self._cache.size)

    @property
    def capacity(self) -> int:
        return int(self._cache.k_cache.shape[2])

    def append(self, keys: Any, values: Any) -> None:
        try:
            self._cache.update(keys, values)
        except AssertionError as error:
            raise CapacityExceeded("update: AssertionError past the maximum sequence length") from error
        except (ValueError, RuntimeError, IndexError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error

    def read(self) -> tuple[Any, Any]:
        return self._cache.k_cache[:, :, : self.seq_len], self._cache.v_cache[:, :, : self.seq_len]

    def raw(self) -> tuple[Any, Any]:
        return self._cache.k_cache, self._cache.v_cache

    def reset(self) -> None:
        self._cache.reset()
