"""BART: an EncoderDecoderCache that is passed to a second `generate` with another input."""

import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

torch.manual_seed(0)
sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
config = BartConfig(vocab_size=64, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, forced_eos_token_id=None, **sizes)
model = BartForConditionalGeneration(config).eval()
for parameter in model.parameters():
    parameter.data *= 8
first, second = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[20, 21, 22]])


def generate(tokens: torch.Tensor, **options: object) -> list[int]:
    return model.generate(tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)[0].tolist()  # type: ignore[no-any-return, operator]


cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
generate(first, past_key_values=cache)
kept = cache.cross_attention_cache.layers[0].keys.clone()
print("second input, without a cache:", generate(second))
print("second input, with the cache of the first:", generate(second, past_key_values=cache))
print("the source is still the first:", torch.equal(kept, cache.cross_attention_cache.layers[0].keys))
cache.reset()
print("second input, after reset:", generate(second, past_key_values=cache))
