"""Adapter of kvpress as the family `pruned`: one layer of a DynamicCache, and a ScorerPress whose scores are given.

- `append` is `DynamicLayer.update`, `read` its keys and values, `stored_tokens` its `get_seq_length`.
- `prune` is `ScorerPress.compress` with the ratio that keeps this number of tokens. Sinks and recent tokens are matters of the
  scores of other presses: *not offered*.
- The positions of tokens, and the number of tokens seen, are kept by the caller of the cache: *not offered*.
"""

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from kvpress import ScorerPress
from transformers.cache_utils import DynamicLayer

from kvref.errors import PositionOutOfRange
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered


class Kvpress(TorchArrays):
    name = "kvpress"
    version = version("kvpress")
    language = "python"
    project = "kvpress"
    formats = ("float32",)
    limits: ClassVar[dict[str, Any]] = {}

    def pruned(self, *, num_kv_heads: int, head_dim: int, max_tokens: int) -> "KvpressLayer":
        if not all(type(size) is int and size > 0 for size in (num_kv_heads, head_dim, max_tokens)):
            raise NotOffered("validation of sizes, which come from a model")
        return KvpressLayer(num_kv_heads, head_dim, max_tokens)


class GivenScores(ScorerPress):  # type: ignore[misc]
    scores: torch.Tensor

    def score(self, *given: Any) -> torch.Tensor:
        return self.scores


class KvpressLayer:
    def __init__(self, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        self._row, self._most = (num_kv_heads, head_dim), max_tokens
        self._layer = DynamicLayer()
        empty = torch.zeros(1, num_kv_heads, 0, head_dim)
        self._layer.update(empty, empty)

    @property
    def stored_tokens(self) -> int:
        return int(self._layer.get_seq_length())

    def append(self, keys: Any, values: Any) -> None:
        if any(array.ndim != 3 or tuple(array.shape[1:]) != self._row for array in (keys, values)) or len(keys) != len(values):
            raise NotOffered("validation of shapes, which a model computes")
        if torch.float64 in (keys.dtype, values.dtype):
            raise NotOffered("validation of dtypes, which a model computes")
        if self.stored_tokens + len(keys) > self._most:
            raise NotOffered("a largest number of tokens")
        self._layer.update(*(array.float().transpose(0, 1)[None] for array in (keys, values)))

    def prune(self, scores: Any, keep: int) -> None:
        if tuple(scores.shape) != (self._row[0], self.stored_tokens) or not torch.isfinite(scores).all():
            raise NotOffered("validation of scores, which a press computes")
        if keep < 1:
            raise PositionOutOfRange("a press keeps at least one token")
        if keep >= self.stored_tokens:
            return  # compression_ratio 0
        press = GivenScores(1 - (keep + 0.5) / self.stored_tokens)  # + 0.5: the press rounds down
        press.scores = scores[None]
        module = SimpleNamespace(head_dim=self._row[1])
        self._layer.keys, self._layer.values = press.compress(module, None, self._layer.keys, self._layer.values, None, {})

    def read(self) -> tuple[Any, Any]:
        return self._layer.keys[0].transpose(0, 1), self._layer.values[0].transpose(0, 1)
