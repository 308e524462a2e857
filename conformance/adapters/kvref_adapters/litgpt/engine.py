"""Adapter of LitGPT's `generate`: stateless, whole prompts, batches only of prompts of one length."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from litgpt import GPT, Config
from litgpt.generate.base import batched_generate_fn, generate
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

from kvref.canary import Canary, weights
from kvref.canary.dimensions import EPSILON
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.outcome import NotOffered

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
