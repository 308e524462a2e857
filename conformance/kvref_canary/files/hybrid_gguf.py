"""Hybrid canaries (kvref.canary.hybrid) as GGUF files, with llama.cpp's names, shapes and signs of the tensors."""

import re
from dataclasses import dataclass

import numpy as np

from kvref.canary.dimensions import EPSILON
from kvref.canary.hybrid import ARCHITECTURES, CONTEXT, TAPS, WORDS, require_hybrid
from kvref.canary.hybrid_weights import (
    DELTA_DIM,
    DELTA_HEADS,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KERNEL,
    KV_HEADS,
    LATENT,
    MAMBA_HEAD_DIM,
    QWEN_HEAD_DIM,
    STATE_SIZE,
    hybrid_weights,
)
from kvref.errors import ConfigError
from kvref_canary.files.gguf import ARRAY, BOOL, FLOAT32, INT32, UINT32, Key, encode_gguf, general_keys, tokenizer_keys
from kvref_canary.files.huggingface import identity
from kvref_conformance.implementation_api import NDArray


@dataclass(frozen=True)
class Layout:
    """How llama.cpp stores an architecture.

    name: llama.cpp's. blocks: how many layers it has. ssm_heads: of a layer with a matrix, 0 if there is none. delta_rule:
    whether the matrix has the delta rule; the factors of norms are then those of the checkpoint plus 1. head_dim: of attention.
    """

    name: str
    blocks: int = 1
    ssm_heads: int = 4
    delta_rule: bool = False
    head_dim: int = HEAD_DIM


LAYOUTS = {  # of the architectures that can be converted
    "lfm2": Layout("lfm2", 3, ssm_heads=0),
    "mamba2": Layout("mamba2", ssm_heads=8),
    "falcon-h1": Layout("falcon-h1"),
    "qwen3.5": Layout("qwen35", 2, DELTA_HEADS, True, QWEN_HEAD_DIM),
    "granite-moe-hybrid": Layout("granitehybrid", 2, ssm_heads=8),
    "nemotron-h": Layout("nemotron_h", 4),
    "qwen3-next": Layout("qwen3next", 2, DELTA_HEADS, True, QWEN_HEAD_DIM),
    "kimi-linear": Layout("kimi-linear", 3, ssm_heads=0, head_dim=LATENT + HEAD_DIM),
}
NAMES = {
    r"^(model\.embed_tokens|backbone\.embeddings)": "token_embd", r"^lm_head": "output",
    r"^model\.embedding_norm": "token_embd_norm", r"^(model\.norm|model\.final_layernorm|backbone\.norm_f)": "output_norm",
    r"^(model|backbone)\.layers": "blk", r"\.(operator_norm|input_layernorm)\.": ".attn_norm.", r"(\d)\.norm\.": r"\1.attn_norm.",
    r"\.pre_ff_layernorm\.weight": ".ffn_norm", r"\.post_attention_layernorm\.": ".post_attention_norm.",
    r"\.mlp\.gate\.": ".ffn_gate_inp.", r"\.mlp\.shared_expert_gate\.": ".ffn_gate_inp_shexp.",
    r"\.mlp\.experts\.(gate|up|down)_proj\.": r".ffn_\1_exps.", r"\.mlp\.shared_expert\.(gate|up|down)_proj\.": r".ffn_\1_shexp.",
    r"\.feed_forward\.w1\.": ".ffn_gate.", r"\.feed_forward\.w3\.": ".ffn_up.", r"\.feed_forward\.w2\.": ".ffn_down.",
    r"\.(feed_forward|mlp|shared_mlp|mixer)\.(gate|up|down)_proj\.": r".ffn_\2.",
    r"\.(self_attn\.(o_proj|out_proj)|mixer\.o_proj)\.": ".attn_output.",
    r"\.(self_attn|mixer)\.([qkv])_proj\.": r".attn_\2.", r"\.self_attn\.([qk])_(layer)?norm\.": r".attn_\1_norm.",
    r"\.self_attn\.([qkv])_conv1d\.": r".ssm_conv1d_\1.", r"\.self_attn\.([fg]_[ab])_proj\.": r".ssm_\1.",
    r"\.self_attn\.b_proj\.": ".ssm_beta.", r"\.self_attn\.o_norm\.": ".ssm_norm.",
    r"\.self_attn\.kv_a_proj_with_mqa\.": ".attn_kv_a_mqa.", r"\.self_attn\.kv_a_layernorm\.": ".attn_kv_a_norm.",
    r"\.self_attn\.([kv])_b_proj\.": r".attn_\1_b.",
    r"\.conv\.(conv|in_proj|out_proj)\.": r".shortconv.\1.",
    r"\.linear_attn\.in_proj_qkv\.": ".attn_qkv.", r"\.linear_attn\.in_proj_z\.": ".attn_gate.",
    r"\.linear_attn\.in_proj_b\.": ".ssm_beta.", r"\.linear_attn\.in_proj_a\.": ".ssm_alpha.",
    r"\.linear_attn\.in_proj_ba\.": ".ssm_ba.",
    r"\.(mixer|mamba|linear_attn|self_attn)\.A_log$": ".ssm_a", r"\.(mixer|mamba)\.D$": ".ssm_d",
    r"\.(mixer|mamba|linear_attn|self_attn)\.dt_bias$": ".ssm_dt.bias", r"\.(mixer|mamba)\.in_proj\.": ".ssm_in.",
    r"\.(mixer|mamba|linear_attn)\.(conv1d|norm)\.": r".ssm_\2.", r"\.(mixer|mamba|linear_attn)\.out_proj\.": ".ssm_out.",
}  # fmt: skip
SMALL = ("norm", "conv.conv", "conv1d", "ssm_a", "ssm_d", "bias", "gate_inp")  # parts of the names of tensors that are float32


