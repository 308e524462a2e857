"""mlx-lm's prompt cache with a random Llama 4 with chunks of 8: a prompt with the beginning of an earlier, longer one."""

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.models.llama4 import Model, ModelArgs

mx.set_default_device(mx.cpu)
mx.random.seed(0)
sizes = {
    "model_type": "llama4_text", "attention_chunk_size": 8, "num_hidden_layers": 4, "hidden_size": 32, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "intermediate_size_mlp": 32, "vocab_size": 64,
    "num_local_experts": 1, "num_experts_per_tok": 1, "interleave_moe_layer_step": 9, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "use_qk_norm": False,
}  # fmt: skip
model = Model(ModelArgs(model_type="llama4", text_config=sizes))
first = list(range(1, 41))
second = [*first[:20], 50, 51, 52]


def told(tokens, cache, size=8):
    for start in range(0, len(tokens), size):
        logits = model(mx.array([tokens[start : start + size]]), cache=cache)
    return logits[0, -1]


kept, cache = LRUPromptCache(), make_prompt_cache(model)
told(first, cache)
kept.insert_cache("any", first, cache)
cache, rest = kept.fetch_nearest_cache("any", second)
offsets = [each.offset for each in cache]
right = told(second, make_prompt_cache(model))
print(f"of {len(second)} tokens {len(rest)} remain to compute, and the layers continue at {offsets}; three of them are chunked")
print("the logits after them differ by", mx.abs(told(rest, cache) - right).max().item(), end=", ")
print("other chunk sizes alone make a difference of", mx.abs(told(second, make_prompt_cache(model), 3) - right).max().item())
