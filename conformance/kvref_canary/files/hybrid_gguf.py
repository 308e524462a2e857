"""Hybrid canaries (kvref.canary.hybrid) as GGUF files, with llama.cpp's names, shapes and signs of the tensors."""

import re

import numpy as np

from kvref.canary.dimensions import EPSILON
from kvref.canary.hybrid import CONTEXT, TAPS, WORDS, require_hybrid
from kvref.canary.hybrid_weights import (
    DELTA_DIM,
    DELTA_HEADS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KERNEL,
    KV_HEADS,
    MAMBA_HEAD_DIM,
    QWEN_HEAD_DIM,
    STATE_SIZE,
    hybrid_weights,
)
from kvref.errors import ConfigError
from kvref_canary.files.gguf import ARRAY, FLOAT32, INT32, UINT32, Key, encode_gguf, general_keys, tokenizer_keys
from kvref_canary.files.huggingface import identity
from kvref_conformance.implementation_api import NDArray

ARCHITECTURES = {"lfm2": "lfm2", "mamba2": "mamba2", "falcon-h1": "falcon-h1", "qwen3.5": "qwen35"}
NAMES = {
    r"^(model\.embed_tokens|backbone\.embeddings)": "token_embd", r"^lm_head": "output",
    r"^model\.embedding_norm": "token_embd_norm", r"^(model\.norm|model\.final_layernorm|backbone\.norm_f)": "output_norm",
    r"^(model|backbone)\.layers": "blk", r"\.(operator_norm|input_layernorm)\.": ".attn_norm.", r"(\d)\.norm\.": r"\1.attn_norm.",
    r"\.pre_ff_layernorm\.weight": ".ffn_norm", r"\.post_attention_layernorm\.": ".post_attention_norm.",
    r"\.feed_forward\.w1\.": ".ffn_gate.", r"\.feed_forward\.w3\.": ".ffn_up.", r"\.feed_forward\.w2\.": ".ffn_down.",
    r"\.(feed_forward|mlp)\.(gate|up|down)_proj\.": r".ffn_\2.", r"\.self_attn\.(o_proj|out_proj)\.": ".attn_output.",
    r"\.self_attn\.([qkv])_proj\.": r".attn_\1.", r"\.self_attn\.([qk])_(layer)?norm\.": r".attn_\1_norm.",
    r"\.conv\.(conv|in_proj|out_proj)\.": r".shortconv.\1.",
    r"\.linear_attn\.in_proj_qkv\.": ".attn_qkv.", r"\.linear_attn\.in_proj_z\.": ".attn_gate.",
    r"\.linear_attn\.in_proj_b\.": ".ssm_beta.", r"\.linear_attn\.in_proj_a\.": ".ssm_alpha.",
    r"\.(mixer|mamba|linear_attn)\.A_log$": ".ssm_a", r"\.(mixer|mamba)\.D$": ".ssm_d",
    r"\.(mixer|mamba|linear_attn)\.dt_bias$": ".ssm_dt.bias", r"\.(mixer|mamba)\.in_proj\.": ".ssm_in.",
    r"\.(mixer|mamba|linear_attn)\.(conv1d|norm)\.": r".ssm_\2.", r"\.(mixer|mamba|linear_attn)\.out_proj\.": ".ssm_out.",
}  # fmt: skip
SMALL = ("norm", "conv.conv", "conv1d", "ssm_a", "ssm_d", "bias")  # parts of the names of tensors that are float32


def hybrid_gguf_file(architecture: str, dtype: str = "bfloat16") -> bytes:
    """Return the file. dtype: of the matrices. Raises ConfigError for an architecture without a conversion."""
    require_hybrid(architecture)
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"--gguf: expected one of {', '.join(ARCHITECTURES)}, got {architecture}")
    tensors = {tensor_name(name): _converted(architecture, name, tensor) for name, tensor in hybrid_weights(architecture).items()}
    name = ARCHITECTURES[architecture]
    keys = general_keys(name, identity(architecture, dtype))
    keys |= {f"{name}.{key}": value for key, value in _sizes(architecture).items()}
    wide = {name for name in tensors if not any(part in name for part in SMALL)}
    return encode_gguf(keys | tokenizer_keys(WORDS), tensors, dtype, wide)


def tensor_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    for pattern, theirs in NAMES.items():
        name = re.sub(pattern, theirs, name)
    return name


def _converted(architecture: str, name: str, tensor: NDArray) -> NDArray:
    """Return a tensor as llama.cpp computes with it: rates without logarithm, factors of norms without an offset."""
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    elif architecture == "qwen3.5" and "norm" in name and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    if tensor.ndim == 3:
        return tensor[:, 0]
    if architecture != "qwen3.5" and name.endswith((".A_log", ".D")):
        return tensor[:, None]
    return tensor[None] if name.endswith(("mixer.norm.weight", "mamba.norm.weight")) else tensor


def _sizes(architecture: str) -> dict[str, Key]:
    blocks = {"lfm2": 3, "qwen3.5": 2}.get(architecture, 1)
    attends = architecture != "mamba2"
    found: dict[str, Key] = {
        "vocab_size": (UINT32, WORDS.vocabulary), "context_length": (UINT32, CONTEXT), "embedding_length": (UINT32, HIDDEN),
        "block_count": (UINT32, blocks), "feed_forward_length": (UINT32, INTERMEDIATE if attends else 0),
        "attention.head_count": (UINT32, HEADS if attends else 0),
        "attention.layer_norm_rms_epsilon": (FLOAT32, EPSILON),
    }  # fmt: skip
    if attends:
        head_dim = QWEN_HEAD_DIM if architecture == "qwen3.5" else HEAD_DIM
        found |= {
            "attention.head_count_kv": (UINT32, KV_HEADS), "attention.key_length": (UINT32, head_dim),
            "attention.value_length": (UINT32, head_dim), "rope.dimension_count": (UINT32, HEAD_DIM),
            "rope.freq_base": (FLOAT32, WORDS.theta),
        }  # fmt: skip
    if architecture == "lfm2":  # layers without kv heads are convolutions
        return found | {"attention.head_count_kv": (ARRAY, (INT32, [0, KV_HEADS, 0])), "shortconv.l_cache": (UINT32, TAPS)}
    if architecture == "qwen3.5":
        state, heads, groups, inner = DELTA_DIM, DELTA_HEADS, DELTA_HEADS, DELTA_HEADS * DELTA_DIM
        found |= {"full_attention_interval": (UINT32, 2), "rope.dimension_sections": (ARRAY, (INT32, [11, 11, 10, 0]))}
    else:
        state, heads, groups = STATE_SIZE, 4 if attends else 8, 1
        inner = heads * MAMBA_HEAD_DIM
    return found | {
        "ssm.conv_kernel": (UINT32, KERNEL), "ssm.state_size": (UINT32, state), "ssm.inner_size": (UINT32, inner),
        "ssm.time_step_rank": (UINT32, heads), "ssm.group_count": (UINT32, groups),
    }  # fmt: skip
