"""The quantized cache: a fixed number of tokens a layer, each head's row quantized on its own as it is appended.

A row [head_dim] of one token and one head has one scale, or one for each of its groups. It is quantized once, when appended, and
never again (QUANT-05).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.contents import Contents, Saved, Stretch, both, shape_of
from kvref.errors import (
    CapacityExceeded,
    HeadOutOfRange,
    LayerOutOfRange,
    PositionOutOfRange,
    in_range,
    whole_fields,
)
from kvref.formats import ROW_FORMATS, Format, get_format, of_keys_and_values
from kvref.inputs import accept, accept_pair
from kvref.slots import TokenStore
from kvref.transfer import Movable


@dataclass(frozen=True)
class QuantizedConfig:
    """capacity: tokens a layer. format: int8, float8_e4m3fn, float8_e5m2, or one of groups, which go into head_dim (QUANT-10).

    key_scale, value_scale: what all keys, and all values, are divided by in formats whose scale is given (FMT-STATIC), 1.0 where
    nothing is said; in others there must be none.
    """

    num_layers: int
    capacity: int
    num_kv_heads: int
    head_dim: int
    format: str = "int8"
    key_scale: float | None = None
    value_scale: float | None = None

    def __post_init__(self) -> None:
        whole_fields(self, "num_layers", "capacity", "num_kv_heads", "head_dim")
        for format in self.formats:
            format.code_width(self.head_dim)  # which says whether it has groups of whole width

    @property
    def formats(self) -> tuple[Format, Format]:
        """Of keys, and of values: the same but for a scale that is given. Raises ConfigError."""
        return of_keys_and_values(self.format, self.key_scale, self.value_scale, ROW_FORMATS)


class QuantizedCache(Movable):
    _moved = ("_store", "_lengths")

    def __init__(self, config: QuantizedConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        slots = config.num_layers * config.capacity  # token p of layer l lies in slot l * capacity + p
        of_keys, of_values = config.formats
        self._store = TokenStore(backend, of_keys, slots, config.num_kv_heads, config.head_dim, of_values)
        self._lengths = [0] * config.num_layers

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim], to one layer: all or none.

        Raises LayerOutOfRange, ShapeMismatch, DtypeMismatch, NonFinite, or CapacityExceeded where they do not fit.
        """
        layer = self._layer(layer)
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        self._append([layer] * keys.shape[0], keys, values)

    def append_step(self, keys: Array, values: Array) -> None:
        """Append one token to every layer, keys and values [num_layers, num_kv_heads, head_dim]: to all or none (QUANT-01)."""
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        self._append(range(self.config.num_layers), keys, values)

    def read_head(self, layer: int, position: int, head: int) -> tuple[Array, Array]:
        """One head's key and value at a position, float32 [head_dim]. Raises Layer-, Position- or HeadOutOfRange."""
        key, value = self.read_token(layer, position)
        head = in_range(head, self.config.num_kv_heads, HeadOutOfRange, "head")
        return key[head, :], value[head, :]

    def read_token(self, layer: int, position: int) -> tuple[Array, Array]:
        """All heads' key and value at a position, float32 [num_kv_heads, head_dim]."""
        keys, values = self.read_tokens(layer, [position])
        return keys[0, ...], values[0, ...]

    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]."""
        layer = self._layer(layer)
        length, what = self._lengths[layer], f"position in layer {layer}"
        wanted = [in_range(position, length, PositionOutOfRange, what) for position in positions]
        return self._store.read([layer * self.config.capacity + position for position in wanted])

    def length(self, layer: int = 0) -> int:
        """Tokens in the layer."""
        return self._lengths[self._layer(layer)]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every layer (EDIT-01).

        Raises PositionOutOfRange for more than some layer has.
        """
        length = in_range(length, min(self._lengths) + 1, PositionOutOfRange, "length")
        self._lengths = [length] * self.config.num_layers

    def clear(self) -> None:
        """Forget every token in every layer."""
        self._lengths = [0] * self.config.num_layers

    @property
    def memory_bytes(self) -> int:
        """Codes, scales and zeros, over the whole capacity of all layers (QUANT-07)."""
        return self.config.num_layers * self.config.capacity * self._store.token_bytes

    @property
    def fp32_bytes(self) -> int:
        """What float32 keys and values would take: 8 * capacity * num_kv_heads * head_dim a layer."""
        config = self.config
        return 8 * config.num_layers * config.capacity * config.num_kv_heads * config.head_dim

    @property
    def compression_ratio(self) -> float:
        return self.fp32_bytes / self.memory_bytes

    def attend(self, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over what the layer reads as (ATTN-10)."""
        layer = self._layer(layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(layer * self.config.capacity + np.arange(start, stop))

        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, read, self._lengths[layer], row, scale=scale, causal=causal, backend=self._backend)

    def contents(self) -> Contents:
        """What is saved: of any capacity, for that is no part of what it holds."""
        return Contents("quantized", shape_of(self.config, "capacity", formats=self.config.formats), {}, self._stretches())

    def _another(self) -> "QuantizedCache":
        return QuantizedCache(self.config, self._backend)

    def _make_room(self, saved: Saved) -> list[Stretch]:
        self._lengths = [saved.count(f"layers.{layer}.keys") for layer in range(self.config.num_layers)]
        if (longest := max(self._lengths)) > self.config.capacity:
            raise CapacityExceeded(f"cache full: {longest} tokens per layer needed, capacity is {self.config.capacity}")
        return self._stretches()

    def _stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        for layer, length in enumerate(self._lengths):
            slots = layer * self.config.capacity + np.arange(length)
            found += both(f"layers.{layer}", self._store, slots)
        return found

    def _append(self, layers: Sequence[int], keys: Array, values: Array) -> None:
        """Append token i to layers[i], in one write that may raise; lengths follow once it went well."""
        capacity, lengths, slots = self.config.capacity, list(self._lengths), []
        for layer in layers:
            if lengths[layer] == capacity:
                tokens = self._lengths[layer] + layers.count(layer)
                raise CapacityExceeded(f"layer {layer} full: {tokens} tokens needed, capacity is {capacity}")
            slots.append(layer * capacity + lengths[layer])
            lengths[layer] += 1
        self._store.write(slots, keys, values)
        self._lengths = lengths

    def _layer(self, layer: int) -> int:
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")


def mean_absolute_error(rows: Array, format: str | Format, backend: Backend = reference) -> float:
    """The mean of |x - value| over rows [n, width]: what quantizing them costs, 0.0 for no elements (QUANT-09).

    Raises ConfigError for a format that there is not, or a width that its groups do not go into.
    """
    format = get_format(format) if isinstance(format, str) else format
    rows = accept("rows", rows, ("n", "width"), backend)
    if 0 in rows.shape:
        return 0.0
    read_back = backend.dequantize(backend.quantize(rows, format), rows.shape[-1], format)
    return float(backend.xp.mean(backend.xp.abs(rows - read_back)))
