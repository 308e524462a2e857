"""Adapters of ONNX Runtime's GroupQueryAttention with a sliding window, on a CPU.

Adapter of ONNX Runtime's GroupQueryAttention with `local_window_size`, on a CPU: its outputs are all tokens, past and new.

The caller passes all tokens in again, so stored tokens, reads and truncation are not offered. Each number of heads and each scale
is a graph of its own, built here.

Adapters of ONNX Runtime's GroupQueryAttention with `sliding_window_cache`, on a CPU: a buffer that drops old tokens.

The caller counts the tokens and passes the last output buffer in again. Which position is in which row, and when tokens can be
truncated, is computed as the operator's documentation defines it (`L(T)`). The contents and what a query sees are judged.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from kvref.errors import DtypeMismatch, NotTruncatable, PositionOutOfRange, ShapeMismatch
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_adapters._shared.onnx_nodes import OnnxOperators
from kvref_adapters.onnxruntime.operators import OnnxRuntime, run
from kvref_conformance.implementation_api import Level

TYPES = {"query": 1, "key": 1, "value": 1, "past_key": 1, "past_value": 1, "seqlens_k": 6, "total_sequence_length": 6}


class OnnxRuntimeWindow:
    name = "onnxruntime-window"
    version = onnxruntime.__version__
    language = "c++"
    project = "onnxruntime"
    level: Level = "exact"
    formats = ("float32",)
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "head_dim": {"multiple_of": 8}}

    def asarray(self, values: Any) -> Any:
        return np.asarray(values)

    def to_numpy(self, array: Any) -> Any:
        return array

    def windowed(self, **config: Any) -> "OnnxRuntimeWindowLayer":
        return OnnxRuntimeWindowLayer(config)


class OnnxRuntimeWindowLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        check_sizes(config)
        self._config = config
        self._past = [np.zeros((1, config["num_kv_heads"], 0, config["head_dim"]), np.float32)] * 2

    @property
    def length(self) -> int:
        return int(self._past[0].shape[2])

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        total = self.length + keys.shape[0]
        key, value = self._past
        given = {
            **{name: array.reshape(1, len(array), -1) for name, array in (("query", query), ("key", keys), ("value", values))},
            "past_key": key, "past_value": value, "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array([total], np.int32),
        }  # fmt: skip
        session = _session(query.shape[1], key.shape[1], self._config["window"], scale)
        try:
            out, *past = session.run(None, given)
        except (RuntimeError, ValueError, InvalidArgument) as error:
            raise (DtypeMismatch if "data type" in str(error) else ShapeMismatch)(str(error)) from error
        self._past = past
        return out.reshape(query.shape)


@cache
def _session(num_heads: int, num_kv_heads: int, window: int, scale: float) -> Any:
    attributes = {"num_heads": num_heads, "kv_num_heads": num_kv_heads, "local_window_size": window, "scale": scale}
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", list(TYPES), outputs, domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node], "window", [helper.make_tensor_value_info(name, of, None) for name, of in TYPES.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


OUTPUTS = ["output", "present_key", "present_value"]


class OnnxRuntimeWindowCache(OnnxRuntime):
    """With a buffer of the window's size: it drops one token in each step."""

    name = "onnxruntime-window-cache"
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "head_dim": {"multiple_of": 8}}
    room = 0

    def windowed(self, **config: Any) -> "OnnxRuntimeWindowBuffer":
        return OnnxRuntimeWindowBuffer(config, self.room)


class OnnxRuntimeWindowCacheRoom(OnnxRuntimeWindowCache):
    """With room for one token more: it drops two tokens in every second step."""

    name = "onnxruntime-window-cache-room"
    room = 1


class OnnxRuntimeWindowBuffer:
    def __init__(self, config: dict[str, Any], room: int) -> None:
        check_sizes(config)
        self._config, self._capacity = config, config["window"] + room
        self._past = [np.zeros((1, config["num_kv_heads"], self._capacity, config["head_dim"]), np.float32)] * 2
        self.length = 0

    @property
    def stored_tokens(self) -> int:
        return self._held(self.length)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        total = self.length + len(keys)
        past_key, past_value = self._past
        given = {
            name: array.reshape(1, len(array), -1) for name, array in (("query", query), ("key", keys), ("value", values))
        }  # fmt: skip
        out, *self._past = OnnxOperators(run)(
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
