"""An FP8 cache whose tokens are appended to a layer and read one by one."""

from typing import Any, ClassVar

import numpy as np

from api_subsets import Host
from api_subsets.errors import CapacityExceeded, ConfigError, LayerOutOfRange, NonFinite, PositionOutOfRange
from api_subsets.given import index, size, tokens

LARGEST = np.float32(448)


def _value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return float(np.ldexp(8 + mantissa, exponent - 10) if exponent else np.ldexp(mantissa, -9))


MAGNITUDES = np.array([_value(code) for code in range(0x7F)])  # 0x7f is NaN
TABLE = np.concatenate([MAGNITUDES, [np.nan], -MAGNITUDES, [np.nan]]).astype(np.float32)
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def encode(numbers: Any) -> Any:
    """Convert float32 to codes of E4M3FN: nearest, ties to even, saturating."""
    size = np.abs(numbers).astype(np.float64)
    below, above = np.searchsorted(MIDPOINTS, size, side="left"), np.searchsorted(MIDPOINTS, size, side="right")
    codes = np.where(below % 2 == 0, below, above)
    return np.where(np.signbit(numbers), codes + 0x80, codes).astype(np.uint8)


class Cache:
    def __init__(self, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, format: str) -> None:
        if format != "float8_e4m3fn":
            raise ConfigError(f"format: {format!r}")
        self.num_layers, self.capacity = size("num_layers", num_layers), size("capacity", capacity)
        self.row = size("num_kv_heads", num_kv_heads), size("head_dim", head_dim)
        self.codes = np.zeros((2, self.num_layers, self.capacity, *self.row), np.uint8)
        self.scales = np.zeros(self.codes.shape[:-1], np.float32)
        self.lengths = [0] * self.num_layers

    def append(self, layer: int, keys: Any, values: Any) -> None:
        """keys, values: [1, num_kv_heads, head_dim]."""
        layer = self.layer(layer)
        tokens((keys, values), (1, *self.row))
        at = self.lengths[layer]
        if at == self.capacity:
            raise CapacityExceeded(f"{self.capacity}")
        codes, scales = self.quantized(np.concatenate([keys, values]).astype(np.float32))
        self.codes[:, layer, at], self.scales[:, layer, at] = codes, scales
        self.lengths[layer] += 1

    def read_token(self, layer: int, position: int) -> tuple[Any, Any]:
        layer = self.layer(layer)
        position = index(position, self.lengths[layer], PositionOutOfRange)
        return self.value(0, layer, position), self.value(1, layer, position)

    def length(self, layer: int) -> int:
        return self.lengths[self.layer(layer)]

    def clear(self) -> None:
        self.lengths = [0] * self.num_layers

    @property
    def memory_bytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes)

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.codes.size

    @property
    def compression_ratio(self) -> float:
        return self.fp32_bytes / self.memory_bytes

    def layer(self, layer: int) -> int:
        return index(layer, self.num_layers, LayerOutOfRange)

    def quantized(self, rows: Any) -> tuple[Any, Any]:
        """Quantize float32 [..., head_dim] to codes and one scale per row."""
        if not np.isfinite(rows).all():
            raise NonFinite("expected finite numbers, got a NaN or an infinity")
        scale = np.maximum(np.abs(rows).max(axis=-1) / LARGEST, np.float32(2.0**-23))
        return encode(np.clip(rows / scale[..., None], -LARGEST, LARGEST)), scale

    def value(self, *place: int) -> Any:
        return TABLE[self.codes[place]] * self.scales[place][..., None]


class Fp8(Host):
    name = "fp8 surface"
    formats = ("float8_e4m3fn",)
    limits: ClassVar = {"tokens": 1}
    quantized = Cache
