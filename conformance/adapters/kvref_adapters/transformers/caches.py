"""Adapters of Hugging Face transformers' cache classes: growing, preallocated, quantized, and with a window.

Adapters of Hugging Face transformers' DynamicCache, StaticCache and EncoderDecoderCache as contiguous caches of one layer.

Functions that the library lacks are not offered: neither cache grows by doubling, accepts keys and values in one array, or
advances a length; DynamicCache has no maximum length and no raw buffers, StaticCache cannot be cropped. The library's exceptions
are mapped to the specification's errors. The adapter validates nothing and undoes nothing.

Adapters of Hugging Face transformers' QuantizedCache with its three backends, by `update`, `get_seq_length` and `reset`.

The contents of the cache are what an `update` without tokens returns. FP8 is the family `quantized`. quanto and HQQ quantize
groups of `q_group_size` numbers: with one head and a group size of head_dim, a group is a token. Both are the family `tiered`
without a tail, because with `residual_length=1` every token is quantized at once. HQQ uses axis 1 and 8 bits: with the default
axis a group is no token, and 4 bits are packed two tokens per byte. The caches have no maximum length and take no sizes. The
adapter validates nothing.

Adapters of Hugging Face transformers' cache layers with a sliding window and with chunks.

One step is the library's own mask for the cache, `update`, and SDPA as the library calls it, in a model's order. Stored tokens
are those that the next step would read. The adapter validates nothing.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    QuantizedCache,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

from kvref.errors import CapacityExceeded, DtypeMismatch, NotTruncatable, PositionOutOfRange, RowOutOfRange, ShapeMismatch
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_adapters._shared.torch_arrays import E4M3FN, TorchArrays, TorchRows
from kvref_conformance.exceptions import NotOffered


class _TransformersCaches(TorchArrays):
    version = transformers.__version__
    language = "python"
    project = "transformers"
    formats = ("float32",)  # a cache stores the given dtype without a cast


class TransformersDynamic(_TransformersCaches):
    name = "transformers-dynamic"

    def contiguous(self, **config: Any) -> "TransformersLayer":
        _not_taken(config, *config)
        return TransformersDynamicLayer(DynamicCache(), config, config["max_seq_len"])


class TransformersStatic(_TransformersCaches):
    name = "transformers-static"

    def contiguous(self, **config: Any) -> "TransformersLayer":
        _not_taken(config, *(name for name in config if name != "max_seq_len"))
        one_layer = LlamaConfig(num_hidden_layers=1)  # the other sizes come from the first tokens
        return TransformersStaticLayer(StaticCache(one_layer, max_cache_len=config["max_seq_len"]), config)


class TransformersEncoderDecoder(_TransformersCaches):
    name = "transformers-encoder-decoder"

    def contiguous(self, **config: Any) -> "TransformersLayer":
        _not_taken(config, *config)
        return TransformersDecoderLayer(EncoderDecoderCache(DynamicCache(), DynamicCache()), config, config["max_seq_len"])


class TransformersLayer:
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


class TransformersDynamicLayer(TransformersLayer):
    def truncate(self, length: int) -> None:
        try:
            self._cache.crop(int(length) - self.seq_len)  # a negative argument is the number of tokens to remove
        except ValueError as error:
            raise PositionOutOfRange(str(error)) from error


class TransformersDecoderLayer(TransformersDynamicLayer):
    """The self-attention cache, next to the cross-attention cache, which a decoder's first step fills."""

    @property
    def _updated(self) -> Cache:
        return self._cache.self_attention_cache

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        if not self._cache.is_updated.get(0):
            self._cache.cross_attention_cache.update(keys, values, 0)
            self._cache.is_updated[0] = True


class TransformersStaticLayer(TransformersLayer):
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


TIERS = {"num_kv_heads": 1, "tail_length": 0, "warm_length": 0, "tail_dtype": "float32"}
WORDS = ("format", "tail_dtype", "warm_format", "store_format")


class _TransformersQuantized(TorchRows):
    version = transformers.__version__
    project = "transformers"
    rows = None  # type: ignore[assignment]


class TransformersFp8(_TransformersQuantized):
    name = "transformers-fp8"
    formats = (E4M3FN,)
    limits: ClassVar[Mapping[str, Any]] = {"format": E4M3FN}

    def quantized(self, **config: Any) -> "TransformersQuantizedLayers":
        return TransformersQuantizedLayers(config)


class TransformersQuanto(_TransformersQuantized):
    name = "transformers-quanto"
    formats = ("float32", "q4")
    limits: ClassVar[Mapping[str, Any]] = {**TIERS, "warm_format": "q4", "store_format": "q4"}

    def tiered(self, **config: Any) -> "TransformersTiers":
        return TransformersTiers("quanto", config, {"nbits": 4, "q_group_size": config["head_dim"]})


class TransformersHqq(_TransformersQuantized):
    name = "transformers-hqq"
    formats = ("float32", "q8")
    limits: ClassVar[Mapping[str, Any]] = {**TIERS, "warm_format": "q8", "store_format": "q8"}

    def tiered(self, **config: Any) -> "TransformersTiers":
        return TransformersTiers("hqq", config, {"nbits": 8, "q_group_size": config["head_dim"], "axis_key": 1, "axis_value": 1})


