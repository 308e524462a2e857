"""The quantized cache: room for a fixed number of tokens per layer, each row quantized when it is appended.

A row is the head_dim numbers of one token and head. It has one scale, one scale per group, or a scale that the caller gives. It
is quantized once and never again (QUANT-05).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.errors import (
    CapacityExceeded,
    HeadOutOfRange,
    LayerOutOfRange,
    PositionOutOfRange,
    in_range,
    whole_fields,
)
from kvref.formats import ROW_FORMATS, Format, get_format, of_keys_and_values
from kvref.serialization import Serializable
from kvref.snapshot import Contents, SavedState, TokenSpan, key_and_value_spans, shape_of
from kvref.token_store import TokenStore
from kvref.validation import accept, accept_pair


@dataclass(frozen=True)
class QuantizedConfig:
    """Sizes and format of a QuantizedCache. Raises ConfigError (LAW-12).

    - `capacity`: tokens per layer.
    - `format`: int8, float8_e4m3fn, float8_e5m2, a static format, a format of groups or a rotated variant of one of these. If it
      has groups, `head_dim` must be a multiple of the group (QUANT-10). Formats with one scale per token (q8, q4) and without
      scales (float16) are not permitted.
    - `key_scale`, `value_scale`: the scales of all keys and of all values, in static formats only (FMT-STATIC), there 1.0 by
      default. In all other formats they must be None.
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
            format.code_width(self.head_dim)  # raises ConfigError unless head_dim is a multiple of the group

    @property
    def formats(self) -> tuple[Format, Format]:
        """The format of keys and the format of values. They differ in a given scale only. Raises ConfigError."""
        return of_keys_and_values(self.format, self.key_scale, self.value_scale, ROW_FORMATS)


