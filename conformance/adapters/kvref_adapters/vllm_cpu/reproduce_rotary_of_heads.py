"""vLLM on a CPU: rotary embeddings of queries [tokens, heads, head_size], as its LFM2 model has them, rotate the wrong rows."""

import os

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

TOKENS, HEADS, SIZE = 6, 2, 64

with set_current_vllm_config(VllmConfig()):
    rope = get_rope(SIZE, max_position=128, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
positions = torch.arange(TOKENS)
for shape in ((TOKENS, HEADS * SIZE), (TOKENS, HEADS, SIZE)):
    query = torch.ones(shape)
    native, _ = rope.forward_native(positions, query.clone(), query.clone())
    on_cpu, _ = rope.forward_cpu(positions, query.clone(), query.clone())
    wrong = (native - on_cpu).abs().reshape(TOKENS, HEADS, SIZE).amax(2) > 1e-4
    print(f"queries of shape {shape}: heads of each token that are rotated wrongly: {wrong.sum(1).tolist()}")
    rows = on_cpu.reshape(TOKENS * HEADS, SIZE)
    rotated = [divmod(row, HEADS) for row in range(len(rows)) if rows[row, 0] != 1]
    print("  (token, head) that are rotated at all:", rotated)
