"""The latent cache: one row a token that all heads share, as multi-head latent attention (MLA) keeps it.

    row = [ latent: rank numbers | rope: rope_dim numbers ]

A row is stored as one piece in the cache's format (MLA-06); a packed one in two, whose formats differ (MLA-04).

A head's key is its nope part, made of the latent by a matrix of the head's own, with the rope part behind it, which is rotated
before it comes here; its value is made of the latent by another. Nothing is expanded to attend: the matrix of the keys goes into
the query, that of the values behind the weighted mean of latents, and between the two the row itself is the key and its first
`rank` numbers are the value (MLA-01, MLA-02).
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
from kvref.contents import Contents, Saved, Stretch, shape_of
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
from kvref.inputs import accept
from kvref.slots import SlotStore
from kvref.transfer import Movable

PACKED = "packed"  # FP8 latents with a scale each TILE numbers, and the rope part in bfloat16 (MLA-04)
DTYPES = (*FORMATS, PACKED)
TILE = 128
# How numbers of a dtype lie in a record.
BYTES = {"float32": "<f4", "float16": "<u2", "bfloat16": "<u2", "uint16": "<u2", "uint8": "u1", "int8": "i1"}


@dataclass(frozen=True)
class LatentConfig:
    """dtype: of a row, any format whose groups go into rank and rope_dim, or PACKED, for which rank is a multiple of TILE. A
    scale that would be given is 1.0.
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
        for width in (self.rank, self.rope_dim):  # that no group lies in both (MLA-06)
            get_format(self.dtype, among=DTYPES).code_width(width)


