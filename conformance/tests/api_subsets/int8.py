"""An INT8 cache of six operations: a token is appended to all layers at once, and heads are read one by one."""

from typing import Any

import numpy as np

from api_subsets import Host
from api_subsets.errors import (
    CapacityExceeded,
    ConfigError,
    HeadOutOfRange,
    LayerOutOfRange,
    NonFinite,
    PositionOutOfRange,
)
from api_subsets.given import index, size, tokens


class Cache:
    def __init__(self, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, format: str) -> None:
        if format != "int8":
            raise ConfigError(f"format: {format!r}")
        self.num_layers, self.capacity = size("num_layers", num_layers), size("capacity", capacity)
        self.row = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        self.codes = np.zeros((2, self.num_layers, self.capacity, *self.row), np.int8)
        self.scales = np.zeros(self.codes.shape[:-1], np.float32)
        self.filled = 0

    def append_step(self, keys: Any, values: Any) -> None:
        """keys, values: [num_layers, num_kv_heads, head_dim], one token."""
        tokens((keys, values), (self.num_layers, *self.row))
        if self.filled == self.capacity:
            raise CapacityExceeded(f"{self.capacity}")
        codes, scales = self.quantized(np.stack([keys, values]).astype(np.float32))
        self.codes[:, :, self.filled], self.scales[:, :, self.filled] = codes, scales
        self.filled += 1

    def read_head(self, layer: int, position: int, head: int) -> tuple[Any, Any]:
        layer = index(layer, self.num_layers, LayerOutOfRange)
        position = index(position, self.filled, PositionOutOfRange)
        head = index(head, self.row[0], HeadOutOfRange)
        return self.value(0, layer, position, head), self.value(1, layer, position, head)

    def length(self, layer: int) -> int:
        index(layer, self.num_layers, LayerOutOfRange)
        return self.filled

    @property
    def memory_bytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.codes.size

    @property
    def compression_ratio(self) -> float:
        return self.fp32_bytes / self.memory_bytes

    def quantized(self, rows: Any) -> tuple[Any, Any]:
        """Quantize float32 [..., head_dim] to codes and one scale per row."""
        scale = np.maximum(np.abs(rows).max(axis=-1) / np.float32(127), np.float32(2.0**-23))
        with np.errstate(invalid="ignore", over="ignore"):
            halves_away = np.floor(np.abs((rows / scale[..., None]).astype(np.float64)) + 0.5)
            codes = np.copysign(np.minimum(halves_away, 127), rows)
            if not np.isfinite(codes.astype(np.float32) * scale[..., None]).all():
                raise NonFinite("expected rows that read back finite, got one that does not")
        return codes.astype(np.int8), scale

    def value(self, *place: int) -> Any:
        return self.codes[place].astype(np.float32) * self.scales[place]


class Int8(Host):
    name = "int8 surface"
    formats = ("int8",)
    quantized = Cache
