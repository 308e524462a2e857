"""Adapter of mlx-lm's cache with index keys (DeepSeek V3.2) as the family `sparse`: per layer a CacheList of two KVCaches.

- A sequence is a cache of its own, as `make_cache` of the model makes it: there are no blocks (`num_free_blocks` is *not
  offered*). `append` is `update_and_fetch` of both; the index keys are keys of the second, as the model stores them.
- `fork` is `copy.deepcopy`, as in the server's prompt cache; `truncate` is `trim_prompt_cache`; `offload` and `restore` are
  `save_prompt_cache` and `load_prompt_cache`.
- `select` is the model's Indexer, with weights that let index queries, weights and cached index keys pass unchanged. What the
  mask hides is removed from its choice, as the model does.
- Attention is part of the model's layer, which stores latents: *not offered*.
"""

import copy
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from mlx_lm.models.deepseek_v32 import Indexer, ModelArgs

from kvref.errors import KeyNotFound, SequenceNotFound
from kvref_adapters.mlx.adapter import Mlx
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level


class MlxLmIndexed(Mlx):
    name = "mlx-lm-indexed"
    version = version("mlx-lm")
    language = "python"
    project = "mlx-lm"
    level: Level = "exact"
    formats = ("float32",)
    limits: ClassVar[dict[str, Any]] = {"block_size": 1}

    def sparse(self, **config: Any) -> "IndexedCaches":
        if not all(type(size) is int and size > 0 for size in config.values()):
            raise NotOffered("validation of sizes, which come from a model")
        return IndexedCaches(config)


class IndexedCaches:
    """Sequences, each with a CacheList of its own."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._row = config["num_kv_heads"], config["head_dim"]
        self._caches: dict[int, Any] = {}
        self._files: dict[int, Path] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._next = 0

    def create(self) -> int:
        return self._add(CacheList(KVCache(), KVCache()))

    def _add(self, cache: Any) -> int:
        self._caches[self._next] = cache
        self._next += 1
        return self._next - 1

    def _cache(self, sequence: int) -> Any:
        if sequence not in self._caches:
            raise SequenceNotFound(f"sequence {sequence}: the caller of the library keeps the caches")
        return self._caches[sequence]

    def _require_room(self, count: int) -> None:
        if sum(map(self.length, self._caches)) + count > self._config["num_blocks"]:
            raise NotOffered("a memory of blocks")

    def fork(self, sequence: int) -> int:
        cache = self._cache(sequence)
        self._require_room(self.length(sequence))
        return self._add(copy.deepcopy(cache))

    def drop(self, sequence: int) -> None:
        self._cache(sequence)
        del self._caches[sequence]

    def length(self, sequence: int) -> int:
        return int(self._cache(sequence).size())

    def append(self, sequence: int, keys: Any, values: Any, index_keys: Any) -> None:
        cache = self._cache(sequence)
        parts, shapes = (keys, values, index_keys), (self._row, self._row, (self._config["index_dim"],))
        if any(tuple(part.shape[1:]) != shape or len(part) != len(keys) for part, shape in zip(parts, shapes, strict=True)):
            raise NotOffered("validation of shapes, which a model computes")
        if any(part.dtype != mx.float32 for part in parts):
            raise NotOffered("other dtypes than that of the model")
        if not len(keys):
            raise NotOffered("no tokens")
        self._require_room(len(keys))
        index_keys = index_keys[None, None]
        mx.eval(cache[0].update_and_fetch(keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None]))
        mx.eval(cache[1].update_and_fetch(index_keys, index_keys))

    def truncate(self, sequence: int, length: int) -> None:
        cache = self._cache(sequence)
        if not 0 <= length <= self.length(sequence):
            raise NotOffered("validation of the number of tokens to remove")
        trim_prompt_cache([cache], self.length(sequence) - int(length))

    def read(self, sequence: int) -> tuple[Any, Any]:
        if not self.length(sequence):
            return mx.zeros((0, *self._row)), mx.zeros((0, *self._row))
        keys, values = self._cache(sequence)[0].keys_and_values()
        return keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1)

    def read_index(self, sequence: int) -> Any:
        if not self.length(sequence):
            return mx.zeros((0, self._config["index_dim"]))
        return self._cache(sequence)[1].keys_and_values()[0][0, 0]

    def select(self, sequence: int, index_queries: Any, weights: Any, causal: bool = False) -> Any:
        stored = self.read_index(sequence)[None, None]
        width, top_k, length = self._config["index_dim"], self._config["top_k"], self.length(sequence)
        if index_queries.ndim != 3 or index_queries.shape[2] != width or weights.shape != index_queries.shape[:2]:
            raise NotOffered("validation of shapes, which a model computes")
        count, heads = weights.shape
        if not heads or not count or not length:
            raise NotOffered("an indexer without heads, queries or tokens")
        indexer = Indexer(
            ModelArgs(
                hidden_size=heads, q_lora_rank=heads * width, index_n_heads=heads, index_head_dim=width, index_topk=top_k,
                qk_rope_head_dim=2,
            )
        )  # fmt: skip
        indexer.wq_b.weight, indexer.weights_proj.weight = mx.eye(heads * width), mx.eye(heads)
        indexer.rope = lambda rows, offset: rows
        at = np.arange(length - count, length)[:, None] if causal else np.full((count, 1), length)
        seen = np.arange(length)[None] <= at
        cache = SimpleNamespace(offset=0, keys=stored, update_and_fetch=lambda keys, values: (stored, None))
        mask = mx.array(seen) if causal else None
        chosen = indexer(weights[None], index_queries.reshape(1, count, heads * width), mask, cache)
        numbers = np.tile(np.arange(length), (count, 1)) if chosen is None else np.array(chosen)[0, 0]
        rows = np.full((count, top_k), -1, np.int32)
        for row, each in enumerate(numbers):
            kept = np.sort(each[seen[row, each]])
            rows[row, : len(kept)] = kept
        return mx.array(rows)

    def offload(self, sequence: int) -> int:
        cache, handle = self._cache(sequence), self._next
        if not self.length(sequence):
            raise NotOffered("files of caches without tokens")
        self._next += 1
        self._files[handle] = Path(self._folder.name, f"{handle}.safetensors")
        save_prompt_cache(str(self._files[handle]), [cache])
        return handle

    def _file(self, handle: int) -> Path:
        if handle not in self._files:
            raise KeyNotFound(f"handle {handle}: the caller of the library keeps the files")
        return self._files[handle]

    def restore(self, handle: int) -> int:
        (cache,) = load_prompt_cache(str(self._file(handle)))
        self._require_room(int(cache.size()))
        return self._add(cache)

    def discard(self, handle: int) -> None:
        self._file(handle).unlink()
        del self._files[handle]
