"""Adapters of OpenVINO's PagedAttention on its CPU plugin: the operation alone, with blocks that this module allocates.

One call writes the new tokens of several sequences into the blocks of a pool, and attends with one query per new token. Judged is
where it writes (`paged`), and what it attends over: attention over blocks (`attention`), and with its sliding window
(`windowed`). Block allocation and sequence lengths are the caller's; errors about them are not offered. Neither is writing below
the length, because the operation appends new tokens after `past_lens`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import openvino
from openvino import opset15 as op
from openvino.op import _PagedAttentionExtension

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_conformance.implementation_api import Level
from kvref_conformance.outcome import NotOffered

BLOCK = 32  # tokens per block on this plugin, as the cache shapes of a compiled model show
PRECISION = {"float32": "f32", "float16": "f16"}
# Inputs in this order, with their types. No type means the dtype of the tokens.
GIVEN = {
    "query": "", "key": "", "value": "", "key_cache": "dynamic", "value_cache": "dynamic", "past_lens": "i32",
    "subsequence_begins": "i32", "block_indices": "i32", "block_indices_begins": "i32", "scale": "f32", "sliding_window": "i32",
    "max_context_len": "i32",
}  # fmt: skip
SCALARS = ("scale", "sliding_window", "max_context_len")


class OpenVino:
    version = openvino.__version__.partition("-")[0]
    language = "c++"
    project = "openvino"
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32",)

    def asarray(self, values: Any) -> Any:
        return np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array


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
