"""Adapters of Hugging Face transformers' caches with index keys (DeepSeek V3.2, GLM MoE DSA) as the family `sparse`.

- A sequence is a cache layer of its own, `DynamicIndexedLayer` or `StaticIndexedLayer`: there are no blocks (`num_free_blocks` is
  *not offered*). `append` is `update` and `update_indexer`.
- `fork` is `copy.deepcopy` of the layer, as the documentation of prefix reuse does with a cache; `truncate` is `crop`.
- `select` is DeepseekV32Indexer.forward, with weights that let index queries, weights and cached index keys pass unchanged. Its
  choice contains masked tokens if a query sees fewer than `top_k`; the attention mask removes them, as the adapter does.
- `attend` is the model's: the choice becomes a mask, by which `eager_attention_forward` attends.
- `offload` moves a layer between devices, which a CPU has not: *not offered*.
"""

import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import transformers
from transformers import DeepseekV32Config
from transformers.cache_utils import DynamicIndexedLayer, StaticIndexedLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, eager_attention_forward

from kvref.errors import SequenceNotFound
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered


class TransformersIndexed(TorchArrays):
    name = "transformers-indexed"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    formats = ("float32",)
    limits: ClassVar[dict[str, Any]] = {"block_size": 1}

    def sparse(self, **config: Any) -> "IndexedLayers":
        if not all(type(size) is int and size > 0 for size in config.values()):
            raise NotOffered("validation of sizes, which come from a model")
        return IndexedLayers(config)


class TransformersIndexedStatic(TransformersIndexed):
    name = "transformers-indexed-static"

    def sparse(self, **config: Any) -> "IndexedLayers":
        if not all(type(size) is int and size > 0 for size in config.values()):
            raise NotOffered("validation of sizes, which come from a model")
        return StaticIndexedLayers(config)


