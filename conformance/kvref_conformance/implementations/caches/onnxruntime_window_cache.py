"""Adapters of ONNX Runtime's GroupQueryAttention with `sliding_window_cache`, on a CPU: a buffer that drops old tokens.

The caller counts the tokens and passes the last output buffer in again. Which position is in which row, and when tokens can be
truncated, is computed as the operator's documentation defines it (`L(T)`). The contents and what a query sees are judged.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kvref.errors import NotTruncatable, PositionOutOfRange
from kvref_conformance.implementations.caches.onnx_nodes import Operators
from kvref_conformance.implementations.caches.onnxruntime_operators import Runtime, run
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken

OUTPUTS = ["output", "present_key", "present_value"]


class WindowCache(Runtime):
    """With a buffer of the window's size: it drops one token in each step."""

    name = "onnxruntime-window-cache"
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "head_dim": {"multiple_of": 8}}
    room = 0

    def windowed(self, **config: Any) -> "Buffer":
        return Buffer(config, self.room)


class WindowCacheRoom(WindowCache):
    """With room for one token more: it drops two tokens in every second step."""

    name = "onnxruntime-window-cache-room"
    room = 1


class Buffer:
    def __init__(self, config: dict[str, Any], room: int) -> None:
        taken(config)
        self._config, self._capacity = config, config["window"] + room
        self._past = [np.zeros((1, config["num_kv_heads"], self._capacity, config["head_dim"]), np.float32)] * 2
        self.length = 0

    @property
    def stored_tokens(self) -> int:
        return self._held(self.length)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
        total = self.length + len(keys)
        past_key, past_value = self._past
        given = {
            name: array.reshape(1, len(array), -1) for name, array in (("query", query), ("key", keys), ("value", values))
        }  # fmt: skip
        out, *self._past = Operators(run)(
            "GroupQueryAttention", OUTPUTS, "com.microsoft", **given, past_key=past_key, past_value=past_value,
            seqlens_k=np.array([total - 1], np.int32), total_sequence_length=np.array([total], np.int32),
            num_heads=query.shape[1], kv_num_heads=past_key.shape[1], scale=float(scale),
            local_window_size=self._config["window"], sliding_window_cache=1,
        )  # fmt: skip
        self.length = total
        return out.reshape(query.shape)

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        first = self.length - self._held(self.length)
        if any(not first <= position < self.length for position in positions):
            raise PositionOutOfRange(f"position: expected positions in [{first}, {self.length}), got {list(positions)}")
        rows = [int(position) - first for position in positions]
        keys, values = (np.swapaxes(array[0], 0, 1)[rows] for array in self._past)
        return keys, values

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length: expected an integer in [0, {self.length}], got {length}")
        if self._held(length) != self._held(self.length) - (self.length - length):
            raise NotTruncatable(f"cannot truncate to {length}: L({length}) differs from the number of rows that remain")
        self.length = int(length)

    def _held(self, tokens: int) -> int:
        """L(T), the number of tokens in the buffer, as the documentation of GroupQueryAttention defines it."""
        excess, least = tokens - self._capacity, self._capacity - self._config["window"] + 1
        return tokens if excess <= 0 else tokens - least * -(-excess // least)
