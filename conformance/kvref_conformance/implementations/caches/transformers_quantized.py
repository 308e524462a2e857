"""Adapters of Hugging Face transformers' QuantizedCache with its three backends, by `update`, `get_seq_length` and `reset`.

The contents of the cache are what an `update` without tokens returns. FP8 is the family `quantized`. quanto and HQQ quantize
groups of `q_group_size` numbers: with one head and a group size of head_dim, a group is a token. Both are the family `tiered`
without a tail, because with `residual_length=1` every token is quantized at once. HQQ uses axis 1 and 8 bits: with the default
axis a group is no token, and 4 bits are packed two tokens per byte. The caches have no maximum length and take no sizes. The
adapter validates nothing.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import LlamaConfig, QuantizedCache

from kvref.errors import PositionOutOfRange, ShapeMismatch
from kvref_conformance.implementations.caches.torch_rows import E4M3FN, Rows
from kvref_conformance.outcome import NotOffered

TIERS = {"num_kv_heads": 1, "tail_length": 0, "warm_length": 0, "tail_dtype": "float32"}
WORDS = ("format", "tail_dtype", "warm_format", "store_format")


class _Transformers(Rows):
    version = transformers.__version__
    project = "transformers"
    rows = None  # type: ignore[assignment]


class Fp8(_Transformers):
    name = "transformers-fp8"
    formats = (E4M3FN,)
    limits: ClassVar[Mapping[str, Any]] = {"format": E4M3FN}

    def quantized(self, **config: Any) -> "Layers":
        return Layers(config)


class Quanto(_Transformers):
    name = "transformers-quanto"
    formats = ("float32", "q4")
    limits: ClassVar[Mapping[str, Any]] = {**TIERS, "warm_format": "q4", "store_format": "q4"}

    def tiered(self, **config: Any) -> "Tiers":
        return Tiers("quanto", config, {"nbits": 4, "q_group_size": config["head_dim"]})


class Hqq(_Transformers):
    name = "transformers-hqq"
    formats = ("float32", "q8")
    limits: ClassVar[Mapping[str, Any]] = {**TIERS, "warm_format": "q8", "store_format": "q8"}

    def tiered(self, **config: Any) -> "Tiers":
        return Tiers("hqq", config, {"nbits": 8, "q_group_size": config["head_dim"], "axis_key": 1, "axis_value": 1})


class Cache:
    """A cache of one or more layers. longest: the judge's maximum length."""

    def __init__(self, backend: str, config: dict[str, Any], longest: int, layers: int, options: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name in ("tail_length", "warm_length") else 1
            if name not in WORDS and (type(value) is not int or value < least):
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        self._longest, self._none = longest, torch.zeros(0, config["num_kv_heads"], config["head_dim"])
        self._cache = QuantizedCache(backend, LlamaConfig(num_hidden_layers=layers), **options)

    def _length(self, layer: int) -> int:
        return int(self._cache.get_seq_length(layer))

    def _append(self, layer: int, keys: Any, values: Any) -> None:
        if keys.ndim == 3 and self._length(layer) + keys.shape[0] > self._longest:
            raise NotOffered("a maximum length")
        try:
            self._cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        except (RuntimeError, IndexError, ValueError, AssertionError) as error:
            raise ShapeMismatch(str(error)) from error

    def _held(self, layer: int) -> tuple[Any, Any]:
        if not self._length(layer):
            return self._none, self._none
        nothing = self._none.transpose(0, 1)[None]
        keys, values = self._cache.update(nothing, nothing, layer)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def clear(self) -> None:
        self._cache.reset()


class Layers(Cache):
    def __init__(self, config: dict[str, Any]) -> None:
        if config["format"] != E4M3FN:
            raise NotOffered(f"format {config['format']}")
        super().__init__("fp8", config, config["capacity"], config["num_layers"], {})
        self._count = config["num_layers"]

    def append(self, layer: int, keys: Any, values: Any) -> None:
        self._append(self._known(layer), keys, values)

    def length(self, layer: int) -> int:
        return self._length(self._known(layer))

    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Any, Any]:
        length = self.length(layer)
        if not all(0 <= position < length for position in positions):
            raise PositionOutOfRange(f"position: expected one in [0, {length}), got {list(positions)}")
        keys, values = (part[list(positions)] for part in self._held(layer))
        return keys, values

    def _known(self, layer: int) -> int:
        if not 0 <= layer < self._count:
            raise NotOffered("validation of the layer number")
        return layer


class Tiers(Cache):
    def __init__(self, backend: str, config: dict[str, Any], options: dict[str, Any]) -> None:
        fits = config["warm_length"] == config["tail_length"] == 0 and config["tail_dtype"] == "float32"
        if not fits or not config["warm_format"] == config["store_format"] == f"q{options['nbits']}":
            raise NotOffered("other tier lengths and formats")
        super().__init__(backend, config, config["max_tokens"], 1, {"residual_length": 1, **options})

    @property
    def total_tokens(self) -> int:
        return self._length(0)

    def append(self, keys: Any, values: Any) -> None:
        self._append(0, keys, values)

    def read(self) -> tuple[Any, Any]:
        return self._held(0)

    def stats(self) -> SimpleNamespace:
        """Counts from the length of the residual; no bytes, because the library does not report them."""
        residual = self._cache.layers[0].keys
        tail = residual.shape[-2] if residual is not None and residual.ndim == 4 else 0
        return SimpleNamespace(
            total_tokens=self.total_tokens, tail_tokens=tail, warm_tokens=0, store_tokens=self.total_tokens - tail
        )
