"""Adapters of LitGPT's KVCache, alone and with its attention with a sliding window, and of its `generate`.

KVCache is judged as a contiguous cache of one layer, used as in `GPT.forward`. The caller passes the positions (`input_pos`) and
counts the tokens, so the count is not judged. The cache has its final size from the start, and takes the dtype of its tokens.

A window is a ring buffer of its size. One step uses the mask of `GPT.forward` and calls CausalSelfAttention. Its projections are
the identity, so that its input is queries, keys and values side by side. The scale is set through the configuration.

`generate` is stateless: whole prompts, in batches only of prompts of one length.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from litgpt import GPT, Config
from litgpt.generate.base import batched_generate_fn, generate
from litgpt.model import CausalSelfAttention, KVCache, batched_index_select, build_mask_cache
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

from kvref.canary import Canary, weights
from kvref.canary.dimensions import EPSILON
from kvref.errors import CapacityExceeded, ConfigError, DtypeMismatch, PositionOutOfRange, ShapeMismatch
from kvref_adapters._shared.attention import WINDOW_LIMITS, check_one_projection, check_queries, check_sizes
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters._shared.torch_arrays import OneThreadTorch
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


class _LitGPT(OneThreadTorch):
    version = version("litgpt")
    language = "python"
    project = "litgpt"


class LitGPTCache(_LitGPT):
    name = "litgpt-kv"
    # the capacity is always the maximum length
    limits: ClassVar[Mapping[str, Any]] = {"initial_capacity": {"least": 4096}, "max_seq_len": {"most": 4096}}

    def contiguous(self, **config: Any) -> "LitGPTLayer":
        return LitGPTLayer(**config)


class LitGPTLayer:
    def __init__(
        self, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> None:  # fmt: skip
        if type(initial_capacity) is not int or initial_capacity < 0:
            raise NotOffered("an initial_capacity argument")
        shape = batch_size, num_kv_heads, max_seq_len, head_dim
        try:
            self._cache = KVCache(shape, shape, dtype=getattr(torch, dtype))
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ConfigError(str(error)) from error
        self._count = 0

    @property
    def capacity(self) -> int:
        return int(self._cache.k.shape[2])

    def append(self, keys: Any, values: Any) -> None:
        count = self._count + (keys.shape[-2] if keys.ndim > 1 else 1)
        try:
            self._cache(torch.arange(self._count, count), keys, values)
        except IndexError as error:
            raise (CapacityExceeded if "out of bounds" in str(error) else ShapeMismatch)(str(error)) from error
        except RuntimeError as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        self._count = count

    def read(self) -> tuple[Any, Any]:
        return self._cache.k[:, :, : self._count], self._cache.v[:, :, : self._count]

    def raw(self) -> tuple[Any, Any]:
        return self._cache.k, self._cache.v

    def reset(self) -> None:
        self._cache.reset_parameters()
        self._count = 0


MAX_TOKENS = 1024  # the model's maximum sequence length in tokens, which is the size of its mask


class LitGPTWindow(_LitGPT):
    name = "litgpt-window"
    formats = ("float32",)  # the ring buffer takes the dtype of what is written
    limits: ClassVar[Mapping[str, Any]] = WINDOW_LIMITS

    def windowed(self, **config: Any) -> "LitGPTWindowLayer":
        return LitGPTWindowLayer(config)


class LitGPTWindowLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        check_sizes(config)
        self._config = config
        heads, size = config["num_kv_heads"], config["head_dim"]
        model = Config(
            n_layer=1, n_head=heads, n_query_groups=heads, n_embd=heads * size, head_size=size, rotary_percentage=0.0,
            block_size=MAX_TOKENS, sliding_window_size=config["window"], sliding_window_indices=[1], padded_vocab_size=8,
        )  # fmt: skip
        self._layer = CausalSelfAttention(model, 0)
        self._layer.qkv = self._layer.proj = torch.nn.Identity()
        self._layer.kv_cache = self._layer.build_kv_cache(1, MAX_TOKENS, rope_cache_length=0)
        self._mask, self._no_angles = build_mask_cache(MAX_TOKENS), torch.zeros(1, 1, 0)
        self.length = 0  # kept by the caller, who passes the positions

    @property
    def stored_tokens(self) -> int:
        return min(self.length, int(self._layer.kv_cache.max_cache_len))

    def append(self, keys: Any, values: Any) -> None:
        self._layer.kv_cache(self._positions(keys, values), *(array.transpose(0, 1)[None] for array in (keys, values)))
        self.length += len(keys)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        check_queries(query, keys, self._config)
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
        check_one_projection(keys, values, self._config)
        if len(keys) > self._config["window"]:
            raise NotOffered("a step longer than the window")
        if self.length + len(keys) > MAX_TOKENS:
            raise NotOffered(f"sequences of more than {MAX_TOKENS} tokens")
        return torch.arange(self.length, self.length + len(keys))


GREEDY = {"temperature": 0.0, "top_k": None, "top_p": 0.0}


class LitGPTGenerate(EngineAdapter):
    name = "litgpt"
    version = version("litgpt")
    language = "python"
    project = "litgpt"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "LitGPTEngine":
        return LitGPTEngine(canary, model_of(canary))


class LitGPTEngine(WholePrompts):
    def __init__(self, canary: Canary, model: Any) -> None:
        super().__init__(canary)
        self._model = model

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Creates a new cache per call. LitGPT does not support a window that is wider than the cache."""
        length = len(prompts[0])
        if any(len(prompt) != length for prompt in prompts):
            raise NotOffered("a batch of prompts of different lengths")
        if any(window is not None and length > window for window in self.canary.windows):
            raise NotOffered("a prompt longer than a window")
        self._model.clear_kv_cache()
        self._model.max_seq_length = length + count
        self._model.set_kv_cache(len(prompts))
        if len(prompts) == 1:
            said = generate(self._model, torch.tensor(prompts[0]), length + count, include_prompt=False, **GREEDY)
            return [said.tolist()]
        steps = batched_generate_fn(
            self._model, torch.tensor(prompts), length + count, sample_args=GREEDY, include_prompt=False, include_eos=True
        )
        return [[int(token) for token in row] for row in zip(*steps, strict=True)]


def model_of(canary: Canary) -> Any:
    """The canary in float32, converted by LitGPT from Hugging Face's names."""
    torch.set_num_threads(1)  # for such small matrices, synchronizing threads costs more than they save
    config = Config(
        name="canary", block_size=canary.context, n_layer=canary.num_layers, n_embd=canary.hidden_size,
        vocab_size=canary.vocabulary, padded_vocab_size=canary.vocabulary, n_head=canary.num_query_heads,
        head_size=canary.head_dim, n_query_groups=canary.num_kv_heads, rotary_percentage=1.0, rope_base=int(canary.theta),
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", norm_eps=EPSILON, mlp_class_name="LLaMAMLP",
        intermediate_size=canary.intermediate_size, sliding_window_size=canary.windows[0],
        sliding_window_indices=[int(window is not None) for window in canary.windows],
    )  # fmt: skip
    model, state = GPT(config), dict[str, torch.Tensor]()
    copy_weights_hf_llama(config, {}, state, {name: torch.from_numpy(tensor) for name, tensor in weights(canary).items()})
    model.load_state_dict(state)
    return model.eval()
