"""Adapters of OpenVINO's ScaledDotProductAttention on its CPU plugin, alone and with keys and values in variables.

Variables are ReadValue, Gather by `beam_idx`, Concat and Assign. The plugin fuses them and the attention after them into one
operation with a cache of its own in KV_CACHE_PRECISION. `read` is the result of `query_state`; `truncate` does what GenAI does
(it reads the state and assigns its first tokens); `reorder` is the `beam_idx` of the next step.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import openvino
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo
from openvino.utils.node_factory import NodeFactory

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters.openvino.paged_attention import PRECISION, OpenVino
from kvref_conformance.outcome import NotOffered


class OpenVinoStateful(OpenVino):
    name = "openvino-stateful"
    # A model is never called without tokens; and for repeated heads the plugin builds another graph.
    limits: ClassVar[Mapping[str, Any]] = {"dtype": "float32", "tokens": {"least": 1}, "attention": {"group_size": 1}}

    def contiguous(self, **config: Any) -> "OpenVinoStates":
        return OpenVinoStates(config)

    def attention(self) -> "OpenVinoSdpaInTwoSteps":
        return OpenVinoSdpaInTwoSteps()


class OpenVinoStatefulFloat16(OpenVinoStateful):
    """Tokens and a cache of float16; it computes in float32."""

    name = "openvino-stateful-f16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {**OpenVinoStateful.limits, "dtype": "float16"}


class OpenVinoSdpa(OpenVino):
    """Keys and values are inputs, with a mask unless every query sees all tokens."""

    name = "openvino-sdpa"

    def attention(self) -> "OpenVinoSdpaOperation":
        return OpenVinoSdpaOperation()


class OpenVinoRequest:
    """An infer request of a compiled model, with variables of its own. Raises ShapeMismatch if the sizes allow no model."""

    def __init__(self, compiled: Any, *sizes: Any) -> None:
        try:
            self._request = compiled(*sizes).create_infer_request()
        except RuntimeError as error:
            if "not compatible" not in str(error):
                raise
            raise ShapeMismatch(str(error)) from error

    def step(self, **given: Any) -> Any:
        try:
            for name, array in given.items():
                self._request.set_tensor(name, openvino.Tensor(np.array(array, order="C")))
            self._request.infer()
        except RuntimeError as error:
            raise (DtypeMismatch if "precision" in str(error) else ShapeMismatch)(str(error)) from error
        return self._request.get_output_tensor(0).data.copy()

    def states(self) -> tuple[Any, Any]:
        keys, values = sorted(self._request.query_state(), key=lambda state: state.name)
        return keys, values

    def reset(self) -> None:
        self._request.reset_state()


class OpenVinoStates:
    def __init__(self, config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise NotOffered(f"validation of {name}: it is a property of the model")
        if config["dtype"] not in PRECISION:
            raise NotOffered("a dtype argument")
        self._heads, self._dim, self._dtype = config["num_kv_heads"], config["head_dim"], config["dtype"]
        self._longest, self._batch = config["max_seq_len"], config["batch_size"]
        self._rows: list[int] | None = None  # the `beam_idx` for the next step, if a reorder is pending
        self._request = OpenVinoRequest(_stateful, self._heads, self._heads, self._dim, self._dim, self._dtype)

    @property
    def seq_len(self) -> int:
        return int(self._request.states()[0].state.shape[2])

    def append(self, keys: Any, values: Any) -> None:
        if keys.ndim == values.ndim == 4 and keys.shape[::2] != values.shape[::2]:
            raise NotOffered("rejecting keys and values of different batch sizes or lengths: one projection produces both")
        if keys.ndim == 4 and len(keys) != (self._batch if self._rows is None else len(self._rows)):
            raise NotOffered("rejecting tokens whose batch size differs from that of `beam_idx`")
        if keys.ndim == 4 and self.seq_len + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        self._step(keys, values)

    def read(self) -> tuple[Any, Any]:
        self._reordered()
        if not self.seq_len:  # an unassigned variable has no batch size
            none = np.zeros((self._batch, self._heads, 0, self._dim), np.float32)
            return none, none
        keys, values = (state.state.data.copy() for state in self._request.states())
        return keys, values

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.seq_len:
            raise NotOffered("rejecting a length out of range: the caller slices the state")
        if not length:
            self._request.reset()
            return
        for state in self._request.states():
            state.state = openvino.Tensor(np.array(state.state.data[:, :, : int(length)], order="C"))

    def reorder(self, rows: Sequence[int]) -> None:
        if not self.seq_len or not len(rows):
            raise NotOffered("reordering an empty cache, or to no rows")
        self._reordered()
        if not all(0 <= row < self._batch for row in rows):
            raise NotOffered("rejecting rows out of range")
        self._rows = [int(row) for row in rows]

    def reset(self) -> None:
        self._rows = None
        self._request.reset()

    def _reordered(self) -> None:
        """Apply a pending `beam_idx` with a step of one token, and truncate that token."""
        if self._rows is not None:
            length, none = self.seq_len, np.zeros((len(self._rows), self._heads, 1, self._dim), self._dtype)
            self._step(none, none)
            self.truncate(length)

    def _step(self, keys: Any, values: Any) -> None:
        rows, count = range(self._batch) if self._rows is None else self._rows, keys.shape[2] if keys.ndim == 4 else 1
        query = np.zeros((len(keys), self._heads, count, self._dim), self._dtype)
        mask = np.zeros((1, 1, count, self.seq_len + count), np.float32)
        self._request.step(q=query, k=keys, v=values, mask=mask, scale=np.float32(1), beam_idx=np.array(rows, np.int32))
        self._batch, self._rows = len(rows), None


class OpenVinoSdpaInTwoSteps:
    """Attention in two steps: all tokens but the last ones, then the last ones with the queries.

    The mask hides what a query must not see.
    """

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        _of_heads(query, keys, values)
        count, total = len(query), len(keys)
        if total != len(values):
            raise NotOffered("rejecting different numbers of keys and values: one projection produces both")
        if not total or (causal and count > total):
            raise NotOffered("more queries than tokens: each query brings a token")
        request = OpenVinoRequest(_stateful, query.shape[1], *keys.shape[1:], values.shape[2], str(keys.dtype))
        last = count if causal else 1
        lanes = {"k": keys.swapaxes(0, 1)[None], "v": values.swapaxes(0, 1)[None]}
        told = {"scale": np.float32(scale)}
        if total > last:
            none = np.zeros((1, query.shape[1], total - last, query.shape[2]), keys.dtype)
            mask = np.zeros((1, 1, total - last, total - last), np.float32)
            first = {name: lane[:, :, : total - last] for name, lane in lanes.items()}
            request.step(q=none, mask=mask, beam_idx=np.zeros(1, np.int32), **first, **told)
        rest = {name: lane[:, :, total - last :] for name, lane in lanes.items()}
        mask = np.where(_mask(count, total, causal, int(length)), 0, -np.inf).astype(np.float32)
        if causal:
            out = request.step(
                q=query.swapaxes(0, 1)[None], mask=mask[None, None], beam_idx=np.zeros(1, np.int32), **rest, **told
            )
            return out[0].swapaxes(0, 1)
        # Each query is a beam of its own; all beams continue from the only existing one.
        rest = {name: np.repeat(lane, count, axis=0) for name, lane in rest.items()}
        beams = np.zeros(count, np.int32)
        return request.step(q=query[:, :, None], mask=mask[:1][None, None], beam_idx=beams, **rest, **told)[:, :, 0]


class OpenVinoSdpaOperation:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attended(query, keys, values, scale, causal, int(length))

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attended(query, keys, values, scale, causal, len(keys), sink=logit_sink.reshape(1, -1, 1, 1))

    def _attended(
        self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int, **sink: Any
    ) -> Any:  # fmt: skip
        _of_heads(query, keys, values)
        mask = _mask(len(query), len(keys), causal, length)
        masked = {"mask": mask[None, None]} if not mask.all() or sink else {}
        sizes = query.shape[1], keys.shape[1], query.shape[2], values.shape[2]
        request = OpenVinoRequest(_alone, *sizes, bool(masked), bool(sink))
        return request.step(q=query, k=keys, v=values, scale=np.float32(scale), **masked, **sink)


def _of_heads(*arrays: Any) -> None:
    if any(array.ndim != 3 for array in arrays):
        raise NotOffered("rejecting other ranks: a model is compiled for the given heads")


def _mask(count: int, total: int, causal: bool, length: int) -> Any:
    """Return which tokens each query sees: [queries, tokens]."""
    last = np.arange(length - count, length)[:, None] if causal else np.full((count, 1), length - 1)
    return np.arange(total) <= last


def _made(results: Any, sinks: Any, given: dict[str, Any], precision: str = "f32") -> Any:
    for name, parameter in given.items():
        parameter.output(0).tensor.set_names({name})
    model = openvino.Model([op.result(results)], sinks, list(given.values()), "attention")
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": 2}
    return openvino.Core().compile_model(model, "CPU", options)


def _given(dtype: str, **shapes: list[int]) -> dict[str, Any]:
    return {name: op.parameter(shape, getattr(openvino.Type, dtype)) for name, shape in shapes.items()}


def _ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def _repeated(heads: Any, group: int) -> Any:
    """Repeat each KV head for each query head that reads it, as exporters do."""
    if group == 1:
        return heads
    shape = op.shape_of(heads)
    before, behind = (op.gather(shape, _ints(*axes), _ints(0)) for axes in ((0, 1), (2, 3)))
    wide = op.broadcast(op.unsqueeze(heads, _ints(2)), op.concat([before, _ints(group), behind], 0), "BIDIRECTIONAL")
    count = heads.output(0).get_partial_shape()[1].get_length() * group
    return op.reshape(wide, op.concat([_ints(0, count, -1), op.gather(shape, _ints(3), _ints(0))], 0), True)


@cache
def _stateful(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: str) -> Any:
    precision, sinks = PRECISION[dtype], list[Any]()
    tokens = _given(precision, q=[-1, heads, -1, head_dim], k=[-1, kv_heads, -1, head_dim], v=[-1, kv_heads, -1, value_dim])
    others = _given("f32", mask=[-1, 1, -1, -1], scale=[]) | _given("i32", beam_idx=[-1])
    beams = others["beam_idx"]

    def cached(name: str, dim: int) -> Any:
        info = VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, kv_heads, -1, dim]), openvino.Type.f32
        info.variable_id = name
        variable, batch = Variable(info), op.gather(op.shape_of(beams), _ints(0), _ints(0))
        none = op.broadcast(op.constant(np.float32(0)), op.concat([batch, _ints(kv_heads, 0, dim)], 0))
        past = op.gather(op.read_value(none, variable), beams, op.constant(np.int64(0)))
        both = op.concat([past, op.convert(tokens[name], "f32")], 2)
        sinks.append(op.assign(both, variable))
        return _repeated(both, heads // kv_heads)

    keys, values = cached("k", head_dim), cached("v", value_dim)
    query = op.convert(tokens["q"], "f32")
    found = op.scaled_dot_product_attention(query, keys, values, others["mask"], others["scale"])
    return _made(op.convert(found, precision), sinks, tokens | others, precision)


@cache
def _alone(heads: int, kv_heads: int, head_dim: int, value_dim: int, masked: bool, sink: bool) -> Any:
    tokens = _given("f32", q=[-1, heads, head_dim], k=[-1, kv_heads, head_dim], v=[-1, kv_heads, value_dim])
    scale, others = _given("f32", scale=[]), dict[str, Any]()
    others |= _given("boolean", mask=[1, 1, -1, -1]) if masked else {}
    others |= _given("f32", sink=[1, heads, 1, 1]) if sink else {}
    q, k, v = (op.unsqueeze(op.transpose(each, _ints(1, 0, 2)), _ints(0)) for each in tokens.values())
    inputs = [q, _repeated(k, heads // kv_heads), _repeated(v, heads // kv_heads)]
    inputs += [others.get("mask", op.constant(np.float32(0))), scale["scale"], *([others["sink"]] if sink else [])]
    outputs = [each.output(0) for each in inputs]
    # opset15's node does not accept sinks
    found = NodeFactory("opset13").create("ScaledDotProductAttention", outputs, {"causal": False})
    return _made(op.transpose(op.squeeze(found, _ints(0)), _ints(1, 0, 2)), [], tokens | scale | others)
