"""Bugs in quantized caches with few operations."""

from typing import Any

import numpy as np

from api_subsets import fp8, int8
from api_subsets.breaking import breaks
from api_subsets.errors import CapacityExceeded, LayerOutOfRange, NonFinite, PositionOutOfRange
from api_subsets.fp8 import LARGEST, TABLE, Fp8, encode
from api_subsets.given import index, tokens
from api_subsets.int8 import Int8


@breaks("QUANT-01", Int8)
class AStepSkipsTheLastLayer(int8.Cache):
    def append_step(self, keys: Any, values: Any) -> None:
        super().append_step(keys, values)
        self.codes[:, 1:, self.filled - 1] = 0


@breaks("QUANT-02", Int8)
class AFullCacheStartsAgain(int8.Cache):
    def append_step(self, keys: Any, values: Any) -> None:
        if self.filled == self.capacity:
            self.filled = 0
        super().append_step(keys, values)


@breaks("QUANT-03", Int8)
class HeadsShareAScale(int8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        codes, scale = super().quantized(rows.reshape(*rows.shape[:-2], -1))
        return codes.reshape(rows.shape), np.repeat(scale[..., None], self.row[0], axis=-1)


@breaks("QUANT-05", Int8)
class EveryTokenIsQuantizedAgain(int8.Cache):
    """Each step requantizes all tokens with the largest scale that their head ever had."""

    def append_step(self, keys: Any, values: Any) -> None:
        super().append_step(keys, values)
        past = slice(0, self.filled)
        numbers = self.codes[:, :, past] * self.scales[:, :, past, :, None]
        self.scales[:, :, past] = self.scales[:, :, past].max(axis=2, keepdims=True)
        self.codes[:, :, past] = np.rint(numbers / self.scales[:, :, past, :, None])


@breaks("QUANT-06", Int8)
class ValuesHaveTheKeysScale(int8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        codes, scale = super().quantized(rows)
        with np.errstate(over="ignore"):
            codes[1] = np.clip(np.rint(rows[1] / scale[0][..., None]), -127, 127)
        scale[1] = scale[0]
        return codes, scale


@breaks("QUANT-07", Int8)
class TheScalesTakeNoMemory(int8.Cache):
    @property
    def memory_bytes(self) -> int:
        return int(self.codes.nbytes)


@breaks("LAW-04", Int8)
class TheScaleIsDropped(int8.Cache):
    def value(self, *place: int) -> Any:
        return self.codes[place].astype(np.float32)


@breaks("LAW-04", Int8)
class CodesAreTruncated(int8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        _, scale = super().quantized(rows)
        return np.trunc(rows / scale[..., None]).astype(np.int8), scale


@breaks("LAW-04", Int8)
class HalvesGoToTheEvenCode(int8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        _, scale = super().quantized(rows)
        return np.clip(np.rint(rows / scale[..., None]), -127, 127).astype(np.int8), scale


@breaks("LAW-05", Int8)
class WhatThereIsRoomForIsReadable(int8.Cache):
    def read_head(self, layer: int, position: int, head: int) -> tuple[Any, Any]:
        filled, self.filled = self.filled, self.capacity
        try:
            return super().read_head(layer, position, head)
        finally:
            self.filled = filled


@breaks("LAW-14", Int8)
class NanIsStoredAsZero(int8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        return super().quantized(np.nan_to_num(rows, posinf=1.0, neginf=-1.0))


@breaks("QUANT-01", Fp8)
class ATokenCountsForEveryLayer(fp8.Cache):
    def append(self, layer: int, keys: Any, values: Any) -> None:
        super().append(layer, keys, values)
        self.lengths = [max(self.lengths)] * self.num_layers


@breaks("QUANT-02", Fp8)
class TheLastTokenDoesNotFit(fp8.Cache):
    def append(self, layer: int, keys: Any, values: Any) -> None:
        if self.lengths[self.layer(layer)] == self.capacity - 1:
            tokens((keys, values), (1, *self.row))
            raise CapacityExceeded(f"{self.capacity}")
        super().append(layer, keys, values)


@breaks("QUANT-08", Fp8)
class ClearKeepsALayer(fp8.Cache):
    def clear(self) -> None:
        self.lengths = [0] * (self.num_layers - 1) + self.lengths[-1:]


@breaks("QUANT-05", Fp8)
class TheNewestScaleIsEverybodys(fp8.Cache):
    def append(self, layer: int, keys: Any, values: Any) -> None:
        super().append(layer, keys, values)
        self.scales[:, layer] = self.scales[:, layer, self.lengths[layer] - 1, None]


@breaks("QUANT-03", Fp8)
class TheFirstHeadsScaleIsEverybodys(fp8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        _, scale = super().quantized(rows)
        scale = np.repeat(scale[:, :1], self.row[0], axis=1)
        with np.errstate(over="ignore"):
            return encode(np.clip(rows / scale[..., None], -LARGEST, LARGEST)), scale


@breaks("LAW-04", Fp8)
class TheFirstScaleIsFrozen(fp8.Cache):
    scale: Any = None

    def quantized(self, rows: Any) -> tuple[Any, Any]:
        _, scale = super().quantized(rows)
        if self.scale is None:
            self.scale = scale
        with np.errstate(over="ignore"):
            return encode(np.clip(rows / self.scale[..., None], -LARGEST, LARGEST)), self.scale


@breaks("LAW-04", Fp8)
class CodesAreTruncatedToo(fp8.Cache):
    def quantized(self, rows: Any) -> tuple[Any, Any]:
        codes, scale = super().quantized(rows)
        larger = np.abs(TABLE[codes]) > np.abs(rows / scale[..., None])
        return codes - larger.astype(np.uint8), scale


@breaks("LAW-05", Fp8)
class EveryPositionBelowCapacityIsReadable(fp8.Cache):
    def read_token(self, layer: int, position: int) -> tuple[Any, Any]:
        layer = index(layer, self.num_layers, LayerOutOfRange)
        position = index(position, self.capacity, PositionOutOfRange)
        return self.value(0, layer, position), self.value(1, layer, position)


@breaks("LAW-14", Fp8)
class ATokenThatIsRefusedCounts(fp8.Cache):
    def append(self, layer: int, keys: Any, values: Any) -> None:
        try:
            super().append(layer, keys, values)
        except NonFinite:
            self.lengths[layer] += 1
            raise