def hybrid_gguf_file(architecture: str, dtype: str = "bfloat16") -> bytes:
    """Return the file. dtype: of the matrices. Raises ConfigError for an architecture without a conversion."""
    require_hybrid(architecture)
    if architecture not in LAYOUTS:
        raise ConfigError(f"--gguf: expected one of {', '.join(LAYOUTS)}, got {architecture}")
    layout = LAYOUTS[architecture]
    made = _split_and_stacked(dict(hybrid_weights(architecture)))
    tensors = {tensor_name(name): _converted(layout, name, tensor) for name, tensor in made.items()}
    if layout.name in ("granitehybrid", "kimi-linear"):  # the second norm of a layer has the name of a Llama's
        tensors = {name.replace("post_attention_norm", "ffn_norm"): tensor for name, tensor in tensors.items()}
    keys = general_keys(layout.name, identity(architecture, dtype))
    keys |= {f"{layout.name}.{key}": value for key, value in _sizes(architecture, layout).items()}
    wide = {name for name in tensors if not any(part in name for part in SMALL)}
    return encode_gguf(keys | tokenizer_keys(WORDS), tensors, dtype, wide)


def tensor_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    for pattern, theirs in NAMES.items():
        name = re.sub(pattern, theirs, name)
    return name


def _split_and_stacked(tensors: dict[str, NDArray]) -> dict[str, NDArray]:
    """Return the tensors as llama.cpp groups them: an MLP in two parts, projections of all heads together, experts stacked."""
    made = dict[str, NDArray]()
    for name, tensor in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(tensor, 2), strict=True):
                made[name.replace("input_linear", f"{part}_proj")] = half
        elif name.endswith("in_proj_qkvz.weight"):
            *parts, gate = tensor.reshape(DELTA_HEADS, 4, DELTA_DIM, HIDDEN).swapaxes(0, 1)
            made[name.replace("qkvz", "qkv")] = np.concatenate(parts).reshape(-1, HIDDEN)
            made[name.replace("qkvz", "z")] = gate.reshape(-1, HIDDEN)
        elif name.endswith("kv_b_proj.weight"):
            key, value = tensor.reshape(HEADS, 2, HEAD_DIM, LATENT).swapaxes(0, 1)
            made[name.replace("kv_b", "k_b")], made[name.replace("kv_b", "v_b")] = key.swapaxes(1, 2), value
        elif ".experts." not in name:
            made[name.replace("output_linear", "down_proj")] = tensor
        elif ".experts.0." in name:
            stack = [tensors[name.replace(".experts.0.", f".experts.{number}.")] for number in range(EXPERTS)]
            made[name.replace(".experts.0.", ".experts.")] = np.stack(stack)
    return made