class LatentCache(Movable):
    _moved = ("_stores", "_length")

    def __init__(self, config: LatentConfig, backend: Backend = reference) -> None:
        self.config = config
        self._backend = backend
        self._length = 0
        if config.dtype == PACKED:
            parts = [("float8_e4m3fn", config.rank // TILE, TILE), ("bfloat16", 1, config.rope_dim)]
        else:
            parts = [(config.dtype, 1, config.rank + config.rope_dim)]
        # What a row consists of, in order: one piece of it in one format, in slots of its own.
        self._stores = [SlotStore(backend, FORMATS[name], config.max_tokens, groups, width) for name, groups, width in parts]

    def append(self, latent: Array, rope: Array) -> None:
        """Append n tokens, latent [n, rank] and rope [n, rope_dim]: all or none (MLA-05).

        Raises ShapeMismatch, DtypeMismatch, NonFinite for what the format cannot hold, or CapacityExceeded.
        """
        xp = self._backend.xp
        latent = accept("latent", latent, ("n", self.config.rank), self._backend)
        rope = accept("rope", rope, (latent.shape[0], self.config.rope_dim), self._backend)
        stop = self._length + latent.shape[0]
        if stop > self.config.max_tokens:
            raise CapacityExceeded(f"cache full: {stop} tokens needed, max_tokens is {self.config.max_tokens}")
        rows, at, new = xp.concat([latent, rope], axis=1), 0, []
        for store in self._stores:  # each may raise, so that all come before the first is put anywhere
            new.append(store.quantized(rows[:, at : at + _width(store)]))
            at += _width(store)
        for store, part in zip(self._stores, new, strict=True):
            store.put(range(self._length, stop), part)
        self._length = stop

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    def read(self) -> Array:
        """What the rows read as, float32 [length, rank + rope_dim]."""
        return self._read(0, self._length)

    def _read(self, start: int, stop: int) -> Array:
        """Rows [start, stop)."""
        slots = range(start, stop)
        parts = [self._backend.xp.reshape(store.read(slots), (len(slots), _width(store))) for store in self._stores]
        return parts[0] if len(parts) == 1 else self._backend.xp.concat(parts, axis=1)

    def records(self) -> Array:
        """The rows as they are handed on, byte by byte, uint8 [length, bytes a row]: of each piece the codes, the scales and the
        zeros that there are, little endian (MLA-04, MLA-06).
        """
        parts = [part for store in self._stores for part in store.stored(range(self._length)) if part is not None]
        record = record_of(self.config)
        rows = np.zeros(self._length, record)  # NumPy's: the standard has no bytes of a number
        for name, part in zip(record.names or (), parts, strict=True):
            rows[name] = np.reshape(self._on_host(part), rows[name].shape)
        return self._backend.asarray(rows.view(np.uint8).reshape(self._length, rows.itemsize))

    def _on_host(self, part: Array) -> Array:
        """The part in NumPy, numbers of 16 bits as their codes: NumPy has no bfloat16."""
        xp, dtype = self._backend.xp, dtype_name(part, self._backend.xp).rpartition(".")[2]
        if dtype in ("float16", "bfloat16"):  # rounded already, so that encoding them is exact
            part = self._backend.encode(xp.astype(part, xp.float32), element_format(dtype))
        return self._backend.to_numpy(part)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows held (MLA-03)."""
        return self._length * sum(store.token_bytes for store in self._stores)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens (EDIT-01). Raises PositionOutOfRange for more than there are."""
        self._length = in_range(length, self._length + 1, PositionOutOfRange, "length")

    def clear(self) -> None:
        """Forget every token."""
        self._length = 0

    def contents(self) -> Contents:
        """What is saved: of any room, for that is no part of what it holds."""
        return Contents("latent", shape_of(self.config, "max_tokens"), {}, self._stretches())

    def _another(self) -> "LatentCache":
        return LatentCache(self.config, self._backend)

    def _make_room(self, saved: Saved) -> Sequence[Stretch]:
        self._length = saved.count("rows.0")
        if self._length > self.config.max_tokens:
            raise CapacityExceeded(f"cache full: {self._length} tokens needed, max_tokens is {self.config.max_tokens}")
        return self._stretches()

    def _stretches(self) -> list[Stretch]:
        return [Stretch(f"rows.{at}", store, np.arange(self._length)) for at, store in enumerate(self._stores)]

    def attend(self, query: Array, up_keys: Array, up_values: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of each head over the keys and values that its matrices make of the rows, which are not made: float32
        [num_queries, num_heads, value_dim].

        query [num_queries, num_heads, nope_dim + rope_dim], the rope part last and rotated; up_keys [num_heads, nope_dim,
        rank]; up_values [num_heads, value_dim, rank]. scale: 1 / sqrt(nope_dim + rope_dim) unless given. causal: as in
        `attention`. Raises ShapeMismatch or DtypeMismatch.
        """
        xp, rope_dim = self._backend.xp, self.config.rope_dim
        query, up_keys, up_values = _accepted(query, up_keys, up_values, self.config.rank, rope_dim, self._backend)
        nope_dim, rank = up_keys.shape[1:]
        scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
        absorbed = xp.concat([_by_head(query[:, :, :nope_dim], up_keys), query[:, :, nope_dim:]], axis=2)

        def read(start: int, stop: int) -> tuple[Array, Array]:
            row = self._read(start, stop)[:, None, :]  # of one kv head, which all query heads read
            return row, row[:, :, :rank]

        latents = attention_as_read(
            absorbed, read, self._length, (1, rank + rope_dim), scale=scale, causal=causal, backend=self._backend
        )
        return _by_head(latents, xp.matrix_transpose(up_values))


def record_of(config: LatentConfig) -> np.dtype[np.void]:
    """What a row is, byte by byte, little endian: its fields in order (MLA-04, MLA-06)."""
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
    """The same as `LatentCache.attend` the long way: every head's keys and values are made, and attention goes over those.

    rows [num_tokens, rank + rope_dim], as a cache reads. Raises ShapeMismatch or DtypeMismatch.
    """
    xp = backend.xp
    rows = accept("rows", rows, ("num_tokens", "rank + rope_dim"), backend)
    up_keys = accept("up_keys", up_keys, ("num_heads", "nope_dim", "rank"), backend)
    rank = up_keys.shape[2]
    if rank > rows.shape[1]:
        raise ShapeMismatch(f"up_keys: expected a rank of at most {rows.shape[1]}, a row's numbers, got {rank}")
    rope_dim = rows.shape[1] - rank
    query, up_keys, up_values = _accepted(query, up_keys, up_values, rank, rope_dim, backend)
    heads = up_keys.shape[0]
    latent = xp.broadcast_to(rows[:, None, :rank], (rows.shape[0], heads, rank))
    rope = xp.broadcast_to(rows[:, None, rank:], (rows.shape[0], heads, rope_dim))  # one for all heads
    keys = xp.concat([_by_head(latent, xp.matrix_transpose(up_keys)), rope], axis=2)
    values = _by_head(latent, xp.matrix_transpose(up_values))
    return attention(query, keys, values, scale=scale, causal=causal, backend=backend)


def latent_bound(query: Array, rows: Array, up_keys: Array, up_values: Array, scale: float) -> Array:
    """How far float32 may lie from exact, absorbed or expanded, at worst: float64 [nq, value_dim], for one head and no mask.

    query [nq, nope + rope], rows [n, rank + rope], up_keys [nope, rank], up_values [value_dim, rank], in float64. A score is a
    sum of products of three, q_i A_ij c_j, and of two, q r; an output a sum of p B_dj c_j. Either order multiplies and adds the
    same products, and what is rounded twice is right to (1 + g(a))(1 + g(b)) <= 1 + g(a + b). So, as in `attention_bound`:

    - absorbed, q A is a sum over nope and the score one over rank + rope; expanded, A c is one over rank and the score one over
      nope + rope; with the scale, a score carries nope + rank + rope + 1 roundings at most in both:
      |s^ - s| <= g(nope + rank + rope + 1) |scale| (sum |q| |A| |c| + sum |q r|);
    - weights follow from scores as they do there, to e^(+-2l); over one token the weight is 1 whatever its score, so l is 0;
    - the weighted mean adds 3n + 3 roundings and the product with B, before it or behind it, rank more.

    Hence |out^ - out| <= (e^(2l) (1 + g(3n + 3 + rank)) - 1) sum p |B| |c|. A product that underflows is off by 2^-126, and what
    it is multiplied with later carries that on: |c| or |q| in a score, |B| in an output.
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
    magnitude = xp.abs(latent) @ xp.abs(up_values).mT  # of each token's value, [n, value_dim]
    carried = xp.sum(xp.abs(up_values), axis=1)[None, :]
    underflow = tiny * (4 * n * xp.max(magnitude, axis=0, keepdims=True) + n * carried + rank + n)
    return relative * (weights @ magnitude) + underflow


def _width(store: SlotStore) -> int:
    """Numbers of a token that lie in a slot."""
    return math.prod(store.token_shape)


def _accepted(
    query: Array, up_keys: Array, up_values: Array, rank: int, rope_dim: int, backend: Backend
) -> tuple[Array, Array, Array]:
    """A query and the matrices of its heads, which fit each other and the rows. Raises ShapeMismatch or DtypeMismatch."""
    up_keys = accept("up_keys", up_keys, ("num_heads", "nope_dim", rank), backend)
    heads, nope_dim = up_keys.shape[:2]
    up_values = accept("up_values", up_values, (heads, "value_dim", rank), backend)
    if 0 in (heads, nope_dim, up_values.shape[1]):
        shapes = f"{list(up_keys.shape)} and {list(up_values.shape)}"
        raise ShapeMismatch(f"up_keys, up_values: expected a num_heads, nope_dim and value_dim of at least 1, got {shapes}")
    return accept("query", query, ("num_queries", heads, nope_dim + rope_dim), backend), up_keys, up_values


def _by_head(rows: Array, matrices: Array) -> Array:
    """[n, heads, a] times each head's own matrix, [heads, a, b]: [n, heads, b]."""
    xp = array_namespace(rows)
    return xp.permute_dims(xp.matmul(xp.permute_dims(rows, (1, 0, 2)), matrices), (1, 0, 2))


def _gamma(roundings: int) -> float:
    return roundings * U / (1 - roundings * U)
