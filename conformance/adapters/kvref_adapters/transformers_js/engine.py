"""Adapters of transformers.js in a Node subprocess: whole prompts, left-padded, with its DynamicCache.

The canary is an ONNX graph with past and present keys and values, as exporters write a Llama.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from kvref.canary import Canary, weights
from kvref.canary.dimensions import EPSILON
from kvref.errors import PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, write_canary
from kvref_adapters._shared.node_process import package_version, running_node
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.implementation_api import NDArray

OPSET, IR = 18, 9
END = np.iinfo(np.int64).max
HIDDEN = -3e38  # the score of a masked position; finite, so that a padded query that sees nothing does not give NaN


class GraphBuilder:
    """Builder of a graph: `graph("MatMul", a, b)` adds a node and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def __call__(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def numbers(self, *values: int) -> str:
        return self.constant(values, np.int64)


def onnx_model(canary: Canary) -> bytes:
    """Return the bytes of the ONNX file.

    Inputs: input_ids and position_ids [batch, new], attention_mask [batch, all] over past and new tokens, and the past keys and
    values. Outputs: logits, and the present keys and values [batch, num_kv_heads, all, head_dim], new tokens last. MLPs are left
    out, because a canary's MLPs are zero.
    """
    graph, given = GraphBuilder(), weights(canary)
    positions = graph("Cast", graph("Unsqueeze", "position_ids", graph.numbers(1, 2, 4)), to=TensorProto.FLOAT)
    turns = graph("Mul", positions, graph.constant(canary.frequencies))
    turned = graph("Cos", turns), graph("Sin", turns)
    x = graph("Gather", graph.constant(given["model.embed_tokens.weight"]), "input_ids")
    for layer in range(canary.num_layers):
        x = graph("Add", x, _attention(graph, canary, layer, x, turned))
    x = _norm(graph, x, given["model.norm.weight"])
    graph("MatMul", x, graph.constant(given["lm_head.weight"].T), output="logits")
    return _file(graph, canary)


def _attention(graph: GraphBuilder, canary: Canary, layer: int, x: str, turned: tuple[str, str]) -> str:
    """What a layer's attention adds to the residual stream.

    Heads are [batch, num_kv_heads, query heads per KV head, tokens, head_dim].
    """
    name = f"model.layers.{layer}"
    given = {each: weights(canary)[f"{name}.self_attn.{each}_proj.weight"].T for each in "qkvo"}
    x = _norm(graph, x, weights(canary)[f"{name}.input_layernorm.weight"])

    def heads(weight: NDArray, sharing: int) -> str:
        shape = graph.numbers(0, 0, canary.num_kv_heads, sharing, canary.head_dim)
        return graph("Transpose", graph("Reshape", graph("MatMul", x, graph.constant(weight)), shape), perm=[0, 2, 3, 1, 4])

    def behind_past(kind: str, new: str) -> str:
        new = graph("Squeeze", new, graph.numbers(2))
        all_ = graph("Concat", f"past_key_values.{layer}.{kind}", new, axis=2, output=f"present.{layer}.{kind}")
        return graph("Unsqueeze", all_, graph.numbers(2))

    group = canary.num_query_heads // canary.num_kv_heads
    query = _rotated(graph, canary, heads(given["q"] / np.sqrt(canary.head_dim), group), turned)
    key = behind_past("key", _rotated(graph, canary, heads(given["k"], 1), turned))
    value = behind_past("value", heads(given["v"], 1))
    scores = graph("MatMul", query, graph("Transpose", key, perm=[0, 1, 2, 4, 3]))
    scores = graph("Where", _seen(graph, canary.windows[layer]), scores, graph.constant(HIDDEN))
    read = graph("MatMul", graph("Softmax", scores, axis=-1), value)
    read = graph("Reshape", graph("Transpose", read, perm=[0, 3, 1, 2, 4]), graph.numbers(0, 0, canary.hidden_size))
    return graph("MatMul", read, graph.constant(given["o"]))


def _rotated(graph: GraphBuilder, canary: Canary, x: str, turned: tuple[str, str]) -> str:
    """Rotary embedding in the layout halves: rotates the pair of numbers i and i + head_dim / 2."""
    cos, sin = turned
    half, axis = canary.head_dim // 2, graph.numbers(-1)
    first = graph("Slice", x, graph.numbers(0), graph.numbers(half), axis)
    second = graph("Slice", x, graph.numbers(half), graph.numbers(2 * half), axis)
    left = graph("Sub", graph("Mul", first, cos), graph("Mul", second, sin))
    right = graph("Add", graph("Mul", second, cos), graph("Mul", first, sin))
    return graph("Concat", left, right, axis=-1)


def _seen(graph: GraphBuilder, window: int | None) -> str:
    """Mask of the positions that each new token sees, [batch, 1, 1, new, all], by index in the padded batch."""
    zero, one = graph.constant(0, np.int64), graph.constant(1, np.int64)
    there = graph("Cast", graph("Unsqueeze", "attention_mask", graph.numbers(1, 2, 3)), to=TensorProto.BOOL)
    size = graph("Squeeze", graph("Shape", "attention_mask", start=1))
    places = graph("Range", zero, size, one)
    new = graph("Shape", "input_ids", start=1)
    own = graph("Slice", places, graph("Neg", new), graph.numbers(END), graph.numbers(0))
    back = graph("Sub", graph("Unsqueeze", own, graph.numbers(1)), places)
    seen = graph("And", there, graph("GreaterOrEqual", back, zero))
    return seen if window is None else graph("And", seen, graph("Less", back, graph.constant(window, np.int64)))


def _norm(graph: GraphBuilder, x: str, weight: NDArray) -> str:
    square = graph("ReduceMean", graph("Mul", x, x), graph.numbers(-1))
    length = graph("Sqrt", graph("Add", square, graph.constant(EPSILON)))
    return graph("Mul", graph("Div", x, length), graph.constant(weight))


def _file(graph: GraphBuilder, canary: Canary) -> bytes:
    def tensor(name: str, *axes: int | str) -> Any:
        whole = name.endswith(("_ids", "_mask"))
        return helper.make_tensor_value_info(name, TensorProto.INT64 if whole else TensorProto.FLOAT, axes)

    def cache(name: str, length: str) -> list[Any]:
        kinds = [f"{name}.{layer}.{kind}" for layer in range(canary.num_layers) for kind in ("key", "value")]
        return [tensor(kind, "batch_size", canary.num_kv_heads, length, canary.head_dim) for kind in kinds]

    inputs = [tensor(name, "batch_size", "new") for name in ("input_ids", "position_ids")]
    inputs += [tensor("attention_mask", "batch_size", "all"), *cache("past_key_values", "past")]
    outputs = [tensor("logits", "batch_size", "new", canary.vocabulary), *cache("present", "all")]
    made = helper.make_graph(graph.nodes, "canary", inputs, outputs, graph.constants)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    return bytes(model.SerializeToString())


PACKAGE = "@huggingface/transformers"
PROGRAM = Path(__file__).with_suffix(".cjs")


class TransformersJsGenerate(EngineAdapter):
    name = "transformers.js"
    version = package_version(PACKAGE)
    language = "javascript"
    project = "transformers.js"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersJsEngine":
        return TransformersJsEngine(canary, folder)


class TransformersJsCached(TransformersJsGenerate):
    """With sessions: each keeps a DynamicCache between calls, and a fork receives a copy."""

    name = "transformers.js-cached"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersJsEngine":
        return TransformersJsSessionEngine(canary, folder)


class TransformersJsEngine(WholePrompts):
    def __init__(self, canary: Canary, folder: Path) -> None:
        super().__init__(canary)
        self._caches: dict[int, int] = {}
        write_canary(canary, folder)
        (folder / "onnx").mkdir()
        (folder / "onnx/model.onnx").write_bytes(onnx_model(canary))
        self._node = running_node(PROGRAM)
        self._model = self._node.ask(load=str(folder))["model"]

    def complete(self, prompts: Sequence[Sequence[int]], count: int, **options: Any) -> list[list[int]]:
        said: list[list[int]] = self._node.ask(model=self._model, prompts=prompts, count=count, **options)["said"]
        return said


class TransformersJsSessionEngine(TransformersJsEngine):
    def open(self) -> int:
        session = super().open()
        self._caches[session] = next(_NAMES)
        return session

    def close(self, session: int) -> None:
        super().close(session)
        self._node.ask(forget=self._caches.pop(session))

    def fork(self, session: int) -> int:
        told = self._session_tokens(session)
        child = self.open()
        self._tokens[child] = list(told)
        self._node.ask(copy=self._caches[session], to=self._caches[child])
        return child

    def generate(self, session: int, count: int) -> list[int]:
        told = self._session_tokens(session, generates=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return []
        self._check_room(told, count)
        (said,) = self.complete([told], count, cache=self._caches[session])
        told += said
        return said

    def step(self, sessions: Sequence[int]) -> list[int]:
        if len(sessions) > 1:
            raise NotOffered("batches of caches")
        return [self.generate(session, 1)[0] for session in sessions]


_NAMES = itertools.count()  # of caches, unique among engines
