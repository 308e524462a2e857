"""Adapters of Hugging Face transformers' EncoderDecoderCache: BART's attention and, next to it, the tokens of a padded batch.

`write_source` and `attend_source` are the forward pass of `BartAttention`, with slices and identities as its projections. The
pass writes the cross-attention cache if the layer's flag in `is_updated` is not set, and otherwise ignores the encoder's outputs.
The columns that are entries are in an encoder mask beside the cache, as the caller of `generate` passes it; the library makes the
mask of the attention from it. `clear` is `reset`, of a batch of one row. The tokens are those of a padded batch (`batches.py`) in
the self-attention cache. The adapters validate nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import BartConfig, Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bart.modeling_bart import BartAttention

from kvref.errors import SourceNotWritten
from kvref_adapters.transformers.batches import MODEL, SPARE, TransformersBatchLayer, check_sizes
from kvref_adapters.transformers.caches import _TransformersCaches
from kvref_conformance.exceptions import NotOffered


class TransformersCross(_TransformersCaches):
    name = "transformers-cross"
    limits: ClassVar[Mapping[str, Any]] = {"group_size": [1]}  # BartAttention has one query head per key head

    def cross(self, **config: Any) -> "TransformersCrossLayer":
        return TransformersCrossLayer(EncoderDecoderCache(DynamicCache(), DynamicCache()), config)


class TransformersCrossStatic(TransformersCross):
    """As `generate` creates it: the cross-attention cache has as many columns as the encoder's outputs."""

    name = "transformers-cross-static"

    def cross(self, **config: Any) -> "TransformersCrossLayer":
        check_sizes(config)
        return TransformersStaticCrossLayer(EncoderDecoderCache(_static(config), DynamicCache()), config)


def _static(config: dict[str, Any]) -> StaticCache:
    """Returns a cache of tokens with more columns than a row can have tokens, because padding takes columns too."""
    return StaticCache(MODEL, max_cache_len=2 * config["max_tokens"] + SPARE)


class Part(torch.nn.Module):  # type: ignore[misc]
    """Half of the encoder's features, in the place of a projection: its keys, or its values."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self._which = which

    def forward(self, states: Any) -> Any:
        return states.chunk(2, dim=-1)[self._which]


class TransformersCrossLayer(TransformersBatchLayer):
    def __init__(self, cache: EncoderDecoderCache, config: dict[str, Any]) -> None:
        super().__init__(cache, config)
        heads, dim = config["num_kv_heads"], config["head_dim"]
        self._model = BartConfig(attn_implementation="sdpa")
        self._attention = BartAttention(heads * dim, heads, is_decoder=True, layer_idx=0, config=self._model)
        self._attention.k_proj, self._attention.v_proj = Part(0), Part(1)
        self._attention.q_proj = self._attention.out_proj = torch.nn.Identity()
        self._source = torch.zeros(self.batch_size, 0, dtype=torch.bool)  # the encoder mask: which columns are entries

    @property
    def _tokens(self) -> Cache:
        return self._cache.self_attention_cache

    def write_source(self, rows: Sequence[int], keys: Any, values: Any, counts: Sequence[int] | None = None) -> None:
        if sorted(rows) != list(range(self.batch_size)):
            raise NotOffered("sources of some rows: a step of the decoder writes those of all rows")
        if keys.shape != values.shape or keys.dtype != values.dtype or keys.shape[0] != len(rows) or keys.ndim != 4:
            raise NotOffered("rejecting shapes that do not match: one model computes keys and values")
        if tuple(keys.shape[1::2]) != (self._config["num_kv_heads"], self._config["head_dim"]):
            raise NotOffered("rejecting shapes that do not match: one model computes queries, keys and values")
        columns = keys.shape[2]
        if not columns:
            raise NotOffered("encoder outputs without columns")
        counted = [columns] * len(rows) if counts is None else list(counts)
        if len(counted) != len(rows) or not all(0 <= count <= columns for count in counted):
            raise NotOffered("validation of counts: the library takes an attention mask")
        if max(counted) > self._config["max_source"]:
            raise NotOffered("a maximum length")
        order = [list(rows).index(row) for row in range(len(rows))]
        states = torch.cat([part[order].transpose(1, 2).flatten(2) for part in (keys, values)], dim=-1)
        written = self._is_written()
        self._attend(torch.zeros(len(rows), keys.shape[1], 1, keys.shape[3]), states, None)
        if not written:
            self._source = torch.stack([torch.arange(columns) < counted[at] for at in order])

    def source_length(self, row: int) -> int:
        self._check_source([row])
        return int(self._source[row].sum())

    def read_source(self, row: int) -> tuple[Any, Any]:
        count, layer = self.source_length(row), self._cache.cross_attention_cache.layers[0]
        return layer.keys[row, :, :count], layer.values[row, :, :count]

    def attend_source(self, query: Any, scale: float | None = None) -> Any:
        self._check_source([])
        heads, dim = self._config["num_kv_heads"], self._config["head_dim"]
        if query.ndim != 4 or (*query.shape[:2], query.shape[3]) != (self.batch_size, heads, dim):
            raise NotOffered("rejecting shapes that do not match: one model computes queries, keys and values")
        outputs = torch.full((self.batch_size, self._source.shape[1], 2 * heads * dim), torch.nan)  # ignored after the first step
        embeds = torch.zeros(self.batch_size, query.shape[2], 1)  # only its shape is used
        mask = create_bidirectional_mask(self._model, embeds, self._source, encoder_hidden_states=outputs)
        return self._attend(query, outputs, mask, scale)

    def filter(self, rows: Sequence[int]) -> None:
        super().filter(rows)
        self._source = self._source[torch.tensor(list(rows))]

    def clear(self, row: int) -> None:
        self._check_rows([row])
        if self.batch_size > 1:
            raise NotOffered("clearing a row beside others: `reset` empties the cache")
        self._cache.reset()
        self._mask, self._source = self._mask[:, :0], self._source[:, :0]

    def _attend(self, query: Any, states: Any, mask: Any, scale: float | None = None) -> Any:
        self._attention.scaling = query.shape[-1] ** -0.5 if scale is None else scale
        hidden = query.transpose(1, 2).flatten(2)
        out, _ = self._attention(hidden, states, past_key_values=self._cache, attention_mask=mask)
        return out.unflatten(-1, (-1, query.shape[-1])).transpose(1, 2)

    def _is_written(self) -> bool:
        return bool(self._cache.is_updated.get(0))

    def _check_source(self, rows: Sequence[int]) -> None:
        if rows:
            self._check_rows(rows)
        if not self._is_written():
            raise SourceNotWritten("the flag of the layer in `is_updated` is not set")


class TransformersStaticCrossLayer(TransformersCrossLayer):
    def _attend(self, query: Any, states: Any, mask: Any, scale: float | None = None) -> Any:
        if not self._is_written():
            self._cache = EncoderDecoderCache(self._tokens, StaticCache(MODEL, max_cache_len=states.shape[1]))
        return super()._attend(query, states, mask, scale)