class QuantizedCache(Serializable):
    """A cache of one sequence with several layers, quantized per row (chapter QUANT).

    Each layer has room for `capacity` tokens and a length of its own. Keys and values are passed as float32, float16 or
    bfloat16 arrays, and returned as the float32 numbers that their codes and scales decode to.
    """

    _saved_attributes = ("_store", "_lengths")

    def __init__(self, config: QuantizedConfig, backend: Backend = reference) -> None:
        """Allocate memory for the whole capacity on the device of `backend`."""
        self.config = config
        self._backend = backend
        slots = config.num_layers * config.capacity  # token p of layer l is in slot l * capacity + p
        of_keys, of_values = config.formats
        self._store = TokenStore(backend, of_keys, slots, config.num_kv_heads, config.head_dim, of_values)
        self._lengths = [0] * config.num_layers

    def append(self, layer: int, keys: Array, values: Array) -> None:
        """Append n tokens to one layer: all or none (QUANT-01). keys, values: [n, num_kv_heads, head_dim].

        Raises LayerOutOfRange, ShapeMismatch, DtypeMismatch, NonFinite, or CapacityExceeded if the layer would have more than
        `capacity` tokens (QUANT-02).
        """
        layer = self._layer(layer)
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        self._append([layer] * keys.shape[0], keys, values)

    def append_step(self, keys: Array, values: Array) -> None:
        """Append one token to every layer, or to none (QUANT-01). keys, values: [num_layers, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, NonFinite, or CapacityExceeded if a layer is full.
        """
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        self._append(range(self.config.num_layers), keys, values)

    def read_head(self, layer: int, position: int, head: int) -> tuple[Array, Array]:
        """Return the key and the value of one head at a position: float32 [head_dim] each.

        Raises LayerOutOfRange, PositionOutOfRange or HeadOutOfRange.
        """
        key, value = self.read_token(layer, position)
        head = in_range(head, self.config.num_kv_heads, HeadOutOfRange, "head")
        return key[head, :], value[head, :]

    def read_token(self, layer: int, position: int) -> tuple[Array, Array]:
        """Return the keys and values of all heads at a position: float32 [num_kv_heads, head_dim] each.

        Raises LayerOutOfRange or PositionOutOfRange.
        """
        keys, values = self.read_tokens(layer, [position])
        return keys[0, ...], values[0, ...]

    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values at `positions`, in their order: float32 [n, num_kv_heads, head_dim] each.

        Raises LayerOutOfRange or PositionOutOfRange.
        """
        layer = self._layer(layer)
        length, what = self._lengths[layer], f"position in layer {layer}"
        wanted = [in_range(position, length, PositionOutOfRange, what) for position in positions]
        return self._store.read([layer * self.config.capacity + position for position in wanted])

    def length(self, layer: int = 0) -> int:
        """Return the number of tokens in a layer. Raises LayerOutOfRange."""
        return self._lengths[self._layer(layer)]

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length` from every layer (EDIT-01).

        Raises PositionOutOfRange if some layer has fewer than `length` tokens (EDIT-02).
        """
        length = in_range(length, min(self._lengths) + 1, PositionOutOfRange, "length")
        self._lengths = [length] * self.config.num_layers

    def clear(self) -> None:
        """Remove every token from every layer (QUANT-08)."""
        self._lengths = [0] * self.config.num_layers

    @property
    def memory_bytes(self) -> int:
        """Bytes of the codes, scales and zeros, for the whole capacity of all layers (QUANT-07, QUANT-10)."""
        return self.config.num_layers * self.config.capacity * self._store.token_bytes

    @property
    def fp32_bytes(self) -> int:
        """Bytes that float32 keys and values would have: 8 * num_layers * capacity * num_kv_heads * head_dim (QUANT-07)."""
        config = self.config
        return 8 * config.num_layers * config.capacity * config.num_kv_heads * config.head_dim

    @property
    def compression_ratio(self) -> float:
        """fp32_bytes / memory_bytes (QUANT-07)."""
        return self.fp32_bytes / self.memory_bytes

    def attend(self, layer: int, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention over what a layer reads as: float32 [num_queries, num_query_heads, head_dim] (ATTN-10).

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own. Raises LayerOutOfRange, ShapeMismatch or DtypeMismatch.
        """
        layer = self._layer(layer)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            return self._store.read(layer * self.config.capacity + np.arange(start, stop))

        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, read, self._lengths[layer], row, scale=scale, causal=causal, backend=self._backend)

    def contents(self) -> Contents:
        """Describe what `save` writes. The capacity is not part of it (MOVE-02)."""
        return Contents("quantized", shape_of(self.config, "capacity", formats=self.config.formats), {}, self._token_spans())

    def _new_cache(self) -> "QuantizedCache":
        return QuantizedCache(self.config, self._backend)

    def _allocate_for(self, saved: SavedState) -> list[TokenSpan]:
        self._lengths = [saved.count(f"layers.{layer}.keys") for layer in range(self.config.num_layers)]
        if (longest := max(self._lengths)) > self.config.capacity:
            raise CapacityExceeded(f"cache full: {longest} tokens per layer needed, capacity is {self.config.capacity}")
        return self._token_spans()

    def _token_spans(self) -> list[TokenSpan]:
        """The keys and values of each layer, in their slots."""
        found: list[TokenSpan] = []
        for layer, length in enumerate(self._lengths):
            slots = layer * self.config.capacity + np.arange(length)
            found += key_and_value_spans(f"layers.{layer}", self._store, slots)
        return found

    def _append(self, layers: Sequence[int], keys: Array, values: Array) -> None:
        """Append token i to layer layers[i], in one write. Lengths are updated after it, because it can raise."""
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
        """`layer` as a Python int. Raises LayerOutOfRange."""
        return in_range(layer, self.config.num_layers, LayerOutOfRange, "layer")


def mean_absolute_error(rows: Array, format: str | Format, backend: Backend = reference) -> float:
    """Return the mean of |x - value| over the elements x of `rows`, where value is what x reads back as (QUANT-09).

    rows: [n, width], float32, float16 or bfloat16. format: the name of a format, or a format. Rows without elements give 0.0.

    Raises ConfigError for an unknown format or a width that is not a multiple of its group, ShapeMismatch, DtypeMismatch or
    NonFinite.
    """
    format = get_format(format) if isinstance(format, str) else format
    rows = accept("rows", rows, ("n", "width"), backend)
    if 0 in rows.shape:
        return 0.0
    read_back = backend.dequantize(backend.quantize(rows, format), rows.shape[-1], format)
    return float(backend.xp.mean(backend.xp.abs(rows - read_back)))
