"""transformers' DynamicSlidingWindowLayer: a window of 1, and `crop` before the first tokens and of more than was recorded."""

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def config(window):
    return MistralConfig(num_hidden_layers=1, sliding_window=window, **SIZES)


torch.manual_seed(0)
for window in (1, 2):
    model = MistralForCausalLM(config(window)).eval()
    tokens, cache = torch.arange(3, 11)[None], DynamicCache(config=model.config)
    with torch.no_grad():
        one_by_one = torch.cat([model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(8)], 1)
        off = (one_by_one - model(tokens).logits).abs().amax((0, 2))
    kept = cache.layers[0].keys.shape[2]
    print(
        f"a window of {window}: one by one and at once differ by", [f"{each:.3f}" for each in off], "and", kept, "tokens are kept"
    )

try:
    DynamicCache(config=config(4)).crop(-1)
except AttributeError as error:
    print("crop before the first tokens:", error)

layer = DynamicCache(config=config(4))
layer.activate_past_recording()
for number in range(8):
    layer.update(*[torch.full((1, 1, 1, 1), float(number))] * 2, 0)
    layer.crop(0)
layer.crop(-2)
print("crop(-2) of 8 tokens, a window of 4, the last crop after 8: get_seq_length", layer.get_seq_length(), end=", ")
print("a mask for", layer.get_mask_sizes(1, 0)[0], "tokens at the next one, and there are", layer.layers[0].keys.shape[2] + 1)
