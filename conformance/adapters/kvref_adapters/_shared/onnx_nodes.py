"""ONNX graphs of one or two nodes, and the families built from them, for ONNX's reference evaluator and for ONNX Runtime.

Access by slot is Gather and ScatterND with int64 slots, which both runtimes support, and TensorScatter for a buffer. Attention is
the operator Attention, with `nonpad_kv_seqlen` as the length. With past and present it is a growing cache, whose last output is
its only state.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from onnx import helper

from kvref_conformance.exceptions import NotOffered

OPSET, IR = 24, 11
Run = Callable[[bytes, Mapping[str, Any]], list[Any]]  # takes a serialized model and its inputs by name, returns its outputs


class OnnxOperators:
    """Nodes as functions. Each combination of input types is a model of its own."""

    def __init__(self, run: Run, opset: int = OPSET) -> None:
        self._run, self._opset = run, opset

    def __call__(self, op: str, outputs: Sequence[str], domain: str = "", **given: Any) -> list[Any]:
        """Run a node. Arrays are inputs, in order; other arguments are attributes."""
        arrays = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        attributes = tuple((name, value) for name, value in given.items() if not isinstance(value, np.ndarray | None))
        names = tuple(name if name in arrays else "" for name in given if name in arrays or given[name] is None)
        return self._run(one_node(op, names, _typed(arrays), tuple(outputs), domain, self._opset, attributes), arrays)

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        nodes = (("Unsqueeze", ("slots", "last"), "indices"), ("ScatterND", ("store", "indices", "new"), "out"))
        return self._over_slots(nodes, {"store": store, "slots": slots, "new": new})

    def gather(self, store: Any, slots: Any) -> Any:
        return self._over_slots((("Gather", ("store", "slots"), "out"),), {"store": store, "slots": slots})

    def _over_slots(self, nodes: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        return self._run(several_nodes(nodes, _typed(given), self._opset), given)[0]


def _typed(arrays: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return value infos of inputs: names, types and shapes. Only the rank of a shape is declared; slots have one dimension."""
    return tuple(
        (name, helper.np_dtype_to_tensor_dtype(array.dtype), (None,) * (1 if name == "slots" else array.ndim))
        for name, array in arrays.items()
    )


@cache
def one_node(
    op: str, inputs: tuple[str, ...], types: Any, outputs: tuple[str, ...], domain: str, opset: int, attributes: Any
) -> bytes:
    node = helper.make_node(op, inputs, outputs, domain=domain, **dict(attributes))
    return _model([node], types, outputs, opset, domain, dict(attributes).get("to"))


@cache
def several_nodes(nodes: tuple[Any, ...], types: Any, opset: int) -> bytes:
    last = helper.make_node("Constant", [], ["last"], value_ints=[-1])
    return _model([last, *(helper.make_node(op, inputs, [output]) for op, inputs, output in nodes)], types, ("out",), opset)


def _model(nodes: list[Any], types: Any, outputs: tuple[str, ...], opset: int, domain: str = "", to: int | None = None) -> bytes:
    """Return the serialized model. Its output has the type of the first input, unless it is a cast."""
    _, of, shape = types[0]
    graph = helper.make_graph(
        nodes, "judged", [helper.make_tensor_value_info(*each) for each in types],
        [helper.make_tensor_value_info(name, to or of, None if domain else shape) for name in outputs],
    )  # fmt: skip
    domains = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model: bytes = helper.make_model(graph, opset_imports=domains, ir_version=IR).SerializeToString()
    return model


class OnnxNodeKernels:
    def __init__(self, operators: OnnxOperators) -> None:
        self._operators = operators

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        return self._operators.scatter(store, int64(slots), new)

    def gather(self, store: Any, slots: Any) -> Any:
        return self._operators.gather(store, int64(slots))

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        """Copy blocks as the slots that they consist of."""
        read = self._operators.gather(store, _of_blocks(sources, block_size))
        return self._operators.scatter(store, _of_blocks(targets, block_size), read)

    def update(self, buffer: Any, new: Any, position: int) -> Any:
        write_indices = np.full(len(buffer), position, np.int64)
        return self._operators("TensorScatter", ["present"], past_cache=buffer, update=new, write_indices=write_indices)[0]


def int64(slots: Any) -> Any:
    """Widen narrower integers to int64, the only supported type. Other values are returned unchanged."""
    if slots.dtype == np.uint64:
        raise NotOffered("slots of uint64: ONNX's indices are int64")
    return slots.astype(np.int64) if slots.dtype.kind in "iu" else slots


def _of_blocks(blocks: Any, block_size: int) -> Any:
    blocks = int64(np.asarray(blocks))
    if blocks.dtype != np.int64:
        return blocks
    return (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)


class OnnxNodeAttention:
    def __init__(self, operators: OnnxOperators) -> None:
        self._operators = operators

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        if scale <= 0:
            raise NotOffered("a scale that is not positive: queries and keys are multiplied by its square root")
        return self._attended(query, keys, values, length, scale=float(scale), is_causal=int(causal))

    def _attended(self, query: Any, keys: Any, values: Any, length: int, **attributes: Any) -> Any:
        q, k, v = (np.ascontiguousarray(np.swapaxes(array, 0, 1)[None]) for array in (query, keys, values))
        (out,) = self._operators(
            "Attention", ["Y"], Q=q, K=k, V=v, attn_mask=None, past_key=None, past_value=None,
            nonpad_kv_seqlen=np.array([length], np.int64), **attributes,
        )  # fmt: skip
        return np.swapaxes(out[0], 0, 1)


class OnnxNodeWindows(OnnxNodeAttention):
    """The Attention operator with a sliding window, as of opset 25."""

    def window_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Any:  # fmt: skip
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        return self._attended(query, keys, values, len(keys), scale=float(scale), is_causal=1, left_window_size=window - 1)


class OnnxGrowingCache:
    """A growing cache. `append` is a step of a model whose queries are the keys; its attention output is ignored."""

    def __init__(self, operators: OnnxOperators, config: Mapping[str, Any], dtype: str = "float32") -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            number = isinstance(value, int) and not isinstance(value, bool)
            if not (value == dtype if name == "dtype" else number and value >= least):
                raise NotOffered(f"validation of {name}, which the operator does not take as an argument")
        shape = config["batch_size"], config["num_kv_heads"], 0, config["head_dim"]
        self._operators, self._longest = operators, config["max_seq_len"]  # the judge's maximum length
        self._past = [np.zeros(shape, dtype)] * 2

    @property
    def seq_len(self) -> int:
        return int(self._past[0].shape[2])

    def append(self, keys: Any, values: Any) -> None:
        if keys.ndim == 4 and self.seq_len + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        _, *self._past = self._step(keys, values)

    def read(self) -> tuple[Any, Any]:
        keys, values = self._past
        return keys, values

    def _step(self, keys: Any, values: Any) -> list[Any]:
        past_key, past_value = self._past
        return self._operators(
            "Attention", ["Y", "present_key", "present_value"],
            Q=keys, K=keys, V=values, attn_mask=None, past_key=past_key, past_value=past_value, is_causal=1,
        )  # fmt: skip
