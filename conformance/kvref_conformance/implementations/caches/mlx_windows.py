"""Adapters of mlx-lm's window caches of one layer, on a CPU, with the calls that a model makes.

One step is `create_attention_mask`, `update_and_fetch` and `scaled_dot_product_attention`, in a model's order; `truncate` is
`trim`. If a cache keeps the first tokens, these are the sink tokens; `max_size` includes them. The adapter validates nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchRotatingKVCache, ChunkedKVCache, RotatingKVCache

from kvref.errors import DtypeMismatch, NotTruncatable, PositionOutOfRange, ShapeMismatch
from kvref_conformance.implementations.caches.mlx_caches import Caches
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, taken
from kvref_conformance.outcome import NotOffered

DECOYS = (3, 0, 11)  # tokens at the start of each row of a batch; the middle row is judged


class _Windows(Caches):
    limits: ClassVar[Mapping[str, Any]] = LIMITS


class Rotating(_Windows):
    name = "mlx-lm-window"

    def windowed(self, **config: Any) -> "OneLayer":
        return OneLayer(lambda: RotatingKVCache(max_size=config["window"]), config)


class Sinks(_Windows):
    """As `make_prompt_cache(model, max_kv_size)` creates it for a model without a `make_cache` method."""

    name = "mlx-lm-window-sinks"
    limits: ClassVar[Mapping[str, Any]] = {name: limit for name, limit in LIMITS.items() if name != "sinks"}

    def windowed(self, **config: Any) -> "OneLayer":
        sinks = config["sinks"]
        return OneLayer(lambda: RotatingKVCache(max_size=config["window"] + sinks, keep=sinks), config)


class Batch(_Windows):
    """One row of a batch whose rows began with different lengths, as when sessions join a batch."""

    name = "mlx-lm-window-batch"

    def windowed(self, **config: Any) -> "Row":
        return Row(lambda: RotatingKVCache(max_size=config["window"]), config)


class Chunked(_Windows):
    """Llama 4's: a query sees its own chunk. A window of a chunk's size removes nothing from it."""

    name = "mlx-lm-chunked"
    limits: ClassVar[Mapping[str, Any]] = {**LIMITS, "window": [16], "chunk": [16]}

    def windowed(self, **config: Any) -> "Chunks":
        return Chunks(lambda: ChunkedKVCache(config["chunk"]), config)


class OneLayer:
    def __init__(self, made: Callable[[], Any], config: dict[str, Any]) -> None:
        taken(config)
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
        of_a_model(query, keys, self._config)
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


class Row(OneLayer):
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


class Chunks(OneLayer):
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
