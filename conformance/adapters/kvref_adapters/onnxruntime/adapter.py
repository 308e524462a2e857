"""Adapters of ONNX Runtime's kernels on a CPU: of standard ONNX operators, and of its own attention operators.

E4M3FN is cast with the default options, and E5M2 with `saturate=0`, which keeps infinities: a KV cache would use both. Each
combination of types and each scale is a graph of its own. The adapter validates nothing.

GroupQueryAttention and MultiHeadAttention attend over past and new tokens. As a cache, past and present grow, and the last output
`present` is the only state. As attention, the new tokens are the last of the given tokens, as many as there are queries.
GroupQueryAttention receives them in a buffer that is longer than the tokens, as in a server. If there are more queries than
tokens, each of which sees all tokens, they are passed one by one.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException

from kvref.errors import DtypeMismatch, NotTruncatable, PositionOutOfRange, ShapeMismatch, SlotOutOfRange
from kvref_adapters._shared import onnx_nodes
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_adapters._shared.onnx_nodes import OnnxGrowingCache, OnnxNodeKernels, OnnxOperators
from kvref_conformance.exceptions import NotOffered

TO = {
    "float8_e4m3fn": (TensorProto.FLOAT8E4M3FN, np.uint8), "float8_e5m2": (TensorProto.FLOAT8E5M2, np.uint8),
    "bfloat16": (TensorProto.BFLOAT16, np.uint16), "float16": (TensorProto.FLOAT16, np.uint16),
}  # fmt: skip


def run(model: bytes, given: Mapping[str, Any]) -> list[Any]:
    try:
        return list(_session(model).run(None, dict(given)))
    except (Fail, InvalidArgument, InvalidGraph, RuntimeException) as error:
        said = str(error)
        kind = (
            DtypeMismatch if "Type Error" in said or "Unexpected input data type" in said
            else SlotOutOfRange if "invalid indice" in said or "out of data bounds" in said
            else ShapeMismatch
        )  # fmt: skip
        raise kind(said) from error


@lru_cache(256)
def _session(model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class OnnxRuntime(NumpyArrays):
    version = onnxruntime.__version__
    language = "c++"
    project = "onnxruntime"


class OnnxRuntimeCast(OnnxRuntime):
    """Codes are bytes, because NumPy does not have these types."""

    name = "onnxruntime-cast"
    formats = tuple(TO)

    def elements(self) -> "OnnxRuntimeCast":
        return self

    def encode(self, values: Any, format: str) -> Any:
        of, bits = TO[format]
        codes = np.empty(values.shape, bits)
        _cast((values, _type(values)), (codes, of), saturate=int(format != "float8_e5m2"))
        return codes

    def decode(self, codes: Any, format: str) -> Any:
        numbers = np.empty(codes.shape, np.float32)
        _cast((np.ascontiguousarray(codes), TO[format][0]), (numbers, TensorProto.FLOAT), saturate=1)
        return numbers


def _type(array: Any) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _cast(source: tuple[Any, int], target: tuple[Any, int], saturate: int) -> None:
    """Cast values in memory of one type into memory of another type."""
    attributes = (("to", target[1]), ("saturate", saturate))
    types = (("x", source[1], (None,) * source[0].ndim),)
    session = _session(onnx_nodes.one_node("Cast", ("x",), types, ("y",), "", onnx_nodes.OPSET, attributes))
    values = [onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(*each) for each in (source, target)]
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", values[0])
    binding.bind_ortvalue_output("y", values[1])
    session.run_with_iobinding(binding)


class OnnxRuntimeScatter(OnnxRuntime):
    name = "onnxruntime-scatter"

    def kernels(self) -> OnnxNodeKernels:
        return OnnxNodeKernels(OnnxOperators(run))


class OnnxRuntimeAttention(OnnxRuntime):
    name = "onnxruntime-attention"
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}}  # a model has at least one token

    def attention(self) -> onnx_nodes.OnnxNodeAttention:
        return onnx_nodes.OnnxNodeAttention(OnnxOperators(run))

    def contiguous(self, **config: Any) -> OnnxGrowingCache:
        return OnnxGrowingCache(OnnxOperators(run), config)


class OnnxRuntimeAttentionFloat16(OnnxRuntime):
    name = "onnxruntime-attention-float16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float16"], "tokens": {"least": 1}}

    def attention(self) -> onnx_nodes.OnnxNodeAttention:
        return onnx_nodes.OnnxNodeAttention(OnnxOperators(run))

    def contiguous(self, **config: Any) -> OnnxGrowingCache:
        return OnnxGrowingCache(OnnxOperators(run), config, "float16")


DOMAIN = "com.microsoft"
PRESENT = ["output", "present_key", "present_value"]


class OnnxRuntimeGroupQuery(OnnxRuntime):
    name = "onnxruntime-group-query"
    limits: ClassVar[Mapping[str, Any]] = {
        "dtype": ["float32"], "tokens": {"least": 1}, "batch_size": [1], "head_dim": {"multiple_of": 8}
    }  # fmt: skip

    def attention(self) -> "OnnxRuntimeOverBuffers":
        return OnnxRuntimeOverBuffers()

    def contiguous(self, **config: Any) -> "OnnxRuntimeGroupQueryCache":
        return OnnxRuntimeGroupQueryCache(OnnxOperators(run), config)


class OnnxRuntimeGroupQueryFloat16(OnnxRuntimeGroupQuery):
    name = "onnxruntime-group-query-float16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {**OnnxRuntimeGroupQuery.limits, "dtype": ["float16"]}

    def contiguous(self, **config: Any) -> "OnnxRuntimeGroupQueryCache":
        return OnnxRuntimeGroupQueryCache(OnnxOperators(run), config, "float16")


class OnnxRuntimeMultiHead(OnnxRuntime):
    name = "onnxruntime-multi-head"
    limits: ClassVar[Mapping[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}, "group_size": [1]}

    def attention(self) -> "OnnxRuntimeHeads":
        return OnnxRuntimeHeads()

    def contiguous(self, **config: Any) -> "OnnxRuntimeMultiHeadCache":
        return OnnxRuntimeMultiHeadCache(OnnxOperators(run), config)


class OnnxRuntimeOverBuffers:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return _over_buffers(query, keys, values, length, scale, causal=int(causal))

    def sink_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any
    ) -> Any:  # fmt: skip
        return _over_buffers(query, keys, values, len(keys), scale, logit_sink, causal=int(causal))

    def window_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Any:  # fmt: skip
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        return _over_buffers(query, keys, values, len(keys), scale, causal=1, local_window_size=window)


def _over_buffers(
    query: Any, keys: Any, values: Any, length: int, scale: float, head_sink: Any = None, **attributes: Any
) -> Any:  # fmt: skip
    """Attend over buffers that contain all tokens.

    The last tokens are also passed with the queries; the operator writes them to the same places again.
    """
    if not length or (len(query) > length and attributes["causal"]):
        raise NotOffered("queries without tokens")
    if len(query) > length:  # one by one, each as the query of the newest token
        given = keys, values, length, scale, head_sink
        return np.concatenate([_over_buffers(query[at : at + 1], *given, **attributes) for at in range(len(query))])
    new = slice(length - len(query), length)
    if scale == 0:
        raise NotOffered("a scale of 0, which means the default")
    if query.shape[-1] == keys.shape[-1] != values.shape[-1]:
        raise NotOffered("values whose width differs from that of the keys: the operator has one head_size")
    heads, kv_heads = query.shape[1], keys.shape[1]
    (out, *_) = OnnxOperators(run)(
        "GroupQueryAttention", PRESENT, DOMAIN,
        query=_hidden(query), key=_hidden(keys[new]), value=_hidden(values[new]),
        past_key=_buffer(keys), past_value=_buffer(values), seqlens_k=np.array([length - 1], np.int32),
        total_sequence_length=np.array([length], np.int32), cos_cache=None, sin_cache=None, position_ids=None,
        attention_bias=None, head_sink=head_sink, num_heads=heads, kv_num_heads=kv_heads, scale=float(scale), **attributes,
    )  # fmt: skip
    return out.reshape(query.shape)


class OnnxRuntimeHeads:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        if scale == 0:
            raise NotOffered("a scale of 0, which means the default")
        if causal and length != len(keys):
            raise NotOffered("a causal mask with a length below the number of tokens")
        past = len(keys) - len(query) if causal else 0
        if past < 0:
            raise NotOffered("more queries than tokens")
        before = {"past_key": _buffer(keys[:past]), "past_value": _buffer(values[:past])} if past else {}
        out = OnnxOperators(run)(
            "MultiHeadAttention", PRESENT if past else PRESENT[:1], DOMAIN,
            query=_hidden(query), key=_hidden(keys[past:]), value=_hidden(values[past:]), bias=None,
            key_padding_mask=None if causal else np.array([length], np.int32), attention_bias=None, **before,
            num_heads=query.shape[1], scale=float(scale), unidirectional=int(causal),
        )[0]  # fmt: skip
        return out.reshape(len(query), query.shape[1], -1)


def _hidden(array: Any) -> Any:
    """Return [tokens, heads, dim] as one sequence of hidden states."""
    return array.reshape(1, len(array), math.prod(array.shape[1:])) if array.ndim == 3 else array


def _buffer(array: Any) -> Any:
    return np.ascontiguousarray(np.swapaxes(array, 0, 1)[None]) if array.ndim == 3 else array


class OnnxRuntimeGroupQueryCache(OnnxGrowingCache):
    def _step(self, keys: Any, values: Any) -> list[Any]:
        past_key, past_value = self._past
        total, heads = self.seq_len + (keys.shape[2] if keys.ndim == 4 else 1), past_key.shape[1]
        return self._operators(
            "GroupQueryAttention", PRESENT, DOMAIN,
            query=_states(keys), key=_states(keys), value=_states(values), past_key=past_key, past_value=past_value,
            seqlens_k=np.array([total - 1], np.int32), total_sequence_length=np.array([total], np.int32),
            num_heads=heads, kv_num_heads=heads,
        )  # fmt: skip


class OnnxRuntimeMultiHeadCache(OnnxGrowingCache):
    def _step(self, keys: Any, values: Any) -> list[Any]:
        past_key, past_value = self._past
        return self._operators(
            "MultiHeadAttention", PRESENT, DOMAIN,
            query=_states(keys), key=_states(keys), value=_states(values), bias=None, key_padding_mask=None,
            attention_bias=None, past_key=past_key, past_value=past_value, num_heads=past_key.shape[1], unidirectional=1,
        )  # fmt: skip


def _states(array: Any) -> Any:
    """Return [batch, heads, tokens, dim] as hidden states."""
    if array.ndim != 4:
        return array
    return np.swapaxes(array, 1, 2).reshape(len(array), array.shape[2], math.prod(array.shape[1::2]))


class OnnxRuntimeWindow(OnnxRuntime):
    """GroupQueryAttention with `local_window_size`, whose outputs are all tokens, past and new.

    The caller passes all tokens in again, so stored tokens, reads and truncation are not offered.
    """

    name = "onnxruntime-window"
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "head_dim": {"multiple_of": 8}}

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
        out, *self._past = _window_step(query, keys, values, scale, self._past, self.length, self._config["window"])
        return out.reshape(query.shape)


def _window_step(
    query: Any, keys: Any, values: Any, scale: float, past: list[Any], length: int, window: int, **attributes: int
) -> list[Any]:  # fmt: skip
    past_key, past_value = past
    total = length + len(keys)
    return OnnxOperators(run)(
        "GroupQueryAttention", PRESENT, DOMAIN,
        query=query.reshape(1, len(query), -1), key=keys.reshape(1, len(keys), -1), value=values.reshape(1, len(values), -1),
        past_key=past_key, past_value=past_value, seqlens_k=np.array([total - 1], np.int32),
        total_sequence_length=np.array([total], np.int32), num_heads=query.shape[1], kv_num_heads=past_key.shape[1],
        scale=float(scale), local_window_size=window, **attributes,
    )  # fmt: skip


class OnnxRuntimeWindowCache(OnnxRuntime):
    """GroupQueryAttention with `sliding_window_cache`: a buffer of the window's size, which drops one token in each step.

    The caller counts the tokens and passes the last output buffer in again. Which position is in which row, and when tokens can
    be truncated, is computed as the operator's documentation defines it (`L(T)`). The contents and what a query sees are judged.
    """

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
        past, window = self._past, self._config["window"]
        out, *self._past = _window_step(query, keys, values, scale, past, self.length, window, sliding_window_cache=1)
        self.length += len(keys)
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
