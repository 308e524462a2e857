"""Adapters of x-transformers' Attention without rotary positions, as a cache and as attention, with einsum and `flash=True`.

A cache is the keys and values that `Attention` returns and accepts as `cache`. Its projections pass parts of the input on, so
queries, keys and values enter side by side, like the output of a model's projections. Rows are reordered as in `beam_search`, by
`modify_cached_kv`. Attention is `Attend`; a window is `max_attend_past`, the number of earlier tokens; a logit sink is
`head_learned_sink`. Grouped query heads are judged separately: `x-transformers-grouped`.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from x_transformers.attend import Attend, Intermediates
from x_transformers.autoregressive_wrapper import modify_cached_kv
from x_transformers.x_transformers import Attention, LayerIntermediates

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered


class XTransformersGrouped(TorchArrays):
    """Attention with grouped query heads."""

    name = "x-transformers-grouped"
    version = version("x-transformers")
    language = "python"
    project = "x-transformers"
    formats = ("float32",)  # a cache takes the given dtype
    limits: ClassVar[Mapping[str, Any]] = {"group_size": {"least": 2}, "num_kv_heads": {"least": 2}}
    flash = False

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)

    def attention(self) -> "XTransformersAttention":
        return XTransformersAttention(self.flash)


class XTransformersPlain(XTransformersGrouped):
    name = "x-transformers"
    limits: ClassVar[Mapping[str, Any]] = {"group_size": [1], "contiguous": {"tokens": {"least": 1}}}

    def contiguous(self, **config: Any) -> "XTransformersLayer":
        return XTransformersLayer(self.flash, config)

    def attention(self) -> "XTransformersAttention":
        return XTransformersAttentionWithSinks(self.flash)


class XTransformersFlash(XTransformersPlain):
    name = "x-transformers-flash"
    flash = True

    def attention(self) -> "XTransformersAttention":
        return XTransformersAttention(self.flash)


class XTransformersAttention:
    def __init__(self, flash: bool) -> None:
        self._flash = flash

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        if causal and length != len(keys):
            raise NotOffered("queries at other positions than the last ones")
        mask = None if length == len(keys) else torch.arange(len(keys))[None] < length
        return _attended(Attend(causal=causal, scale=scale, flash=self._flash), query, keys, values, mask)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        first = len(keys) - len(query)
        layer = _layer(self._flash, query.shape[1], keys.shape[1], query.shape[2], max_attend_past=window - 1)
        layer.attend.scale = scale
        before = Intermediates(cached_kv=tuple(_in_batch(array[:first]) for array in (keys, values)))
        given = torch.cat([query.flatten(1), keys[first:].flatten(1), values[first:].flatten(1)], dim=1)[None]
        return layer(given, cache=before if first else None)[0].reshape(*query.shape[:2], values.shape[2])


class XTransformersAttentionWithSinks(XTransformersAttention):
    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        attend = Attend(heads=query.shape[1], causal=causal, scale=scale, head_learned_sink=True)
        attend.head_attn_sink.copy_(logit_sink)
        return _attended(attend, query, keys, values)


class XTransformersLayer:
    def __init__(self, flash: bool, config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            if not (value == "float32" if name == "dtype" else type(value) is int and value >= least):
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        self._shape = [config["batch_size"], config["num_kv_heads"], config["head_dim"]]
        self._longest = config["max_seq_len"]  # the judge's maximum length
        self._layer = _layer(flash, config["num_kv_heads"], config["num_kv_heads"], config["head_dim"])
        self._cache: Any = None

    def append(self, keys: Any, values: Any) -> None:
        fits = keys.ndim == 4 and [*keys.shape[:2], keys.shape[3]] == self._shape
        if not fits or keys.shape != values.shape or keys.dtype != values.dtype:
            raise NotOffered("rejecting other shapes of keys and values: projections produce both")
        if self.read()[0].shape[2] + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        given = torch.cat([array.transpose(1, 2).flatten(2) for array in (keys, keys, values)], dim=2)
        try:
            _, self._cache = self._layer(given, cache=self._cache, return_intermediates=True)
        except RuntimeError as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error

    def read(self) -> tuple[Any, Any]:
        if self._cache is None:  # the library has no empty cache either
            none = torch.zeros(*self._shape[:2], 0, self._shape[2])
            return none, none
        keys, values = self._cache.cached_kv
        return keys, values

    def reorder(self, rows: Sequence[int]) -> None:
        if self._cache is None or not all(0 <= row < self._shape[0] for row in rows) or not len(rows):
            raise NotOffered("rejecting invalid rows, or reordering an empty cache: a beam search does neither")
        self._cache.layer_type = "a"  # as AttentionLayers sets it
        modify_cached_kv(LayerIntermediates(attn_intermediates=[self._cache]), lambda array: array[torch.tensor(list(rows))])
        self._shape[0] = len(rows)


class PartOfInput(torch.nn.Module):  # type: ignore[misc]
    """A projection that returns numbers [start, start + count) of its input."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__()
        self._part = slice(start, start + count)

    def forward(self, given: Any) -> Any:
        return given[..., self._part]


def _layer(flash: bool, heads: int, kv_heads: int, dim: int, **options: Any) -> Any:
    queries, keys = heads * dim, kv_heads * dim
    layer = Attention(queries + 2 * keys, dim, heads=heads, kv_heads=kv_heads, causal=True, flash=flash, **options)
    layer.to_q, layer.to_k, layer.to_v = PartOfInput(0, queries), PartOfInput(queries, keys), PartOfInput(queries + keys, keys)
    layer.to_out = torch.nn.Identity()
    return layer


def _attended(attend: Any, query: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    try:
        out, _ = attend(*(_in_batch(array) for array in (query, keys, values)), mask=mask)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:  # raised for a width of 0
        raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
    return out[0].transpose(0, 1)


def _in_batch(array: Any) -> Any:
    return array.transpose(0, 1)[None]
