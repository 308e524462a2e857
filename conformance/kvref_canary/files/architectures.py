"""The model architectures of a canary: their entries in config.json, and their weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kvref.canary import Canary, Weights, weights
from kvref.errors import ConfigError
from kvref_canary.files.gemma import gemma_weights


class Architecture(NamedTuple):
    """config: raises ConfigError if the architecture does not support the windows."""

    config: Callable[[Canary], dict[str, Any]]
    weights: Callable[[Canary], Weights]


def _llama(canary: Canary) -> dict[str, Any]:
    if any(canary.windows):
        raise ConfigError("architecture: expected mistral or gemma3 for layers with a window, got llama")
    own = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **own}


def _mistral(canary: Canary) -> dict[str, Any]:
    if len(set(canary.windows)) > 1:
        raise ConfigError(f"windows: expected the same for all layers of a mistral, got {canary.windows}")
    own = {"sliding_window": canary.windows[0], "hidden_act": "silu", "tie_word_embeddings": False}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **own}


def _gemma3(canary: Canary) -> dict[str, Any]:
    """Some engines read the window type per layer, others the interval of the layers without a window."""
    widths = {window for window in canary.windows if window is not None} or {canary.context}
    every = canary.windows.index(None) + 1 if None in canary.windows else canary.num_layers + 1
    if len(widths) > 1 or any((window is None) != (number % every == 0) for number, window in enumerate(canary.windows, 1)):
        raise ConfigError(
            f"windows: expected the same width in all layers of a gemma3 except every n-th (None), got {canary.windows}"
        )
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": canary.head_dim,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": widths.pop(),
        "sliding_window_pattern": every,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in canary.windows],
        "rope_local_base_freq": canary.theta,
        "tie_word_embeddings": True,
    }


ARCHITECTURES = {
    "llama": Architecture(_llama, weights),
    "mistral": Architecture(_mistral, weights),
    "gemma3": Architecture(_gemma3, gemma_weights),
}
