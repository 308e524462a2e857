"""Adapter of LitGPT's attention with a sliding window over its KVCache, a ring buffer of the window's size.

One step uses the mask of `GPT.forward` and calls CausalSelfAttention. Its projections are the identity, so that the input is
queries, keys and values side by side. A scale is set through the configuration, as its divisor.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from litgpt import Config
from litgpt.model import CausalSelfAttention, batched_index_select, build_mask_cache

from kvref.errors import PositionOutOfRange
from kvref_conformance.implementations.caches.windows import LIMITS, of_a_model, side_by_side, taken
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered

LONGEST = 1024  # the model's maximum sequence length in tokens, which is the size of its mask


class Window:
    name = "litgpt-window"
    version = version("litgpt")
    language = "python"
    project = "litgpt"
    level: Level = "exact"
    formats = ("float32",)  # the ring buffer takes the dtype of what is written
    limits: ClassVar[Mapping[str, Any]] = LIMITS

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()

    def windowed(self, **config: Any) -> "OneLayer":
        return OneLayer(config)


class OneLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        taken(config)
        self._config = config
        heads, size = config["num_kv_heads"], config["head_dim"]
        model = Config(
            n_layer=1, n_head=heads, n_query_groups=heads, n_embd=heads * size, head_size=size, rotary_percentage=0.0,
            block_size=LONGEST, sliding_window_size=config["window"], sliding_window_indices=[1], padded_vocab_size=8,
        )  # fmt: skip
        self._layer = CausalSelfAttention(model, 0)
        self._layer.qkv = self._layer.proj = torch.nn.Identity()
        self._layer.kv_cache = self._layer.build_kv_cache(1, LONGEST, rope_cache_length=0)
        self._mask, self._no_angles = build_mask_cache(LONGEST), torch.zeros(1, 1, 0)
        self.length = 0  # kept by the caller, who passes the positions

    @property
    def stored_tokens(self) -> int:
        return min(self.length, int(self._layer.kv_cache.max_cache_len))

    def append(self, keys: Any, values: Any) -> None:
        self._layer.kv_cache(self._positions(keys, values), *(array.transpose(0, 1)[None] for array in (keys, values)))
        self.length += len(keys)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        of_a_model(query, keys, self._config)
        at = self._positions(keys, values)
        self._layer.config.n_head, self._layer.config.attention_scores_scalar = query.shape[1], scale**-2
        projected = torch.cat([array.flatten(1) for array in (query, keys, values)], dim=1)[None]
        mask = batched_index_select(self._mask, 2, at)
        with torch.no_grad():
            out = self._layer(projected, self._no_angles, self._no_angles, mask, at)
        self.length += len(keys)
        return out[0].reshape(query.shape)

    def read(self, positions: Sequence[int]) -> tuple[Any, Any]:
        if any(not self.length - self.stored_tokens <= position < self.length for position in positions):
            raise PositionOutOfRange(f"position: expected one of the last {self.stored_tokens} of {self.length}, got {positions}")
        slots = [position % self._config["window"] for position in positions]
        ring = self._layer.kv_cache
        return ring.k[0].transpose(0, 1)[slots], ring.v[0].transpose(0, 1)[slots]

    def clear(self) -> None:
        self._layer.kv_cache.reset_parameters()
        self.length = 0

    def _positions(self, keys: Any, values: Any) -> Any:
        """Return the positions of these tokens, as a model computes them."""
        side_by_side(keys, values, self._config)
        if len(keys) > self._config["window"]:
            raise NotOffered("a step longer than the window")
        if self.length + len(keys) > LONGEST:
            raise NotOffered(f"sequences of more than {LONGEST} tokens")
        return torch.arange(self.length, self.length + len(keys))
