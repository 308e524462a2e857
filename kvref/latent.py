"""The latent cache: one row per token, shared by all heads, for multi-head latent attention (MLA).

    row = [ latent: rank numbers | rope part: rope_dim numbers ]

A row is stored as one row of the cache's format (MLA-06), or if the dtype is "packed", as two parts in different formats
(MLA-04).

The key of a head is the head's matrix `up_keys` times the latent, followed by the rope part, to which the rotary embedding was
applied before `append`. Its value is the matrix `up_values` times the latent (MLA-01). `attend` does not compute keys and values
of heads. It multiplies the query by `up_keys`, attends with the row as the key and its first `rank` numbers as the value, and
multiplies the weighted mean of the latents by `up_values`: the absorbed order (MLA-02).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from kvref.array import UNIT_ROUNDOFF as U
from kvref.array import Array, dtype_name
from kvref.attention import EXP_ERROR, attention, attention_as_read
from kvref.backend import Backend, reference
from kvref.errors import (
    CapacityExceeded,
    ConfigError,
    PositionOutOfRange,
    ShapeMismatch,
    in_range,
    whole_fields,
)
from kvref.formats import FORMATS, element_format, get_format
from kvref.formats.base import stored_as
from kvref.serialization import Serializable
from kvref.snapshot import Contents, SavedState, TokenSpan, shape_of
from kvref.token_store import SlotStore
from kvref.validation import accept

PACKED = "packed"  # FP8 latents with one scale per TILE numbers, and rope parts in bfloat16 (MLA-04)
DTYPES = (*FORMATS, PACKED)
TILE = 128
# NumPy's type for the numbers of a dtype in a record.
BYTES = {"float32": "<f4", "float16": "<u2", "bfloat16": "<u2", "uint16": "<u2", "uint8": "u1", "int8": "i1"}


@dataclass(frozen=True)
class LatentConfig:
    """Sizes and format of a LatentCache. Raises ConfigError (LAW-12).

    - `rank`, `rope_dim`: the numbers of the latent and of the rope part. The defaults are those of DeepSeek V2 and V3.
    - `dtype`: the name of any format, or "packed". If the format has groups, `rank` and `rope_dim` must be multiples of the
      group; if it is "packed", `rank` must be a multiple of 128. Static formats have the scale 1.0.
    """

    rank: int = 512
    rope_dim: int = 64
    max_tokens: int = 4096
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        whole_fields(self, "rank", "rope_dim", "max_tokens")
        if self.dtype == PACKED:
            if self.rank % TILE:
                raise ConfigError(f"rank: expected a multiple of {TILE} for {PACKED} rows, got {self.rank}")
            return
        for width in (self.rank, self.rope_dim):  # each, so that no group is in both (MLA-06)
            get_format(self.dtype, among=DTYPES, argument="dtype").code_width(width)


class LatentCache(Serializable):
    """A cache of one sequence and layer for multi-head latent attention, as in DeepSeek V2 to V3.2 (chapter MLA)."""

    _saved_attributes = ("_stores", "_length")

    def __init__(self, config: LatentConfig, backend: Backend = reference) -> None:
        """Allocate memory for max_tokens rows on the device of `backend`."""
        self.config = config
        self._backend = backend
        self._length = 0
        if config.dtype == PACKED:
            parts = [("float8_e4m3fn", config.rank // TILE, TILE), ("bfloat16", 1, config.rope_dim)]
        else:
            parts = [(config.dtype, 1, config.rank + config.rope_dim)]
        # One store per part of a row, in order: a row has one part, a packed row two.
        self._stores = [SlotStore(backend, FORMATS[name], config.max_tokens, groups, width) for name, groups, width in parts]

    def append(self, latent: Array, rope: Array) -> None:
        """Append n tokens: all or none (MLA-05). latent: [n, rank]. rope: [n, rope_dim], rotated for the tokens' positions.

        Raises ShapeMismatch, DtypeMismatch, NonFinite if the format cannot store a number, or CapacityExceeded if there would be
        more than max_tokens tokens.
        """
        xp = self._backend.xp
        latent = accept("latent", latent, ("n", self.config.rank), self._backend)
        rope = accept("rope", rope, (latent.shape[0], self.config.rope_dim), self._backend)
        stop = self._length + latent.shape[0]
        if stop > self.config.max_tokens:
            raise CapacityExceeded(f"cache full: {stop} tokens needed, max_tokens is {self.config.max_tokens}")
        rows, at, new = xp.concat([latent, rope], axis=1), 0, []
        for store in self._stores:  # each can raise: quantize all parts before writing one
            new.append(store.quantized(rows[:, at : at + _width(store)]))
            at += _width(store)
        for store, part in zip(self._stores, new, strict=True):
            store.put(range(self._length, stop), part)
        self._length = stop

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self._length

    def read(self) -> Array:
        """Return the rows of all tokens, in order: float32 [length, rank + rope_dim] (MLA-01)."""
        return self._read(0, self._length)

    def _read(self, start: int, stop: int) -> Array:
        """The rows of the positions [start, stop), float32."""
        slots = range(start, stop)
        parts = [self._backend.xp.reshape(store.read(slots), (len(slots), _width(store))) for store in self._stores]
        return parts[0] if len(parts) == 1 else self._backend.xp.concat(parts, axis=1)

    def records(self) -> Array:
        """Return the rows as bytes, for kernels, files and other machines: uint8 [length, bytes per row] (MLA-04, MLA-06).

        A record contains, of each part, the codes, and the scales and zeros if the format has them, little-endian.
        """
        parts = [part for store in self._stores for part in store.stored(range(self._length)) if part is not None]
        record = record_of(self.config)
        rows = np.zeros(self._length, record)  # in NumPy: the Array API standard has no access to bytes
        for name, part in zip(record.names or (), parts, strict=True):
            rows[name] = np.reshape(self._on_host(part), rows[name].shape)
        return self._backend.asarray(rows.view(np.uint8).reshape(self._length, rows.itemsize))

    def _on_host(self, part: Array) -> Array:
        """The part as a NumPy array; 16-bit floats as their codes, because NumPy has no bfloat16."""
        xp, dtype = self._backend.xp, dtype_name(part, self._backend.xp).rpartition(".")[2]
        if dtype in ("float16", "bfloat16"):  # encoding is exact, because they are rounded already
            part = self._backend.encode(xp.astype(part, xp.float32), element_format(dtype))
        return self._backend.to_numpy(part)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows of all tokens (MLA-03)."""
        return self._length * sum(store.token_bytes for store in self._stores)

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length` (EDIT-01).

        Raises PositionOutOfRange unless `length` is in `[0, self.length + 1)`.
        """
        self._length = in_range(length, self._length + 1, PositionOutOfRange, "length")

    def clear(self) -> None:
        """Remove every token."""
        self._length = 0

    def contents(self) -> Contents:
        """Describe what `save` writes. max_tokens is not part of it (MOVE-02)."""
        return Contents("latent", shape_of(self.config, "max_tokens"), {}, self._token_spans())

    def _new_cache(self) -> "LatentCache":
        return LatentCache(self.config, self._backend)

    def _allocate_for(self, saved: SavedState) -> Sequence[TokenSpan]:
        self._length = saved.count("rows.0")
        if self._length > self.config.max_tokens:
            raise CapacityExceeded(f"cache full: {self._length} tokens needed, max_tokens is {self.config.max_tokens}")
        return self._token_spans()

    def _token_spans(self) -> list[TokenSpan]:
        """The rows of all tokens, per part."""
        return [TokenSpan(f"rows.{at}", store, np.arange(self._length)) for at, store in enumerate(self._stores)]

    def attend(self, query: Array, up_keys: Array, up_values: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return the attention of each head over its keys and values: float32 [num_queries, num_heads, value_dim] (MLA-02).

        query: [num_queries, num_heads, nope_dim + rope_dim], the rotated part last. up_keys: [num_heads, nope_dim, rank].
        up_values: [num_heads, value_dim, rank]. scale: 1 / sqrt(nope_dim + rope_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own. A query that sees no token gets zeros.

        Keys and values of heads are not computed: see the module's description of the absorbed order. Raises ShapeMismatch or
        DtypeMismatch.
        """
        xp, rope_dim = self._backend.xp, self.config.rope_dim
        query, up_keys, up_values = _accepted(query, up_keys, up_values, self.config.rank, rope_dim, self._backend)
        nope_dim, rank = up_keys.shape[1:]
        scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
        absorbed = xp.concat([_by_head(query[:, :, :nope_dim], up_keys), query[:, :, nope_dim:]], axis=2)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            row = self._read(start, stop)[:, None, :]  # as one kv head, which all query heads read
            return row, row[:, :, :rank]

        latents = attention_as_read(
            absorbed, read, self._length, (1, rank + rope_dim), scale=scale, causal=causal, backend=self._backend
        )
        return _by_head(latents, xp.matrix_transpose(up_values))


def record_of(config: LatentConfig) -> np.dtype[np.void]:
    """Return the fields of a record, in order and little-endian, as a NumPy dtype (MLA-04, MLA-06)."""
    rank, rope_dim = config.rank, config.rope_dim
    if config.dtype == PACKED:
        return np.dtype([("codes", "u1", (rank,)), ("scales", "<f4", (rank // TILE,)), ("numbers", "<u2", (rope_dim,))])
    format = FORMATS[config.dtype]
    names = ("codes", "scales", "zeros") if format.granularity != "element" else ("numbers",)
    parts = stored_as(format, (rank + rope_dim,), np)
    return np.dtype([(name, BYTES[dtype], shape) for name, (shape, dtype) in zip(names, parts, strict=False)])


def expanded(
    query: Array,
    rows: Array,
    up_keys: Array,
    up_values: Array,
    scale: float | None = None,
    causal: bool = False,
    backend: Backend = reference,
) -> Array:
    """Return the result of `LatentCache.attend` in the expanded order: keys and values per head, then attention (MLA-02).

    rows: [num_tokens, rank + rope_dim], as `LatentCache.read` returns them. The other arguments are those of `attend`. Raises
    ShapeMismatch or DtypeMismatch.
    """
    xp = backend.xp
    rows = accept("rows", rows, ("num_tokens", "rank + rope_dim"), backend)
    up_keys = accept("up_keys", up_keys, ("num_heads", "nope_dim", "rank"), backend)
    rank = up_keys.shape[2]
    if rank > rows.shape[1]:
        raise ShapeMismatch(f"up_keys: expected a rank of at most {rows.shape[1]}, the width of a row, got {rank}")
    rope_dim = rows.shape[1] - rank
    query, up_keys, up_values = _accepted(query, up_keys, up_values, rank, rope_dim, backend)
    heads = up_keys.shape[0]
    latent = xp.broadcast_to(rows[:, None, :rank], (rows.shape[0], heads, rank))
    rope = xp.broadcast_to(rows[:, None, rank:], (rows.shape[0], heads, rope_dim))  # the same for all heads
    keys = xp.concat([_by_head(latent, xp.matrix_transpose(up_keys)), rope], axis=2)
    values = _by_head(latent, xp.matrix_transpose(up_values))
    return attention(query, keys, values, scale=scale, causal=causal, backend=backend)


def latent_bound(query: Array, rows: Array, up_keys: Array, up_values: Array, scale: float) -> Array:
    """Return the largest possible error of float32 MLA attention in either order, for one head and without a mask (MLA-02).

    query: [nq, nope + rope], rows: [n, rank + rope], up_keys: A [nope, rank], up_values: B [value_dim, rank], all float64. The
    result is float64 [nq, value_dim]. The notation is that of `attention_bound`; c is a latent, r a rope part, and p a weight.

    A score is a sum of products q_i A_ij c_j and q r, and an output a sum of products p B_dj c_j. Both orders multiply and add
    the same products. Two successive sums have the relative error (1 + g(a))(1 + g(b)) - 1 <= g(a + b). Therefore:

    - Absorbed, q A is a sum over nope, and the score a sum over rank + rope. Expanded, A c is a sum over rank, and the score a
      sum over nope + rope. With the product by the scale, a score has at most nope + rank + rope + 1 roundings in both orders:
      |s^ - s| <= g(nope + rank + rope + 1) |scale| (sum |q| |A| |c| + sum |q r|).
    - Weights are correct up to e^(+-2l), as in `attention_bound`. With a single token the weight is 1 for any score, so l is 0.
    - The weighted mean adds 3n + 3 roundings. The product with B, before or after it, adds rank more.

    Hence |out^ - out| <= (e^(2l) (1 + g(3n + 3 + rank)) - 1) sum p |B| |c|. A product that underflows has an error of 2^-126,
    which is multiplied by the factors that follow: |c| or |q| in a score, |B| in an output.
    """
    xp = array_namespace(query)
    n, (nope, rank) = rows.shape[0], up_keys.shape
    rope, tiny = rows.shape[1] - rank, 2.0**-126
    q, q_rope, latent, r = query[:, :nope], query[:, nope:], rows[:, :rank], rows[:, rank:]
    scores = scale * (q @ up_keys @ latent.mT + q_rope @ r.mT)
    roundings = xp.abs(q) @ xp.abs(up_keys) @ xp.abs(latent).mT + xp.abs(q_rope) @ xp.abs(r).mT
    carried = nope * xp.sum(xp.abs(latent), axis=1)[None, :] + rank * xp.sum(xp.abs(q), axis=1)[:, None]
    score_error = abs(scale) * (_gamma(nope + rank + rope + 1) * roundings + tiny * (carried + nope + rank + rope))
    reach = xp.max(xp.abs(scores) + score_error, axis=-1, keepdims=True)
    log_error = xp.max(score_error, axis=-1, keepdims=True) + 4 * U * reach + EXP_ERROR / (1 - EXP_ERROR)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    relative = xp.exp(2 * log_error if n > 1 else 0 * log_error) * (1 + _gamma(3 * n + 3 + rank)) - 1
    magnitude = xp.abs(latent) @ xp.abs(up_values).mT  # bounds the values of each token, [n, value_dim]
    carried = xp.sum(xp.abs(up_values), axis=1)[None, :]
    underflow = tiny * (4 * n * xp.max(magnitude, axis=0, keepdims=True) + n * carried + rank + n)
    return relative * (weights @ magnitude) + underflow


def _width(store: SlotStore) -> int:
    """How many numbers of a row are in a slot of the store."""
    return math.prod(store.token_shape)


def _accepted(
    query: Array, up_keys: Array, up_values: Array, rank: int, rope_dim: int, backend: Backend
) -> tuple[Array, Array, Array]:
    """A query and the matrices of its heads as float32, with matching shapes. Raises ShapeMismatch or DtypeMismatch."""
    up_keys = accept("up_keys", up_keys, ("num_heads", "nope_dim", rank), backend)
    heads, nope_dim = up_keys.shape[:2]
    up_values = accept("up_values", up_values, (heads, "value_dim", rank), backend)
    if 0 in (heads, nope_dim, up_values.shape[1]):
        shapes = f"{list(up_keys.shape)} and {list(up_values.shape)}"
        raise ShapeMismatch(f"up_keys, up_values: expected a num_heads, nope_dim and value_dim of at least 1, got {shapes}")
    return accept("query", query, ("num_queries", heads, nope_dim + rope_dim), backend), up_keys, up_values


def _by_head(rows: Array, matrices: Array) -> Array:
    """Rows [n, heads, a] times the matrix of each head, [heads, a, b]: [n, heads, b]."""
    xp = array_namespace(rows)
    return xp.permute_dims(xp.matmul(xp.permute_dims(rows, (1, 0, 2)), matrices), (1, 0, 2))


def _gamma(roundings: int) -> float:
    """g(k) = k u / (1 - k u), the relative error of k roundings."""
    return roundings * U / (1 - roundings * U)
