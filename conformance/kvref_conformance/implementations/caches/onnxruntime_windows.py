"""Adapter of ONNX Runtime's GroupQueryAttention with `local_window_size`, on a CPU: its outputs are all tokens, past and new.

The caller passes all tokens in again, so stored tokens, reads and truncation are not offered. Each number of heads and each scale
is a graph of its own, built here.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken
from kvref_conformance.interface import Level

TYPES = {"query": 1, "key": 1, "value": 1, "past_key": 1, "past_value": 1, "seqlens_k": 6, "total_sequence_length": 6}


class GroupQueryAttention:
    name = "onnxruntime-window"
    version = onnxruntime.__version__
    language = "c++"
    project = "onnxruntime"
    level: Level = "exact"
    formats = ("float32",)
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "head_dim": {"multiple_of": 8}}

    def asarray(self, values: Any) -> Any:
        return np.asarray(values)

    def to_numpy(self, array: Any) -> Any:
        return array

    def windowed(self, **config: Any) -> "OneLayer":
        return OneLayer(config)


class OneLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        taken(config)
        self._config = config
        self._past = [np.zeros((1, config["num_kv_heads"], 0, config["head_dim"]), np.float32)] * 2

    @property
    def length(self) -> int:
        return int(self._past[0].shape[2])

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
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
