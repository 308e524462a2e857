"""Adapters of Hugging Face transformers' caches for batches of padded prompts, as `generate` uses them.

The columns that are tokens are in an attention mask [batch_size, columns] beside the cache, as the caller of `generate` passes
it. `append` is the library's mask for the cache, then `update`; `filter` is `reorder_cache`, or `batch_select_indices` where a
cache has it; `trim` is `crop`, if the last columns are tokens in all rows. `read` returns the columns that are tokens. `attend`
is SDPA as the library calls it, with the mask and the arrays of the last append. The adapters validate nothing.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_adapters.transformers.caches import _TransformersCaches
from kvref_conformance.exceptions import NotOffered


class TransformersBatch(_TransformersCaches):
    name = "transformers-batch"

    def ragged(self, **config: Any) -> "TransformersBatchLayer":
        return TransformersBatchLayer(DynamicCache(), config)


class TransformersBatchStatic(_TransformersCaches):
    """With more columns than a row can have tokens, because padding takes columns too."""

    name = "transformers-batch-static"

    def ragged(self, **config: Any) -> "TransformersBatchLayer":
        check_sizes(config)
        return TransformersBatchLayer(StaticCache(MODEL, max_cache_len=2 * config["max_tokens"] + SPARE), config)


SPARE = 64  # columns
MODEL = LlamaConfig(num_hidden_layers=1, attn_implementation="sdpa")


class TransformersBatchLayer:
    def __init__(self, cache: Any, config: dict[str, Any]) -> None:
        check_sizes(config)
        self._cache, self._config = cache, config
        self._mask = torch.zeros(config["batch_size"], 0, dtype=torch.bool)  # which columns are tokens
        self._last: Any = None  # of the last append: mask, keys, values, and the column after each row's last token

    @property
    def batch_size(self) -> int:
        return len(self._mask)

    @property
    def _tokens(self) -> Cache:
        """The cache with the keys and values of the tokens."""
        return self._cache

    def length(self, row: int) -> int:
        self._check_rows([row])
        return int(self._mask[row].sum())

    def append(self, keys: Any, values: Any, counts: Sequence[int] | None = None, left: bool = False) -> None:
        columns = keys.shape[2] if keys.ndim == 4 else 1
        counted = [columns] * self.batch_size if counts is None else list(counts)
        if len(counted) != self.batch_size or not all(0 <= count <= columns for count in counted):
            raise NotOffered("validation of counts: the library takes an attention mask")
        at = torch.arange(columns)
        tokens = torch.stack([at >= columns - count if left else at < count for count in counted])
        mask = torch.cat([self._mask, tokens], dim=1)
        if int(mask.sum(dim=1).max()) > self._config["max_tokens"]:
            raise NotOffered("a maximum length")
        if mask.shape[1] > 2 * self._config["max_tokens"] + SPARE:
            raise NotOffered("more columns than the cache was created for")
        embeds = torch.zeros(self.batch_size, columns, 1)  # only its shape is used
        seen = create_causal_mask(config=MODEL, inputs_embeds=embeds, attention_mask=mask, past_key_values=self._tokens)
        try:
            keys, values = self._tokens.update(keys, values, 0)
        except (RuntimeError, IndexError, ValueError) as error:
            said = str(error)
            raise (DtypeMismatch if "dtype" in said or "scalar type" in said else ShapeMismatch)(said) from error
        self._mask = mask
        self._last = seen, keys, values, columns, counted, left

    def filter(self, rows: Sequence[int]) -> None:
        self._check_rows(rows)
        at = torch.tensor(list(rows))
        if isinstance(self._tokens, DynamicCache):
            self._cache.batch_select_indices(at)
        else:
            self._cache.reorder_cache(at)
        self._mask, self._last = self._mask[at], None

    def trim(self, counts: Sequence[int]) -> None:
        if len({*counts}) != 1 or len(counts) != self.batch_size or counts[0] < 0:
            raise NotOffered("trimming rows by different or negative numbers: `crop` removes columns of all rows")
        count = counts[0]
        if not self._mask[:, self._mask.shape[1] - count :].all() or count > self._mask.shape[1]:
            raise NotOffered("trimming columns that are not tokens of all rows")
        if not isinstance(self._tokens, DynamicCache):
            raise NotOffered("trimming a StaticCache")
        self._cache.crop(-count)
        self._mask, self._last = self._mask[:, : self._mask.shape[1] - count], None

    def read(self, row: int) -> tuple[Any, Any]:
        self._check_rows([row])
        layers = self._tokens.layers
        if not layers or layers[0].keys is None or not self._mask.shape[1]:
            none = torch.zeros(self._config["num_kv_heads"], 0, self._config["head_dim"])
            return none, none
        at = self._mask[row].nonzero()[:, 0]
        return layers[0].keys[row][:, at], layers[0].values[row][:, at]

    def attend(self, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        heads, dim = self._config["num_kv_heads"], self._config["head_dim"]
        if query.ndim != 4 or (query.shape[0], query.shape[3]) != (self.batch_size, dim) or query.shape[1] % heads:
            raise NotOffered("rejecting shapes that do not match: one model computes queries, keys and values")
        if self._last is None:
            raise NotOffered("queries without an append before them")
        mask, keys, values, columns, counted, left = self._last
        number = query.shape[2]
        if number > min(counted) or not (causal or number == 1):
            raise NotOffered("queries of other tokens than those of the last append")
        ends = [columns if left else count for count in counted]
        asked = torch.zeros(*query.shape[:2], columns, dim, dtype=query.dtype)
        for row, end in enumerate(ends):
            asked[row, :, end - number : end] = query[row]
        module = SimpleNamespace(is_causal=True, num_key_value_groups=query.shape[1] // heads)
        out, _ = sdpa_attention_forward(module, asked, keys, values, mask, scaling=scale)
        return torch.stack([out[row, end - number : end].transpose(0, 1) for row, end in enumerate(ends)])

    def _check_rows(self, rows: Sequence[int]) -> None:
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise NotOffered("rejecting invalid rows, or none: the caller selects rows of tensors")


def check_sizes(config: dict[str, Any]) -> None:
    for name, value in config.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise NotOffered(f"validation of {name}, which the library does not take as an argument")
