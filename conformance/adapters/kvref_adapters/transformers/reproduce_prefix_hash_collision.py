"""transformers' continuous batching: two prompts whose first pages of 256 tokens, the default size, have the same hash."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8192}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).eval()
model.set_attn_implementation("sdpa")
greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=6)
words = [7232, 6294, 7679, 2095, 839], [7821, 5009, 4025, 7586, 128]
one, other = ([*[1] * 224, *five, *[1] * 27, 5, 6, 7] for five in words)
for told in ([one], [other], [one, other]):
    batches = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=512, auto_switch_to_flash=False)
    manager = model.init_continuous_batching(greedy, batches)
    manager.start()
    for prompt in told:
        manager.add_request(prompt, max_new_tokens=6)
        said = manager.get_result().generated_tokens
    manager.stop()
    print(f"after {len(told) - 1} others, {prompt[224:229]} gets the answer", said)
