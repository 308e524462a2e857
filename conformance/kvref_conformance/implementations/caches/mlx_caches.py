"""Adapters of mlx-lm's prompt caches of one layer as contiguous caches, on a CPU, with the calls that a model makes.

`append` is `update_and_fetch`, `truncate` is `trim`, whose argument is the number of tokens to remove, and `reorder` is `filter`
of BatchKVCache. The caches have no maximum length and no sizes before the first tokens. The adapter validates nothing.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from kvref.errors import DtypeMismatch, NotTruncatable, ShapeMismatch
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered


class Caches:
    version = version("mlx-lm")
    language = "python"
    project = "mlx-lm"
    level: Level = "exact"
    formats = ("float32",)  # a cache takes the dtype of the first tokens

    def __init__(self) -> None:
        mx.set_default_device(mx.cpu)

    def asarray(self, values: Any) -> Any:
        values = np.asarray(values)
        return mx.array(values, dtype=mx.float64 if values.dtype == np.float64 else None)

    def to_numpy(self, array: Any) -> Any:
        return np.array(array)


class Plain(Caches):
    name = "mlx-lm-kv"

    def contiguous(self, **config: Any) -> "OneLayer":
        return OneLayer(lambda: KVCache(), config)


class Concatenate(Caches):
    name = "mlx-lm-kv-concatenate"

    def contiguous(self, **config: Any) -> "OneLayer":
        return OneLayer(lambda: ConcatenateKVCache(), config)


class Rotating(Caches):
    """One position larger than the maximum length, so that it never overwrites tokens. Its window is judged in mlx_windows."""

    name = "mlx-lm-kv-rotating"

    def contiguous(self, **config: Any) -> "OneLayer":
        return OneLayer(lambda: RotatingKVCache(config["max_seq_len"] + 1), config)


class Batch(Caches):
    """Without padding: all rows have the same length."""

    name = "mlx-lm-kv-batch"

    def contiguous(self, **config: Any) -> "Rows":
        return Rows(lambda: BatchKVCache([0] * config["batch_size"]), config)


class OneLayer:
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            if name == "dtype" and value != "float32":
                raise NotOffered("a dtype argument")
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        self._longest = config["max_seq_len"]  # the judge's maximum length
        self._cache = made()
        self._none = mx.zeros((config["batch_size"], config["num_kv_heads"], 0, config["head_dim"]))

    @property
    def seq_len(self) -> int:
        return int(self._cache.size() or getattr(self._cache, "_idx", self._cache.offset))

    def append(self, keys: Any, values: Any) -> None:
        if keys.ndim == 4 and self.seq_len + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        try:
            mx.eval(self._cache.update_and_fetch(keys, values))
        except (ValueError, IndexError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error

    def read(self) -> tuple[Any, Any]:
        if self._cache.empty():
            return self._none, self._none
        keys, values = self._cache.keys_and_values()
        return keys, values

    def truncate(self, length: int) -> None:
        if not self._cache.is_trimmable():
            raise NotTruncatable(f"{type(self._cache).__name__}.is_trimmable() returned False")
        self._cache.trim(self.seq_len - length)


class Rows(OneLayer):
    def reorder(self, rows: Sequence[int]) -> None:
        size = len(self._cache.left_padding)
        if not len(rows) or not all(0 <= row < size for row in rows):
            raise NotOffered("rejecting invalid rows, or none: MLX documents that it does not check indices")
        self._cache.filter(mx.array(list(rows)))
        self._none = mx.zeros((len(rows), *self._none.shape[1:]))
