"""ONNX Runtime's GroupQueryAttention with `sliding_window_cache`, on a CPU: a buffer of a window's size, from which it drops.

Its caller counts the tokens, and hands in the buffer that came out before. Which positions lie in which rows, and when tokens can
be taken back, is what the operator's own text says (`L(T)`). What lies there, and what is seen, is judged.
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
    """As large as the window: it drops a token a step."""

    name = "onnxruntime-window-cache"
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "head_dim": {"multiple_of": 8}}
    room = 0

    def windowed(self, **config: Any) -> "Buffer":
        return Buffer(config, self.room)


class WindowCacheRoom(WindowCache):
    """With room for a token more: it drops two, every other step."""

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
            raise PositionOutOfRange(f"position: expected one from {first} on and below {self.length}, got {list(positions)}")
        rows = [int(position) - first for position in positions]
        keys, values = (np.swapaxes(array[0], 0, 1)[rows] for array in self._past)
        return keys, values

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise PositionOutOfRange(f"length: expected one from 0 to {self.length}, got {length}")
        if self._held(length) != self._held(self.length) - (self.length - length):
            raise NotTruncatable("L(T - k) is not L(T) - k")
        self.length = int(length)

    def _held(self, tokens: int) -> int:
        """L(T), as GroupQueryAttention's text has it."""
        excess, least = tokens - self._capacity, self._capacity - self._config["window"] + 1
        return tokens if excess <= 0 else tokens - least * -(-excess // least)