class IndexedLayers:
    """Sequences, each with a layer of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._row = config["num_kv_heads"], config["head_dim"]
        self._layers: dict[int, Any] = {}
        self._next = 0

    def _new_layer(self) -> Any:
        return DynamicIndexedLayer()

    def create(self) -> int:
        return self._add(self._new_layer())

    def _add(self, layer: Any) -> int:
        self._layers[self._next] = layer
        self._next += 1
        return self._next - 1

    def _layer(self, sequence: int) -> Any:
        if sequence not in self._layers:
            raise SequenceNotFound(f"sequence {sequence}: the caller of the library keeps the caches")
        return self._layers[sequence]

    def fork(self, sequence: int) -> int:
        layer = self._layer(sequence)
        self._require_room(self.length(sequence))
        return self._add(copy.deepcopy(layer))

    def _require_room(self, count: int) -> None:
        if sum(map(self.length, self._layers)) + count > self._config["num_blocks"]:
            raise NotOffered("a memory of blocks")

    def drop(self, sequence: int) -> None:
        self._layer(sequence)
        del self._layers[sequence]

    def length(self, sequence: int) -> int:
        return int(self._layer(sequence).get_seq_length())

    def append(self, sequence: int, keys: Any, values: Any, index_keys: Any) -> None:
        layer = self._layer(sequence)
        parts, shapes = (keys, values, index_keys), (self._row, self._row, (self._config["index_dim"],))
        if any(tuple(part.shape[1:]) != shape or len(part) != len(keys) for part, shape in zip(parts, shapes, strict=True)):
            raise NotOffered("validation of shapes, which a model computes")
        if any(part.dtype != torch.float32 for part in parts):
            raise NotOffered("other dtypes than that of the model")
        self._require_room(len(keys))
        layer.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        layer.update_indexer(index_keys[None])

    def truncate(self, sequence: int, length: int) -> None:
        layer = self._layer(sequence)
        removed = self.length(sequence) - int(length)
        if removed < 0 or length < 0:
            raise NotOffered("validation of the number of tokens to remove")
        layer.crop(-removed)

    def read(self, sequence: int) -> tuple[Any, Any]:
        layer, length = self._layer(sequence), self.length(sequence)
        if not length:
            empty = torch.zeros(0, *self._row)
            return empty, empty
        return layer.keys[0, :, :length].transpose(0, 1), layer.values[0, :, :length].transpose(0, 1)

    def read_index(self, sequence: int) -> Any:
        layer, length = self._layer(sequence), self.length(sequence)
        return layer.indexer_keys[0, :length] if length else torch.zeros(0, self._config["index_dim"])

    def _mask(self, sequence: int, count: int, causal: bool) -> Any:
        """What each query sees, bool [1, count, length]."""
        length = self.length(sequence)
        at = torch.arange(length - count, length)[:, None] if causal else torch.full((count, 1), length)
        return (torch.arange(length)[None] <= at)[None]

    def _chosen(self, sequence: int, index_queries: Any, weights: Any, causal: bool) -> Any:
        """The indexer's choice, int32 [num_queries, min(top_k, length)], in its order."""
        width = self._config["index_dim"]
        if index_queries.ndim != 3 or index_queries.shape[2] != width or weights.shape != index_queries.shape[:2]:
            raise NotOffered("validation of shapes, which a model computes")
        count, heads = weights.shape
        if not heads or not count or not self.length(sequence):
            raise NotOffered("an indexer without heads, queries or tokens")
        indexer = DeepseekV32Indexer(
            DeepseekV32Config(
                hidden_size=heads, q_lora_rank=heads * width, index_n_heads=heads, index_head_dim=width,
                index_topk=self._config["top_k"], qk_rope_head_dim=0,
            ), 0,
        )  # fmt: skip
        torch.nn.init.eye_(indexer.wq_b.weight)
        torch.nn.init.eye_(indexer.weights_proj.weight)
        stored = SimpleNamespace(update_indexer=lambda new, layer: self.read_index(sequence)[None])
        nothing = torch.zeros(1, count, 0)
        return indexer(
            weights[None], index_queries.reshape(1, count, heads * width), (nothing, nothing),
            self._mask(sequence, count, causal), None, past_key_values=stored,
        )[0]  # fmt: skip

    def select(self, sequence: int, index_queries: Any, weights: Any, causal: bool = False) -> Any:
        self._layer(sequence)
        chosen = self._chosen(sequence, index_queries, weights, causal)
        seen = self._mask(sequence, len(weights), causal)[0]
        rows = torch.full((len(weights), self._config["top_k"]), -1, dtype=torch.int32)
        for row, numbers in enumerate(chosen):
            kept = numbers[seen[row, numbers.long()]].sort().values
            rows[row, : len(kept)] = kept
        return rows

    def attend(
        self, sequence: int, query: Any, index_queries: Any, weights: Any, scale: float | None = None, causal: bool = False
    ) -> Any:
        self._layer(sequence)
        heads, dim = self._row
        if query.ndim != 3 or query.shape[2] != dim or query.shape[1] % heads or len(query) != len(weights):
            raise NotOffered("validation of shapes, which a model computes")
        chosen = self._chosen(sequence, index_queries, weights, causal)
        count, length = len(query), self.length(sequence)
        seen = self._mask(sequence, count, causal)
        hidden = torch.ones(1, count, length, dtype=torch.bool).scatter(-1, chosen[None].long(), False)  # as the model does
        mask = torch.zeros(1, 1, count, length).masked_fill(~seen | hidden, torch.finfo(torch.float32).min)
        if (~seen).all(dim=-1).any():
            raise NotOffered("queries that see no token")
        keys, values = (part.transpose(0, 1)[None] for part in self.read(sequence))
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // heads, training=False)
        scaling = dim**-0.5 if scale is None else float(scale)
        out, _ = eager_attention_forward(module, query.transpose(0, 1)[None], keys, values, mask, scaling)
        return out[0]


class StaticIndexedLayers(IndexedLayers):
    """The preallocated layer, which cannot be cropped."""

    truncate = None  # type: ignore[assignment]

    def _new_layer(self) -> Any:
        return StaticIndexedLayer(max_cache_len=self._config["num_blocks"])
