"""OpenVINO's PagedAttention on its CPU plugin: the operation alone, over blocks and tables that are made here.

One call writes the new tokens of some sequences into the blocks of a pool, and attends with a query of each of them. Judged
are where and what it writes (`paged`), and what it attends over: as attention over pages (`attention`), and with its sliding
window (`windowed`). Which blocks are whose, and how many tokens each sequence has, is its caller's: what would be refused for
that is not offered, nor is writing below the length, for it takes the new tokens for the last ones.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import openvino
from openvino import opset15 as op
from openvino.op import _PagedAttentionExtension

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

BLOCK = 32  # the tokens of a block on this plugin: a compiled model says so in the shapes of its caches
PRECISION = {"float32": "f32", "float16": "f16"}
# What a caller gives it in this order, and as what; a dtype that is not said is that of the tokens.
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


class Float32(OpenVino):
    name = "openvino-paged"
    limits: ClassVar[Mapping[str, Any]] = {"block_size": BLOCK, "num_layers": 1, "dtype": "float32"}

    def paged(self, **sizes: Any) -> "Sequences":
        return Sequences(**sizes)


class Float16(Float32):
    """Tokens of float16, in blocks of float16 (KV_CACHE_PRECISION); between them it computes in float32."""

    name = "openvino-paged-f16"
    formats = ("float16",)
    limits: ClassVar[Mapping[str, Any]] = {**Float32.limits, "dtype": "float16"}


class Attention(OpenVino):
    name = "openvino-attention"

    def attention(self) -> "Pages":
        return Pages()


class Window(OpenVino):
    name = "openvino-window"
    limits: ClassVar[Mapping[str, Any]] = LIMITS

    def windowed(self, **config: Any) -> "OneLayer":
        return OneLayer(config)


class Pool:
    """Blocks of keys and values, [blocks, kv heads, BLOCK, dim] as a compiled model wants them, and the calls over them."""

    def __init__(self, num_blocks: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: str = "float32") -> None:
        self.keys, self.values = (np.zeros((num_blocks, num_kv_heads, BLOCK, dim), dtype) for dim in (head_dim, value_dim))

    def step(
        self, query: Any, keys: Any, values: Any, pasts: Sequence[int], counts: Sequence[int], tables: Sequence[Sequence[int]],
        scale: float = 1.0, window: int = 0, logit_sink: tuple[float, ...] = (),
    ) -> Any:  # fmt: skip
        """One call: so many new tokens of each sequence, one sequence behind the other, and the blocks of each."""
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
        """Tokens of one sequence, of which the output is of no interest."""
        query = np.zeros((len(keys), *self.keys.shape[1::2]), self.keys.dtype)
        self.step(query, keys, values, [past], [len(keys)], [table])

    def again(self, query: Any, table: Sequence[int], length: int, scale: float, window: int = 0, **options: Any) -> Any:
        """Each query as a sequence of its own over the same blocks, whose last token comes once more: each call brings one."""
        count = len(query)
        if not count:
            raise NotOffered("a call without tokens")
        keys, values = (np.repeat(rows[-1:], count, axis=0) for rows in self.read(table, length))
        return self.step(query, keys, values, [length - 1] * count, [1] * count, [table] * count, scale, window, **options)

    def read(self, table: Sequence[int], count: int) -> tuple[Any, Any]:
        """The first tokens of a sequence, from where they have to lie."""
        keys, values = (store[list(table)].swapaxes(1, 2) for store in (self.keys, self.values))
        return keys.reshape(-1, *keys.shape[2:])[:count], values.reshape(-1, *values.shape[2:])[:count]


class Sequences:
    def __init__(self, **sizes: Any) -> None:
        for name, value in sizes.items():
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < (name != "num_blocks")):
                raise NotOffered(f"a pool that is given its {name}: its caller makes it")
        if sizes["dtype"] not in PRECISION:
            raise NotOffered("a pool that is given its dtype")
        self._pool = Pool(sizes["num_blocks"], sizes["num_kv_heads"], sizes["head_dim"], sizes["head_dim"], sizes["dtype"])
        self._free = list(range(sizes["num_blocks"]))
        self._tables, self._lengths, self._begun = dict[int, list[int]](), dict[int, int](), 0

    def create(self) -> int:
        self._begun += 1
        self._tables[self._begun], self._lengths[self._begun] = [], 0
        return self._begun

    def drop(self, sequence: int) -> None:
        """Its blocks are for others, with what lies in them."""
        self.length(sequence, 0)
        self._free += self._tables.pop(sequence)
        del self._lengths[sequence]

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        if start != self.length(sequence, layer):
            raise NotOffered("writing anywhere but behind the tokens that it is told of")
        self._pool.write(keys, values, start, self._room(sequence, start + len(keys)))
        self._lengths[sequence] += len(keys)

    def append(self, sequences: Sequence[int], layer: int, keys: Any, values: Any) -> None:
        pasts = [self.length(sequence, layer) for sequence in sequences]
        if len({*sequences}) < len(pasts) or len(pasts) != len(keys):
            raise NotOffered("a batch of other arrays than a token a sequence, which its caller makes")
        tables = [self._room(sequence, past + 1) for sequence, past in zip(sequences, pasts, strict=True)]
        query = np.zeros((len(keys), *self._pool.keys.shape[1::2]), self._pool.keys.dtype)
        self._pool.step(query, keys, values, pasts, [1] * len(pasts), tables)
        for sequence in sequences:
            self._lengths[sequence] += 1

    def truncate(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self.length(sequence, 0):
            raise NotOffered("a length that is out of range, which its caller counts")
        self._lengths[sequence] = length

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        length = self.length(sequence, layer)
        return self._pool.read(self._tables[sequence], length)

    def length(self, sequence: int, layer: int) -> int:
        if sequence not in self._lengths or layer:
            raise NotOffered("refusing sequences and layers that are not there: they are its caller's")
        return self._lengths[sequence]

    def attend(self, sequence: int, layer: int, query: Any, scale: float) -> Any:
        length = self.length(sequence, layer)
        if not length:
            raise NotOffered("attention without a token")
        return self._pool.again(query, self._tables[sequence][: -(-length // BLOCK)], length, scale)

    def _room(self, sequence: int, length: int) -> list[int]:
        """The blocks of so many tokens, every other one of the free."""
        table = self._tables[sequence]
        missing = -(-length // BLOCK) - len(table)
        if missing > len(self._free):
            raise NotOffered("running out of blocks, which its caller hands out")
        table += [self._free.pop(-1 - len(table) % 2 * (len(self._free) > 1)) for _ in range(missing)]
        return table[: -(-length // BLOCK)]


class Pages:
    """Tokens are written a block a sequence, as prompts that come together; then the queries come with theirs once more."""

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attended(query, keys, values, scale, causal, int(length))

    def window_attention(
        self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
    ) -> Any:  # fmt: skip
        if sinks or chunk:
            raise NotOffered("sinks and chunks beside the window")
        return self._attended(query, keys, values, scale, True, len(keys), window=int(window))

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attended(query, keys, values, scale, causal, len(keys), logit_sink=tuple(map(float, logit_sink)))

    def _attended(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int, **options: Any) -> Any:
        if any(array.ndim != 3 for array in (query, keys, values)):
            raise NotOffered("arrays of other ranks than [tokens, heads, dim]: it is given [tokens, heads * dim]")
        count = len(query)
        if length < (count if causal else 1):
            raise NotOffered("queries without a token: each comes with one")
        blocks = -(-len(keys) // BLOCK)
        pool, table = Pool(blocks + 1, keys.shape[1], keys.shape[2], values.shape[2]), list(range(blocks, 0, -1))
        counts = [min(BLOCK, len(keys) - first) for first in range(0, len(keys), BLOCK)]
        nothing = np.zeros((len(keys), *query.shape[1:]), np.float32)
        pool.step(nothing, keys, values, [0] * blocks, counts, [[block] for block in table])
        table = table[: -(-length // BLOCK)]
        if causal:
            new, pasts, counts = slice(length - count, length), [length - count], [count]
            return pool.step(query, keys[new], values[new], pasts, counts, [table], scale, **options)
        return pool.again(query, table, length, scale, **options)


class OneLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        taken(config)
        self._config, self._length = config, 0
        self._pool, self._table = Pool(0, config["num_kv_heads"], config["head_dim"], config["head_dim"]), list[int]()

    @property
    def length(self) -> int:
        return self._length

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
        self._grow(-(-(self._length + len(keys)) // BLOCK))
        table = self._table[: -(-(self._length + len(keys)) // BLOCK)]
        out = self._pool.step(query, keys, values, [self._length], [len(keys)], [table], scale, self._config["window"])
        self._length += len(keys)
        return out

    def attend(self, query: Any, scale: float) -> Any:
        """As that of a sequence."""
        if not self._length:
            raise NotOffered("attention without a token")
        return self._pool.again(query, self._table[: -(-self._length // BLOCK)], self._length, scale, self._config["window"])

    def _grow(self, blocks: int) -> None:
        """To twice as many as are needed, the new ones in the table the last first."""
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
    # Behind them: slopes of ALiBi, and what is for scores, rotation, sparse attention, eviction, images and drafts.
    inputs = [*tokens, *pool, none(floats), longest, none(), none(), none(), none(floats), none(floats), zero, zero]
    inputs += [op.constant(sink), zero, none(), none(), none(), none(), none(np.uint8), none()]
    node = _PagedAttentionExtension([each.output(0) for each in inputs])
    told = {"num_k_heads": kv_heads, "num_v_heads": kv_heads, "k_head_size": head_dim, "v_head_size": value_dim}
    for name, size in told.items():
        node.get_rt_info()[name] = size
    model = openvino.Model([op.result(node.output(0))], list(given.values()), "pages")
    options = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": PRECISION[dtype], "INFERENCE_NUM_THREADS": 2}
    return openvino.Core().compile_model(model, "CPU", options)
