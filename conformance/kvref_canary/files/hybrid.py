"""Hybrid canaries (kvref.canary.hybrid) as Hugging Face model folders."""

from typing import Any

from kvref.canary.dimensions import EPSILON
from kvref.canary.hybrid import BITS, CONTEXT, TAPS, WORDS, require_hybrid
from kvref.canary.hybrid_weights import (
    BAMBA_HEAD_DIM,
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
from kvref_canary.files.huggingface import Files, folder_files, identity

ATTENTION: dict[str, Any] = {
    "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT, "attention_dropout": 0.0,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": WORDS.theta}
MAMBA = {  # with a head per bit of a syllable
    "mamba_n_heads": BITS, "mamba_d_head": MAMBA_HEAD_DIM, "mamba_n_groups": 1, "mamba_d_state": STATE_SIZE,
    "mamba_d_conv": KERNEL, "mamba_expand": 1, "mamba_chunk_size": 64, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "time_step_limit": [0.0, 1e4],
}  # fmt: skip
WIDE_MAMBA = MAMBA | {"mamba_n_heads": 2 * BITS, "mamba_expand": 2}
DELTA = {
    "linear_conv_kernel_dim": KERNEL, "linear_key_head_dim": DELTA_DIM, "linear_value_head_dim": DELTA_DIM,
    "linear_num_key_heads": DELTA_HEADS, "linear_num_value_heads": DELTA_HEADS,
}  # fmt: skip

# The entries that only some engines read have a comment; transformers derives them from the others.
CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": ATTENTION | {
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": [1], "conv_L_cache": TAPS, "conv_bias": False,
        "norm_eps": EPSILON, "rope_theta": WORDS.theta, "rope_parameters": ROPE, "tie_word_embeddings": True,
        "tie_embedding": True, "block_auto_adjust_ff_dim": False, "block_ff_dim": INTERMEDIATE,
        # of mlx-lm and vLLM:
        "conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0,
        "block_norm_eps": EPSILON,
    },
    "mamba2": {
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 1, "num_heads": 8,
        "head_dim": MAMBA_HEAD_DIM, "state_size": STATE_SIZE, "expand": 8 * MAMBA_HEAD_DIM // HIDDEN, "conv_kernel": KERNEL,
        "n_groups": 1, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "layer_norm_epsilon": EPSILON,
        "rms_norm": True, "residual_in_fp32": True, "time_step_limit": [0.0, 1e4], "chunk_size": 64,
        "tie_word_embeddings": False,
        # of mlx-lm and llama.cpp:
        "intermediate_size": 8 * MAMBA_HEAD_DIM, "time_step_rank": HIDDEN // 16, "d_state": STATE_SIZE, "d_conv": KERNEL,
    },
    "falcon-h1": ATTENTION | MAMBA | {
        "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 1, "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu", "rms_norm_eps": EPSILON, "rope_theta": WORDS.theta, "rope_parameters": ROPE,
        "tie_word_embeddings": False, "mamba_d_ssm": BITS * MAMBA_HEAD_DIM, "mamba_norm_before_gate": False,
        "mamba_rms_norm": True, "projectors_bias": False, "mlp_bias": False, "attention_bias": False,
        # mlx-lm's defaults are those of one checkpoint:
        "ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2,
        "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0,
    },
    "qwen3.5": ATTENTION | DELTA | {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 2,
        "head_dim": QWEN_HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": EPSILON, "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention"], "attention_bias": False,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
        # of mlx-lm and llama.cpp:
        "full_attention_interval": 2, "attn_output_gate": True, "rope_theta": WORDS.theta, "partial_rotary_factor": 0.25,
    },
    "granite-moe-hybrid": ATTENTION | WIDE_MAMBA | {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"], "hidden_act": "silu", "rms_norm_eps": EPSILON, "tie_word_embeddings": False,
        "position_embedding_type": "rope", "rope_theta": WORDS.theta, "rope_parameters": ROPE, "attention_bias": False,
        "attention_multiplier": HEAD_DIM**-0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": INTERMEDIATE,
    },
    "bamba": ATTENTION | WIDE_MAMBA | {
        "model_type": "bamba", "architectures": ["BambaForCausalLM"], "num_hidden_layers": 2, "attn_layer_indices": [1],
        "head_dim": BAMBA_HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": EPSILON, "tie_word_embeddings": False,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "attention_bias": False, "mlp_bias": False,
    },
    "nemotron-h": ATTENTION | {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-", "head_dim": HEAD_DIM, "mlp_hidden_act": "relu2", "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_num_heads": BITS,
        "mamba_head_dim": MAMBA_HEAD_DIM, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "ssm_state_size": STATE_SIZE,
        "n_groups": 1, "conv_kernel": KERNEL, "use_conv_bias": True, "chunk_size": 64, "time_step_min": 1e-3,
        "time_step_max": 0.1, "time_step_limit": [0.0, 1e4], "residual_in_fp32": False,
    },
    "qwen3-next": ATTENTION | DELTA | {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2,
        "head_dim": QWEN_HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": EPSILON, "tie_word_embeddings": False,
        "full_attention_interval": 2, "attention_bias": False, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        "num_experts": EXPERTS, "num_experts_per_tok": 1, "moe_intermediate_size": INTERMEDIATE, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": INTERMEDIATE, "mlp_only_layers": [], "norm_topk_prob": True,
        # of mlx-lm and llama.cpp:
        "rope_theta": WORDS.theta, "partial_rotary_factor": 0.25,
    },
    "kimi-linear": ATTENTION | {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "num_hidden_layers": 3, "hidden_act": "silu",
        "num_key_value_heads": HEADS, "model_max_length": CONTEXT, "rms_norm_eps": EPSILON, "tie_word_embeddings": False,
        "kv_lora_rank": LATENT, "q_lora_rank": None, "qk_nope_head_dim": HEAD_DIM, "qk_rope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM, "mla_use_nope": True, "first_k_dense_replace": 3, "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS, "num_experts_per_token": 1, "num_shared_experts": 1, "moe_layer_freq": 1,
        "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": HEADS, "head_dim": DELTA_DIM,
            "short_conv_kernel_size": KERNEL,
        },
        # of mlx-lm:
        "head_dim": HEAD_DIM, "rope_theta": WORDS.theta,
    },
}  # fmt: skip


def make_hybrid_files(architecture: str, dtype: str = "bfloat16") -> Files:
    """Return the files of a hybrid canary by name. dtype: of the weights. Raises ConfigError for an unknown architecture."""
    require_hybrid(architecture)
    config = CONFIGS[architecture] | {"vocab_size": WORDS.vocabulary, "hidden_size": HIDDEN}
    return folder_files(WORDS, identity(architecture, dtype), config, hybrid_weights(architecture))
