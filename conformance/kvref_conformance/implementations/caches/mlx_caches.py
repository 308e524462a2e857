"""mlx-lm's prompt caches of one layer, on a CPU, as contiguous caches: what a model is given, by the calls that it makes.

`append` is `update_and_fetch`, `truncate` is `trim`, which takes how many tokens go, and `reorder` is BatchKVCache's `filter`.
None has a maximum length, and none says which sizes it has before the first tokens. Nothing is checked on their behalf.
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
    formats = ("float32",)  # a cache stores what dtype it is given first

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
    """As far as nothing rotates, and not up to its brim: what its window drops is another matter."""

    name = "mlx-lm-kv-rotating"

    def contiguous(self, **config: Any) -> "OneLayer":
        return OneLayer(lambda: RotatingKVCache(config["max_seq_len"] + 1), config)


class Batch(Caches):
    """Without padding: all rows are of one length."""

    name = "mlx-lm-kv-batch"

    def contiguous(self, **config: Any) -> "Rows":
        return Rows(lambda: BatchKVCache([0] * config["batch_size"]), config)


class OneLayer:
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            if name == "dtype" and value != "float32":
                raise NotOffered("a cache that is given its dtype")
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise NotOffered(f"a cache that is given its {name}")
        self._longest = config["max_seq_len"]  # what the judge takes for the maximum
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
            raise NotTruncatable(f"{type(self._cache).__name__}.is_trimmable() says no")
        self._cache.trim(self.seq_len - length)


class Rows(OneLayer):
    def reorder(self, rows: Sequence[int]) -> None:
        size = len(self._cache.left_padding)
        if not len(rows) or not all(0 <= row < size for row in rows):
            raise NotOffered("rows that are not there, and none at all: MLX checks no indices, and says so")
        self._cache.filter(mx.array(list(rows)))
        self._none = mx.zeros((len(rows), *self._none.shape[1:]))
