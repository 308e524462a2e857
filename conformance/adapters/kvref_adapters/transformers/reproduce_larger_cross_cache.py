"""BART: a static cross-attention cache larger than the encoder's outputs. Whisper: the flag after a write that raises."""

import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache, StaticCache, WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention

torch.manual_seed(0)
sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
config = BartConfig(vocab_size=64, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
model = BartForConditionalGeneration(config).eval()
for parameter in model.parameters():
    parameter.data *= 3
prompt, start = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[2, 5, 9]])
for mask in ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]):
    call = {"input_ids": prompt, "decoder_input_ids": start, "attention_mask": torch.tensor([mask])}
    with torch.no_grad():
        expected = model(**call).logits
        for columns in (6, 16):
            cache = EncoderDecoderCache(StaticCache(config, max_cache_len=32), StaticCache(config, max_cache_len=columns))
            try:
                error = (model(**call, past_key_values=cache).logits - expected).abs().max().item()
                print(f"encoder mask {mask}, {columns} columns: the logits differ by at most {error:.2g}")
            except RuntimeError as raised:
                print(f"encoder mask {mask}, {columns} columns: {raised}")

whisper = WhisperConfig(d_model=8, decoder_attention_heads=2, attn_implementation="sdpa")
attention = WhisperAttention(8, 2, is_decoder=True, layer_idx=0, config=whisper).eval()
cache = EncoderDecoderCache(DynamicCache(), StaticCache(whisper, max_cache_len=4))
try:
    attention(torch.ones(1, 1, 8), torch.randn(1, 6, 8), cache)
except IndexError as raised:
    print(f"Whisper, 6 columns in a cache of 4: {raised}")
layer = cache.cross_attention_cache.layers[0]
print(f"is_updated = {cache.is_updated}; the next call reads values of {layer.values.unique()}")