class TransformersQuantizedCache:
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


class TransformersQuantizedLayers(TransformersQuantizedCache):
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


class TransformersTiers(TransformersQuantizedCache):
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


LONGEST = 2**20  # the maximum length that a static cache is given; it allocates memory for its window only


class _TransformersWindows(TorchArrays):
    version = transformers.__version__
    language = "python"
    project = "transformers"
    formats = ("float32",)  # a cache stores the given dtype without a cast
    limits: ClassVar[Mapping[str, Any]] = WINDOW_LIMITS


class TransformersWindow(_TransformersWindows):
    name = "transformers-window"

    def windowed(self, **config: Any) -> "TransformersWindowLayer":
        model = _of_a_window(config)
        return TransformersDynamicWindowLayer(model, DynamicCache(config=model), create_sliding_window_causal_mask, config)


class TransformersWindowRecording(_TransformersWindows):
    """As in assisted generation: new tokens are kept until the next `crop`."""

    name = "transformers-window-recording"

    def windowed(self, **config: Any) -> "TransformersWindowLayer":
        model = _of_a_window(config)
        cache = DynamicCache(config=model)
        cache.activate_past_recording()
        return TransformersRecordingWindowLayer(model, cache, create_sliding_window_causal_mask, config)


class TransformersWindowStatic(_TransformersWindows):
    name = "transformers-window-static"

    def windowed(self, **config: Any) -> "TransformersWindowLayer":
        model = _of_a_window(config)
        cache = StaticCache(model, max_cache_len=LONGEST)
        return TransformersWindowLayer(model, cache, create_sliding_window_causal_mask, config)


class TransformersChunked(_TransformersWindows):
    """Llama 4's: a query sees its own chunk. A window of a chunk's size removes nothing from it."""

    name = "transformers-chunked"
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "window": [16], "chunk": [16]}

    def windowed(self, **config: Any) -> "TransformersWindowLayer":
        check_sizes(config)
        model = Llama4TextConfig(num_hidden_layers=1, attention_chunk_size=config["chunk"], layer_types=["chunked_attention"])
        return TransformersDynamicWindowLayer(_ours(model), DynamicCache(config=model), create_chunked_causal_mask, config)


class TransformersWindowLayer:
    def __init__(self, model: Any, cache: Any, mask: Any, config: Mapping[str, Any]) -> None:
        self._model, self._cache, self._mask, self._config = model, cache, mask, config

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length())

    @property
    def stored_tokens(self) -> int:
        return len(self._held())

    def append(self, keys: Any, values: Any) -> None:
        self._update(keys, values)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        embeds = torch.zeros(1, keys.shape[0], 1)  # only its shape is used, for the mask
        mask = self._mask(config=self._model, inputs_embeds=embeds, attention_mask=None, past_key_values=self._cache)
        keys, values = self._update(keys, values)
        module = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // self._config["num_kv_heads"])
        out, _ = sdpa_attention_forward(module, _in_batch(query), keys, values, mask, scaling=scale)
        return out[0]

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        held = self._held()
        if any(position not in held for position in positions):
            raise PositionOutOfRange(f"position: expected one of {held}, got {list(positions)}")
        if not held:
            none = torch.zeros(0, self._config["num_kv_heads"], self._config["head_dim"])
            return none, none  # the library has no tensors yet
        layer, at = self._cache.layers[0], [held.index(position) for position in positions]
        return layer.keys[0].transpose(0, 1)[at], layer.values[0].transpose(0, 1)[at]

    def clear(self) -> None:
        self._cache.reset()

    def _held(self) -> range:
        layer = self._cache.layers[0]
        count = min(layer.keys.shape[2], self.length) if layer.is_initialized else 0
        return range(self.length - count, self.length)

    def _update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        try:
            keys, values = self._cache.update(_in_batch(keys), _in_batch(values), 0)
        except (RuntimeError, IndexError, ValueError) as error:
            said = str(error)
            raise (DtypeMismatch if "dtype" in said or "scalar type" in said else ShapeMismatch)(said) from error
        return keys, values


class TransformersDynamicWindowLayer(TransformersWindowLayer):
    def truncate(self, length: int) -> None:
        try:
            self._cache.crop(int(length) - self.length)
        except RuntimeError as error:
            raise NotTruncatable(str(error)) from error


class TransformersRecordingWindowLayer(TransformersDynamicWindowLayer):
    def _update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        if self.length:
            self._cache.crop(0)  # due after each step; delayed as long as part of the step can be truncated
        return super()._update(keys, values)


def _of_a_window(config: dict[str, Any]) -> Any:
    check_sizes(config)
    return _ours(MistralConfig(num_hidden_layers=1, sliding_window=config["window"]))


def _ours(model: Any) -> Any:
    model._attn_implementation = "sdpa"
    return model


def _in_batch(array: Any) -> Any:
    return array.transpose(0, 1)[None]
