"""Adapters of mlx-lm's prompt caches of one layer, and of its attention, on a CPU, with the calls that a model makes.

Contiguous caches: `append` is `update_and_fetch`, `truncate` is `trim`, whose argument is the number of tokens to remove, and
`reorder` is `filter` of BatchKVCache. The caches have no maximum length and no sizes before the first tokens.

Caches with a window: one step is `create_attention_mask`, `update_and_fetch` and `scaled_dot_product_attention`, in a model's
order; `truncate` is `trim`. If a cache keeps the first tokens, these are the sink tokens; `max_size` includes them.

`mlx-lm-sdpa` is `scaled_dot_product_attention`, which calls `mx.fast`, with "causal" or the mask of `create_causal_mask`, over
the view that a KVCache returns: tokens past the length are not in it.

The adapters validate nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, ChunkedKVCache, ConcatenateKVCache, KVCache, RotatingKVCache

from kvref.errors import DtypeMismatch, NotTruncatable, PositionOutOfRange, ShapeMismatch
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_queries, check_sizes
from kvref_adapters.mlx.adapter import Mlx
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level


class MlxLm(Mlx):
    version = version("mlx-lm")
    language = "python"
    project = "mlx-lm"
    level: Level = "exact"
    formats = ("float32",)  # a cache takes the dtype of the first tokens


class MlxLmKV(MlxLm):
    name = "mlx-lm-kv"

    def contiguous(self, **config: Any) -> "MlxLmLayer":
        return MlxLmLayer(lambda: KVCache(), config)


class MlxLmConcatenate(MlxLm):
    name = "mlx-lm-kv-concatenate"

    def contiguous(self, **config: Any) -> "MlxLmLayer":
        return MlxLmLayer(lambda: ConcatenateKVCache(), config)


class MlxLmRotating(MlxLm):
    """One position larger than the maximum length, so that it never overwrites tokens. For its window, see `MlxLmWindow`."""

    name = "mlx-lm-kv-rotating"

    def contiguous(self, **config: Any) -> "MlxLmLayer":
        return MlxLmLayer(lambda: RotatingKVCache(config["max_seq_len"] + 1), config)


class MlxLmBatch(MlxLm):
    """Without padding: all rows have the same length."""

    name = "mlx-lm-kv-batch"

    def contiguous(self, **config: Any) -> "MlxLmBatchLayer":
        return MlxLmBatchLayer(lambda: BatchKVCache([0] * config["batch_size"]), config)


class MlxLmLayer:
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            if name == "dtype" and value != "float32":
                raise NotOffered("a dtype argument")
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        self._longest = config["max_seq_len"]  # the judge's maximum length
        self._cache = made()
        self._none = mx.zeros((config["batch_size"], config["num_kv_heads"], 0, config["head_dim"]))

    @property
    def seq_len(self) -> int:
        return int(self._cache.size() or getattr(self._cache, "_idx", self._cache.offset))

    def append(self, keys: Any, values: Any) -> None:
        if keys.ndim == 4 and self.seq_len + keys.shape[2] > self._longest:
            raise NotOffered("a maximum length")
        try:
            mx.eval(self._cache.update_and_fetch(keys, values))
        except (ValueError, IndexError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error

    def read(self) -> tuple[Any, Any]:
        if self._cache.empty():
            return self._none, self._none
        keys, values = self._cache.keys_and_values()
        return keys, values

    def truncate(self, length: int) -> None:
        if not self._cache.is_trimmable():
            raise NotTruncatable(f"{type(self._cache).__name__}.is_trimmable() returned False")
        self._cache.trim(self.seq_len - length)


class MlxLmBatchLayer(MlxLmLayer):
    def reorder(self, rows: Sequence[int]) -> None:
        size = len(self._cache.left_padding)
        if not len(rows) or not all(0 <= row < size for row in rows):
            raise NotOffered("rejecting invalid rows, or none: MLX documents that it does not check indices")
        self._cache.filter(mx.array(list(rows)))
        self._none = mx.zeros((len(rows), *self._none.shape[1:]))


DECOYS = (3, 0, 11)  # tokens at the start of each row of a batch; the middle row is judged


class _MlxLmWindows(MlxLm):
    limits: ClassVar[Mapping[str, Any]] = WINDOW_LIMITS


class MlxLmWindow(_MlxLmWindows):
    name = "mlx-lm-window"

    def windowed(self, **config: Any) -> "MlxLmWindowLayer":
        return MlxLmWindowLayer(lambda: RotatingKVCache(max_size=config["window"]), config)


class MlxLmWindowSinks(_MlxLmWindows):
    """As `make_prompt_cache(model, max_kv_size)` creates it for a model without a `make_cache` method."""

    name = "mlx-lm-window-sinks"
    limits: ClassVar[Mapping[str, Any]] = {name: limit for name, limit in WINDOW_LIMITS.items() if name != "sinks"}

    def windowed(self, **config: Any) -> "MlxLmWindowLayer":
        sinks = config["sinks"]
        return MlxLmWindowLayer(lambda: RotatingKVCache(max_size=config["window"] + sinks, keep=sinks), config)


class MlxLmWindowBatch(_MlxLmWindows):
    """One row of a batch whose rows began with different lengths, as when sessions join a batch."""

    name = "mlx-lm-window-batch"

    def windowed(self, **config: Any) -> "MlxLmWindowBatchLayer":
        return MlxLmWindowBatchLayer(lambda: RotatingKVCache(max_size=config["window"]), config)


class MlxLmChunked(_MlxLmWindows):
    """Llama 4's: a query sees its own chunk. A window of a chunk's size removes nothing from it."""

    name = "mlx-lm-chunked"
    limits: ClassVar[Mapping[str, Any]] = {**WINDOW_LIMITS, "window": [16], "chunk": [16]}

    def windowed(self, **config: Any) -> "MlxLmChunkedLayer":
        return MlxLmChunkedLayer(lambda: ChunkedKVCache(config["chunk"]), config)


class MlxLmWindowLayer:
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        check_sizes(config)
        self._config = config
        self._none = mx.zeros((0, config["num_kv_heads"], config["head_dim"]))
        self._cache = made()

    @property
    def length(self) -> int:
        return int(self._cache.offset)

    @property
    def stored_tokens(self) -> int:
        return len(self._held())

    def append(self, keys: Any, values: Any) -> None:
        self._update(keys, values)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        return self._attended(query, keys, values, create_attention_mask(mx.zeros((1, keys.shape[0], 1)), self._cache), scale)

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        held = self._held()
        if any(position not in held for position in positions):
            raise PositionOutOfRange(f"position: expected one of {held}, got {list(positions)}")
        if not positions:
            return self._none, self._none
        at = mx.array([held.index(position) for position in positions])
        keys, values = (array[0].transpose(1, 0, 2)[at] for array in self._in_order())
        return keys, values

    def truncate(self, length: int) -> None:
        if length != self.length and not self._cache.is_trimmable():
            raise NotTruncatable(f"{type(self._cache).__name__}.is_trimmable() returned False")
        self._cache.trim(self.length - length)

    def _held(self) -> list[int]:
        """Return the cached positions: the first `sinks` tokens and the last tokens."""
        if self._cache.empty():
            return []
        count, length = self._in_order()[0].shape[2], self.length
        first = range(min(self._config["sinks"], count))
        return [*first, *range(max(0, length - count + len(first)), length)]

    def _in_order(self) -> tuple[Any, Any]:
        """Return keys and values, oldest first."""
        return self._cache._temporal_order(self._cache.keys), self._cache._temporal_order(self._cache.values)

    def _attended(self, query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
        keys, values = self._update(keys, values)
        out = scaled_dot_product_attention(self._in_batch(query), keys, values, cache=self._cache, scale=scale, mask=mask)
        return self._judged(out)

    def _update(self, keys: Any, values: Any) -> tuple[Any, Any]:
        try:
            keys, values = self._cache.update_and_fetch(self._in_batch(keys), self._in_batch(values))
            mx.eval(keys, values)
        except (ValueError, IndexError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        return keys, values

    def _in_batch(self, array: Any) -> Any:
        return array.transpose(1, 0, 2)[None]

    def _judged(self, array: Any) -> Any:
        return array[0].transpose(1, 0, 2)


class MlxLmWindowBatchLayer(MlxLmWindowLayer):
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        super().__init__(made, config)
        rows = [made() for _ in DECOYS]
        for row, count in zip(rows, DECOYS, strict=True):
            if count:
                tokens = mx.full((1, config["num_kv_heads"], count, config["head_dim"]), 1e4)
                row.update_and_fetch(tokens, tokens)
        self._cache = BatchRotatingKVCache.merge(rows)
        self._row = DECOYS.index(0)

    @property
    def length(self) -> int:
        return int(self._cache.offset[self._row].item())

    def truncate(self, length: int) -> None:
        raise NotOffered("trimming one row of a batch")

    def _in_order(self) -> tuple[Any, Any]:
        alone = self._cache.extract(self._row)
        return alone.keys, alone.values

    def _in_batch(self, array: Any) -> Any:
        """Return the judged row and the other rows of the batch, which contain the same numbers in another order."""
        row, other = array.transpose(1, 0, 2), array[::-1].transpose(1, 0, 2)
        return mx.stack([row if each == self._row else other for each in range(len(DECOYS))])

    def _judged(self, array: Any) -> Any:
        return array[self._row].transpose(1, 0, 2)


class MlxLmChunkedLayer(MlxLmWindowLayer):
    """Used like in Llama4Model: the front is trimmed before the mask is made; `trim` returns the number of removed tokens."""

    def append(self, keys: Any, values: Any) -> None:
        self._cache.maybe_trim_front()
        super().append(keys, values)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        self._cache.maybe_trim_front()
        size, offset = self._cache.chunk_size, self._cache.offset
        ours = mx.arange(self._cache.start_position, offset + keys.shape[0])
        theirs = mx.arange(offset, offset + keys.shape[0])[:, None]
        mask = (mx.abs((ours // size) - (theirs // size)) == 0) & (ours <= theirs)
        return self._attended(query, keys, values, mask, scale)

    def _in_order(self) -> tuple[Any, Any]:
        keys, values = self._cache.keys_and_values()
        return keys, values


class MlxLmSdpa(MlxLm):
    name = "mlx-lm-sdpa"
    language = "c++"

    def attention(self) -> "MlxLmAttention":
        return MlxLmAttention()


class MlxLmAttention:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        if len(keys) != len(values) and length < len(keys):
            raise NotOffered("rejecting keys and values of different lengths, if they are equal up to `length`")
        return _attend(query, keys[:length], values[:length], scale, "causal" if causal and len(query) > 1 else None)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        mask = create_causal_mask(len(query), len(keys) - len(query), window_size=window)
        return _attend(query, keys, values, scale, mask)

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return _attend(query, keys, values, scale, "causal" if causal and len(query) > 1 else None, sinks=logit_sink)


def _attend(query: Any, keys: Any, values: Any, scale: float, mask: Any, **sinks: Any) -> Any:
    try:
        given = [array.swapaxes(0, 1)[None] for array in (query, keys, values)]
        output = scaled_dot_product_attention(*given, cache=None, scale=scale, mask=mask, **sinks)
        mx.eval(output)
    except ValueError as error:
        raise ShapeMismatch(str(error)) from error
    return output[0].swapaxes(0, 1)
