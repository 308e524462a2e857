"""Adapters of OpenVINO's operations on its CPU plugin: PagedAttention, Convert, and ScaledDotProductAttention.

PagedAttention is used alone, with blocks that this module allocates. One call writes the new tokens of several sequences into the
blocks of a pool, and attends with one query per new token. Judged is where it writes (`paged`), and what it attends over:
attention over blocks (`attention`), and with its sliding window (`windowed`). Block allocation and sequence lengths are the
caller's; errors about them are not offered. Neither is writing below the length, because the operation appends new tokens after
`past_lens`.

Convert casts from and to float32, value by value. Codes are unsigned integers.

ScaledDotProductAttention is judged alone, and with keys and values in variables: ReadValue, Gather by `beam_idx`, Concat and
Assign. The plugin fuses them and the attention after them into one operation with a cache of its own in KV_CACHE_PRECISION.
`read` is the result of `query_state`; `truncate` does what GenAI does (it reads the state and assigns its first tokens);
`reorder` is the `beam_idx` of the next step.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import openvino
from openvino import opset15 as op
from openvino.op import _PagedAttentionExtension
from openvino.op.util import Variable, VariableInfo
from openvino.utils.node_factory import NodeFactory

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_conformance.exceptions import NotOffered

BLOCK = 32  # tokens per block on this plugin, as the cache shapes of a compiled model show
PRECISION = {"float32": "f32", "float16": "f16"}
# Inputs in this order, with their types. No type means the dtype of the tokens.
GIVEN = {
    "query": "", "key": "", "value": "", "key_cache": "dynamic", "value_cache": "dynamic", "past_lens": "i32",
    "subsequence_begins": "i32", "block_indices": "i32", "block_indices_begins": "i32", "scale": "f32", "sliding_window": "i32",
    "max_context_len": "i32",
}  # fmt: skip
SCALARS = ("scale", "sliding_window", "max_context_len")


class OpenVino(NumpyArrays):
    version = openvino.__version__.partition("-")[0]
    language = "c++"
    project = "openvino"


class OpenVinoPaged(OpenVino):
    name = "openvino-paged"
    limits: ClassVar[Mapping[str, Any]] = {"block_size": BLOCK, "num_layers": 1, "dtype": "float32"}

    def paged(self, **sizes: Any) -> "OpenVinoSequences":
        return OpenVinoSequences(**sizes)


class OpenVinoPagedFloat16(OpenVinoPaged):
    """Tokens and blocks of float16 (KV_CACHE_PRECISION); it computes in float32."""

    name = "openvino-paged-f16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {**OpenVinoPaged.limits, "dtype": "float16"}


class OpenVinoAttention(OpenVino):
    name = "openvino-attention"

    def attention(self) -> "OpenVinoAttentionOverBlocks":
        return OpenVinoAttentionOverBlocks()


class OpenVinoWindow(OpenVino):
    name = "openvino-window"
    limits: ClassVar[Mapping[str, Any]] = WINDOW_LIMITS

    def windowed(self, **config: Any) -> "OpenVinoWindowLayer":
        return OpenVinoWindowLayer(config)


class OpenVinoPool:
    """Blocks of keys and values, [blocks, kv heads, BLOCK, dim] as a compiled model expects them, and the calls over them."""

    def __init__(self, num_blocks: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: str = "float32") -> None:
        self.keys, self.values = (np.zeros((num_blocks, num_kv_heads, BLOCK, dim), dtype) for dim in (head_dim, value_dim))

    def step(
        self, query: Any, keys: Any, values: Any, pasts: Sequence[int], counts: Sequence[int], tables: Sequence[Sequence[int]],
        scale: float = 1.0, window: int = 0, logit_sink: tuple[float, ...] = (),
    ) -> Any:  # fmt: skip
        """Call the operation once.

        counts: the number of new tokens of each sequence, concatenated in `keys` and `values`. tables: the blocks of each
        sequence.
        """
        given = {
            "query": query, "key": keys, "value": values, "key_cache": self.keys, "value_cache": self.values,
            "past_lens": pasts, "subsequence_begins": np.cumsum([0, *counts]),
            "block_indices": [block for table in tables for block in table],
            "block_indices_begins": np.cumsum([0, *map(len, tables)]), "scale": scale, "sliding_window": window,
            "max_context_len": max(map(sum, zip(pasts, counts, strict=True)), default=0),
        }  # fmt: skip
        heads, kv_heads = query.shape[1], self.keys.shape[1]
        dims = self.keys.shape[3], self.values.shape[3]
        request = _compiled(heads, kv_heads, *dims, self.keys.dtype.name, logit_sink).create_infer_request()
        try:
            for name, kind in GIVEN.items():
                array = np.array(given[name], {"i32": np.int32, "f32": np.float32}[kind]) if "3" in kind else given[name]
                request.set_tensor(name, openvino.Tensor(array, shared_memory=kind == "dynamic"))
            request.infer()
        except RuntimeError as error:
            raise (DtypeMismatch if "precision" in str(error) else ShapeMismatch)(str(error)) from error
        return request.get_output_tensor(0).data.reshape(-1, heads, dims[1]).copy()

    def write(self, keys: Any, values: Any, past: int, table: Sequence[int]) -> None:
        """Write tokens of one sequence; the output is ignored."""
        query = np.zeros((len(keys), *self.keys.shape[1::2]), self.keys.dtype)
        self.step(query, keys, values, [past], [len(keys)], [table])

    def again(self, query: Any, table: Sequence[int], length: int, scale: float, window: int = 0, **options: Any) -> Any:
        """Attend with each query as a sequence of its own over the same blocks.

        Each call has to bring a new token, so the last token is written again.
        """
        count = len(query)
        if not count:
            raise NotOffered("attention without queries")
        keys, values = (np.repeat(rows[-1:], count, axis=0) for rows in self.read(table, length))
        return self.step(query, keys, values, [length - 1] * count, [1] * count, [table] * count, scale, window, **options)

    def read(self, table: Sequence[int], count: int) -> tuple[Any, Any]:
        """Return the first `count` tokens of a sequence, from the slots where they must be."""
        keys, values = (store[list(table)].swapaxes(1, 2) for store in (self.keys, self.values))
        return keys.reshape(-1, *keys.shape[2:])[:count], values.reshape(-1, *values.shape[2:])[:count]


class OpenVinoSequences:
    def __init__(self, **sizes: Any) -> None:
        for name, value in sizes.items():
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < (name != "num_blocks")):
                raise NotOffered(f"validation of {name}: the caller allocates the pool")
        if sizes["dtype"] not in PRECISION:
            raise NotOffered("validation of dtype")
        dim = sizes["head_dim"]
        self._pool = OpenVinoPool(sizes["num_blocks"], sizes["num_kv_heads"], dim, dim, sizes["dtype"])
        self._free = list(range(sizes["num_blocks"]))
        self._tables, self._lengths, self._begun = dict[int, list[int]](), dict[int, int](), 0

    def create(self) -> int:
        self._begun += 1
        self._tables[self._begun], self._lengths[self._begun] = [], 0
        return self._begun

    def drop(self, sequence: int) -> None:
        """Free the sequence's blocks without erasing them."""
        self.length(sequence, 0)
        self._free += self._tables.pop(sequence)
        del self._lengths[sequence]

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        if start != self.length(sequence, layer):
            raise NotOffered("writing anywhere but at the end")
        self._pool.write(keys, values, start, self._room(sequence, start + len(keys)))
        self._lengths[sequence] += len(keys)

    def append(self, sequences: Sequence[int], layer: int, keys: Any, values: Any) -> None:
        pasts = [self.length(sequence, layer) for sequence in sequences]
        if len({*sequences}) < len(pasts) or len(pasts) != len(keys):
            raise NotOffered("rejecting a step that is not one token per sequence: the caller builds the batch")
        tables = [self._room(sequence, past + 1) for sequence, past in zip(sequences, pasts, strict=True)]
        query = np.zeros((len(keys), *self._pool.keys.shape[1::2]), self._pool.keys.dtype)
        self._pool.step(query, keys, values, pasts, [1] * len(pasts), tables)
        for sequence in sequences:
            self._lengths[sequence] += 1

    def truncate(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self.length(sequence, 0):
            raise NotOffered("rejecting a length out of range: the caller counts the tokens")
        self._lengths[sequence] = length

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        length = self.length(sequence, layer)
        return self._pool.read(self._tables[sequence], length)

    def length(self, sequence: int, layer: int) -> int:
        if sequence not in self._lengths or layer:
            raise NotOffered("rejecting unknown sequences and layers: the caller keeps track of them")
        return self._lengths[sequence]

    def attend(self, sequence: int, layer: int, query: Any, scale: float) -> Any:
        length = self.length(sequence, layer)
        if not length:
            raise NotOffered("attention without tokens")
        return self._pool.again(query, self._tables[sequence][: -(-length // BLOCK)], length, scale)

    def _room(self, sequence: int, length: int) -> list[int]:
        """Allocate blocks for `length` tokens, alternately from both ends of the free list so that they are not adjacent."""
        table = self._tables[sequence]
        missing = -(-length // BLOCK) - len(table)
        if missing > len(self._free):
            raise NotOffered("running out of blocks: the caller allocates them")
        table += [self._free.pop(-1 - len(table) % 2 * (len(self._free) > 1)) for _ in range(missing)]
        return table[: -(-length // BLOCK)]


class OpenVinoAttentionOverBlocks:
    """Attention over blocks: writes the tokens as one sequence per block, then passes the queries with their tokens again."""

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attended(query, keys, values, scale, causal, int(length))

    def window_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Any:  # fmt: skip
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        return self._attended(query, keys, values, scale, True, len(keys), window=int(window))

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attended(query, keys, values, scale, causal, len(keys), logit_sink=tuple(map(float, logit_sink)))

    def _attended(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int, **options: Any) -> Any:
        if any(array.ndim != 3 for array in (query, keys, values)):
            raise NotOffered("rejecting other ranks than [tokens, heads, dim]: the operation takes [tokens, heads * dim]")
        count = len(query)
        if length < (count if causal else 1):
            raise NotOffered("more queries than tokens: each query brings a token")
        blocks = -(-len(keys) // BLOCK)
        pool, table = OpenVinoPool(blocks + 1, keys.shape[1], keys.shape[2], values.shape[2]), list(range(blocks, 0, -1))
        counts = [min(BLOCK, len(keys) - first) for first in range(0, len(keys), BLOCK)]
        nothing = np.zeros((len(keys), *query.shape[1:]), np.float32)
        pool.step(nothing, keys, values, [0] * blocks, counts, [[block] for block in table])
        table = table[: -(-length // BLOCK)]
        if causal:
            new, pasts, counts = slice(length - count, length), [length - count], [count]
            return pool.step(query, keys[new], values[new], pasts, counts, [table], scale, **options)
        return pool.again(query, table, length, scale, **options)


class OpenVinoWindowLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        check_sizes(config)
        self._config, self._length = config, 0
        self._pool, self._table = OpenVinoPool(0, config["num_kv_heads"], config["head_dim"], config["head_dim"]), list[int]()

    @property
    def length(self) -> int:
        return self._length

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        self._grow(-(-(self._length + len(keys)) // BLOCK))
        table = self._table[: -(-(self._length + len(keys)) // BLOCK)]
        out = self._pool.step(query, keys, values, [self._length], [len(keys)], [table], scale, self._config["window"])
        self._length += len(keys)
        return out

    def attend(self, query: Any, scale: float) -> Any:
        """Attend over the sequence of this layer."""
        if not self._length:
            raise NotOffered("attention without tokens")
        return self._pool.again(query, self._table[: -(-self._length // BLOCK)], self._length, scale, self._config["window"])

    def _grow(self, blocks: int) -> None:
        """Grow the pool to twice the needed number of blocks; new blocks are appended to the table in descending order."""
        held = len(self._table)
        if blocks > held:
            self._table += reversed(range(held, 2 * blocks))
            for name in ("keys", "values"):
                store = getattr(self._pool, name)
                more = np.zeros((2 * blocks - held, *store.shape[1:]), store.dtype)
                setattr(self._pool, name, np.concatenate([store, more]))


@cache
def _compiled(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: str, logit_sink: tuple[float, ...]) -> Any:
    shapes = {"query": [-1, heads, head_dim], "key": [-1, kv_heads, head_dim], "value": [-1, kv_heads, value_dim]}
    shapes |= {"key_cache": [-1] * 4, "value_cache": [-1] * 4} | {name: [] for name in SCALARS}
    given = {
        name: op.parameter(shapes.get(name, [-1]), getattr(openvino.Type, kind or PRECISION[dtype]), name)
        for name, kind in GIVEN.items()
    }
    for name, parameter in given.items():
        parameter.output(0).tensor.set_names({name})

    def none(kind: Any = np.int32) -> Any:
        return op.constant(np.zeros(0, kind))

    _, _, _, *pool, longest = given.values()
    tokens = [op.reshape(given[name], op.constant(np.array([0, -1])), True) for name in ("query", "key", "value")]
    sink = np.array(logit_sink, np.float32).reshape((1, -1, 1, 1) if logit_sink else (0,) * 4)
    zero, floats = op.constant(np.int32(0)), np.float32
    # The remaining inputs: ALiBi slopes, and options for scores, rotation, sparse attention, eviction, images and drafts.
    inputs = [*tokens, *pool, none(floats), longest, none(), none(), none(), none(floats), none(floats), zero, zero]
    inputs += [op.constant(sink), zero, none(), none(), none(), none(), none(np.uint8), none()]
    node = _PagedAttentionExtension([each.output(0) for each in inputs])
    told = {"num_k_heads": kv_heads, "num_v_heads": kv_heads, "k_head_size": head_dim, "v_head_size": value_dim}
    for name, size in told.items():
        node.get_rt_info()[name] = size
    model = openvino.Model([op.result(node.output(0))], list(given.values()), "pages")
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": PRECISION[dtype], "INFERENCE_NUM_THREADS": 2}
    return openvino.Core().compile_model(model, "CPU", options)


CAST_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}


class OpenVinoConvert(OpenVino):
    name = "openvino-convert"
    formats = tuple(CAST_TYPES)

    def elements(self) -> "OpenVinoConvert":
        return self

    def encode(self, values: Any, format: str) -> Any:
        codes = _convert("f32", CAST_TYPES[format], lambda kind: openvino.Tensor(values))
        return codes.view(f"uint{8 * codes.itemsize}")

    def decode(self, codes: Any, format: str) -> Any:
        return _convert(CAST_TYPES[format], "f32", lambda kind: openvino.Tensor(codes, codes.shape, kind))


def _convert(source: str, target: str, tensor: Any) -> Any:
    request = _compiled_cast(source, target).create_infer_request()
    try:
        request.set_input_tensor(tensor(getattr(openvino.Type, source)))
        request.infer()
    except RuntimeError as error:
        raise (DtypeMismatch if "precision" in str(error) else ShapeMismatch)(str(error)) from error
    return request.get_output_tensor(0).data.copy()


@cache
def _compiled_cast(source: str, target: str) -> Any:
    values = op.parameter([-1], getattr(openvino.Type, source))
    model = openvino.Model([op.result(op.convert(values, target))], [values], "convert")
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


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