def _converted(layout: Layout, name: str, tensor: NDArray) -> NDArray:
    """Return a tensor as llama.cpp computes with it: rates without logarithm, factors of norms without an offset."""
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    elif layout.delta_rule and "norm" in name and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if layout.name == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs are adjacent
        halves = tensor.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if layout.name == "kimi-linear":
        return tensor[None] if "conv1d" in name else tensor
    if "conv" in name and tensor.ndim == 3:
        return tensor[:, 0]
    if name.endswith("shared_expert_gate.weight"):
        return tensor.reshape(-1)
    if not layout.delta_rule and name.endswith((".A_log", ".D")):
        return tensor[:, None]
    return tensor[None] if name.endswith(("mixer.norm.weight", "mamba.norm.weight")) else tensor


def _sizes(architecture: str, layout: Layout) -> dict[str, Key]:
    attends = ARCHITECTURES[architecture].attends
    found: dict[str, Key] = {
        "vocab_size": (UINT32, WORDS.vocabulary), "context_length": (UINT32, CONTEXT), "embedding_length": (UINT32, HIDDEN),
        "block_count": (UINT32, layout.blocks), "feed_forward_length": (UINT32, INTERMEDIATE if attends else 0),
        "attention.head_count": (UINT32, HEADS if attends else 0),
        "attention.layer_norm_rms_epsilon": (FLOAT32, EPSILON),
    }  # fmt: skip
    if attends:
        found |= {
            "attention.head_count_kv": (UINT32, KV_HEADS), "attention.key_length": (UINT32, layout.head_dim),
            "attention.value_length": (UINT32, layout.head_dim), "rope.dimension_count": (UINT32, HEAD_DIM),
            "rope.freq_base": (FLOAT32, WORDS.theta),
        }  # fmt: skip
    found |= _own_sizes(architecture)
    if not layout.ssm_heads:
        return found
    state, groups = (DELTA_DIM, layout.ssm_heads) if layout.delta_rule else (STATE_SIZE, 1)
    inner = layout.ssm_heads * (DELTA_DIM if layout.delta_rule else MAMBA_HEAD_DIM)
    return found | {
        "ssm.conv_kernel": (UINT32, KERNEL), "ssm.state_size": (UINT32, state), "ssm.inner_size": (UINT32, inner),
        "ssm.time_step_rank": (UINT32, layout.ssm_heads), "ssm.group_count": (UINT32, groups),
    }  # fmt: skip


def _own_sizes(architecture: str) -> dict[str, Key]:
    """The keys of one architecture. Layers without kv heads are not attention."""
    return {
        "lfm2": {"attention.head_count_kv": (ARRAY, (INT32, [0, KV_HEADS, 0])), "shortconv.l_cache": (UINT32, TAPS)},
        "qwen3.5": {"full_attention_interval": (UINT32, 2), "rope.dimension_sections": (ARRAY, (INT32, [11, 11, 10, 0]))},
        "granite-moe-hybrid": {
            "attention.head_count_kv": (ARRAY, (INT32, [0, KV_HEADS])), "attention.scale": (FLOAT32, HEAD_DIM**-0.5),
            "rope.scaling.finetuned": (BOOL, True),
        },
        "nemotron-h": {
            "attention.head_count_kv": (ARRAY, (INT32, [0, KV_HEADS, 0, 0])),
            "feed_forward_length": (ARRAY, (INT32, [0, 0, 0, INTERMEDIATE])), "attention.layer_norm_epsilon": (FLOAT32, EPSILON),
        },
        "kimi-linear": {
            "attention.head_count_kv": (ARRAY, (INT32, [0, 1, 0])), "attention.value_length": (UINT32, LATENT),
            "attention.key_length_mla": (UINT32, 2 * HEAD_DIM), "attention.value_length_mla": (UINT32, HEAD_DIM),
            "attention.kv_lora_rank": (UINT32, LATENT), "kda.head_dim": (UINT32, DELTA_DIM), "ssm.conv_kernel": (UINT32, KERNEL),
            "leading_dense_block_count": (UINT32, 3), "expert_feed_forward_length": (UINT32, INTERMEDIATE),
            "expert_count": (UINT32, EXPERTS), "expert_used_count": (UINT32, 1), "expert_shared_count": (UINT32, 1),
            "expert_gating_func": (UINT32, 2), "expert_weights_scale": (FLOAT32, 1.0),
        },
        "qwen3-next": {
            "full_attention_interval": (UINT32, 2), "expert_count": (UINT32, EXPERTS), "expert_used_count": (UINT32, 1),
            "expert_feed_forward_length": (UINT32, INTERMEDIATE), "expert_shared_feed_forward_length": (UINT32, INTERMEDIATE),
        },
    }.get(architecture, {})  # fmt: skip
