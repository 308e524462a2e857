"""Adapters of Hugging Face transformers' DynamicCache, StaticCache and EncoderDecoderCache as contiguous caches of one layer.

Functions that the library lacks are not offered: neither cache grows by doubling, accepts keys and values in one array, or
advances a length; DynamicCache has no maximum length and no raw buffers, StaticCache cannot be cropped. The library's exceptions
are mapped to the specification's errors. The adapter validates nothing and undoes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache

from kvref.errors import CapacityExceeded, DtypeMismatch, PositionOutOfRange, RowOutOfRange, ShapeMismatch
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered


class _Transformers:
    version = transformers.__version__
    language = "python"
    project = "transformers"
    level: Level = "exact"
    formats = ("float32",)  # a cache stores the given dtype without a cast

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class Dynamic(_Transformers):
    name = "transformers-dynamic"

    def contiguous(self, **config: Any) -> "OneLayer":
        _not_taken(config, *config)
        return Growing(DynamicCache(), config, config["max_seq_len"])


class Static(_Transformers):
    name = "transformers-static"

    def contiguous(self, **config: Any) -> "OneLayer":
        _not_taken(config, *(name for name in config if name != "max_seq_len"))
        one_layer = LlamaConfig(num_hidden_layers=1)  # the other sizes come from the first tokens
        return WithBuffers(StaticCache(one_layer, max_cache_len=config["max_seq_len"]), config)


class EncoderDecoder(_Transformers):
    name = "transformers-encoder-decoder"

    def contiguous(self, **config: Any) -> "OneLayer":
        _not_taken(config, *config)
        return OfADecoder(EncoderDecoderCache(DynamicCache(), DynamicCache()), config, config["max_seq_len"])


class OneLayer:
    def __init__(self, cache: Cache, config: dict[str, Any], longest: int | None = None) -> None:
        self._cache = cache
        self._no_tokens = torch.zeros(config["batch_size"], config["num_kv_heads"], 0, config["head_dim"])
        self._longest = longest  # the judge's maximum length, if the cache has none

    @property
    def _updated(self) -> Cache:
        """Return the cache that a layer's attention updates."""
        return self._cache

    @property
    def seq_len(self) -> int:
        return int(self._cache.get_seq_length())

    def append(self, keys: Any, values: Any) -> None:
        if self._longest is not None and keys.ndim == 4 and self.seq_len + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        try:
            self._updated.update(keys, values, 0)
        except (RuntimeError, IndexError, ValueError) as error:
            raise _in_our_words(error) from error

    def read(self) -> tuple[Any, Any]:
        layers = self._updated.layers
        if not layers or layers[0].keys is None:
            return self._no_tokens, self._no_tokens  # the library has no layer yet, or a layer without tensors
        layer = layers[0]
        return layer.keys[:, :, : self.seq_len], layer.values[:, :, : self.seq_len]

    def reorder(self, rows: Sequence[int]) -> None:
        if not self.seq_len:
            raise NotOffered("reordering an empty cache: it has no batch size yet")
        try:
            self._cache.reorder_cache(torch.tensor(rows, dtype=torch.long))
        except (RuntimeError, IndexError) as error:
            raise RowOutOfRange(str(error)) from error
        self._no_tokens = self._no_tokens[:1].expand(len(rows), -1, -1, -1)  # the result of reads after a reset

    def reset(self) -> None:
        self._cache.reset()


class Growing(OneLayer):
    def truncate(self, length: int) -> None:
        try:
            self._cache.crop(int(length) - self.seq_len)  # a negative argument is the number of tokens to remove
        except ValueError as error:
            raise PositionOutOfRange(str(error)) from error


class OfADecoder(Growing):
    """The self-attention cache, next to the cross-attention cache, which a decoder's first step fills."""

    @property
    def _updated(self) -> Cache:
        return self._cache.self_attention_cache

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        if not self._cache.is_updated.get(0):
            self._cache.cross_attention_cache.update(keys, values, 0)
            self._cache.is_updated[0] = True


class WithBuffers(OneLayer):
    def raw(self) -> tuple[Any, Any]:
        layer = self._cache.layers[0]
        if layer.keys is None:
            raise NotOffered("raw buffers before the first tokens")
        return layer.keys, layer.values


def _not_taken(config: dict[str, Any], *names: str) -> None:
    """Raise NotOffered for an invalid size: the library does not see this size and so cannot reject it."""
    for name in names:
        value, least = config[name], 0 if name == "initial_capacity" else 1
        good = value == "float32" if name == "dtype" else isinstance(value, int) and value >= least
        if not good:
            raise NotOffered(f"validation of {name}, which the library does not take as an argument")


def _in_our_words(error: Exception) -> Exception:
    said = str(error)
    if "out of range" in said or "out of bounds" in said:
        return CapacityExceeded(said)
    if "dtype" in said or "scalar type" in said:
        return DtypeMismatch(said)
    return ShapeMismatch(said)
