"""The layer of the adapters of MLX caches for batches of prompts with different lengths, with the calls of a batch generator.

`append` is `make_mask`, `update_and_fetch`, and, with padding on the right, `prepare` before and `finalize` after them. Padding
on the left is `prepare(left_padding=...)` of an empty cache. `extend` creates a cache of the new rows and adds it with `extend`,
`filter` is `filter`, `trim` is `trim` if all counts are equal, `read` is `extract`, and `length` is `offset`, by which models
rotate keys. `attend` is the attention function of the project's models with the mask and the arrays of the last append.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_conformance.exceptions import NotOffered


class MlxBatchLayer:
    def __init__(self, made: Callable[[int], Any], attention: Callable[..., Any], config: dict[str, Any]) -> None:
        """made: creates a cache with this number of rows. attention: `scaled_dot_product_attention` of the models."""
        for name, value in config.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        self._config, self._made, self._attention = config, made, attention
        self._cache = made(config["batch_size"])
        self._last: Any = None  # of the last append: its mask, keys and values, and the column after each row's last token

    @property
    def batch_size(self) -> int:
        return len(self._cache.left_padding)

    def length(self, row: int) -> int:
        self._check_rows([row])
        return int(self._cache.offset[row].item())

    def append(self, keys: Any, values: Any, counts: Sequence[int] | None = None, left: bool = False) -> None:
        old = [self.length(row) for row in range(self.batch_size)]
        self._last = self._append(self._cache, old, keys, values, counts, left)

    def extend(self, keys: Any, values: Any, counts: Sequence[int] | None = None, left: bool = False) -> None:
        new = self._made(keys.shape[0])
        if keys.ndim != 4 or keys.shape[2]:  # a batch of new prompts without cached tokens was never updated
            self._append(new, [0] * keys.shape[0], keys, values, counts, left)
        try:
            self._cache.extend(new)
        except ValueError as error:
            raise ShapeMismatch(str(error)) from error
        self._last = None

    def _append(self, cache: Any, old: list[int], keys: Any, values: Any, counts: Any, left: bool) -> Any:
        columns = keys.shape[2] if keys.ndim == 4 else 1
        counted = [columns] * len(old) if counts is None else list(counts)
        if len(counted) != len(old) or not all(0 <= count <= columns for count in counted):
            raise NotOffered("validation of counts: the library takes the padding, which its generator computes")
        if any(length + count > self._config["max_tokens"] for length, count in zip(old, counted, strict=True)):
            raise NotOffered("a maximum length")
        padding = [columns - count for count in counted]
        if any(padding) and left:
            if not cache.empty():
                raise NotOffered("padding on the left after the first tokens")
            cache.prepare(left_padding=padding)
        elif any(padding):
            cache.prepare(lengths=counted, right_padding=padding)
        mask = cache.make_mask(columns)
        try:
            keys, values = cache.update_and_fetch(keys, values)
            mx.eval(keys, values, cache.state)
        except (ValueError, IndexError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        if any(padding) and not left:
            cache.finalize()
            mx.eval(cache.state)
        return mask, keys, values, columns, counted, left

    def filter(self, rows: Sequence[int]) -> None:
        self._check_rows(rows)
        self._cache.filter(list(rows))
        self._last = None

    def trim(self, counts: Sequence[int]) -> None:
        if len({*counts}) != 1 or len(counts) != self.batch_size:
            raise NotOffered("trimming rows by different numbers")
        if not self._cache.is_trimmable():
            raise NotOffered("trimming a cache whose is_trimmable() returns False")
        self._cache.trim(counts[0])
        self._last = None

    def read(self, row: int) -> tuple[Any, Any]:
        self._check_rows([row])
        if self._cache.empty():
            none = mx.zeros((self._config["num_kv_heads"], 0, self._config["head_dim"]))
            return none, none
        alone = self._cache.extract(row)
        return alone.keys[0], alone.values[0]

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        shape = self.batch_size, query.shape[1], query.shape[2], self._config["head_dim"]
        if tuple(query.shape) != shape or shape[1] % self._config["num_kv_heads"]:
            raise NotOffered("rejecting shapes that do not match: one model computes queries, keys and values")
        if self._last is None:
            raise NotOffered("queries without an append before them")
        mask, keys, values, columns, counted, left = self._last
        number = query.shape[2]
        if number > min(counted) or not (causal or number == 1):
            raise NotOffered("queries of other tokens than those of the last append")
        ends = [columns if left else count for count in counted]
        asked = mx.zeros((*query.shape[:2], columns, query.shape[3]), query.dtype)
        for row, end in enumerate(ends):
            asked[row, :, end - number : end] = query[row]
        scale = query.shape[3] ** -0.5 if scale is None else scale
        out = self._attention(asked, keys, values, cache=self._cache, scale=scale, mask=mask)
        return mx.stack([out[row, :, end - number : end] for row, end in enumerate(ends)])

    def _check_rows(self, rows: Sequence[int]) -> None:
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise NotOffered("rejecting invalid rows, or none: MLX documents that it does not check indices")
